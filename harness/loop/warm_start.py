"""Beginning from another run: ``start.run``, and what of it ``start.take`` takes."""

import math
from pathlib import Path

from harness.loop.run import Run
from harness.plan.build import Plan
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows


def begin_from(run: Run) -> None:
    """``start.run``: another run's weights with a new schedule, or everything with a larger budget.

    Rates, decays and clips are this run's own; moments and sums are the other's. The first process reads it for all.

    Raises:
        ValueError: naming ``start.run``, what differs and what is allowed.
    """
    start, processes = run.plan.start, run.runtime.processes
    if start.run is None:
        return
    content, theirs = processes.from_first(lambda: _read_start(start.run))
    with processes.together():
        _take(run, content, theirs)


def _read_start(path: str) -> tuple[dict, dict]:
    """The newest checkpoint of a run folder, and its provenance."""
    folder = Path(path)
    newest = checkpoint.newest(folder)
    if newest is None or folder.is_symlink():  # a link such as outputs/latest is soon another run
        raise ValueError(f"start.run={path}: must be a run folder that has a checkpoint, and no link to one")
    return checkpoint.load(newest), read_rows(folder / RECORD)[0]


def _take(run: Run, content: dict, theirs: dict) -> None:
    start, plan = run.plan.start, run.plan
    if start.take == "weights":
        run.take_weights(content["model"])
        _must_agree(plan, _model_facts(theirs["config"]), _model_facts(plan.config))
        return
    unit = plan.budget.unit
    if content["spent"][unit] >= plan.budget.amount:
        raise ValueError(
            f"budget.{unit}={plan.budget.amount}: start.run={start.run} has spent {content['spent'][unit]} already; "
            "allowed with start.take=everything is more"
        )
    now = {"config": plan.config, "data": {"sha256": run.corpus.sha256}, "optimizers": run.optimizers.describe()}
    _must_agree(plan, _stream_facts(theirs), _stream_facts(now))
    for name, optimizer in run.optimizers.optimizers.items():
        content["optimizers"]["groups"][name]["param_groups"] = optimizer.state_dict()["param_groups"]
    run.restore(content | {"nats": 0.0, "steps": 0, "best_bits": math.inf, "wandb_id": None})


def _model_facts(config: dict) -> dict[str, object]:
    """What makes two models of equal shapes compute differently, by configuration key; rates of dropout may change."""
    free = ("dropout", "embedding_dropout", "embedding_std", "head_zero_init", "default_bytes")
    facts = {f"model.{name}": value for name, value in config["model"].items() if name not in free}
    return facts | {f"position.{name}": value for name, value in config["position"].items()}


def _stream_facts(row: dict) -> dict[str, object]:
    """What must also be the same to go on where a run ended: what it reads, in which order, and what moves it."""
    config = row["config"]
    facts = {f"batch.{name}": config["batch"][name] for name in ("lanes", "segment", "carry")}
    facts |= {"seed": config["seed"], "data.sha256": row["data"]["sha256"]}
    facts |= {f"optim {o['name']}": (o["optimizer"], o["parameters"]) for o in row["optimizers"]}
    return _model_facts(config) | facts


def _must_agree(plan: Plan, theirs: dict[str, object], own: dict[str, object]) -> None:
    differ = [
        f"{key} was {theirs.get(key)}, is {own.get(key)}" for key in own | theirs if theirs.get(key) != own.get(key)
    ]
    if differ:
        start = plan.start
        raise ValueError(f"start.run={start.run}: cannot be taken up with start.take={start.take}: {'; '.join(differ)}")
