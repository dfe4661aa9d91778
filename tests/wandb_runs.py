"""W&B in tests: an environment without key or server, and run files read back."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.command import MADE, ROOT, TINY, Ended, run_folders
from tests.forked import run
from tests.patience import PATIENCE_SECONDS

SIZES = tuple(word for word in TINY if not word.startswith(("record.", "budget.", "eval.every"))) + MADE
"""A training of a second that keeps W&B and its figures."""


def lonely_environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """No key, no settings of this user, and a server that nobody can reach."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "no_netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    kept |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_ERROR_REPORTING": "false", "PYTHONPATH": str(ROOT)}
    return kept | variables


def python(*arguments, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Python in a process of its own, in the environment's home folder."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=environment["HOME"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )


def trained(script: str | Path, *words: str, environment: dict[str, str]) -> Ended:
    """A training by this script, as :func:`python` would run it; it has not imported W&B yet."""
    ended = run(script, *words, folder=Path(environment["HOME"]), environment=environment)
    assert ended.code == 0, ended
    return ended


def inspect(folder: Path, *, environment: dict[str, str]) -> dict:
    """State, configuration and summary of an offline run, as W&B's own reader has them."""
    command = ("-m", "wandb", "leet", "inspect", "--summary", "--json", folder)
    return json.loads(python(*command, environment=environment).stdout)


@dataclass(frozen=True, kw_only=True)
class OfflineRuns:
    """Finished runs: their folders, and of each W&B's own reading of its file."""

    folders: list[Path]
    inspected: list[dict]


def make_offline_runs(here: Path) -> OfflineRuns:
    """Train adaptive_span and product_key_memory for a second each, in one command."""
    environment = lonely_environment(here)
    words = (*SIZES, "variant=adaptive_span,product_key_memory", "budget.steps=12", "eval.every=0.4", "eval.test=true")
    words += ("record.every_steps=3", "record.wandb.every_seconds=0.001", "record.wandb.group=together")
    words += ("record.wandb.tags=[mine]", "eval.windows=true")
    trained("train.py", "-m", *words, environment=environment)
    folders = run_folders(here / "outputs")
    files = [next((folder / "wandb").glob("offline-run-*")) for folder in folders]
    return OfflineRuns(
        folders=folders,
        inspected=[inspect(file, environment=environment) for file in files],
    )
