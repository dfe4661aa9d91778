"""Sweeps: which jobs are finished, which are launched, and a table of all at the end.

A job's state is read off its run folder, so that it is the same under any launcher, and for another process that types
the same command: a finished job is not launched, one that runs elsewhere is waited for, and everything else is left to the
launcher, where the job itself resumes or begins.
"""

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.compose import cli
from harness.compose.cli import GROUP, MISTAKES, JobFailed, exit_code, portable, print_error, typed

if TYPE_CHECKING:
    from harness.record.folder import RunFolder  # torch comes with it: not for --help

LOOK_SECONDS = 1.0
"""Between two looks at jobs that run elsewhere."""
CORES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Endings(Callback):
    """Named in ``conf/command.yaml``: prints how jobs end, and runs a sweep in the place of Hydra's basic sweeper."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        """An error is printed now: a sweep goes on to its other jobs. A job alone ends the command."""
        if job_return.status != JobStatus.FAILED:
            return
        error, sweeping = job_return._return_value, config.hydra.mode == RunMode.MULTIRUN
        if not (sweeping and getattr(error, "held", False)):
            print_error(error, job=config.hydra.overrides.task if sweeping else ())
        if not sweeping:
            sys.exit(exit_code([error]))
        job_return._return_value = portable(error)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Hydra's own refuses the whole sweep for one job that does not compose, and hides what follows one that fails."""
        if config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            try:
                failed = Sweep(config).run()
            except Exception as error:  # Hydra would make a warning of it
                print_error(error)
                failed = [error]
            sys.exit(exit_code(failed))


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """One job, and its run folder as it was looked at; None where a mistake hides it, or none is asked for."""

    overrides: list[str]
    folder: "RunFolder | None" = None

    @property
    def finished(self) -> bool:
        return self.folder is not None and self.folder.summary is not None

    @property
    def held(self) -> bool:
        """Whether a process is running it."""
        from harness.record.folder import holder

        return self.folder is not None and holder(self.folder.path) is not None

    @property
    def state(self) -> str:
        from harness.record.folder import ending

        if self.folder is None:
            return "new"
        if self.finished or self.held:
            return "finished before" if self.finished else "running elsewhere"
        if (end := ending(self.folder.path)) and end[0] != "finished":
            return "failed before and tried again"
        changed = "new because the source changed since" if self.folder.note else "new"
        return "to go on" if self.folder.begun else changed


class Sweep:
    """The jobs of the words that were typed, and the launcher that was chosen."""

    def __init__(self, config: DictConfig):
        self.config, self.loader, self.resumes = config, GlobalHydra.instance().config_loader(), cli.running.resumes
        words = sorted(str(word) for word in config.hydra.overrides.task)
        choice = config.hydra.runtime.choices.get("sweep") or "sweep"
        self.name = f"{choice}-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]}"
        context = HydraContext(config_loader=self.loader, callbacks=Callbacks(config))
        task = {"hydra_context": context, "task_function": cli.running.task, "config": config}
        self.launcher = Plugins.instance().instantiate_launcher(**task)
        self.digests: dict[str, str | None] = {}

    def run(self) -> list[Exception]:
        """Run what has not finished, to the last job; returns the errors."""
        failed: list[Exception] = []
        jobs = [*self._jobs(failed)]
        if self.resumes and jobs:
            print(f"sweep {self.name}: {standing(jobs)}", flush=True)
        waiting = [job for job in jobs if not job.finished]
        with env_override(environment(self.launcher, len(jobs))):
            while waiting:
                free = [job for job in waiting if not job.held]
                if not free:
                    time.sleep(LOOK_SECONDS)
                for job, result in zip(free, self._launched(free) if free else (), strict=True):
                    error = result._return_value if result.status == JobStatus.FAILED else None
                    if getattr(error, "held", False):  # another process took it before its turn
                        continue
                    waiting.remove(job)
                    if error:
                        print_error(error, job=job.overrides)
                        failed.append(error)
                looked = [self._look(job.overrides) for job in waiting]
                waiting = [job for job in looked if not job.finished]
        if self.resumes and jobs:
            self._show(jobs)
        return failed

    def _jobs(self, failed: list[Exception]) -> Iterator[SweepJob]:
        """Those that compose; the mistakes of the others are printed, and appended to ``failed``."""
        params = OmegaConf.to_container(self.config.hydra.sweeper.params or OmegaConf.create({}), resolve=True)
        words = [*(f"{key}={value}" for key, value in params.items()), *self.config.hydra.overrides.task]
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(words)
        for job in BasicSweeper.split_arguments(overrides, None)[0]:
            try:
                yield self._look(job)
            except MISTAKES as error:
                print_error(error, job=job)
                failed.append(error)

    def _launched(self, jobs: Sequence[SweepJob]) -> Sequence[JobReturn]:
        try:
            return self.launcher.launch([job.overrides for job in jobs], 0)
        except MISTAKES:
            raise
        except Exception as error:  # a job's process was killed, or could not be started
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise JobFailed(f"the launcher gave up ({reason}); the same command goes on with what is left") from error

    def _look(self, overrides: list[str]) -> SweepJob:
        """Where a job stands; what it would refuse beyond its words, it says itself."""
        cfg = self.loader.load_sweep_config(self.config, overrides)
        if not self.resumes:
            return SweepJob(overrides=overrides)
        from harness.data import corpora  # torch comes with these: not for --help
        from harness.loop.prepare import locate, planned
        from harness.plan.build import hydra_facts

        overrides = [*overrides, *settled_words(cfg.runtime, self.launcher)]
        if cfg.record.wandb.group is None and not any(word.startswith(f"{GROUP}=") for word in overrides):
            overrides = [*overrides, f"{GROUP}={self.name}"]
        facts = hydra_facts(cfg.hydra)
        with open_dict(cfg):
            del cfg["hydra"]
        try:
            plan = planned(cfg, **facts)
            key = json.dumps(plan.data, sort_keys=True)
            if key not in self.digests:
                self.digests[key] = None  # what cannot be read is not asked for again
                self.digests[key] = corpora.load(**plan.data).sha256
            digest = self.digests[key]
            folder = locate(plan, data_digest=digest) if digest else None
        except Exception:  # whatever it is, the job meets it too
            folder = None
        return SweepJob(overrides=overrides, folder=folder)

    def _show(self, jobs: Sequence[SweepJob]) -> None:
        """How many are finished, and these side by side."""
        from harness.record.closing_table import print_sweep_table
        from harness.record.folder import finished_summary

        words = [[word for word in typed(job.overrides) if not word.startswith("seed=")] for job in jobs]
        shared, finished = set.intersection(*map(set, words)), []
        for job, each in zip(jobs, words, strict=True):
            if job.folder and (summary := finished_summary(job.folder.path)):
                differing = [word.removeprefix("variant=") for word in each if word not in shared]
                finished.append((" ".join(differing) or summary["variant"], summary))
        print(f"sweep {self.name}: {len(finished)} of {len(jobs)} done")
        print_sweep_table(finished)


def settled_words(runtime: DictConfig, launcher: Launcher) -> list[str]:
    """What ``auto`` means here, as overrides, so that all machines of a sweep take it alike.

    The device stays: ``auto`` is any GPU that is free. No words for a cluster's jobs, which may have a device that is not here.
    """
    from harness.device.choice import device_count, settled
    from harness.plan.settings import RuntimeSettings, parse

    try:
        choice = settled(parse(RuntimeSettings, OmegaConf.to_container(runtime, resolve=True), key="runtime"))
    except Exception:  # a mistake, which the job meets too, or a device of the jobs' machines
        return []
    if type(launcher).__name__ == "SlurmLauncher" and runtime.device != "cpu" and not device_count():
        return []
    words = {"precision": choice.precision, "compile": str(choice.compile).lower()}
    return [f"runtime.{key}={word}" for key, word in words.items() if runtime[key] == "auto"]


def standing(jobs: Sequence[SweepJob]) -> str:
    """``12 jobs: 5 finished before, 1 to go on, 6 new``."""
    states = Counter(job.state for job in jobs)
    return f"{len(jobs)} job{'s' * (len(jobs) != 1)}: {', '.join(f'{n} {state}' for state, n in sorted(states.items()))}"


def environment(launcher: Launcher, n_jobs: int) -> dict[str, str]:
    """Variables for jobs in fresh processes: they import this very source, and those that start at once share the cores.

    Submitit's local executor knows nothing of cores, joblib divides them. It goes by the number of the sweep's jobs, not of
    those that are left: a resumed job must have as many threads as before.
    """
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if type(launcher).__name__ == "LocalLauncher" and not any(name in os.environ for name in CORES):
        variables |= dict.fromkeys(CORES, str(max(1, len(os.sched_getaffinity(0)) // n_jobs)))
    return variables
