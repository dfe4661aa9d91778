"""Around Hydra: one clear message and exit code 2 for a user's mistake, and sweeps whose other jobs still run.

Left alone, Hydra 1.3 prints before it exits with 1, refuses a whole sweep for one bad job, and leaves a file behind. So
``run_command`` is the outermost frame, and seven of Hydra's functions are changed while it runs. An error that is nobody's
mistake keeps its trace and exits with 1; ``HYDRA_FULL_ERROR=1`` shows the trace of a mistake, too.
"""

import contextlib
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra._internal.utils as hydra_frame
import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness import failures, source
from harness.compose.strangers import check_loaded, check_seen, is_strangers, read_text
from harness.device.torchrun import check_launch, is_later, read_launch

GROUP = "record.wandb.group"
"""The key that a sweep sets in its jobs; what belongs to a sweep is one group in W&B."""
HEAD, TAIL = 3000, 1000
INSTALLED = ("windtunnel", "train")
"""What is typed for a run where there is no checkout."""
MISTAKES = (ValueError, HydraException, OmegaConfBaseException, yaml.YAMLError)


class JobFailed(RuntimeError):
    """What a sweep keeps of a job's error that is nobody's mistake: one line, without the frames and their tensors."""


SAID = (*MISTAKES, JobFailed)
"""Errors whose message is all there is to say, beside failures."""


def run_command(
    command: Callable[[], object], *, many: bool = False, launcher: Callable[..., Launcher] | None = None
) -> None:
    """Call a function decorated with ``hydra.main`` and exit as ``docs/exit_codes.md`` says.

    Args:
        many: whether several processes, started by ``torchrun``, may do it together.
        launcher: makes the launcher of a sweep's jobs out of the one that was chosen and Hydra's three keywords.
    """
    failed: list[Exception] = []
    with _hydra_tamed(failed, launcher):
        try:
            check_launch(sys.argv[1:], many=many)
            if read_launch().world_size > 1:  # what it would log, frames and all, is in the errors that it raises
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            command()
        except KeyboardInterrupt:  # while nothing of ours listens: between two jobs, or as the jobs' launcher waits
            if os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0"):
                traceback.print_exc()
            print("interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            print_error(error)
            failed.append(error)
    codes = {failures.exit_code(error, mistakes=MISTAKES) for error in failed}
    sys.exit(failures.BUG if failures.BUG in codes else max(codes, default=0))


def print_error(error: Exception, *, job: Sequence[str] = ()) -> None:
    """Print what went wrong, once: a job says it when it happens, and a sweep goes on to its other jobs.

    Of several processes the first one speaks of a mistake that all of them meet before they have joined; after that an
    error is a process's ``own``, or another has ``already_printed`` it.

    Args:
        job: overrides of the sweep's job; those of the job that is running now are known.
    """
    others = isinstance(error, MISTAKES) and is_later() and not getattr(error, "own", False)
    if others or getattr(error, "already_printed", None) in (True, _terminal()):
        return
    said = isinstance(error, SAID) or failures.kind_of(error)
    if not said or os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0"):
        traceback.print_exception(error)
    if not job and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        job = HydraConfig.get().overrides.task
    where = f" (in the job {' '.join(typed(job))})" if job else ""
    if said:
        print(f"error: {explain(error) or type(error).__name__}{where}", file=sys.stderr)
    elif where:
        print(f"error{where}", file=sys.stderr)
    error.already_printed = _terminal()


def reported(error: Exception) -> Exception:
    """Print it, and return what to raise in its place.

    In a sweep that is a copy with the message alone: it can be sent from process to process, and does not keep the
    failed job's tensors in memory while the other jobs run.
    """
    sweeping = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    held = sweeping and getattr(error, "held", False)
    if held:  # nobody's mistake: the sweep waits for the process that runs this job
        error.already_printed = True
    print_error(error)
    if not sweeping:
        return error
    if kind := failures.kind_of(error):
        copy: Exception = kind(explain(error) or type(error).__name__)
    elif isinstance(error, MISTAKES):
        copy = ValueError(explain(error))
    else:
        copy = JobFailed(f"{type(error).__name__}: {_first_line(error)}")
    copy.already_printed, copy.held = error.already_printed, held
    return copy


def typed(job: Sequence[str]) -> list[str]:
    """The overrides of a sweep's job that the user knows of."""
    return [word for word in job if not word.startswith(f"{GROUP}=")]


def own_command() -> str:
    """What to type to run this very run, also if it is a job of a sweep in a process of its own."""
    hydra = HydraConfig.get()
    launch, installed = read_launch(), not (source.ROOT / "pyproject.toml").exists()
    if hydra.mode != RunMode.MULTIRUN:
        alone = installed and launch.world_size == 1
        return shlex.join([*(INSTALLED if alone else (*launch.words, sys.argv[0])), *sys.argv[1:]])
    folders = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    words = [word for folder in folders for word in ("-cd", folder)]
    words += [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    return shlex.join([*(INSTALLED if installed else ("python", "train.py")), *words, *typed(hydra.overrides.task)])


def _terminal() -> tuple[int, int]:
    """Which file or terminal standard error is: a launcher may run jobs where the user does not read along."""
    found = os.fstat(2)
    return found.st_dev, found.st_ino


def explain(error: Exception) -> str:
    """One message that names the key, the value, and the keys or choices that are allowed there, where Hydra knows them.

    Of one that a value of a file has made endless, both ends: the key, and what is allowed.
    """
    said = _explain(error)
    left_out = len(said) - HEAD - TAIL
    return said if left_out <= 0 else f"{said[:HEAD]} [{left_out:,} letters more] {said[-TAIL:]}"


def _explain(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        more = "; pip install -e '.[sweep]' brings more" if group == "hydra/launcher" else ""
        allowed = [option for option in error.options if not (group == "sweep" and option.startswith("wandb_"))]
        return f"{group}={name}: there is no such choice; allowed are {', '.join(allowed)}{more}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r}: must read KEY=VALUE, as in model.heads=4 or trust=[mine] ({_first_line(error)})"
    if isinstance(error, HydraException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(cause, given=str(error).partition("use +")[2] or cause.full_key)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    if str(error).startswith("Config group override must be"):
        return _no_name(sys.argv[1:]) or str(error)
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, HydraException) and cause is not None:
        lines.append(_first_line(cause))
    return " ".join(line for line in lines if line and not line.startswith("To append"))


def _unknown_key(error: OmegaConfBaseException, *, given: str) -> str:
    """A key that is not in the composed configuration, and the keys that are; ``given`` is KEY=VALUE."""
    allowed = [str(name) for name in error.parent_node] if isinstance(error.parent_node, DictConfig) else []
    at_top = error.full_key == error.key
    if at_top and GlobalHydra.instance().is_initialized():  # groups that are null by default, as recipe, are no keys
        allowed += GlobalHydra.instance().config_loader().list_groups("")
        allowed = [name for name in dict.fromkeys(allowed) if name != "hydra"]
    there = f"allowed are {', '.join(allowed)}" if allowed else f"allowed are none, but for new ones: +{given}"
    return f"{given}: no such key; {there}"


def _no_name(words: Sequence[str]) -> str:
    """Hydra does not say which of the choices was given a number or null in place of a name."""
    loader, found = GlobalHydra.instance().config_loader(), []
    for word in words:
        group, given, name = word.partition("=")
        choices = loader.get_group_options(group.partition("@")[0]) if given else []
        if choices and any(re.fullmatch(r"null|true|false|[-+.\d]+", part) for part in name.lower().split(",")):
            found.append(f"{word}: must be a name; allowed are {', '.join(choices)}")
    return "; ".join(found)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def _hydra_tamed(failed: list[Exception], launcher: Callable[..., Launcher] | None) -> Iterator[None]:
    """Hydra with our manners; errors of a sweep's jobs are appended to ``failed``."""
    Plugins.instance()  # defines the sweeper's class anew
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    report, returned, instantiate = hydra_frame.run_and_report, JobReturn.return_value, Plugins.instantiate_launcher
    sweep, check = BasicSweeper.sweep, BasicSweeper.validate_batch_is_legal
    files = SourcesRegistry.instance().resolve("file")
    load, load_first = files.load_config, ConfigRepository.load_config

    def run_and_say(function: Callable[[], object]) -> object:
        """Hydra's own prints a shortened trace and exits with 1."""
        try:
            return function()
        except Exception as error:
            print_error(error)
            raise

    def result(self: JobReturn) -> object:
        """Hydra's own raises, so that the first failed job hides the others and ends the sweep."""
        if self.status != JobStatus.FAILED:
            return returned.fget(self)
        print_error(self._return_value, job=self.overrides if self.hydra_cfg.hydra.mode == RunMode.MULTIRUN else ())
        failed.append(self._return_value)
        return None

    def keep_legal(self: BasicSweeper, batch: list) -> None:
        """Hydra's own refuses the whole sweep if one of its jobs does not compose."""
        for overrides in list(batch):
            try:
                check(self, [overrides])
            except MISTAKES as error:
                print_error(error, job=overrides)
                failed.append(error)
                batch.remove(overrides)

    def sweep_cleanly(self: BasicSweeper, arguments: list[str]) -> object:
        """Hydra's own leaves multirun.yaml, even where no job was legal; each run folder knows its configuration."""
        folder = Path(self.config.hydra.sweep.dir)
        new = [path for path in (folder / "multirun.yaml", folder, *folder.parents) if not path.exists()]
        try:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"outputs={self.config.outputs}: cannot be written ({error.strerror})") from error
            return sweep(self, arguments)
        finally:
            for path in new:
                with contextlib.suppress(OSError):  # not empty: a launcher or a run needs it
                    path.unlink() if path.is_file() else path.rmdir()

    def load_checked(self: ConfigSource, config_path: str) -> ConfigResult:
        """Hydra's own believes every file, and acts on what it says before a command begins."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if not path.exists() or not is_strangers(path):
            return load(self, config_path)
        read_text(path, what=str(path.parent))
        found = load(self, config_path)
        check_loaded(found, name=config_path, file=path)
        return found

    def load_only(self: ConfigRepository, config_path: str) -> ConfigResult | None:
        """Hydra's own takes the first file of a name, and passes over the others in silence."""
        check_seen(config_path, [folder for folder in self.sources if folder.is_config(config_path)])
        return load_first(self, config_path)

    def make_launcher(self: Plugins, **given) -> Launcher:
        chosen = instantiate(self, **given)
        return launcher(chosen, **given) if launcher else chosen

    hydra_frame.run_and_report, Plugins.instantiate_launcher = run_and_say, make_launcher
    BasicSweeper.sweep, BasicSweeper.validate_batch_is_legal = sweep_cleanly, keep_legal
    JobReturn.return_value, files.load_config = property(result, returned.fset), load_checked
    ConfigRepository.load_config = load_only
    try:
        yield
    finally:
        hydra_frame.run_and_report, JobReturn.return_value, files.load_config = report, returned, load
        Plugins.instantiate_launcher, ConfigRepository.load_config = instantiate, load_first
        BasicSweeper.sweep, BasicSweeper.validate_batch_is_legal = sweep, check
