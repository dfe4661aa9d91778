"""Sweeps: which jobs stand already, which are launched, and one line that says how far they all are.

A job's state is read off its run folder, so that it is the same under any launcher, and for another process that types
the same command: a finished job returns its recorded objective without being launched, one that runs elsewhere is waited
for, and everything else is left to the launcher, where the job itself resumes or begins.
"""

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.compose.cli import GROUP, MISTAKES, JobFailed, typed

if TYPE_CHECKING:
    from harness.record.folder import RunFolder  # torch comes with it: not for --help

LOOK_SECONDS = 1.0
"""Between two looks at the jobs' folders."""
OWN_CORES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """One job, as its run folder shows it.

    Attributes:
        overrides: what makes it this job.
        folder: its run folder as it was looked at, or None where its configuration, data or device has a mistake, which
            the job will say.
        ended: how and when its last try had ended by then, from ``folder.ending``.
    """

    overrides: list[str]
    cfg: DictConfig
    folder: "RunFolder | None" = None
    ended: tuple[str, int] | None = None

    @property
    def finished(self) -> bool:
        return self.folder is not None and self.folder.summary is not None

    @property
    def state(self) -> str:
        """``failed``, ``begun``, ``changed`` where only another source's run of it is there, or ``new``."""
        if self.ended is not None and self.ended[0] != "finished":
            return "failed"
        if self.folder and self.folder.begun:
            return "begun"
        return "changed" if self.folder and self.folder.note else "new"

    def result(self) -> JobReturn:
        """Of a finished job."""
        done = JobReturn(overrides=self.overrides, cfg=self.cfg, status=JobStatus.COMPLETED)
        done.return_value = self.folder.summary["valid_bits_per_byte"]
        return done


class Resuming(Launcher):
    """Any launcher, the ``chosen`` one, given only the jobs that are not finished."""

    def __init__(self, chosen: Launcher, **hydra):
        self._chosen = chosen
        self.setup(**hydra)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config
        swept = sorted(str(word) for word in config.hydra.overrides.task)
        choice = config.hydra.runtime.choices.get("sweep") or "sweep"
        self.name = f"{choice}-{hashlib.sha256(json.dumps(swept).encode()).hexdigest()[:8]}"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The jobs' results in their order; those that were there before as if they had been made now."""
        digests: dict[str, str | None] = {}
        jobs = [self._look(list(overrides), digests) for overrides in job_overrides]
        found = {index: job.result() for index, job in enumerate(jobs) if job.finished}
        if any(job.folder for job in jobs):
            print(f"sweep {self.name}: {standing(jobs)}", flush=True)
        with _status(self.name, jobs), env_override(environment(self._chosen, len(jobs))):
            while left := [index for index in range(len(jobs)) if index not in found]:
                free = [index for index in left if not _held(jobs[index])]
                if free:
                    results = self._launched([jobs[index].overrides for index in free], initial_job_idx)
                    found |= {index: result for index, result in zip(free, results, strict=True) if not _late(result)}
                else:
                    time.sleep(LOOK_SECONDS)
                jobs = [job if i in found else self._look(job.overrides, digests) for i, job in enumerate(jobs)]
                found |= {index: jobs[index].result() for index in left if index not in found and jobs[index].finished}
        self._show(jobs)
        return [found[index] for index in range(len(jobs))]

    def _launched(self, job_overrides: list[list[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        try:
            return self._chosen.launch(job_overrides, initial_job_idx)
        except MISTAKES:
            raise
        except Exception as error:  # a job's process was killed, or could not be started
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise JobFailed(f"the launcher gave up ({reason}); the same command goes on with what is left") from error

    def _show(self, jobs: Sequence[SweepJob]) -> None:
        """All finished jobs side by side, and where to look on."""
        from harness.record.closing_table import print_sweep_table
        from harness.record.folder import finished_summary

        words = [[word for word in typed(job.overrides) if not word.startswith("seed=")] for job in jobs]
        shared = set.intersection(*map(set, words))
        found = []
        for job, own in zip(jobs, words, strict=True):
            if job.folder and (summary := finished_summary(job.folder.path)):
                differing = [word.removeprefix("variant=") for word in own if word not in shared]
                found.append((" ".join(differing) or summary["variant"], summary))
        print_sweep_table(found)

    def _settled(self, cfg: DictConfig) -> list[str]:
        """Words for a job, so that all machines of the sweep take ``auto`` alike; none where the jobs' machines are others
        and may have a device that is not here."""
        try:
            words = settled_words(cfg.runtime)
        except Exception:  # a mistake, which the job meets too, or a device of the jobs' machines
            words = []
        if type(self._chosen).__name__ != "SlurmLauncher" or cfg.runtime.device == "cpu":
            return words
        from harness.device.choice import device_count

        return words if device_count() else []

    def _look(self, overrides: list[str], digests: dict[str, str | None]) -> SweepJob:
        """Where a job stands; one with a mistake is left to the launcher, and says it itself."""
        from harness.data import corpora  # torch comes with these: not for --help
        from harness.loop.prepare import locate, planned
        from harness.plan.build import hydra_facts
        from harness.record.folder import ending

        cfg = self._loader.load_sweep_config(self._config, overrides)
        overrides = [*overrides, *self._settled(cfg)]
        if cfg.record.wandb.group is None and not any(word.startswith(f"{GROUP}=") for word in overrides):
            overrides = [*overrides, f"{GROUP}={self.name}"]
        facts = hydra_facts(cfg.hydra)
        with open_dict(cfg):
            del cfg["hydra"]
        try:
            plan = planned(cfg, **facts)
            key = json.dumps(plan.data, sort_keys=True)
            if key not in digests:
                digests[key] = None  # what cannot be read is not asked for again
                digests[key] = corpora.load(**plan.data).sha256
            place = digests[key] and locate(plan, data_digest=digests[key])
        except Exception:  # whatever it is, the job meets it too
            place = None
        return SweepJob(overrides=overrides, cfg=cfg, folder=place, ended=place and ending(place.path))


def settled_words(runtime: DictConfig) -> list[str]:
    """What ``auto`` means on this machine, as overrides; the device stays, because ``auto`` is any GPU that is free."""
    from harness.device.choice import settled
    from harness.plan.settings import RuntimeSettings, parse

    own = settled(parse(RuntimeSettings, OmegaConf.to_container(runtime, resolve=True), key="runtime"))
    words = {"precision": own.precision, "compile": str(own.compile).lower()}
    return [f"runtime.{key}={word}" for key, word in words.items() if runtime[key] == "auto"]


def standing(jobs: Sequence[SweepJob]) -> str:
    """``12 jobs: 5 finished before, 1 goes on, 6 new (2 because the source changed)``."""
    states = Counter("finished" if job.finished else "held" if _held(job) is not None else job.state for job in jobs)
    changed = states.pop("changed", 0)
    states["new"] += changed
    words = {"finished": "finished before", "held": "running elsewhere", "failed": "failed before and tried again"}
    words |= {"begun": "to go on", "new": "new"}
    told = [f"{states[state]} {word}" for state, word in words.items() if states[state]]
    because = f" ({changed} because the source changed since)" if changed else ""
    return f"{len(jobs)} job{'s' * (len(jobs) != 1)}: {', '.join(told)}{because}"


def progress(jobs: Sequence[SweepJob]) -> str:
    """``5 of 12 done, 2 running, 4 queued, 1 failed``; jobs with a mistake stay queued until they have said it."""
    from harness.record.folder import ending

    now = [ending(job.folder.path) if job.folder else None for job in jobs]
    news = [end[0] if end and end != job.ended else None for job, end in zip(jobs, now, strict=True)]
    held = [_held(job) is not None for job in jobs]
    done = sum(job.finished or new == "finished" for job, new in zip(jobs, news, strict=True))
    running = sum(held and new is None for held, new in zip(held, news, strict=True))
    failed = sum(new not in (None, "finished") for new in news)
    return (
        f"{done} of {len(jobs)} done, {running} running, {len(jobs) - done - running - failed} queued, {failed} failed"
    )


def _late(result: JobReturn) -> bool:
    """Whether another process had taken the job's folder by its turn."""
    return result.status == JobStatus.FAILED and getattr(result._return_value, "held", False)


def _held(job: SweepJob) -> str | None:
    from harness.record.folder import holder

    return holder(job.folder.path) if job.folder else None


@contextmanager
def _status(name: str, jobs: Sequence[SweepJob]) -> Iterator[None]:
    """One line each time that the counts change, while the block lasts and at its end."""
    ended, told = threading.Event(), [progress(jobs)]

    def tell() -> None:
        now = progress(jobs)
        if now != told[0]:
            told[0] = now
            print(f"sweep {name}: {now}", flush=True)

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            tell()

    watcher = threading.Thread(target=watch, name="sweep", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        tell()


def environment(launcher: Launcher, n_jobs: int) -> dict[str, str]:
    """Variables for jobs in fresh processes: they import this very source, and those that start at once share the cores.

    Submitit's local executor knows nothing of cores, joblib divides them. It goes by the number of the sweep's jobs, not of
    those that are left: a resumed job must have as many threads as before.
    """
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(paths)}
    if type(launcher).__name__ == "LocalLauncher" and not any(name in os.environ for name in OWN_CORES):
        found |= dict.fromkeys(OWN_CORES, str(max(1, len(os.sched_getaffinity(0)) // n_jobs)))
    return found
