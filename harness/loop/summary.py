"""Summary of a run: its identity before the first step, its costs and final scores after the last."""

from harness.count.flops import forward_flops_per_byte
from harness.count.ideal import excuses
from harness.count.memory import Peak, optimizer_bytes, tensor_bytes
from harness.data.byte_counts import compressed_bits
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
from harness.loop.scoring import MOST_LUCKY_BITS, MOST_NATS, NOT_CAUSAL, score_windows
from harness.loop.trainer import Trainer
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
    """What a number comes from: enough to repeat it, and to refuse comparisons. ``measuring`` for rows of bench."""
    row = {"format": FORMAT, "variant": plan.variant, "seed": plan.seed, "command": command, "config_hash": config_hash}
    row |= {"source": source, "tree": digest_of_tree(measuring=measuring), "commit": commit()}
    row["data"] = corpus.provenance()
    numerics = {"variant": None if plan.trust else plan.config["variant"].get("numerics"), "shared": NUMERICS}
    row |= {"protocol": plan.protocol(), "numerics": numerics, "recomputation": plan.runtime.checkpoint}
    return row | runtime.describe()


def identity(trainer: Trainer, run: Identity, *, command: str) -> dict:
    """The provenance of a run, and what was built for it."""
    plan, model, digests = trainer.plan, trainer.model, {"config_hash": run.config, "source": run.source}
    row = provenance(plan, corpus=trainer.corpus, runtime=trainer.runtime, command=command, **digests)
    row |= {"purpose": plan.purpose, "point": plan.point, "budget": {plan.budget.unit: plan.budget.amount}}
    row |= {"parameters": parameters(model), "optimizers": trainer.optimizers.describe(), "backend": trainer.backend}
    row |= {"evaluation_backend": trainer.evaluation_backend, "backend_choice": plan.backend_choice}
    return row | {"check": plan.admission}


def costs(trainer: Trainer, *, peak: Peak) -> dict:
    """Time, FLOPs and memory of training; the forward is counted warm, on one stream. Of several processes: bytes and
    FLOPs of all, the highest peak, and the first one's seconds, parameters, gradients and optimizer state."""
    segment, span, units = trainer.plan.eval.segment, trainer.plan.model.span, trainer.update.units
    with trainer.runtime.autocast(), units.gathered():
        executed = forward_flops_per_byte(trainer.model, segment=segment, max_bytes=span + 4 * segment)
    model, optimizers, place = trainer.model, trainer.optimizers, trainer.place()
    row = {"bytes_seen": place["bytes_seen"], "epochs": place["epochs"], "steps": place["step"], **place["clock"]}
    row |= {"training_flops": trainer.spent.flops}
    row["flops_per_byte"] = {"executed": executed.per_byte, "ideal": model.ideal_flops()}
    row["flops_per_byte"] |= {"unknown": executed.unknown, "warm": executed.warm}
    row |= {"ideal_excuses": excuses(model), "flops_estimated_3x": model.flops_estimated_3x()}
    row["memory"] = {
        "peak_bytes": peak.bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "approximate": peak.approximate,
        "parameter_bytes": tensor_bytes(units.parameters),
        "gradient_bytes": trainer.update.gradient_bytes,
        "optimizer_bytes": optimizer_bytes(optimizers.optimizers.values()),
        "state_bytes": executed.state_bytes,
    }
    return row


def final_score(trainer: Trainer, split: str, summary: dict) -> dict:
    """Score a split as ``eval`` says with the present weights; updates the ``summary`` and returns a row."""
    plan, corpus, part = trainer.plan, trainer.corpus, trainer.reported(split)
    score = trainer.evaluate(part, look=plan.seed)
    bits, metrics = {"bits_per_byte": score.bits_per_byte}, trainer.model.metrics(score.stats)
    change = score.future_nats
    if plan.eval.windows:
        with trainer.update.units.gathered():
            windows = score_windows(trainer.model, part, runtime=trainer.runtime, look=plan.seed)
        bits["windows_bits_per_byte"], change = windows.bits_per_byte, max(change, windows.future_nats)
    if answers := corpus.answer_masks(part):  # bits of the bytes that follow from earlier ones
        bits["bits_per_copy"] = {label: score.bits_of(where) for label, where in answers.items()}
    if floor := corpus.floor_bits(part):
        bits["floor_bits_per_byte"] = floor
    leaks = not change <= MOST_NATS or ((floor or 0.0) - score.bits_per_byte) * len(score.nats) > MOST_LUCKY_BITS
    capped = (
        len(part) if len(part) < len(corpus.scored_part(split, selection_bytes=plan.eval.selection_bytes)) else None
    )
    main = trainer.runtime.processes.is_main  # a second of work for each MB
    summary |= {f"{split}_{name}": value for name, value in bits.items()} | {f"{split}_metrics": metrics}
    summary["capped"] |= {split: capped} if capped else {}
    summary["compressors"][split] = compressed_bits(part, train=corpus.splits["train"]) if main else {}
    summary["check"] = NOT_CAUSAL if leaks else summary["check"]
    row = {"kind": split, **trainer.place(), "final": True, **bits, "capped_bytes": capped, "check": summary["check"]}
    row |= {"future_nats": change, "protocol": plan.protocol()}
    return row | {"metrics": metrics}


def parameters(model) -> dict:
    """Numbers of parameters: in all, read for one byte, and of each sublayer."""
    by_sublayer = model.parameters_by_sublayer()
    return {"total": sum(by_sublayer.values()), "touched": model.touched_parameters(), "by_sublayer": by_sublayer}


def spans(metrics: dict) -> dict | None:
    """Mean, smallest and largest of all heads' spans, in keys."""
    values = [value for name, value in metrics.items() if name.endswith(".span")]
    flat = [span for value in values for span in (value if isinstance(value, list) else [value])]
    return {"mean": sum(flat) / len(flat), "min": min(flat), "max": max(flat)} if flat else None
