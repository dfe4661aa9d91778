"""The code that runs: a digest of every file that can change a number of this run, as this process read them.

A sweep goes on with the modules that it has loaded, whatever is edited meanwhile. So each file is read once and
remembered, and a module that is loaded later must still be what it was then.
"""

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from harness.cache import sha256_of

ROOT = Path(__file__).resolve().parent.parent
OURS = re.compile(r"(variants|harness|bench)(\.\w+)*|train")
"""Modules that are ours, by name."""
LEFT_OUT = re.compile(
    r"harness/(compose/|record/(?!checkpoint|shard)|loop/progress\.py)|variants/conformance/|bench/(results|report)/"
)
"""Files of ours that a run may load and that change no number: what composes it, records it but for checkpoints, shows its
progress, checks its mechanism; and what only reads the rows of ``bench``. What they import is not followed."""
HIDDEN = re.compile(r"(^|/)(\.|__pycache__/)")
Files = tuple[tuple[str, Path], ...]


def digest(config: Mapping, *, trust: tuple[str, ...] = (), measuring: bool = False) -> str:
    """SHA-256 of the source that a run of this configuration can import, and of all modules that the user named.

    Args:
        config: resolved; its targets say which files of ours count, see :func:`closure`.
        trust: those modules. A package counts with all its files; a single file with what it imports from its own folder
            (unless it was installed), and with files of the same stem, as ``mine.cpp`` beside ``mine.py``.
        measuring: whether the code of bench counts, for its rows.

    Raises:
        ValueError: a trusted module has no source file, or a file was edited before this process had loaded it.
    """
    bench = dict(_all_of("bench")) if measuring else {}
    modules = [name.removesuffix(".py").replace("/", ".") for name in bench]
    ours, named = closure([*_targets(config), *modules], trust=trust)
    return digest_of((*sorted((dict(ours) | bench).items()), *named))


def digest_of_tree(*, measuring: bool = False) -> str:
    """The same of all of ours that any run may use: where it is equal, times and memory of two variants are of one code."""
    return _hash(_all_of("train.py", "variants", "harness", *["bench"] * measuring))


def mechanism_files(config: Mapping, *, trust: tuple[str, ...] = ()) -> Files:
    """Names and paths of the files below ``variants/`` that the targets of a configuration reach, and of the user's modules."""
    ours, named = closure(_targets(config), trust=trust)
    return (*(file for file in ours if file[0].startswith("variants/")), *named)


def closure(targets: Iterable[str], *, trust: tuple[str, ...] = ()) -> tuple[Files, Files]:
    """Names and paths of our files that can be imported from ``train.py``, these targets and the user's modules; and theirs.

    Imports are followed as they are written: inside functions too, but not those for type checkers. A text that names a
    module of ours is followed as well: a process may run it. A package's ``__init__.py`` counts with each of its modules, and
    so do files of the same stem, as ``window.cpp`` beside ``window.py``.

    Args:
        targets: dotted names of modules, or of what is in them; those that are not ours are passed over.
        trust: names of the user's modules.
    """
    named = tuple(file for module in trust for file in _named(module))
    theirs = [name for _, path in named if path.suffix == ".py" for name in _imports(path, _first_read(path))]
    return _closure(frozenset({"train", *targets, *filter(OURS.fullmatch, theirs)})), named


@functools.cache
def _closure(names: frozenset[str]) -> Files:
    files = _reached([path for name in names if OURS.fullmatch(name) for path in _paths(name, ROOT)], ROOT, ours=True)
    return tuple(sorted((path.relative_to(ROOT).as_posix(), path) for path in files))


def _reached(waiting: list[Path], root: Path, *, ours: bool) -> set[Path]:
    """These files of Python, those below ``root`` that they import, ours or the user's, and what has the stem of each."""
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in reached and not (ours and LEFT_OUT.match(path.relative_to(root).as_posix())):
            reached.add(path)
            names = (name for name in _imports(path, _first_read(path)) if bool(OURS.fullmatch(name)) == ours)
            waiting += (other for name in names for other in _paths(name, root))
    return {file for path in reached for file in path.parent.glob(f"{path.stem}.*") if file.is_file()}


def _paths(name: str, root: Path) -> Iterator[Path]:
    """Files that importing a module below ``root`` runs: its packages' and its own; the name may be of something in it."""
    for part in name.split("."):
        package, module = root / part / "__init__.py", root / f"{part}.py"
        if package.is_file() or module.is_file():
            yield package if package.is_file() else module
        root /= part


@functools.cache
def _imports(path: Path, content: str) -> frozenset[str]:
    """What a file of Python imports, or names of ours, late or early; a name may be a module's or that of something in it.

    Args:
        content: its digest, by which it is remembered.
    """
    names, waiting = set(), []
    with suppress(SyntaxError, OSError, ValueError):  # an import will say so
        waiting = [ast.parse(path.read_bytes())]
    package = path.relative_to(ROOT).with_suffix("").parts if path.is_relative_to(ROOT) else ()
    while waiting:
        node = waiting.pop()
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        waiting += node.orelse if typing_only else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join((*package[: -node.level if node.level else 0], *filter(None, [node.module])))
            names.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
            names.update({node.value} if "." in node.value else ())
    return frozenset(names)


@functools.cache
def _named(module: str) -> Files:
    """Names and paths of the files of a module that the user named."""
    spec = find_spec(module)
    origin = Path((spec and spec.origin) or "").resolve()
    if not origin.is_file():
        raise ValueError(f"trust={module}: has no source file; allowed are modules and packages of Python files")
    installed = origin.parent in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if origin.name == "__init__.py" or "." in module:
        files = _tree(origin.parent)
    else:  # beside an installed file lies all of torch
        files = _reached([origin], Path(os.devnull) if installed else origin.parent, ours=False)
    return tuple((f"{module}/{path.relative_to(origin.parent).as_posix()}", path) for path in sorted(files))


def _targets(node: object) -> Iterator[str]:
    """Every ``_target_`` in a configuration, at any depth."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        node = list(node.values())
    if isinstance(node, list | tuple):
        for value in node:
            yield from _targets(value)


def _all_of(*roots: str) -> Files:
    files = sorted((path.relative_to(ROOT).as_posix(), path) for root in roots for path in _tree(ROOT / root))
    return tuple(file for file in files if not LEFT_OUT.match(file[0]))


def _tree(root: Path) -> list[Path]:
    """A file, or all files of a folder but hidden ones and what Python has compiled."""
    if root.is_file():
        return [root]
    visible = [path for path in root.rglob("*") if not HIDDEN.search(path.relative_to(root).as_posix())]
    return [path for path in visible if path.is_file()]


def digest_of(files: Files) -> str:
    """SHA-256 of these files' names and contents; ValueError where one was edited before this process had loaded it."""
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for _, path in files:
        if path not in _checked and str(path.with_suffix(".py")) in loaded:
            if _read(path) != _first_read(path):
                raise ValueError(
                    f"{path} was edited while this process ran; the same command again runs the new source"
                )
            _checked.add(path)
    return _hash(files)


def _hash(files: Iterable[tuple[str, Path]]) -> str:
    return hashlib.sha256("".join(f"{name}\0{_first_read(path)}\n" for name, path in files).encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return "cannot be read"


_first_read = functools.cache(_read)
_checked: set[Path] = set()
"""Files that were what they had been when they were first read, after this process had loaded them."""


def forget() -> None:
    """Forget what this process has read, as a new one would."""
    for remembered in (_closure, _named, _first_read, _checked):
        remembered.clear() if isinstance(remembered, set) else remembered.cache_clear()


def commit() -> str | None:
    """The commit of the working tree, with ``-dirty`` where files differ from it, or None outside git.

    Of our own repository alone: one that our folder lies in may be a stranger's, whose settings git would run.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), "-c", "core.fsmonitor=false", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
