"""The code that runs: a digest of every file that can change a number of a run. A process reads each file once: edits
do not change the modules that a sweep has loaded."""

import functools
import hashlib
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path

from harness.cache import sha256_of

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(
    r"harness/(compose/|record/(?!checkpoint|shard)|loop/sampling\.py)"
    r"|variants/conformance/|bench/(results|report)/|(.*/)?(\.|__pycache__/)"
)
"""Files that change no number: what composes a run, records it but for checkpoints, samples from it, checks its
mechanism, reports it; hidden ones, and what Python has compiled."""
Files = tuple[tuple[str, Path], ...]


def digest(config: Mapping, *, trust: tuple[str, ...] = (), measuring: bool = False) -> str:
    """SHA-256 of ``train.py``, the harness, the files of ``variants/`` that the configuration's targets can import, and
    the modules of ``trust``; ``measuring`` adds bench, for its rows.

    Args:
        trust: a package counts with all its files; a file with its imports from its folder (unless installed), and with
            files of its stem, as ``mine.cpp`` beside ``mine.py``. ValueError for a module without source file.
    """
    return digest_of((*_ours("train.py", "harness", *["bench"] * measuring), *mechanism_files(config, trust=trust)))


def digest_of_tree(*, measuring: bool = False) -> str:
    """The same of all our files that a run may use: where equal, times and memory of two variants are of one code."""
    return digest_of(_ours("train.py", "variants", "harness", *["bench"] * measuring))


def mechanism_files(config: Mapping, *, trust: tuple[str, ...] = ()) -> Files:
    """Names and paths of the files below ``variants/`` that a configuration's targets and the user's modules import
    anywhere, and of these modules."""
    theirs = tuple(file for module in trust for file in _files_of(module))
    code = tuple(path for _, path in theirs if path.suffix == ".py")
    targets = frozenset(name for name in _targets(config) if name.startswith("variants."))
    ours = (path for path in _reached(targets, code, ROOT) if path.is_relative_to(ROOT / "variants"))
    named = sorted((path.relative_to(ROOT).as_posix(), path) for path in ours)
    return (*(file for file in named if not LEFT_OUT.match(file[0])), *theirs)


@functools.cache
def _reached(names: frozenset[str], code: tuple[Path, ...], root: Path) -> frozenset[Path]:
    """Files of modules, which ``names`` or names in them, of Python files, of their imports below ``root``, and files
    of equal stems, as ``window.cpp``."""
    finder = ModuleFinder([str(root)], excludes=["harness", "bench"])
    for find, places in ((finder.import_hook, names), (finder.load_file, map(str, code))):
        for place in places:
            with suppress(ImportError, SyntaxError, ValueError, OSError):  # importing it will say so
                find(place)
    paths = {Path(module.__file__) for module in finder.modules.values() if module.__file__}.union(code)
    return frozenset(file for path in paths for file in path.parent.glob(f"{path.stem}.*") if file.is_file())


@functools.cache
def _files_of(module: str) -> Files:
    """Names and paths of the files of a module that the user named."""
    spec = find_spec(module)
    origin = Path((spec and spec.origin) or "").resolve()
    folder = origin.parent
    if not origin.is_file():
        raise ValueError(f"trust={module}: has no source file; allowed are modules and packages of Python files")
    if origin.name == "__init__.py" or "." in module:
        files = _tree(folder, folder)
    elif folder in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        files = folder.glob(f"{origin.stem}.*")  # beside an installed file lies all of torch
    else:
        files = _reached(frozenset(), (origin,), folder)
    return tuple((f"{module}/{path.relative_to(folder).as_posix()}", path) for path in sorted(files))


def _targets(node: object) -> Iterator[str]:
    """Every ``_target_`` in a configuration, at any depth."""
    if isinstance(node, Mapping):
        yield from (str(value) for key, value in node.items() if key == "_target_")
        node = list(node.values())
    for value in node if isinstance(node, list | tuple) else ():
        yield from _targets(value)


def _ours(*roots: str) -> Files:
    return tuple(
        sorted((path.relative_to(ROOT).as_posix(), path) for root in roots for path in _tree(ROOT / root, ROOT))
    )


def _tree(place: Path, root: Path) -> Iterator[Path]:
    """A file, or all files of a folder, without those ``LEFT_OUT`` by their path below ``root``."""
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.is_file() and not LEFT_OUT.match(path.relative_to(root).as_posix()):
            yield path


def digest_of(files: Files) -> str:
    """SHA-256 of these files' names and contents."""
    return hashlib.sha256("".join(f"{name}\0{_read_once(path)}\n" for name, path in files).encode()).hexdigest()


@functools.cache
def _read_once(path: Path) -> str:
    """The digest of a file, as this process read it first."""
    try:
        return sha256_of(path)
    except OSError:
        return "cannot be read"


def forget() -> None:
    """Forget all files that this process has read."""
    _files_of.cache_clear(), _read_once.cache_clear(), _reached.cache_clear()


def commit() -> str | None:
    """The commit of our working tree, with ``-dirty`` where files other than result rows differ, or None outside git;
    never of a repository around our folder, whose settings git would run."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}
    command, options = ["git", "-C", str(ROOT), "-c", "core.fsmonitor=false"], {"capture_output": True, "text": True}
    with suppress(OSError, subprocess.CalledProcessError):
        head, status = (
            subprocess.run([*command, *words], env=environment, check=True, **options).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ":/", ":/!bench/results"])
        )
        return head + ("-dirty" if status else "")
    return None
