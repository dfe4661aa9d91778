"""The shapes of all rows that a report shows, by kind: what ``train.py`` and the verbs of bench write.

A number that was not measured is None or missing. What is there has to be of the right kind.
"""

from bench.report.shapes import CONFIG, COUNT, METRIC, NUMBER, TEXT, TRUTH, Each, Maybe, Only

TIMES = Maybe({"p20": COUNT, "p50": COUNT, "p80": COUNT, "n": COUNT})
PARAMETERS = {"total": COUNT, "touched": COUNT, "by_sublayer": Maybe(Each(COUNT))}
PROTOCOL = {
    "lanes": COUNT,
    "segment": COUNT,
    "span": COUNT,
    "bytes": Maybe(COUNT),
    "vocabulary": COUNT,
    "drop_newlines": TRUTH,
}
SPANS = Maybe({"mean": COUNT, "min": COUNT, "max": COUNT})
IDENTITY = {
    "variant": TEXT,
    "seed": COUNT,
    "command": TEXT,
    "config_hash": TEXT,
    "source": TEXT,
    "commit": Maybe(TEXT),
    "data": {"name": TEXT, "bytes": COUNT, "sha256": TEXT, "fallback_for": Maybe(TEXT)},
    "device": TEXT,
    "device_kind": TEXT,
    "threads": COUNT,
    "precision": TEXT,
    "compile": TRUTH,
    "versions": Each(TEXT),
    "processes": Maybe(COUNT),
    "instruction_set": Maybe(TEXT),
    "environment": Maybe(Each(TEXT)),
}
BENCH = IDENTITY | {"config": CONFIG, "protocol": PROTOCOL, "path": TEXT}
STATUS = {"status": Only(("measured", "out of memory", "failed")), "reason": Maybe(TEXT)}

COST = (
    BENCH
    | STATUS
    | {
        "mode": Only(("cold", "stream")),
        "length": COUNT,
        "segment": COUNT,
        "span": COUNT,
        "lanes": COUNT,
        "checkpoint": Maybe(TEXT),
        "interleaved": Maybe(TRUTH),
        "parameters": Maybe(PARAMETERS),
        "spans": SPANS,
        "utilisation": Maybe({"flops_per_s": COUNT, "peak_flops_per_s": COUNT, "share": COUNT}),
        "flops": Maybe(
            {
                "executed_per_byte": Maybe(COUNT),
                "ideal_per_byte": Maybe(COUNT),
                "step": Maybe(COUNT),
                "optimizer": Maybe(COUNT),
                "unknown": Maybe(Each(COUNT)),
            }
        ),
        "bytes_moved": Maybe({"step": Maybe(COUNT), "optimizer": Maybe(COUNT)}),
        "memory": Maybe(
            {
                "parameter_bytes": Maybe(COUNT),
                "touched_bytes": Maybe(COUNT),
                "gradient_bytes": Maybe(COUNT),
                "optimizer_bytes": Maybe(COUNT),
                "state_bytes": Maybe(COUNT),
                "train_peak_bytes": Maybe(COUNT),
                "inference_peak_bytes": Maybe(COUNT),
                "growth_bytes_per_step": Maybe(NUMBER),
                "approximate": Maybe(TRUTH),
            }
        ),
        "time": Maybe(
            {
                "train_ms": TIMES,
                "evaluate_ms": TIMES,
                "generate_ms": TIMES,
                "compile_s": Maybe(COUNT),
                "first_steps_s": Maybe(COUNT),
            }
        ),
    }
)
COMPARED = (
    BENCH
    | STATUS
    | {
        "relative_to": Maybe(TEXT),
        "yardstick_in_judge": Maybe(COUNT),
        "rounds": Maybe(COUNT),
        "interrupted": Maybe(TRUTH),
        "void": Maybe(TEXT),
    }
)
PEERS = COMPARED | {
    "name": TEXT,
    "package": Maybe(TEXT),
    "package_version": Maybe(TEXT),
    "job": TEXT,
    "lanes": COUNT,
    "segment": COUNT,
    "parameters": Maybe(PARAMETERS),
    "checks": Maybe(Each(TEXT)),
    "bytes_per_second": Maybe(COUNT),
    "time": Maybe({"train_ms": TIMES}),
    "memory": Maybe({"train_peak_bytes": Maybe(COUNT), "approximate": Maybe(TRUTH)}),
    "relative_to_yardstick": Maybe(COUNT),
}
FIT = BENCH | {
    "lanes": COUNT,
    "segment": COUNT,
    "span": COUNT,
    "device_memory_bytes": Maybe(COUNT),
    "predicted_peak_bytes": Maybe(COUNT),
    "split": Maybe(Each(COUNT)),
    "measured_peak_bytes": Maybe(COUNT),
    "warm": Maybe(TRUTH),
    "largest": Maybe(Each(Maybe(COUNT))),
    "roofline": Maybe(
        {"name": Maybe(TEXT), "peak_flops_per_s": Maybe(COUNT), "bytes_per_s": Maybe(COUNT), "train_ms": Maybe(COUNT)}
    ),
}
SPEED = COMPARED | {
    "case": TEXT,
    "position": Maybe(TEXT),
    "cache": Maybe(TEXT),
    "ratio": Maybe(COUNT),
    "ratio_of": Maybe(TEXT),
    "target": Maybe(COUNT),
    "judged": Maybe(TRUTH),
    "reached": Maybe(TRUTH),
    "peak_bytes": Maybe(COUNT),
    "peak_limit_bytes": Maybe(COUNT),
    "peak_reached": Maybe(TRUTH),
    "second": Maybe({"what": TEXT, "ratio": COUNT, "target": COUNT}),
    "time": Maybe(Each(TIMES)),
}
BENCH_KINDS = {"cost": COST, "peers": PEERS, "fit": FIT, "speed": SPEED}

RUN = {"budget": Each(Maybe(COUNT)), "protocol": PROTOCOL, "parameters": Maybe(PARAMETERS), "path": TEXT}
OPTIMIZERS = Maybe(Each({"name": TEXT, "optimizer": TEXT, "share": COUNT}, ordered=True))
PROVENANCE = IDENTITY | RUN | {"config": CONFIG, "optimizers": OPTIMIZERS}
BITS = {
    f"{split}{context}_bits_per_byte": Maybe(COUNT) for split in ("valid", "test") for context in ("", "_context_512")
}
SUMMARY = (
    IDENTITY
    | RUN
    | BITS
    | {
        "status": TEXT,
        "optimizers": OPTIMIZERS,
        "bytes_seen": Maybe(COUNT),
        "best_bytes_seen": Maybe(COUNT),
        "epochs": Maybe(COUNT),
        "steps": Maybe(COUNT),
        "seconds": Maybe(COUNT),
        "bytes_per_second": Maybe(COUNT),
        "training_flops": Maybe(COUNT),
        "flops_per_byte": Maybe(
            {"executed": Maybe(COUNT), "ideal": Maybe(COUNT), "unknown": Maybe(Each(COUNT)), "warm": Maybe(TRUTH)}
        ),
        "memory": Maybe(
            {
                name: Maybe(COUNT)
                for name in (
                    *("peak_bytes", "inference_peak_bytes", "parameter_bytes", "gradient_bytes"),
                    *("optimizer_bytes", "state_bytes"),
                )
            }
            | {"approximate": Maybe(TRUTH)}
        ),
        "capped": Maybe(Each(COUNT)),
        "compressors": Maybe(Each(Each(Maybe(COUNT)))),
        "spans": SPANS,
        "valid_metrics": Maybe(METRIC),
        "test_metrics": Maybe(METRIC),
    }
)
FAILED = {"status": Only(("failed",)), "error": Maybe(TEXT)}
"""What a run that ended with an error leaves; the rest is null where it is not known."""
_PLACE = {"bytes_seen": COUNT, "step": Maybe(COUNT), "fraction": Maybe(COUNT), "epochs": Maybe(COUNT)}
_CLOCK = Maybe({"seconds": Maybe(COUNT), "bytes_per_second": Maybe(COUNT)})
TRAIN = _PLACE | {"bits_per_byte": Maybe(COUNT), "metrics": Maybe(METRIC), "clock": _CLOCK}
SCORE = TRAIN | {"capped_bytes": Maybe(COUNT), "context_512_bits_per_byte": Maybe(COUNT)}
FINAL = {name: Maybe(shape) for name, shape in SCORE.items()}
FINAL |= {"final": TRUTH, "block_nats": Maybe(Each(Maybe(COUNT), ordered=True))}


def of_run_row(row: dict) -> dict:
    """The shape of one row of ``record.jsonl``; of kinds that a report does not read, only that they are one."""
    kind = row.get("kind")
    if kind in ("valid", "test"):
        return FINAL if row.get("final") else SCORE
    known = {"train": TRAIN, "provenance": PROVENANCE}
    return known[kind] if isinstance(kind, str) and kind in known else {"kind": TEXT}
