"""Run commands under Hydra. A user's mistake gives one clear message and exit code 2, a failure of
``harness/failures.py`` a message and its own code, and a bug its trace and exit code 1. With
HYDRA_FULL_ERROR=1, which ``run_command`` sets, Hydra raises errors instead of printing them.
``run_command`` prints the errors that no callback of ``harness/compose/sweep.py`` has printed.
If the user sets HYDRA_FULL_ERROR=1, all are printed with a trace."""

import inspect
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
import yaml
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness import failures, source
from harness.compose.help import help_text
from harness.compose.untrusted_config import CONF, FileConfigSource
from harness.device.output import contained_output
from harness.device.torchrun import check_launch, is_secondary, read_launch
from harness.failures import did_you_mean, first_line, note

TRACE_VARIABLE = "WINDTUNNEL_TRACE"
"""Environment variable in which ``run_command`` saves the user's HYDRA_FULL_ERROR before it
overwrites it."""
MISTAKES = (ValueError, HydraException, OmegaConfBaseException, yaml.YAMLError)
SYNONYMS = {
    "batch.streams": ("batch_size",),
    "model.span": ("context", "context_length", "window", "window_size"),
    "batch.segment": ("block_size", "seq_len", "seq_length", "sequence_length"),
    "optim.lr": ("learning_rate", "rate"),
    "model.layers": ("n_layer", "n_layers", "num_layers", "depth"),
    "model.heads": ("n_head", "n_heads", "num_heads"),
    "model.d_model": ("n_embd", "dim", "hidden_size", "width"),
    "budget.steps": ("max_steps", "iterations", "n_steps"),
    "data": ("dataset", "corpus"),
    "variant": ("attention", "mechanism"),
    "budget.bytes": ("epochs", "max_bytes"),
    "optim": ("optimizer",),
}
"""The names that other programs give to our keys."""
# packages whose SystemExit ends a command
EXITING = ("harness", "bench", "hydra", "argparse", "__main__")
task: TaskFunction | None = None  # the function that the launcher of a sweep calls for each job


class JobFailed(RuntimeError):
    """The error of a sweep's job in a form that can be pickled and holds no tensors: message, exit
    ``code``, and ``already_printed``, the device and inode of the stderr to which it was
    printed, or None."""


def with_config(name: str) -> Callable[[TaskFunction], Callable[[], None]]:
    """Return ``hydra.main`` with the configuration ``conf/<name>.yaml``."""
    return hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)


def run_command(command: Callable[[], object], *, multiprocess: bool = False) -> None:
    """Call a function decorated with ``with_config``. If it fails, exit with a code of
    ``docs/exit_codes.md``. ``multiprocess`` states whether ``torchrun`` may start the command in
    several processes."""
    global task
    task = inspect.unwrap(command)
    Plugins.instance()  # registers Hydra's file source, which the next line replaces
    SourcesRegistry.instance().types["file"] = FileConfigSource
    trace = os.environ.get(TRACE_VARIABLE, os.environ.get("HYDRA_FULL_ERROR", ""))
    with env_override({"HYDRA_FULL_ERROR": "1", TRACE_VARIABLE: trace}), contained_output():
        try:
            if {"--help", "-h"} & {*sys.argv[1:]}:
                words = [word for word in sys.argv[1:] if word not in ("--help", "-h")]
                print(help_text(Path(inspect.getfile(task)).stem, *words[:1]))
                return
            check_launch(sys.argv[1:], multiprocess=multiprocess)
            if read_launch().world_size > 1:  # torch's errors repeat what its C++ code logs
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            command()
        except KeyboardInterrupt:  # outside of a job: between two jobs, or while a launcher waits
            note("interrupted")
            sys.exit(128 + signal.SIGINT)
        except SystemExit as stop:
            if (caller := _calling_module(stop)).partition(".")[0] in EXITING:
                raise
            note(f"error: the code of {caller} calls exit({stop.code})")
            sys.exit(failures.MISTAKE)
        except Exception as error:
            print_error(error)
            sys.exit(exit_code([error]))


def _calling_module(stop: SystemExit) -> str:
    """Return the module that has called ``sys.exit`` or ``exit``. W&B replaces ``sys.exit`` by a
    function of its own."""
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(stop.__traceback__)]
    return next(
        name
        for name in reversed(modules)
        if name.partition(".")[0] not in ("_sitebuiltins", "wandb")
    )


def exit_code(errors: Sequence[Exception]) -> int:
    """Return the exit code of a command with several errors: that of a bug if one is a bug, else
    the highest."""
    codes = {
        getattr(error, "code", None) or failures.exit_code(error, mistakes=MISTAKES)
        for error in errors
    }
    if failures.BUG in codes:
        return failures.BUG
    return max(codes, default=0)


def print_error(error: Exception, *, job: Sequence[str] = ()) -> None:
    """Print an error to stderr, unless it was printed there before. ``job`` has the overrides of a
    sweep's job. A mistake in the configuration is raised by all processes of a run, and printed by
    the main process only. A mistake marked ``of_process`` was raised later, perhaps in one
    process only, and is printed by that process."""
    stderr_status = os.fstat(2)
    # the stderr of a launcher's job may be another file
    stderr_file = stderr_status.st_dev, stderr_status.st_ino
    printed_by_main = (
        isinstance(error, MISTAKES) and is_secondary() and not getattr(error, "of_process", False)
    )
    if printed_by_main or getattr(error, "already_printed", None) in (True, stderr_file):
        return
    has_message = isinstance(error, (*MISTAKES, JobFailed)) or failures.failure_class(error)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # clears a line that shows progress
    if not has_message or os.environ.get(TRACE_VARIABLE) not in (None, "", "0"):
        traceback.print_exception(error)
    message = ""
    if has_message:
        message = f": {explain(error) or type(error).__name__}"
    suffix = ""
    if job:
        suffix = f" (in the job {' '.join(job)})"
    if message or suffix:
        note(f"error{message}{suffix}")
    error.already_printed = stderr_file


def to_job_failed(error: Exception) -> JobFailed:
    """Return the ``JobFailed`` for the error of a sweep's job."""
    code = exit_code([error])
    name = type(error).__name__
    message = f"{name}: {first_line(error)}" if code == failures.BUG else explain(error) or name
    failed = JobFailed(message)
    failed.code = code
    failed.already_printed = getattr(error, "already_printed", None)
    return failed


def command_of_run() -> str:
    """Return the command line that repeats this run alone, also if the run is a job of a sweep."""
    hydra = HydraConfig.get()
    launch = read_launch()
    is_checkout = (source.ROOT / "pyproject.toml").exists()
    script = ("python", "train.py") if is_checkout else ("windtunnel", "train")
    if hydra.mode != RunMode.MULTIRUN:
        if is_checkout or launch.world_size > 1:
            script = (*launch.command_prefix, sys.argv[0])
        return shlex.join([*script, *sys.argv[1:]])
    folders = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    options = [word for folder in folders for word in ("-cd", folder)]
    options += [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    return shlex.join([*script, *options, *task_words(hydra)])


def task_words(hydra: DictConfig) -> list[str]:
    """Return the overrides of a job as typed. Hydra's list would resolve each ``${..}`` when it is
    read."""
    return OmegaConf.to_container(hydra.overrides.task, resolve=False)


def explain(error: Exception) -> str:
    """Return one message that names the key, the value and what is allowed, if the error has them.
    A long message is shortened in the middle."""
    message = _explain(error)
    if len(message) <= 4000:
        return message
    return f"{message[:3000]} [..] {message[-1000:]}"


def _explain(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        hint = ""
        if group == "hydra/launcher":
            hint = "; pip install -e '.[sweep]' installs more"
        nearest = did_you_mean(name, error.options)
        return (
            f"{group}={name}: no such choice{nearest}; allowed are {', '.join(error.options)}{hint}"
        )
    if isinstance(error, OverrideParseException):
        allowed = (
            "KEY=VALUE, as in model.heads=4 or trust=[mine], or \"KEY='VALUE'\" with signs "
            "and letters like é"
        )
        return f"{error.override!r}: must be {allowed} ({first_line(error)})"
    if isinstance(error, HydraException) and isinstance(
        cause, ConfigAttributeError | ConfigKeyError
    ):
        override = str(error).partition("use +")[2] or cause.full_key
        names = []
        if isinstance(cause.parent_node, DictConfig):
            names = [str(name) for name in cause.parent_node or ()]
        paths = []
        # at the top, add the groups: those that are null by default are no keys
        if cause.full_key == cause.key:
            names += sorted(path.name for path in CONF.iterdir() if path.is_dir())
            paths = _paths(OmegaConf.to_container(cause.parent_node), str(cause.key))
        paths = paths or [ours for ours, theirs in SYNONYMS.items() if cause.key in theirs]
        section = str(cause.full_key).removesuffix(str(cause.key))
        nearest = did_you_mean(str(cause.key), names, prefix=section)
        hint = f" (did you mean {' or '.join(paths)}?)" if paths else nearest
        allowed = ", ".join(name for name in dict.fromkeys(names) if name != "hydra")
        return (
            f"{override}: no such key{hint}; allowed are "
            f"{allowed or f'none; +{override} adds a new key'}"
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first_line(error)}"
    # Hydra's message does not name the group
    if str(error).startswith("Config group override must be"):
        groups = [word for word in sys.argv[1:] if (CONF / word.partition("=")[0]).is_dir()]
        invalid = [
            word for word in groups if re.search(r"=(.*,)?(null|true|false|[-+.\d]+)(,|$)", word)
        ]
        return f"{' '.join(invalid)}: must be the name of a file in this group"
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, HydraException) and cause is not None:
        lines.append(first_line(cause))
    return " ".join(line for line in lines if line and not line.startswith("To append"))


def _paths(section: dict, key: str) -> list[str]:
    """Return the dotted paths at which a nested section has ``key``."""
    paths = []
    if key in section:
        paths = [key]
    nested = (
        (name, node) for name, node in section.items() if isinstance(node, dict) and name != "hydra"
    )
    return paths + [f"{name}.{path}" for name, node in nested for path in _paths(node, key)]
