"""Sweeps by any launcher: every job is launched; a finished one returns its recorded result, a killed one goes on."""

import hashlib
import json
import os
import sys
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from harness.compose import cli
from harness.compose.cli import exit_code, portable, print_error


class Endings(Callback):
    """The callback in ``conf/command.yaml``: prints jobs' errors, and replaces Hydra's basic sweeper in a sweep."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: object) -> None:
        """Print an error; a sweep goes on to its other jobs, a single job ends the command."""
        if job_return.status != JobStatus.FAILED:
            return
        error, sweeping = job_return._return_value, config.hydra.mode == RunMode.MULTIRUN
        print_error(error, job=config.hydra.overrides.task if sweeping else ())
        if not sweeping:
            sys.exit(exit_code([error]))
        job_return._return_value = portable(error)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Run the sweep; Hydra's sweeper would stop at the first failed job."""
        if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            return
        errors: list[Exception] = []
        try:
            run_sweep(config, errors)
        except Exception as error:  # Hydra would make a warning of it
            print_error(error)
            errors.append(error)
        sys.exit(exit_code(errors))


def run_sweep(config: DictConfig, errors: list[Exception]) -> None:
    """Run the jobs of the typed words by the chosen launcher; failures are appended to ``errors``."""
    loader = GlobalHydra.instance().config_loader()
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    launcher = Plugins.instance().instantiate_launcher(context, cli.task, config)
    params = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create({}), resolve=True)
    typed = [str(word) for word in config.hydra.overrides.task]
    words = [*(f"{key}={value}" for key, value in params.items()), *typed]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
    jobs = BasicSweeper.split_arguments(overrides, None)[0]
    for job in jobs:
        loader.load_sweep_config(config, job)  # a wrong word ends the sweep before anything runs
    digest = hashlib.sha256(json.dumps(sorted(typed)).encode()).hexdigest()[:8]
    name = f"{config.hydra.runtime.choices.get('sweep') or 'sweep'}-{digest}"
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables, trains = {"PYTHONPATH": os.pathsep.join(paths)}, config.hydra.job.name == "train"
    if trains and config.record.wandb.group is None:
        variables["WANDB_RUN_GROUP"] = os.environ.get("WANDB_RUN_GROUP", name)
    with env_override(variables):
        results = launcher.launch(jobs, 0)
    for job, result in zip(jobs, results, strict=True):
        if result.status == JobStatus.FAILED:
            print_error(result._return_value, job=job)
            errors.append(result._return_value)
    if trains:
        print(f"sweep {name}: {sum(r.status != JobStatus.FAILED for r in results)} of {len(jobs)} done")
