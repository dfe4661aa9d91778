"""Import arrows point one way, and other promises about the source that can be read off its text."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.timeouts import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("variants", "harness", "bench", "windtunnel")
PRODUCT = [ROOT / "train.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
TESTS = [*(ROOT / "tests").rglob("*.py")]
TEXT = (".py", ".yaml", ".yml", ".md", ".toml", ".txt", ".json", ".jsonl", ".cfg", "")
FOLDERS = (*PACKAGES, "conf", "tests", "docs", ".ci")

# Modules that the files of each room may import, beside the standard library; a name allows what is below it.
ARROWS = {
    "variants": {"torch", "einops", "variants", "triton"},
    "variants/kernels": {"torch", "variants.kernels", "triton"},  # triton: in one file, imported where it is used
    "variants/conformance": {"torch", "variants.conformance", "variants.contract"},
    "harness": {"harness.cache", "harness.failures", "variants.contract"},
    "harness/record": {"harness.record", "harness.cache", "harness.failures"},
    "harness/optim": {"harness.optim"},
    "harness/data": {"harness.data", "harness.cache", "harness.failures", "harness.hashing"},
    "harness/count": {"harness.count", "harness.model", "variants.contract"},
    "harness/plan": {"harness.plan", "harness.optim", "harness.model", "variants.contract"},
    "harness/device": {f"harness.{name}" for name in ("device", "plan.settings", "cache", "failures", "hashing")},
    "harness/loop": {"harness", "variants.contract", "variants.conformance"},
    "harness/compose": {"harness"},
    "bench": {"bench", "harness", "variants.contract", "variants.conformance"},
    "windtunnel": {"windtunnel", "bench", "harness", "torch"},
    "bench/report": {"bench.report", "bench.rows", "harness.record", "harness.cache", "harness.failures"},
    "train.py": {"harness", "hydra", "omegaconf"},
}
OURS = {"variants", "harness", "bench", "windtunnel", "tests", "train", "conf"}
THIRD_PARTY_ALLOWED = ("harness", "bench")


def room(path: Path) -> str:
    """The folder of a file; ``train.py`` is a room of its own."""
    path = path.relative_to(ROOT)
    return path.name if path.parent == Path(".") else path.parent.as_posix()


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it; ``from a import b`` is a.b, whether b is a module or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def inside(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def strays(path: Path) -> set[str]:
    """What a file imports against the arrows."""
    allowed = ARROWS[room(path)]
    found = {name for name in imported(path) if name.partition(".")[0] not in sys.stdlib_module_names}
    if room(path).partition("/")[0] in THIRD_PARTY_ALLOWED:
        found = {name for name in found if name.partition(".")[0] in OURS}
    return {name for name in found if not inside(name, allowed)}


def test_import_arrows():
    assert not {path: against for path in PRODUCT if (against := strays(path))}


def modules_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def arrows() -> dict[str, set[str]]:
    """Each module of the product, and those of the product that it imports, anywhere in it."""
    known = {modules_of(path): path for path in PRODUCT}

    def module(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or None

    return {own: {module(name) for name in imported(path)} - {None, own} for own, path in known.items()}


def test_no_module_and_no_room_is_in_a_circle():
    """Verbs of bench are one room, what they share is another."""
    between = arrows()
    verbs = {f"bench.{path.stem}" for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
    across = {(one, other) for one in verbs for other in between[one] & verbs}
    assert len(verbs) > 5 and across == {("bench.decompress", "bench.compress")}  # one file, two commands
    verbs |= {"bench.coded_file", "bench.coding"}  # names of it that tests import
    verbs |= {"bench.results_page"}  # tables of the front page

    def room_of(module: str) -> str:
        if module in verbs:
            return "verbs"
        packages = [name for name in (module, module.rpartition(".")[0]) if name.replace(".", "/") in ARROWS]
        return packages[0] if packages and packages[0] != "harness" else module

    rooms: dict[str, set[str]] = {}
    for own, others in between.items():
        rooms.setdefault(room_of(own), set()).update({room_of(other) for other in others} - {room_of(own)})
    for graph in (between, rooms):
        list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_variants_can_be_imported_alone(tmp_path):
    shutil.copytree(ROOT / "variants", tmp_path / "variants")
    modules = ", ".join(modules_of(path) for path in (ROOT / "variants").rglob("[!_]*.py"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}; assert 'harness' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True, timeout=TIMEOUT_SECONDS)


def test_names_and_sizes():
    assert not [path for path in [*PRODUCT, *TESTS] if path.stem.startswith("util")]
    assert not {path.name: n for path in PRODUCT if (n := len(path.read_text(encoding="utf-8").splitlines())) >= 400}


def test_bench_knows_no_mechanism_by_name():
    """Configurations and data may name variants, code may not: a stranger's would be treated otherwise."""
    variants = "|".join(path.stem for path in (ROOT / "conf" / "variant").glob("*.yaml"))
    named = re.compile(rf"(?<![\w-])({variants})(?![\w-])")  # as a word: other packages' names may contain one
    files = [path for path in PRODUCT if path.is_relative_to(ROOT / "bench")]
    assert not [f"{path}: {found[0]}" for path in files if (found := named.search(path.read_text(encoding="utf-8")))]


def test_no_path_of_one_machine():
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a worktree
    files += [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    machine = re.compile(r"(?<![\w.~}])/(work|root|tmp|home)/[a-z]")
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix in TEXT
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if machine.search(line)
    ]
    assert not found
