"""Summary of a run: its provenance, costs and final scores."""

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
from harness.record import folder
from harness.record.row import (
    ABSENT,
    Costs,
    Final,
    ForwardFlops,
    Memory,
    Origin,
    Parameters,
    RunOrigin,
    Spans,
)
from harness.record.rows import FORMAT
from harness.source import commit, digest_of_tree


def origin(
    plan: Plan,
    *,
    corpus: Corpus,
    runtime: Runtime,
    command: str,
    measuring: bool = False,
    **digests: str,
) -> Origin:
    """Return what the reproduction of a row needs. ``measuring`` is true for rows of bench, whose
    ``source`` includes the code that measures. ``digests`` are ``config_hash`` and ``source``."""
    code = commit()
    # Golden numbers pin only committed code. Rows without a version are pooled only if their source
    # is equal.
    pinned = not plan.trust and not str(code).endswith("-dirty")
    version = None
    if pinned:
        version = plan.config["variant"].get("numerics")
    return Origin(
        format=FORMAT,
        variant=plan.variant,
        seed=plan.seed,
        command=command,
        **digests,
        tree=digest_of_tree(measuring=measuring),
        commit=code,
        data=corpus.provenance(),
        protocol=plan.protocol(),
        numerics={"variant": version, "shared": NUMERICS},
        recomputation=plan.runtime.checkpoint,
        **runtime.describe(),
    )


def run_origin(trainer: Trainer, digests: folder.Identity, *, command: str) -> RunOrigin:
    """Return the provenance of a run, with its budget, parameters, optimizers and backends."""
    plan = trainer.plan
    common = origin(
        plan,
        corpus=trainer.corpus,
        runtime=trainer.runtime,
        command=command,
        config_hash=digests.config,
        source=digests.source,
    )
    return RunOrigin(
        **vars(common),
        purpose=plan.purpose,
        budget={plan.budget.unit: plan.budget.amount},
        parameters=parameters(trainer.model),
        optimizers=trainer.optimizers.describe(),
        backend=trainer.backend,
        evaluation_backend=trainer.evaluation_backend,
        pretrained=plan.pretrained or ABSENT,
        backend_choice=plan.backend_choice,
        check=plan.admission,
    )


def costs(trainer: Trainer, *, peak: Peak) -> Costs:
    """Return the time, FLOPs and memory of training. Forward FLOPs are counted on one stream with a
    full past. The peak is the highest of all processes."""
    model = trainer.model
    segment = trainer.plan.eval.segment
    distributed = trainer.optimizers.distributed
    parameters = distributed.local_parameters if distributed else model.parameters()
    with trainer.runtime.autocast(), trainer.whole_parameters():
        max_bytes = trainer.plan.model.span + 4 * segment
        text = trainer.reported_split("valid")
        executed = forward_flops_per_byte(model, segment=segment, max_bytes=max_bytes, text=text)
    progress = trainer.progress()
    return Costs(
        bytes_seen=progress["bytes_seen"],
        epochs=progress["epochs"],
        steps=progress["step"],
        **progress["clock"],
        training_flops=progress["training_flops"],
        flops_per_byte=ForwardFlops(
            executed=executed.per_byte,
            ideal=model.ideal_flops(),
            unknown=executed.unknown,
            warm=executed.warm,
        ),
        ideal_excuses=ideal_excuses(model),
        flops_estimated_3x=model.flops_estimated_3x(),
        memory=Memory(
            peak_bytes=peak.bytes,
            peak_reserved_bytes=peak.reserved_bytes,
            approximate=peak.approximate,
            parameter_bytes=tensor_bytes(parameters),
            gradient_bytes=trainer.optimizers.gradient_bytes,
            optimizer_bytes=optimizer_bytes(trainer.optimizers.optimizers.values()),
            state_bytes=executed.state_bytes,
        ),
    )


def final_score(trainer: Trainer, name: str) -> Final:
    """Score the split ``name`` with the present weights."""
    plan = trainer.plan
    corpus = trainer.corpus
    split = trainer.reported_split(name)
    stream_cuts, window_cuts = _cuts(trainer, len(split))
    score = trainer.evaluate(split, future_seed=plan.seed, cuts=stream_cuts)
    scores = [score]
    windows_bits = ABSENT
    if plan.eval.windows and not corpus.sequence:
        check = {"future_seed": plan.seed, "cuts": window_cuts}
        with trainer.whole_parameters():
            windows = score_windows(trainer.model, split, runtime=trainer.runtime, **check)
        scores.append(windows)
        windows_bits = windows.bits_per_byte
    floor = corpus.floor_bits(split)
    precision = trainer.runtime.precision
    future, causal = check_causality(trainer.model, scores, floor=floor, precision=precision)
    n_bytes = len(corpus.scored_part(name, selection_bytes=plan.eval.selection_bytes))
    return Final(
        kind=name,
        **trainer.progress(),
        final=True,
        bits_per_byte=score.bits_per_byte,
        windows_bits_per_byte=windows_bits,
        **score.answers(corpus.answer_masks(split)),
        bits_per_repeat=score.bits_by_label(corpus.repeat_masks(split)) or ABSENT,
        floor_bits_per_byte=floor or ABSENT,
        capped_bytes=len(split) if len(split) < n_bytes else None,
        check=plan.admission if causal else NOT_CAUSAL,
        protocol=plan.protocol(),
        **future.row(),
        metrics=trainer.model.metrics(score.stats),
    )


def _cuts(trainer: Trainer, n_bytes: int) -> tuple[int, int]:
    """Return the number of cuts in the streams and in the windows of a final score of ``n_bytes``:
    ``CUTS`` together, or as many as ``CUTS_SHARE`` of the run's time allows, but at least
    ``MIN_CUTS``. The backward pass counts twice."""
    e = trainer.plan.eval
    splits = len(trainer.splits)
    window_share = 0.0
    if e.windows:
        window_share = scoring.WINDOW_CUTS_SHARE
    bytes_per_cut = e.segment * (1 - window_share) + scoring.WINDOWS[1] * window_share
    run_bytes = 3 * trainer.state.spent.bytes + splits * n_bytes * (3 if e.windows else 1)
    affordable = int(scoring.CUTS_SHARE * run_bytes / (splits * bytes_per_cut))
    cuts = min(scoring.CUTS, max(scoring.MIN_CUTS, affordable))
    window_cuts = round(cuts * window_share)
    return cuts - window_cuts, window_cuts


def compressors(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Return bits per byte of each final split under compressors, and by counts of as many bytes
    as the model read."""
    counted = trainer.corpus.splits["train"][: trainer.state.spent.bytes]
    return {
        name: compressed_bits(trainer.reported_split(name), train=counted)
        for name in trainer.splits
    }


def parameters(model: LanguageModel) -> Parameters:
    """Return the numbers of a model's parameters."""
    sizes = model.parameters_by_sublayer()
    touched = model.touched_parameters()
    return Parameters(total=sum(sizes.values()), touched=touched, by_sublayer=sizes)


def spans(metrics: dict) -> Spans | None:
    """Return the spans of all heads, or None if ``metrics`` has none."""
    lengths = []
    for name, metric in metrics.items():
        if name.endswith(".span"):
            lengths += metric if isinstance(metric, list) else [metric]
    if lengths:
        return Spans(mean=sum(lengths) / len(lengths), min=min(lengths), max=max(lengths))
    return None
