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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
from harness.compose.cli import MISTAKES, exit_code, portable, print_error

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
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            return
        errors: list[Exception] = []
        try:
            Sweep(config, errors).run()
        except Exception as error:  # Hydra would make a warning of it
            print_error(error)
            errors.append(error)
        sys.exit(exit_code(errors))


class SweepJob(NamedTuple):
    """One job, and its run folder as it was looked at; None where a mistake hides it, or where sweeps do not resume."""

    overrides: list[str]
    folder: "RunFolder | None" = None

    def state(self) -> str:
        """As the sweep's first line counts it."""
        from harness.record.folder import holder, status_of

        if self.folder is None:
            return "new"
        if self.folder.summary:
            return "finished before"
        if holder(self.folder.path) is not None:
            return "running elsewhere"
        if status_of(self.folder.path) not in (None, "finished"):
            return "failed before and tried again"
        return "to go on" if self.folder.begun else "new"


class Sweep:
    """The jobs of the words that were typed, and the launcher that was chosen; failures are appended to ``errors``."""

    def __init__(self, config: DictConfig, errors: list[Exception]):
        self.config, self.errors, self.loader = config, errors, GlobalHydra.instance().config_loader()
        self.resumes = config.hydra.job.name == "train"  # a verb measures anew
        self.words = [str(word) for word in config.hydra.overrides.task]
        digest = hashlib.sha256(json.dumps(sorted(self.words)).encode()).hexdigest()[:8]
        self.name = f"{config.hydra.runtime.choices.get('sweep') or 'sweep'}-{digest}"
        context = HydraContext(config_loader=self.loader, callbacks=Callbacks(config))
        self.launcher = Plugins.instance().instantiate_launcher(context, cli.running, config)
        self.digests: dict[str, str | None] = {}

    def run(self) -> None:
        """Run what has not finished, to the last job."""
        jobs = list(self._jobs())
        if any(job.folder for job in jobs):
            counts = ", ".join(f"{n} {state}" for state, n in sorted(Counter(job.state() for job in jobs).items()))
            print(f"sweep {self.name}: {len(jobs)} job{'s' * (len(jobs) != 1)}: {counts}", flush=True)
        variables, left = environment(self.launcher, len(jobs)), jobs
        if self.resumes and self.config.record.wandb.group is None:
            variables["WANDB_RUN_GROUP"] = os.environ.get("WANDB_RUN_GROUP", self.name)
        with env_override(variables):
            while left := [job for job in left if job.state() != "finished before"]:
                if free := [job for job in left if job.state() != "running elsewhere"]:
                    tried = self._launch(free)
                    left = [job for job in left if job not in tried]
                else:
                    time.sleep(LOOK_SECONDS)
                left = [self._look(job.overrides) for job in left]
        if any(job.folder for job in jobs):
            self._show(jobs)

    def _jobs(self) -> Iterator[SweepJob]:
        """Those that compose."""
        params = OmegaConf.to_container(self.config.hydra.sweeper.params or OmegaConf.create({}), resolve=True)
        words = [*(f"{key}={value}" for key, value in params.items()), *self.words]
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(words)
        for job in BasicSweeper.split_arguments(overrides, None)[0]:
            try:
                yield self._look(job)
            except MISTAKES as error:
                print_error(error, job=job)
                self.errors.append(error)

    def _look(self, overrides: list[str]) -> SweepJob:
        """Where a job stands; what it would refuse beyond its words, it says itself."""
        cfg = self.loader.load_sweep_config(self.config, overrides)
        if not self.resumes:
            return SweepJob(overrides)
        from harness.data import corpora  # torch comes with these: not for --help
        from harness.loop.prepare import locate, planned
        from harness.plan.build import hydra_facts

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
            return SweepJob(overrides, locate(plan, data_digest=digest) if digest else None)
        except Exception:  # whatever it is, the job meets it too
            return SweepJob(overrides)

    def _launch(self, jobs: Sequence[SweepJob]) -> list[SweepJob]:
        """Those that finished or failed, and not those that another process took before their turn."""
        tried = []
        for job, result in zip(jobs, self.launcher.launch([job.overrides for job in jobs], 0), strict=True):
            error = result._return_value if result.status == JobStatus.FAILED else None
            if getattr(error, "held", False):
                continue
            tried.append(job)
            if error:
                print_error(error, job=job.overrides)
                self.errors.append(error)
        return tried

    def _show(self, jobs: Sequence[SweepJob]) -> None:
        """How many are finished, and these side by side."""
        from harness.record.closing_table import print_sweep_table
        from harness.record.folder import finished_summary

        words = [[word for word in job.overrides if not word.startswith("seed=")] for job in jobs]
        shared, finished = set.intersection(*map(set, words)), []
        for job, each in zip(jobs, words, strict=True):
            if job.folder and (summary := finished_summary(job.folder.path)):
                differing = [word.removeprefix("variant=") for word in each if word not in shared]
                finished.append((" ".join(differing) or summary["variant"], summary))
        print(f"sweep {self.name}: {len(finished)} of {len(jobs)} done")
        print_sweep_table(finished)


def environment(launcher: Launcher, n_jobs: int) -> dict[str, str]:
    """Variables for jobs in fresh processes: they import this very source, and those that start at once share the cores.

    Submitit's local executor knows nothing of cores, joblib divides them. It goes by the number of the sweep's jobs, not of
    those that are left: a resumed job must have as many threads as before.
    """
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if type(launcher).__name__ == "LocalLauncher" and not any(name in os.environ for name in CORES):
        variables |= dict.fromkeys(CORES, str(max(1, len(os.sched_getaffinity(0)) // max(1, n_jobs))))
    return variables
