"""Summary of a run: the keys of its rows that describe provenance, costs and scores."""

from harness.count.flops import forward_flops_per_byte
from harness.count.ideal import ideal_excuses
from harness.count.memory import Peak, optimizer_bytes, tensor_bytes
from harness.data.byte_counts import compressed_bits
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
from harness.loop import scoring
from harness.loop.scoring import NOT_CAUSAL, check_causality, score_windows
from harness.loop.trainer import Trainer
from harness.model import NUMERICS, LanguageModel
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
    """Return the keys of a row that its reproduction needs, and that decide which rows may be compared. ``measuring``
    is true for rows of bench, whose ``source`` includes the code that measures."""
    row = {"format": FORMAT, "variant": plan.variant, "seed": plan.seed, "command": command, "config_hash": config_hash}
    row |= {"source": source, "tree": digest_of_tree(measuring=measuring), "commit": commit()}
    # Golden numbers pin only committed code. Rows without a version are pooled only if their source is equal.
    pinned = not plan.trust and not str(row["commit"]).endswith("-dirty")
    numerics = {"variant": plan.config["variant"].get("numerics") if pinned else None, "shared": NUMERICS}
    row |= {"data": corpus.provenance(), "protocol": plan.protocol(), "numerics": numerics}
    return row | {"recomputation": plan.runtime.checkpoint} | runtime.describe()


def run_provenance(trainer: Trainer, digests: Identity, *, command: str) -> dict:
    """Return the provenance of a run, with its budget, parameters, optimizers and backends."""
    plan, keys = trainer.plan, {"config_hash": digests.config, "source": digests.source}
    row = provenance(plan, corpus=trainer.corpus, runtime=trainer.runtime, command=command, **keys)
    row |= {"purpose": plan.purpose, "budget": {plan.budget.unit: plan.budget.amount}}
    row |= {"parameters": parameters(trainer.model), "optimizers": trainer.optimizers.describe()}
    row |= {"backend": trainer.backend, "evaluation_backend": trainer.evaluation_backend}
    row |= {"pretrained": plan.pretrained} if plan.pretrained else {}
    return row | {"backend_choice": plan.backend_choice, "check": plan.admission}


def costs(trainer: Trainer, *, peak: Peak) -> dict:
    """Return the time, FLOPs and memory of training. Forward FLOPs are counted on one stream with a full past. Bytes
    and FLOPs are those of all processes, the peak is the highest, and other figures are those of the main process."""
    model, parameters, segment = trainer.model, trainer.update.parameters, trainer.plan.eval.segment
    with trainer.runtime.autocast(), parameters.unsharded():
        max_bytes = trainer.plan.model.span + 4 * segment
        text = trainer.reported_split("valid")
        executed = forward_flops_per_byte(model, segment=segment, max_bytes=max_bytes, text=text)
    progress = trainer.progress()
    row = {key: progress[key] for key in ("bytes_seen", "epochs")}
    row |= {"steps": progress["step"], **progress["clock"], "training_flops": trainer.spent.flops}
    row["flops_per_byte"] = {"executed": executed.per_byte, "ideal": model.ideal_flops()}
    row["flops_per_byte"] |= {"unknown": executed.unknown, "warm": executed.warm}
    row |= {"ideal_excuses": ideal_excuses(model), "flops_estimated_3x": model.flops_estimated_3x()}
    row["memory"] = {
        "peak_bytes": peak.bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "approximate": peak.approximate,
        "parameter_bytes": tensor_bytes(parameters.local_parameters),
        "gradient_bytes": trainer.update.gradient_bytes,
        "optimizer_bytes": optimizer_bytes(trainer.optimizers.optimizers.values()),
        "state_bytes": executed.state_bytes,
    }
    return row


def final_score(trainer: Trainer, name: str, summary: dict) -> dict:
    """Score the split ``name`` with the present weights. Adds the scores to ``summary``, and returns their row."""
    plan, corpus, split = trainer.plan, trainer.corpus, trainer.reported_split(name)
    stream_cuts, window_cuts = _cuts(trainer, len(split))
    score = trainer.evaluate(split, future_seed=plan.seed, cuts=stream_cuts)
    bits, scores = {"bits_per_byte": score.bits_per_byte}, [score]
    if plan.eval.windows and not corpus.sequence:
        with trainer.update.parameters.unsharded():
            keywords = {"runtime": trainer.runtime, "future_seed": plan.seed, "cuts": window_cuts}
            windows = score_windows(trainer.model, split, **keywords)
        bits["windows_bits_per_byte"] = windows.bits_per_byte
        scores.append(windows)
    bits |= score.answers(corpus.answer_masks(split))
    if repeats := corpus.repeat_masks(split):
        bits["bits_per_repeat"] = score.bits_by_label(repeats)
    if floor := corpus.floor_bits(split):
        bits["floor_bits_per_byte"] = floor
    precision = trainer.runtime.precision
    future, causal = check_causality(trainer.model, scores, floor=floor, precision=precision)
    if not causal:
        summary["check"] = NOT_CAUSAL
    n_bytes = len(corpus.scored_part(name, selection_bytes=plan.eval.selection_bytes))
    capped_bytes = len(split) if len(split) < n_bytes else None
    summary["capped"] |= {name: capped_bytes} if capped_bytes else {}
    metrics = trainer.model.metrics(score.stats)
    summary |= {f"{name}_{key}": number for key, number in bits.items()} | {f"{name}_metrics": metrics}
    row = {"kind": name, **trainer.progress(), "final": True, **bits, "capped_bytes": capped_bytes}
    row |= {"check": summary["check"], "protocol": plan.protocol()} | future.row()
    return row | {"metrics": metrics}


def _cuts(trainer: Trainer, n_bytes: int) -> tuple[int, int]:
    """Return the number of cuts in the streams and in the windows of a final score of ``n_bytes``:
    ``CUTS`` together, or as many as ``CUTS_SHARE`` of the run's time allows, but at least
    ``MIN_CUTS``. The backward pass counts twice."""
    e, splits = trainer.plan.eval, len(trainer.splits)
    window_share = scoring.WINDOW_CUTS_SHARE if e.windows else 0.0
    bytes_per_cut = e.segment * (1 - window_share) + scoring.WINDOWS[1] * window_share
    run_bytes = 3 * trainer.spent.bytes + splits * n_bytes * (3 if e.windows else 1)
    affordable = int(scoring.CUTS_SHARE * run_bytes / (splits * bytes_per_cut))
    cuts = min(scoring.CUTS, max(scoring.MIN_CUTS, affordable))
    window_cuts = round(cuts * window_share)
    return cuts - window_cuts, window_cuts


def compressors(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Return bits per byte of each final split under compressors, and by counts of as many bytes as the model read."""
    counted = trainer.corpus.splits["train"][: trainer.spent.bytes]
    return {name: compressed_bits(trainer.reported_split(name), train=counted) for name in trainer.splits}


def parameters(model: LanguageModel) -> dict:
    """Return numbers of parameters: in total, read for one byte, and by sublayer."""
    by_sublayer = model.parameters_by_sublayer()
    return {"total": sum(by_sublayer.values()), "touched": model.touched_parameters(), "by_sublayer": by_sublayer}


def spans(metrics: dict) -> dict | None:
    """Return mean, smallest and largest span of all heads, in keys, or None if ``metrics`` has no spans."""
    lengths = []
    for name, metric in metrics.items():
        if name.endswith(".span"):
            lengths += metric if isinstance(metric, list) else [metric]
    return {"mean": sum(lengths) / len(lengths), "min": min(lengths), "max": max(lengths)} if lengths else None
