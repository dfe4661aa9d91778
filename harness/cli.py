"""Around Hydra: one clear message and exit code 2 for a user's mistake, and sweeps whose other jobs still run.

Hydra exits with 1 and prints first, unless the outermost frame catches: so it is told to raise, and this is that frame.
``HYDRA_FULL_ERROR=1`` still shows the trace.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

MISTAKES = (ValueError, HydraException, OmegaConfBaseException)


def run_command(command: Callable[[], object]) -> None:
    """Call a function decorated with ``hydra.main`` and exit: 0, or 2 with a message for a user's mistake."""
    full = os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    broken: list[str] = []
    _run_the_legal_jobs(broken)
    try:
        command()
    except MISTAKES as error:
        if full:
            traceback.print_exc()
        elif not getattr(error, "said", False):
            print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(2 if broken else 0)


def say(error: Exception) -> None:
    """Print a job's mistake when it happens, once: a sweep goes on to its other jobs."""
    print(f"error: {explain(error)}", file=sys.stderr)
    error.said = True


def explain(error: Exception) -> str:
    """One message out of an exception and its cause, with the allowed keys or choices where Hydra knows them."""
    parts = [str(error).strip()]
    if error.__cause__ is not None and str(error.__cause__) not in parts[0]:
        parts.append(str(error.__cause__).strip())
    lines = [line.strip() for part in parts for line in part.splitlines()]
    lines = [line for line in lines if line and not re.match(r"(full_key|object_type|reference_type|To append)", line)]
    return " ".join(lines)


def _run_the_legal_jobs(broken: list[str]) -> None:
    """Hydra refuses a whole sweep if one of its jobs does not compose; here that job alone is refused."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    check = BasicSweeper.validate_batch_is_legal

    def keep_legal(self, batch) -> None:
        for overrides in list(batch):
            try:
                check(self, [overrides])
            except MISTAKES as error:
                broken.append(" ".join(overrides))
                print(f"error: {explain(error)} (in the job {' '.join(overrides)})", file=sys.stderr)
                batch.remove(overrides)

    BasicSweeper.validate_batch_is_legal = keep_legal
