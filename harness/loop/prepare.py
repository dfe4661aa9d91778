"""Preparation of a run, from a composed configuration until it can begin: planned, read, found on disk, built,
perhaps from another run.

Nothing is written.
"""

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path

from omegaconf import DictConfig

from harness import source
from harness.count.memory import PeakMemory
from harness.data import corpora
from harness.data.public import PINNED
from harness.device import choice, runtime
from harness.device.processes import SINGLE, ProcessGroup
from harness.loop.admission import admission
from harness.loop.run import Run, recording
from harness.loop.settle import settled
from harness.loop.train_state import TrainState
from harness.optim.budget import Spent
from harness.plan.build import Plan, hydra_facts, plan_run
from harness.record import checkpoint, folder, shards
from harness.record.folder import identity_of, read_provenance
from harness.record.rows import RECORD, read_object

WARM_BYTES = 16
"""Bytes of the step that is thrown away before memory is measured."""


def prepare(cfg: DictConfig, *, command: str, processes: ProcessGroup = SINGLE) -> Run:
    """Check, read and build everything; nothing is written before all of it stands.

    Raises:
        ValueError: a user's mistake, in one message.
    """
    with processes.fail_together():
        plan = planned(cfg, **hydra_facts())
        corpus = corpora.load(**plan.data)
    place = processes.on_main(lambda: locate(plan, data_digest=corpus.sha256))
    if place.summary:
        return Run(plan, place, None, command=command, processes=processes)
    plan = dataclasses.replace(plan, admission=processes.on_main(lambda: admission(plan)))
    known = {"variant": plan.variant, "seed": plan.seed, "command": command}
    with ExitStack() as held, recording(plan, place, known, processes):
        with processes.fail_together():
            lease = runtime.take_gpu(plan.runtime) if processes.world_size == 1 else None
            held.callback(lease.release if lease else lambda: None)
            device = runtime.start(plan.runtime, gpu=lease and lease.index, processes=processes)
        plan = settled(plan, device, recorded=processes.on_main(lambda: _recorded(place)))
        with processes.fail_together():
            _warm(plan, corpus, device)
            runtime.forget_earlier_jobs()
            peak = PeakMemory(device.device)
            training = TrainState(plan, corpus, device)
        training.spread()
        if place.checkpoint is None:
            begin_from(training)
        return Run(plan, place, training, command=command, processes=processes, peak=peak, held=held.pop_all())


def planned(cfg: DictConfig, **facts: object) -> Plan:
    """The plan as it runs on this machine: its configuration has what ``auto`` means here, and so has the run's identity.

    Args:
        facts: keywords of ``plan_run``.
    """
    plan = plan_run(cfg, **facts)
    own = choice.settled(plan.runtime)
    words = plan.config["runtime"] | {"precision": own.precision, "compile": own.compile}
    return dataclasses.replace(plan, runtime=own, config=plan.config | {"runtime": words})


def _recorded(place: folder.RunFolder) -> dict | None:
    """How the run that is gone on with has chosen its backend."""
    return read_object(place.path / RECORD, first_line=True).get("backend_choice") if place.checkpoint else None


def _warm(plan: Plan, corpus: corpora.Corpus, device: runtime.Runtime) -> None:
    """One small step, thrown away: what libraries load and kernels compile once is neither the memory nor the seconds of
    the process's first run."""
    few = dataclasses.replace(plan.batch, streams=1, segment=min(plan.batch.segment, WARM_BYTES), accumulate=1)
    alone = dataclasses.replace(device, compile=False, processes=SINGLE)
    TrainState(dataclasses.replace(plan, batch=few), corpus, alone).step()


def locate(plan: Plan, *, data_digest: str) -> folder.RunFolder:
    """The folder where a plan is run or was, reading data of this SHA-256; ValueError as it and the device say."""
    identity = folder.Identity(
        variant=plan.variant,
        seed=plan.seed,
        config=folder.config_hash(plan.config, pinned=PINNED),
        source=source.digest(plan.config, trust=plan.trust),
        data=data_digest,
        device=runtime.device_kind(plan.runtime),
        precision=plan.runtime.precision,
    )
    return folder.RunFolder(plan.outputs, identity, force=plan.force, reuse=plan.reuse)


def begin_from(training: TrainState) -> None:
    """``init_from.run``: another run's weights with a new schedule, or everything with a larger budget.

    Rates, decays and clips are this run's own; moments and sums are the other's. The first process reads it for all.

    Raises:
        ValueError: naming ``init_from.run``, what differs and what is allowed.
    """
    init_from, processes = training.plan.init_from, training.runtime.processes
    if init_from.run is None:
        return
    content, theirs = processes.on_main(lambda: _read_start(init_from.run))
    content = shards.put_back(content, training.trainer.units.empty)
    with processes.fail_together():
        try:
            _take(training, content, theirs)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"init_from.run={init_from.run}: its checkpoint or its {RECORD} is not what this code wrote "
                f"({type(error).__name__}: {error}); allowed is the folder of a run"
            ) from error


def _read_start(path: str) -> tuple[dict, dict]:
    """The newest checkpoint of a run folder, and its provenance."""
    place = Path(path)
    if checkpoint.newest(place) is None or place.is_symlink():  # a link such as outputs/latest is soon another run
        raise ValueError(f"init_from.run={path}: must be a run folder that has a checkpoint, and no link to one")
    theirs = read_provenance(place, key="init_from.run")
    return checkpoint.load_newest(place, identity_of(theirs)), theirs


def _take(training: TrainState, content: dict, theirs: dict) -> None:
    init_from, plan = training.plan.init_from, training.plan
    if init_from.restore == "weights":
        training.take_weights(content["model"])
        _must_agree(plan, _model_facts(theirs["config"]), _model_facts(plan.config))
        return
    unit = plan.budget.unit
    if content["spent"][unit] >= plan.budget.amount:
        raise ValueError(
            f"budget.{unit}={plan.budget.amount}: init_from.run={init_from.run} has spent {content['spent'][unit]} already; "
            "allowed with init_from.restore=everything is more"
        )
    now = {
        "config": plan.config,
        "data": {"sha256": training.corpus.sha256},
        "optimizers": training.optimizers.describe(),
    }
    _must_agree(plan, _stream_facts(theirs), _stream_facts(now))
    for name, optimizer in training.optimizers.optimizers.items():
        content["optimizers"]["groups"][name]["param_groups"] = optimizer.state_dict()["param_groups"]
    spent = Spent(**content["spent"])
    validated = {"bytes": spent.bytes, "fraction": plan.budget.fraction(spent)}
    fresh = {"nats": 0.0, "steps": 0, "best_bits": math.inf, "wandb_id": None, "validated": validated}
    training.restore(content | fresh)


def _model_facts(config: dict) -> dict[str, object]:
    """What makes two models of equal shapes compute differently, by configuration key; rates of dropout may change."""
    free = ("dropout", "embedding_dropout", "embedding_std", "head_zero_init", "default_bytes")
    facts = {f"model.{name}": value for name, value in config["model"].items() if name not in free}
    return facts | {f"position.{name}": value for name, value in config["position"].items()}


def _stream_facts(row: dict) -> dict[str, object]:
    """What must also be the same to go on where a run ended: what it reads, in which order, and what moves it."""
    config = row["config"]
    facts = {f"batch.{name}": config["batch"][name] for name in ("streams", "segment", "carry")}
    facts |= {"seed": config["seed"], "data.sha256": row["data"]["sha256"]}
    facts |= {f"optim {o['name']}": (o["optimizer"], o["parameters"]) for o in row["optimizers"]}
    return _model_facts(config) | facts


def _must_agree(plan: Plan, theirs: dict[str, object], own: dict[str, object]) -> None:
    differ = [
        f"{key} was {theirs.get(key)}, is {own.get(key)}" for key in own | theirs if theirs.get(key) != own.get(key)
    ]
    if differ:
        init_from = plan.init_from
        raise ValueError(
            f"init_from.run={init_from.run}: cannot be taken up with init_from.restore={init_from.restore}: {'; '.join(differ)}"
        )
