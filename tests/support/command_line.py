"""Commands called in the test process, which saves the seconds that a new process spends on
imports."""

import contextlib
import io
import json
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from harness import source

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    *(
        "model.d_model=32",
        "model.layers=2",
        "model.heads=2",
        "model.span=32",
        "batch.streams=2",
        "batch.segment=32",
    ),
    *(
        "budget.steps=3",
        "eval.selection_bytes=200",
        "eval.bytes=300",
        "eval.segment=32",
        "eval.streams=2",
    ),
    *(
        "eval.every=0",
        "eval.windows=false",
        "runtime.device=cpu",
        "runtime.precision=float32",
        "runtime.threads=1",
    ),
    "record.wandb.mode=disabled",
)
"""Overrides for a training run that takes a second."""
GENERATED = ("data=recall", "data.bytes=60000")
"""Overrides that choose a generated corpus."""


@dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """How a command ended: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


CONTENTS, IMPORTS = (
    (source._module_files, source._sha256_once),
    (source._imported_files, source._with_imports),
)


def clear_source_caches(functions: tuple = CONTENTS + IMPORTS):
    """Let this process read all source files again, as a new process does."""
    for function in functions:
        function.cache_clear()


def call(script: str, *words: str) -> CommandOutcome:
    """Run ``python SCRIPT WORDS`` in this process. ``script`` is relative to the repository. Files
    are read again, but imports are not searched again, which takes half of the time of a short
    run."""
    clear_source_caches(CONTENTS)
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    sys.argv, code = [str(ROOT / script), *words], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    return CommandOutcome(code=code, out=out.getvalue(), err=err.getvalue())


def train(*words: str) -> CommandOutcome:
    """Run ``python train.py`` with ``TINY`` and ``words``, of which flags come first."""
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    return call("train.py", *words[:first], *TINY, *words[first:])


def run_folders(outputs: Path) -> list[Path]:
    return sorted(path for path in outputs.glob("*-s*-*") if not path.is_symlink())


def summaries(outputs: Path) -> list[dict]:
    """Return the summaries of all runs, in the order of ``run_folders``."""
    return [json.loads((run / "summary.json").read_text()) for run in run_folders(outputs)]


@pytest.fixture(name="cwd")
def empty_folder(tmp_path, monkeypatch) -> Path:
    """An empty current folder, with an empty cache and a network that refuses every connection."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"
