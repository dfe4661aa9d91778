"""From a composed configuration to a job that can begin: planned, read, found on disk, built; nothing is written."""

import dataclasses
from contextlib import ExitStack

from omegaconf import DictConfig

from harness import source
from harness.count.memory import PeakMemory
from harness.data import corpora
from harness.device import runtime
from harness.device.processes import ALONE, Processes
from harness.loop.job import Job, recording
from harness.loop.run import Run
from harness.loop.warm_start import begin_from
from harness.plan.build import Plan, hydra_facts, plan_run
from harness.record import folder

WARM_BYTES = 16
"""Bytes of the step that is thrown away before memory is measured."""


def prepare(cfg: DictConfig, *, command: str, processes: Processes = ALONE) -> Job:
    """Check, read and build everything; nothing is written before all of it stands.

    Raises:
        ValueError: a user's mistake, in one message.
    """
    with processes.together():
        plan = plan_run(cfg, **hydra_facts())
        corpus = corpora.load(**plan.data)
    place = processes.from_first(lambda: locate(plan, data_digest=corpus.sha256))
    if place.summary:
        return Job(plan, place, None, command=command, processes=processes)
    known = {"variant": plan.variant, "seed": plan.seed, "command": command}
    with ExitStack() as held, recording(place, known, processes):
        with processes.together():
            lease = runtime.take_gpu(plan.runtime) if processes.number == 1 else None
            held.callback(lease.release if lease else lambda: None)
            device = runtime.start(plan.runtime, gpu=lease and lease.index, processes=processes)
            _warm(plan, corpus, device)
            runtime.forget_earlier_jobs()
            peak = PeakMemory(device.device)
            run = Run(plan, corpus, device)
        processes.copy_first_(run.model)
        if place.checkpoint is None:
            begin_from(run)
        return Job(plan, place, run, command=command, processes=processes, peak=peak, held=held.pop_all())


def _warm(plan: Plan, corpus: corpora.Corpus, device: runtime.Runtime) -> None:
    """One small step, thrown away: what libraries load once is not the memory of the process's first run.

    A GPU's counter does not see them.
    """
    if device.device.type == "cpu":
        few = dataclasses.replace(plan.batch, lanes=1, segment=min(plan.batch.segment, WARM_BYTES), accumulate=1)
        alone = dataclasses.replace(device, compile=False, processes=ALONE)
        Run(dataclasses.replace(plan, batch=few), corpus, alone).step()


def locate(plan: Plan, *, data_digest: str) -> folder.RunFolder:
    """The folder where a plan is run or was, reading data of this SHA-256; ValueError as it and the device say."""
    identity = folder.Identity(
        variant=plan.variant,
        seed=plan.seed,
        config=folder.config_hash(plan.config),
        source=source.digest(plan.trust),
        data=data_digest,
        device=runtime.device_kind(plan.runtime),
        precision=plan.runtime.precision,
    )
    return folder.RunFolder(plan.outputs, identity, force=plan.force, reuse=plan.reuse)
