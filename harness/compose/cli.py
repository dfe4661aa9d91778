"""Around Hydra: one clear message and exit code 2 for a user's mistake, where Hydra prints a trace and exits with 1.

With HYDRA_FULL_ERROR=1 Hydra raises errors: ``run_command`` sets that, and is the outermost frame; the callback of
``harness.compose.sweep`` gets a job's error first. Other errors keep their trace and exit with 1; if the user sets
``HYDRA_FULL_ERROR=1``, mistakes have a trace too.
"""

import inspect
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

import yaml
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness import failures, source
from harness.compose.untrusted_config import CONF, FileConfigSource
from harness.device.torchrun import check_launch, is_secondary, read_launch

TRACE = "WINDTUNNEL_TRACE"
"""Variable that keeps the user's own HYDRA_FULL_ERROR, which ``run_command`` overwrites."""
MISTAKES = (ValueError, HydraException, OmegaConfBaseException, yaml.YAMLError)
task: TaskFunction | None = None
"""The function that a sweep's launcher calls for each job."""


class JobFailed(RuntimeError):
    """A sweep job's error: message, exit ``code`` and stderr ``already_printed``; it pickles and keeps no tensors."""


def run_command(command: Callable[[], object], *, many: bool = False) -> None:
    """Call a function decorated with ``hydra.main``, and exit as in ``docs/exit_codes.md`` where it fails. ``many``:
    whether ``torchrun`` may start several processes of it."""
    global task
    task = inspect.unwrap(command)
    Plugins.instance()  # registers Hydra's own source of files
    SourcesRegistry.instance().types["file"] = FileConfigSource
    trace = os.environ.get(TRACE, os.environ.get("HYDRA_FULL_ERROR", ""))
    with env_override({"HYDRA_FULL_ERROR": "1", TRACE: trace}):
        try:
            check_launch(sys.argv[1:], many=many)
            if read_launch().world_size > 1:  # torch's errors repeat the text of its C++ log
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            command()
        except KeyboardInterrupt:  # between two jobs, or while a launcher waits
            print("interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            print_error(error)
            sys.exit(exit_code([error]))


def exit_code(errors: Sequence[Exception]) -> int:
    """Exit code for several errors: a bug's if any is a bug, else the highest."""
    codes = {getattr(error, "code", None) or failures.exit_code(error, mistakes=MISTAKES) for error in errors}
    return failures.BUG if failures.BUG in codes else max(codes, default=0)


def print_error(error: Exception, *, job: Sequence[str] = ()) -> None:
    """Print an error once; ``job``: overrides of the sweep's job. Before processes join, only the first one prints
    mistakes; afterwards only errors marked ``of_process`` are printed."""
    status = os.fstat(2)
    terminal = status.st_dev, status.st_ino  # a launcher may run jobs elsewhere
    others = isinstance(error, MISTAKES) and is_secondary() and not getattr(error, "of_process", False)
    if others or getattr(error, "already_printed", None) in (True, terminal):
        return
    has_message = isinstance(error, (*MISTAKES, JobFailed)) or failures.kind_of(error)
    if not has_message or os.environ.get(TRACE) not in (None, "", "0"):
        traceback.print_exception(error)
    where = f" (in the job {' '.join(job)})" if job else ""
    if has_message or where:
        message = f": {explain(error) or type(error).__name__}" if has_message else ""
        print(f"error{message}{where}", file=sys.stderr)
    error.already_printed = terminal


def portable(error: Exception) -> JobFailed:
    """A job's error as a sweep keeps it."""
    code, name = exit_code([error]), type(error).__name__
    copy = JobFailed(f"{name}: {_first_line(error)}" if code == failures.BUG else explain(error) or name)
    copy.code, copy.already_printed = code, getattr(error, "already_printed", None)
    return copy


def own_command() -> str:
    """The command of this run, also for a job of a sweep."""
    hydra, launch = HydraConfig.get(), read_launch()
    checkout = (source.ROOT / "pyproject.toml").exists()
    if hydra.mode != RunMode.MULTIRUN:
        script = (*launch.command_prefix, sys.argv[0]) if checkout or launch.world_size > 1 else ("windtunnel", "train")
        return shlex.join([*script, *sys.argv[1:]])
    folders = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    words = [word for folder in folders for word in ("-cd", folder)]
    words += [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    script = ("python", "train.py") if checkout else ("windtunnel", "train")
    return shlex.join([*script, *words, *hydra.overrides.task])


def explain(error: Exception) -> str:
    """One message with the key, the value, and what is allowed, as far as Hydra knows; of a long one both ends."""
    message = _explain(error)
    return message if len(message) <= 4000 else f"{message[:3000]} [..] {message[-1000:]}"


def _explain(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        more = "; pip install -e '.[sweep]' brings more" if group == "hydra/launcher" else ""
        return f"{group}={name}: there is no such choice; allowed are {', '.join(error.options)}{more}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r}: must read KEY=VALUE, as in model.heads=4 or trust=[mine] ({_first_line(error)})"
    if isinstance(error, HydraException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        word = str(error).partition("use +")[2] or cause.full_key
        allowed = [str(name) for name in cause.parent_node or ()] if isinstance(cause.parent_node, DictConfig) else []
        if cause.full_key == cause.key:  # groups that are null by default, as recipe, are no keys
            allowed += sorted(path.name for path in CONF.iterdir() if path.is_dir())
        allowed = ", ".join(name for name in dict.fromkeys(allowed) if name != "hydra")
        return f"{word}: no such key; allowed are {allowed or f'none, but for new ones: +{word}'}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    if str(error).startswith("Config group override must be"):  # Hydra does not say of which
        groups = [word for word in sys.argv[1:] if (CONF / word.partition("=")[0]).is_dir()]
        wrong = [word for word in groups if re.search(r"=(.*,)?(null|true|false|[-+.\d]+)(,|$)", word)]
        return f"{' '.join(wrong)}: must be a choice's name"
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, HydraException) and cause is not None:
        lines.append(_first_line(cause))
    return " ".join(line for line in lines if line and not line.startswith("To append"))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
