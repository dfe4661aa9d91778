"""Digests of the source files that can change a number of a run. A process reads each file once,
because later edits do not change the modules that it has loaded."""

import ast
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path

from harness import cache

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = re.compile(
    r"harness/(compose/|record/(?!checkpoint)|loop/sampling\.py|check/conformance\.py)"
    r"|variants/conformance/|bench/(results/|tables/|report\.py)|(.*/)?(\.|__pycache__/)"
)
"""Files that change no number of a run: those that compose, record (except for checkpoints),
sample, check or report; hidden files, and bytecode."""


def python_path() -> str:
    """Return the ``PYTHONPATH`` with which a child process imports this code."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


Files = tuple[tuple[str, Path], ...]  # name in the digest, and path, of each file


def digest(config: Mapping, *, trust: tuple[str, ...] = (), measuring: bool = False) -> str:
    """Return SHA-256 of ``train.py``, the harness, and the files of ``mechanism_files``; with
    ``measuring`` also of bench."""
    project = _project_files("train.py", "harness", *["bench"] * measuring)
    return digest_of((*project, *mechanism_files(config, trust=trust)))


def digest_of_tree(*, measuring: bool = False) -> str:
    """Return SHA-256 of all project files that any run may use. If it is equal for runs of two
    variants, their times and memory were measured with the same code."""
    return digest_of(_project_files("train.py", "variants", "harness", *["bench"] * measuring))


def mechanism_files(config: Mapping, *, trust: tuple[str, ...] = ()) -> Files:
    """Return names and paths of the user's files, and of the files below ``variants/`` that they or
    the configuration's targets import. ``trust`` has the modules of the user. Modules that they
    import count too, at any depth: those of installed distributions and of Python by their version,
    others by their files. All files of a package count, and for a module of a single file those of
    the same stem, such as ``mine.cpp`` for ``mine.py``. ValueError for a module of ``trust``
    without a source file."""
    user_files = _with_imports(tuple(file for module in trust for file in _module_files(module)))
    user_code = tuple(path for _, path in user_files if path.suffix == ".py")
    # at any depth
    targets = frozenset(re.findall(r'"_target_": "(variants\.[^"]+)"', json.dumps(config)))
    imported = _imported_files(targets, user_code, ROOT)
    named = sorted(
        (p.relative_to(ROOT).as_posix(), p) for p in imported if p.is_relative_to(ROOT / "variants")
    )
    return (*(file for file in named if not EXCLUDED.match(file[0])), *user_files)


@functools.cache
def _imported_files(names: frozenset[str], code: tuple[Path, ...], root: Path) -> frozenset[Path]:
    """Return the Python files ``code``, the files of the modules ``names`` (or of the modules that
    define these names), their imports below ``root``, and files of the same stems, such as
    ``window.cpp``."""
    finder = ModuleFinder([str(root)], excludes=["harness", "bench"])
    for find, sources in ((finder.import_hook, names), (finder.load_file, map(str, code))):
        for source in sources:
            # the run itself reports such errors
            with suppress(ImportError, SyntaxError, ValueError, OSError):
                find(source)
    paths = {Path(module.__file__) for module in finder.modules.values() if module.__file__}.union(
        code
    )
    return frozenset(
        file for path in paths for file in path.parent.glob(f"{path.stem}.*") if file.is_file()
    )


@functools.cache
def _module_files(module: str) -> Files:
    """Return names and paths of the files of a module of the user, and of all of its package if it
    is in one."""
    origin = _origin(module)
    folder = origin.parent
    if not origin.is_file():
        raise ValueError(
            f"trust={module}: has no source file; must be a module or package of Python files"
        )
    if "." in module and (top := _origin(module.partition(".")[0])).is_file():
        folder = top.parent
    is_package = origin.name == "__init__.py" or "." in module
    files = _files_below(folder, folder) if is_package else folder.glob(f"{origin.stem}.*")
    return tuple(
        (f"{module}/{path.relative_to(folder).as_posix()}", path) for path in sorted(files)
    )


def _origin(module: str) -> Path:
    """Return the file of a module; a folder if it has none."""
    spec = find_spec(module)
    return Path((spec and spec.origin) or "").resolve()


@functools.cache
def _with_imports(files: Files) -> Files:
    """Return the user's files, with those of the modules that they import, and an empty file for
    each version."""
    found = dict(files)
    pending = [*files]
    seen = {"harness", "bench", "variants", *sys.stdlib_module_names}
    if files:
        found[f"python {platform.python_version()}"] = Path(os.devnull)
    while pending:
        for module in _imported_modules(pending.pop()[1]) - seen:
            seen.add(module)
            more = _files_of_import(module)
            pending += more
            found |= more
    return tuple(sorted(found.items()))


def _imported_modules(path: Path) -> set[str]:
    """Return the first parts of the names of the modules that a Python file imports anywhere; those
    of its package excepted."""
    names = set()
    with suppress(SyntaxError, ValueError, OSError):  # the run itself reports such errors
        for node in ast.walk(
            ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
        ):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def _files_of_import(module: str) -> Files:
    """Return the files of an imported module, or its name and version if it is installed; none if
    there is no such module."""
    with suppress(ImportError, ValueError, AttributeError, TypeError):
        spec = find_spec(module)
        places = [
            Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin]
        ]
        if any({"site-packages", "dist-packages"}.intersection(place.parts) for place in places):
            return ((f"{module} {_version(module)}", Path(os.devnull)),)
        if spec.origin and Path(spec.origin).is_file():
            return _module_files(module)
        # a package without __init__.py
        files = ((place, path) for place in places for path in place.rglob("*.py"))
        return tuple(
            (f"{module}/{path.relative_to(place).as_posix()}", path)
            for place, path in sorted(files)
        )
    return ()


def _version(module: str) -> str:
    """Return the versions of the installed distributions that have a module; empty if it belongs to
    none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(module)
    names = metadata.packages_distributions().get(module, ())
    return " ".join(f"{name} {metadata.version(name)}" for name in sorted(names))


def _project_files(*roots: str) -> Files:
    paths = (path for root in roots for path in _files_below(ROOT / root, ROOT))
    return tuple(sorted((path.relative_to(ROOT).as_posix(), path) for path in paths))


def _files_below(start: Path, root: Path) -> Iterator[Path]:
    """Yield ``start`` itself if it is a file, else all files below it, unless their path below
    ``root`` is excluded."""
    for path in [start] if start.is_file() else start.rglob("*"):
        if path.is_file() and not EXCLUDED.match(path.relative_to(root).as_posix()):
            yield path


def digest_of(files: Files) -> str:
    """Return SHA-256 of the names and contents of files."""
    lines = (f"{name}\0{_sha256_once(path)}\n" for name, path in files)
    return cache.digest("".join(lines).encode())


@functools.cache
def _sha256_once(path: Path) -> str:
    """Return the SHA-256 of a file when this process first read it."""
    try:
        return cache.sha256_of(path)
    except OSError:
        return "cannot be read"


def commit() -> str | None:
    """Return the commit of the project's working tree, with ``-dirty`` if files other than result
    rows differ; None outside of git. A repository that contains the project's folder is ignored,
    because git would execute programs that its settings name."""
    environment = {
        name: setting for name, setting in os.environ.items() if not name.startswith("GIT_")
    }
    environment |= {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), "-c", "core.fsmonitor=false", *words]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        head = git("rev-parse", "HEAD")
        if git("status", "--porcelain", "--", ":/", ":/!bench/results"):
            return f"{head}-dirty"
        return head
    return None
