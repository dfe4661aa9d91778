"""Summary of a run: its identity before the first step, its costs and final scores after the last."""

from harness.count.flops import forward_flops_per_byte
from harness.count.ideal import excuses
from harness.count.memory import Peak, optimizer_bytes, tensor_bytes
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
from harness.loop.futures import MOST_NATS, NOT_CAUSAL
from harness.loop.step import score_windows
from harness.loop.train_state import TrainState
from harness.model import NUMERICS
from harness.plan.build import Plan
from harness.record.folder import Identity
from harness.record.rows import FORMAT
from harness.source import commit, digest_of_tree


def provenance(
    plan: Plan,
    *,
    corpus: Corpus,
    runtime: Runtime,
    command: str,
    config_hash: str,
    source: str,
    measuring: bool = False,
) -> dict:
    """What a number is of: enough to measure it again, and to refuse to compare it with something else.

    Args:
        measuring: whether bench has measured it.
    """
    label = {} if corpus.fallback_from is None else {"fallback_for": corpus.fallback_from}
    return {
        "format": FORMAT,
        "variant": plan.variant,
        "seed": plan.seed,
        "command": command,
        "config_hash": config_hash,
        "source": source,
        "tree": digest_of_tree(measuring=measuring),
        "commit": commit(),
        "data": corpus.provenance() | label,
        "protocol": plan.protocol(),
        "numerics": {"variant": None if plan.trust else plan.config["variant"].get("numerics"), "shared": NUMERICS},
        "recomputation": plan.runtime.checkpoint,
        **runtime.describe(),
    }


def identity(training: TrainState, whose: Identity, *, command: str) -> dict:
    """The provenance of a run, and what was built for it."""
    plan, known = training.plan, {"config_hash": whose.config, "source": whose.source}
    return {
        **provenance(plan, corpus=training.corpus, runtime=training.runtime, command=command, **known),
        "purpose": plan.purpose,
        "point": plan.point,
        "budget": {plan.budget.unit: plan.budget.amount},
        "parameters": {
            "total": sum(p.numel() for p in training.model.parameters()),
            "touched": training.model.touched_parameters(),
            "by_sublayer": training.model.parameters_by_sublayer(),
        },
        "optimizers": training.optimizers.describe(),
        "backend": training.backend,
        "evaluation_backend": training.evaluation_backend,
        "backend_choice": plan.backend_choice,
        "check": plan.admission,
    }


def costs(training: TrainState, *, peak: Peak) -> dict:
    """Time, FLOPs and memory of the training that was done; the forward is counted warm, on one stream.

    Of several processes: seconds by the first one's clock, bytes and FLOPs of all together, peak memory of the one that
    had most; parameters, gradients and optimizer state are the first one's.
    """
    segment, units = training.plan.eval.segment, training.trainer.units
    with training.runtime.autocast(), units.gathered():
        executed = forward_flops_per_byte(
            training.model, segment=segment, most_bytes=training.plan.model.span + 4 * segment
        )
    place = training.place()
    return {
        "bytes_seen": place["bytes_seen"],
        "epochs": place["epochs"],
        "steps": place["step"],
        **training.skipped_steps(),
        **place["clock"],
        "flops_per_byte": {
            "executed": executed.per_byte,
            "ideal": training.model.ideal_flops(),
            "unknown": executed.unknown,
            "warm": executed.warm,
        },
        "ideal_excuses": excuses(training.model),
        "training_flops": training.spent.flops,
        "flops_estimated_3x": training.model.flops_estimated_3x(),
        "unreached": training.optimizers.unreached(),
        "memory": {
            "peak_bytes": peak.bytes,
            "peak_reserved_bytes": peak.reserved_bytes,
            "approximate": peak.approximate,
            "parameter_bytes": tensor_bytes(units.parameters),
            "gradient_bytes": training.trainer.gradient_bytes,
            "optimizer_bytes": optimizer_bytes(training.optimizers.optimizers.values()),
            "state_bytes": executed.state_bytes,
        },
    }


def final_score(training: TrainState, split: str, found: dict) -> dict:
    """Score a split as ``eval`` says, with the weights the model has now: into the summary ``found``, and as a row."""
    plan, part = training.plan, training.reported(split)
    score = training.score(part, look=plan.seed)
    bits, metrics = {"bits_per_byte": score.bits_per_byte}, training.model.metrics(score.stats)
    if plan.eval.windows:
        with training.trainer.units.gathered():
            apart = score_windows(training.model, part, runtime=training.runtime, look=plan.seed)
        bits["windows_bits_per_byte"] = apart.bits_per_byte
    if copies := training.corpus.copied_from(part):
        far = {str(distance): score.bits_of(where) for distance, where in copies.items()}
        bits["bits_per_copy"] = far  # of the bytes that are a copy from so far back
    capped = {split: len(part)} if training.capped(split) else {}
    found |= {f"{split}_{name}": value for name, value in bits.items()} | {f"{split}_metrics": metrics}
    found["capped"] |= capped
    train = training.corpus.splits["train"]  # a second of work for each MB
    found["compressors"][split] = (
        corpora.compressed_bits(part, train=train) if training.runtime.processes.is_main else {}
    )
    change = max(score.future_nats, apart.future_nats if plan.eval.windows else 0.0)
    found["check"] = NOT_CAUSAL if not change <= MOST_NATS else found["check"]
    row = {"kind": split, **training.place(), "final": True, **bits, "capped_bytes": capped.get(split)}
    return row | {
        "check": found["check"],
        "future_nats": change,
        "protocol": plan.protocol(),
        "block_nats": score.blocks(),
        "metrics": metrics,
    }


def spans(metrics: dict) -> dict | None:
    """Mean, smallest and largest of all heads' spans, in keys."""
    values = [value for name, value in metrics.items() if name.endswith(".span")]
    flat = [span for value in values for span in (value if isinstance(value, list) else [value])]
    return {"mean": sum(flat) / len(flat), "min": min(flat), "max": max(flat)} if flat else None
