"""The code that runs: a digest of every file that can change a number, as this process read them.

A sweep goes on with the modules that it has loaded, whatever is edited meanwhile. So each file is read once and
remembered, and a module that is loaded later must still be what it was then.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path

from harness.cache import sha256_of

ROOT = Path(__file__).resolve().parent.parent
OURS = ("train.py", "variants", "harness")
MEASURING = ("bench",)
READERS = ("results", "report")
"""Folders of bench that measure nothing."""


def digest(trust: tuple[str, ...] = (), *, measuring: bool = False) -> str:
    """SHA-256 of our source and of all modules that the user named.

    Args:
        trust: those modules. A package counts with all its files; a single file with what it imports from its own folder
            (unless it was installed), and with files of the same stem, as ``mine.cpp`` beside ``mine.py``.
        measuring: whether the code of bench counts, for its rows.

    Raises:
        ValueError: a trusted module has no source file, or a file was edited before this process had loaded it.
    """
    return _digest(_ours(measuring), trust)


def digest_of_mechanisms(trust: tuple[str, ...] = ()) -> str:
    """The same of ``variants/`` and the user's modules alone: of what a mechanism computes, and on which device it was right."""
    return _digest([(name, path) for name, path in _ours(False) if name.startswith("variants/")], trust)


def _digest(files: Iterable[tuple[str, Path]], trust: tuple[str, ...]) -> str:
    files = [*files, *(file for module in trust for file in _trusted(module))]
    _check_loaded({path for _, path in files})
    return hashlib.sha256("".join(f"{name}\0{_first_read(path)}\n" for name, path in files).encode()).hexdigest()


def commit() -> str | None:
    """The commit of the working tree, with ``-dirty`` where files differ from it, or None outside git.

    Of our own repository alone: one that our folder lies in may be a stranger's, whose settings git would run.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own |= {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), "-c", "core.fsmonitor=false", *words]
        return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def _ours(measuring: bool) -> tuple[tuple[str, Path], ...]:
    """Names and paths of our files."""
    roots = [ROOT / name for name in (*OURS, *(MEASURING if measuring else ()))]
    readers = {ROOT / "bench" / name for name in READERS}
    files = [path for root in roots for path in _tree(root) if not readers.intersection(path.parents)]
    return tuple((str(path.relative_to(ROOT)), path) for path in files)


@functools.cache
def _trusted(module: str) -> tuple[tuple[str, Path], ...]:
    """Names and paths of a trusted module's files."""
    found = find_spec(module)
    origin = Path((found and found.origin) or "").resolve()
    if not origin.is_file():
        raise ValueError(f"trust={module}: has no source file; allowed are modules and packages of Python files")
    if origin.name == "__init__.py" or "." in module:
        files = _tree(origin.parent)
    else:
        finder = ModuleFinder(path=[str(origin.parent)], excludes=["variants", "harness"])
        if origin.parent not in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
            with suppress(SyntaxError):  # an import will say so
                finder.run_script(str(origin))  # which runs nothing
        imported = {origin, *(Path(known.__file__) for known in finder.modules.values() if known.__file__)}
        files = sorted({path for own in imported for path in own.parent.glob(f"{own.stem}.*") if path.is_file()})
    return tuple((f"{module}/{path.relative_to(origin.parent)}", path) for path in files)


def _tree(root: Path) -> list[Path]:
    """A file, or all files of a folder but hidden ones and what Python has compiled."""
    if root.is_file():
        return [root]
    passed_over = re.compile(r"(^|/)(\.|__pycache__/)")
    files = (path for path in root.rglob("*") if not passed_over.search(path.relative_to(root).as_posix()))
    return sorted(path for path in files if path.is_file())


def _read(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return "cannot be read"


_first_read = functools.cache(_read)


def _check_loaded(paths: Iterable[Path]) -> None:
    """ValueError if a module among these files, or what lies beside it for it to read, was edited before it was loaded."""
    names = {path.name for path in paths}
    for file in [getattr(module, "__file__", None) for module in list(sys.modules.values())]:
        if file and os.path.basename(file) in names and (path := _resolved(file)) in paths:
            _check_once(path, frozenset(p for p in paths if p.parent == path.parent and p.suffix != ".py"))


@functools.cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


@functools.cache
def _check_once(module: Path, beside: frozenset[Path]) -> None:
    for path in (module, *beside):
        if _read(path) != _first_read(path):
            raise ValueError(f"{path} was edited while this process ran; the same command again runs the new source")
