"""Summary of a run: its provenance, costs and final scores."""

from harness.count.flops import forward_flops_per_byte
from harness.count.ideal import ideal_excuses
from harness.count.memory import Peak, optimizer_bytes, tensor_bytes
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
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
    segment = trainer.objective.scored_segment
    distributed = trainer.optimizers.distributed
    parameters = distributed.local_parameters if distributed else model.parameters()
    with trainer.runtime.autocast(), trainer.whole_parameters():
        max_bytes = trainer.plan.model.span + 4 * segment
        e = trainer.plan.eval
        text = trainer.corpus.scored_part("valid", selection_bytes=e.selection_bytes, limit=e.bytes)
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
            ideal=model.ideal_flops(text=segment),
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
            state_bytes=executed.state_bytes if trainer.plan.objective.predicts_next else 0,
        ),
    )


def final_score(trainer: Trainer, name: str) -> Final:
    """Score the split ``name`` with the present weights."""
    plan = trainer.plan
    objective = trainer.objective
    part = objective.reported_part(name)
    trainer.check_weights()
    spent = trainer.state.spent.bytes
    with trainer.whole_parameters():
        score, keys = objective.final(trainer.model, part, trained_bytes=spent)
    is_capped = len(part) < len(objective.reported_part(name, capped=False))
    return Final(
        kind=name,
        **trainer.progress(),
        final=True,
        bits_per_byte=score.bits_per_byte,
        capped_bytes=len(part) if is_capped else None,
        protocol=plan.protocol(),
        metrics=trainer.model.metrics(score.stats),
        **{"check": plan.admission} | keys,
    )


def compressors(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Return bits of each final split by the objective's baselines."""
    spent = trainer.state.spent.bytes
    objective = trainer.objective
    return {
        name: objective.baselines(objective.reported_part(name), trained_bytes=spent)
        for name in objective.splits
    }


def parameters(model: LanguageModel) -> Parameters:
    """Return the numbers of a model's parameters."""
    sizes = model.parameters_by_sublayer()
    return Parameters(
        total=sum(sizes.values()), touched=model.touched_parameters(), by_sublayer=sizes
    )


def spans(metrics: dict) -> Spans | None:
    """Return the spans of all heads, or None if ``metrics`` has none."""
    lengths = []
    for name, metric in metrics.items():
        if name.endswith(".span"):
            lengths += metric if isinstance(metric, list) else [metric]
    if lengths:
        return Spans(mean=sum(lengths) / len(lengths), min=min(lengths), max=max(lengths))
    return None
