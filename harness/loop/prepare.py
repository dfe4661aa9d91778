"""Preparation of a run by its configuration: plan, corpus, folder, model, another run's weights. Writes nothing."""

import dataclasses
from pathlib import Path

from omegaconf import DictConfig

from harness import source
from harness.count.memory import PeakMemory
from harness.data import corpora
from harness.data.sources import PINNED
from harness.device import runtime
from harness.device.processes import SINGLE, ProcessGroup
from harness.loop.admission import admission
from harness.loop.run import Run, recording
from harness.loop.select_backend import settled
from harness.loop.trainer import Trainer
from harness.plan.build import Plan, hydra_arguments, plan_run
from harness.record import checkpoint, folder
from harness.record.folder import identity_of, read_provenance
from harness.record.rows import RECORD, read_object

WARM_BYTES = 16
"""Of the step that is thrown away before memory is measured."""
FREE = ("dropout", "embedding_dropout", "embedding_std", "head_zero_init", "default_bytes")
"""Keys of ``model`` that may differ from those of ``init_from.run``."""


def prepare(cfg: DictConfig, *, command: str, processes: ProcessGroup = SINGLE) -> Run:
    """Check, read and build everything before anything is written. ValueError is a user's mistake."""
    with processes.fail_together():
        plan = planned(cfg)
        corpus = corpora.load(**plan.data)
    place = processes.on_main(lambda: _locate(plan, data_digest=corpus.sha256))
    if place.summary:
        return Run(plan, place, None, command=command, processes=processes)
    plan = dataclasses.replace(plan, admission=processes.on_main(lambda: admission(plan)))
    provenance = {"variant": plan.variant, "seed": plan.seed, "command": command}
    with recording(plan, place, provenance, processes):
        with processes.fail_together():
            device = runtime.start(plan.runtime, processes=processes)
        record = processes.on_main(
            lambda: read_object(place.path / RECORD, first_line=True) if place.checkpoint else {}
        )
        plan = settled(plan, device, recorded=record.get("backend_choice"))
        with processes.fail_together():
            _warm(plan, corpus, device)
            runtime.forget_earlier_jobs()
            peak = PeakMemory(device.device)
            trainer = Trainer(plan, corpus, device)
        trainer.update.spread(shard=plan.runtime.shard)
        if place.checkpoint is None and plan.init_from.run is not None:
            begin_from(trainer)
        return Run(plan, place, trainer, command=command, processes=processes, peak=peak)


def planned(cfg: DictConfig) -> Plan:
    """The plan with what ``auto`` means on this machine, also in its configuration, by which the run is identified;
    ValueError names key, value and what is allowed."""
    plan = plan_run(cfg, **hydra_arguments())
    here = runtime.settled(plan.runtime)
    words = plan.config["runtime"] | {"precision": here.precision, "compile": here.compile}
    return dataclasses.replace(plan, runtime=here, config=plan.config | {"runtime": words})


def _locate(plan: Plan, *, data_digest: str) -> folder.RunFolder:
    identity = folder.Identity(
        variant=plan.variant,
        seed=plan.seed,
        config=folder.config_hash(plan.config, pinned=PINNED),
        source=source.digest(plan.config, trust=plan.trust),
        data=data_digest,
        device=runtime.device_kind(plan.runtime),
        precision=plan.runtime.precision,
    )
    return folder.RunFolder(plan.outputs, identity, force=plan.force)


def _warm(plan: Plan, corpus: corpora.Corpus, device: runtime.Runtime) -> None:
    """One small step, thrown away: what libraries load and compile once is not the first run's memory or time."""
    few = dataclasses.replace(plan.batch, streams=1, segment=min(plan.batch.segment, WARM_BYTES), accumulate=1)
    alone = dataclasses.replace(device, compile=False, processes=SINGLE)
    Trainer(dataclasses.replace(plan, batch=few), corpus, alone).step()


def begin_from(trainer: Trainer) -> None:
    """``init_from.run``: another run's weights with a new schedule, or everything with a larger budget; rates, decays
    and clips stay this run's. ValueError says what differs."""
    path, processes = trainer.plan.init_from.run, trainer.runtime.processes
    content, theirs = processes.on_main(lambda: _read_start(Path(path)))
    with processes.fail_together():
        try:
            _restore(trainer, content, theirs)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"init_from.run={path}: its checkpoint or its {RECORD} is not what this code wrote "
                f"({type(error).__name__}: {error}); allowed is the folder of a run"
            ) from error


def _read_start(path: Path) -> tuple[dict, dict]:
    """The newest checkpoint of a run folder, and its provenance."""
    if checkpoint.newest(path) is None or path.is_symlink():  # outputs/latest is another run after the next command
        raise ValueError(f"init_from.run={path}: must be a run folder that has a checkpoint, and no link to one")
    theirs = read_provenance(path, key="init_from.run")
    return checkpoint.load_newest(path, identity_of(theirs)), theirs


def _restore(trainer: Trainer, content: dict, theirs: dict) -> None:
    plan, restore = trainer.plan, trainer.plan.init_from.restore
    what, unit, optimizers = f"init_from.run={plan.init_from.run}", plan.budget.unit, trainer.optimizers
    if restore == "everything" and content["spent"][unit] >= plan.budget.amount:
        raise ValueError(
            f"budget.{unit}={plan.budget.amount}: {what} has spent {content['spent'][unit]} already; "
            "allowed with init_from.restore=everything is more"
        )
    if restore == "weights":
        trainer.take_weights(content["model"])
    ours = {"config": plan.config, "data": {"sha256": trainer.corpus.sha256}, "optimizers": optimizers.describe()}
    then, now = (_facts(row, everything=restore == "everything") for row in (theirs, ours))
    if differ := [
        f"{key} was {then.get(key)}, is {now.get(key)}" for key in now | then if then.get(key) != now.get(key)
    ]:
        raise ValueError(f"{what}: cannot be taken up with init_from.restore={restore}: {'; '.join(differ)}")
    if restore == "everything":
        for name, optimizer in optimizers.optimizers.items():
            content["optimizers"]["groups"][name]["param_groups"] = optimizer.state_dict()["param_groups"]
        trainer.restore(content | {"nats": 0.0, "steps": 0})


def _facts(row: dict, *, everything: bool) -> dict[str, object]:
    """What makes models of equal shapes compute differently, by key; ``everything`` adds data, order and optimizers."""
    config = row["config"]
    facts = {f"model.{name}": value for name, value in config["model"].items() if name not in FREE}
    facts |= {f"position.{name}": value for name, value in config["position"].items()}
    if everything:
        facts |= {f"batch.{name}": config["batch"][name] for name in ("streams", "segment", "carry")}
        facts |= {"seed": config["seed"], "data.sha256": row["data"]["sha256"]}
        facts |= {f"optim {o['name']}": (o["optimizer"], o["parameters"]) for o in row["optimizers"]}
    return facts
