"""Rules for the text of the source: directions of imports, sizes of files, and names."""

import ast
import graphlib
import re
import sys
from pathlib import Path

from tests.support.command_line import ROOT
from tests.support.small_configs import VARIANT_NAMES

PACKAGES = ("variants", "harness", "bench", "windtunnel")
PRODUCT = [ROOT / "train.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
TESTS = [*(ROOT / "tests").rglob("*.py")]
TEXT = (".py", ".yaml", ".yml", ".md", ".toml", ".txt", ".json", ".jsonl", ".cfg", "")
FOLDERS = (*PACKAGES, "conf", "tests", "docs", ".ci")

# What the files of each folder may import besides the standard library. A package stands for all of
# its modules.
ALLOWED_IMPORTS = {
    "variants": {"torch", "einops", "variants", "triton"},
    # triton: in one file, imported where it is used
    "variants/kernels": {"torch", "variants.kernels", "triton"},
    "variants/conformance": {"torch", "variants.conformance", "variants.contract"},
    "harness": {"harness.cache", "harness.failures", "variants.contract"},
    "harness/trained.py": {"harness"},
    "harness/record": {"harness.record", "harness.cache", "harness.failures"},
    "harness/optim": {"harness.optim"},
    "harness/data": {"harness.data", "harness.cache", "harness.failures", "harness.hashing"},
    "harness/count": {"harness.count", "harness.model", "variants.contract"},
    "harness/plan": {
        "harness.plan",
        "harness.optim",
        "harness.model",
        "harness.failures",
        "variants.contract",
    },
    "harness/device": {
        f"harness.{name}" for name in ("device", "plan.settings", "cache", "failures", "hashing")
    },
    "harness/check": {
        f"harness.{name}"
        for name in ("check", "count", "device", "model", "plan", "source", "cache")
    }
    | {"harness.failures", "variants.contract", "variants.conformance"},
    "harness/objective": {
        f"harness.{name}"
        for name in ("objective", "data", "device.runtime", "model", "plan", "hashing")
    },
    "harness/loop": {"harness", "variants.contract"},
    "harness/compose": {"harness"},
    "bench": {"bench", "harness", "variants.contract", "variants.conformance"},
    "windtunnel": {"windtunnel", "bench", "harness"},
    "bench/tables": {
        "bench.tables",
        "bench.rows",
        "harness.record",
        "harness.cache",
        "harness.failures",
    },
    "train.py": {"harness", "hydra", "omegaconf"},
}
OURS = {"variants", "harness", "bench", "windtunnel", "tests", "train", "conf"}
THIRD_PARTY_ALLOWED = ("harness", "bench")  # folders with a rule for imports of our packages only


def folder_of(path: Path) -> str:
    """Return the folder of a file, or the file if it has a rule of its own."""
    path = path.relative_to(ROOT)
    return path.as_posix() if path.as_posix() in ALLOWED_IMPORTS else path.parent.as_posix()


def imported(path: Path) -> set[str]:
    """Return names that a file imports anywhere. ``from a import b`` gives a.b, even if b is not a
    module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports must be absolute"
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return names


def inside(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def forbidden_imports(path: Path) -> set[str]:
    allowed = ALLOWED_IMPORTS[folder_of(path)]
    names = {
        name for name in imported(path) if name.partition(".")[0] not in sys.stdlib_module_names
    }
    if folder_of(path).partition("/")[0] in THIRD_PARTY_ALLOWED:
        names = {name for name in names if name.partition(".")[0] in OURS}
    return {name for name in names if not inside(name, allowed)}


def test_files_import_only_what_their_folder_allows():
    assert not {path: names for path in PRODUCT if (names := forbidden_imports(path))}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Return for each module of the product, those that it imports anywhere."""
    paths = {module_name(path): path for path in PRODUCT}

    def module(name: str) -> str | None:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name or None

    return {
        name: {module(imports) for imports in imported(path)} - {None, name}
        for name, path in paths.items()
    }


def test_imports_have_no_cycle_of_modules_or_folders():
    """The commands of bench count as one folder, and the modules that they share as another."""
    modules = import_graph()
    commands = {
        f"bench.{path.stem}"
        for path in (ROOT / "bench").glob("*.py")
        if "__main__" in path.read_text()
    }
    between = {
        (command, imports) for command in commands for imports in modules[command] & commands
    }
    # one file has the code of both
    assert len(commands) > 5 and between == {("bench.decompress", "bench.compress")}
    published = ("published", "published_claims", "published_runs")
    shared = (*published, "text_figures")  # of one command only
    commands |= {f"bench.{name}" for name in shared}

    def group_of(module: str) -> str:
        if module in commands:
            return "commands"
        packages = [
            name
            for name in (module, module.rpartition(".")[0])
            if name.replace(".", "/") in ALLOWED_IMPORTS
        ]
        return packages[0] if packages and packages[0] != "harness" else module

    groups: dict[str, set[str]] = {}
    for name, imports in modules.items():
        groups.setdefault(group_of(name), set()).update(
            {group_of(target) for target in imports} - {group_of(name)}
        )
    for graph in (modules, groups):
        list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a cycle


def test_no_file_is_named_util_and_no_product_file_has_more_than_500_lines():
    assert not [path for path in [*PRODUCT, *TESTS] if path.stem.startswith("util")]
    assert not {path.name: n for path in PRODUCT if (n := len(path.read_text().splitlines())) > 500}


def test_tests_mirror_the_tree():
    """A test lies in the folder of the package that it tests, or of the references, golden numbers
    and long tables that it reads. Tests of the whole repository lie beside these folders."""
    tests = [path.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")]
    folders = {path.parent.as_posix() for path in tests}
    assert folders == {*PACKAGES, "reference", "golden", "faults", "."}
    whole = {path.stem for path in tests if path.parent == Path(".")}
    assert whole == {
        f"test_{name}"
        for name in ("style", "documentation", "architecture_page", "wheel", "gpu_first_run")
    }


def test_the_code_of_bench_names_no_variant():
    """Configurations and data may name variants. Code may not, so that a user's variant is
    treated in the same way."""
    # whole words: package names may contain one
    named = re.compile(rf"(?<![\w-])({'|'.join(VARIANT_NAMES)})(?![\w-])")
    files = [path for path in PRODUCT if path.is_relative_to(ROOT / "bench")]
    assert not [f"{path}: {name[0]}" for path in files if (name := named.search(path.read_text()))]


def test_no_file_has_a_path_of_one_machine():
    # .git is a file in a worktree
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    machine = re.compile(r"(?<![\w.~}])/(work|root|tmp|home)/[a-z]")
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        if path.suffix in TEXT
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if machine.search(line)
    ]
    assert not lines


NOUNS = ("The", "A", "An", "Whether", "All", "Each", "Every", "Bytes", "Number", "ValueError")


def test_the_docstring_of_a_function_begins_with_its_verb():
    """``Return ..`` for what is returned. A context begins with ``Context``."""
    nouns = []
    for path in [*PRODUCT, *TESTS]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("test_"):
                continue
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if "property" in decorators or "fixture" in decorators:
                continue
            if (ast.get_docstring(node) or "Return").split()[0] in NOUNS:
                nouns.append(f"{path.name}: {node.name}")
    assert not nouns
