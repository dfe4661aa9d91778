"""Sweeps with any launcher of Hydra. All jobs are launched, also finished ones: a finished job
returns its recorded score, and a killed job resumes."""

import json
import os
import shlex
import shutil
import sys

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from harness import source
from harness.cache import digest
from harness.compose import cli
from harness.compose.cli import exit_code, print_error, task_words, to_job_failed
from harness.record.cells import BITS_PER_BYTE, UNITS
from harness.record.display import JOB


class JobCallback(Callback):
    """Hydra's callback in ``conf/command.yaml``. It prints the errors of jobs, and replaces
    Hydra's basic sweeper."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        """Print a job's error. A sweep continues with its other jobs; a command without a sweep
        exits."""
        if job_return.status != JobStatus.FAILED:
            return
        error = job_return._return_value
        is_sweep = config.hydra.mode == RunMode.MULTIRUN
        print_error(error, job=task_words(config.hydra) if is_sweep else ())
        if not is_sweep:
            sys.exit(exit_code([error]))
        job_return._return_value = to_job_failed(error)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Run the sweep and exit, in place of Hydra's basic sweeper, which would stop at the
        first failed job."""
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            return
        try:
            errors = run_sweep(config)
        except Exception as error:  # Hydra would turn it into a warning
            print_error(error)
            errors = [error]
        sys.exit(exit_code(errors))


def run_sweep(config: DictConfig) -> list[Exception]:
    """Run the jobs of the command line with the configured launcher, and return their errors."""
    launcher_name = config.hydra.runtime.choices["hydra/launcher"]
    if "slurm" in launcher_name and shutil.which("srun") is None:
        raise ValueError(
            f"hydra/launcher={launcher_name}: must be run on a cluster with Slurm; srun is not on "
            "PATH"
        )
    loader = GlobalHydra.instance().config_loader()
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    launcher = Plugins.instance().instantiate_launcher(context, cli.task, config)
    params = OmegaConf.to_container(
        config.hydra.sweeper.params or OmegaConf.create({}), resolve=True
    )
    command_line = task_words(config.hydra)
    words = [*(f"{key}={grid}" for key, grid in params.items()), *command_line]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
    for job in jobs:
        loader.load_sweep_config(config, job)  # so that a mistake ends the sweep before a job runs
    suffix = digest(json.dumps(sorted(command_line)).encode())[:8]
    name = f"{config.hydra.runtime.choices.get('sweep') or 'sweep'}-{suffix}"
    template = ""
    if launcher_name == "basic":  # it runs them one by one
        template = f"job {{}} of {len(jobs)}: "
    variables = {"PYTHONPATH": source.python_path(), JOB: template}
    is_training = config.hydra.job.name == "train"
    if is_training and config.record.wandb.group is None:
        variables["WANDB_RUN_GROUP"] = os.environ.get("WANDB_RUN_GROUP", name)
    with env_override(variables):
        job_returns = launcher.launch(jobs, 0)
    errors = []
    for job, job_return in zip(jobs, job_returns, strict=True):
        if job_return.status == JobStatus.FAILED:
            print_error(job_return._return_value, job=job)
            errors.append(job_return._return_value)
    if is_training:
        print(f"sweep {name}: {len(jobs) - len(errors)} of {len(jobs)} done")
    if is_training and len(jobs) > 1:
        common = set.intersection(*map(set, jobs))
        for job, job_return in zip(jobs, job_returns, strict=True):
            words = [word for word in job if word not in common]
            print(f"  {shlex.join(words)}: {_outcome(job_return)}")
        print(f"compare: windtunnel compare {shlex.quote(config.outputs)}")
    return errors


def _outcome(job_return: JobReturn) -> str:
    """Return the status of a job, and its score if it has one."""
    if job_return.status == JobStatus.FAILED:
        return f"failed, {job_return._return_value}".partition("\n")[0]
    score = job_return._return_value
    if score is None:
        return "not finite"
    unit = UNITS.get(job_return.cfg.objective.name, BITS_PER_BYTE)
    return f"{score:.4f} {unit} on valid"
