"""The digest of the code that runs: every file that this run can import, as this process read it."""

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import source
from harness.source import closure, digest, mechanism_files
from tests.command import MADE, ROOT, empty_folder, run_folders, train  # noqa: F401 - a fixture
from tests.composing import plan, small

CHECKOUT = {
    "train.py": "from harness.compose.cli import main\nfrom harness.loop import step\n",
    "harness/__init__.py": "",
    "harness/compose/cli.py": "import harness.only_composed",
    "harness/only_composed.py": "",
    "harness/loop/__init__.py": "",
    "harness/loop/step.py": """
        import typing
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from harness import only_typed
        if typing.TYPE_CHECKING:
            import harness.only_typed
        else:
            import harness.otherwise
        def late():
            from variants import contract
            from ..record import checkpoint, rows
            from . import progress
            run("python", "-m", "harness.loop.child")
        """,
    "harness/loop/child.py": "",
    "harness/loop/progress.py": "",
    "harness/loop/never.py": "",
    "harness/only_typed.py": "",
    "harness/otherwise.py": "import harness.otherwise, torch.nn, helper",
    "harness/record/checkpoint.py": "",
    "harness/record/rows.py": "",
    "variants/__init__.py": "",
    "variants/contract.py": "",
    "variants/window.py": "from .kernels.window import attend, CONSTANT\n",
    "variants/window.yaml": "",
    "variants/window_more.yaml": "",
    "variants/kernels/__init__.py": "from variants.kernels import table\n",
    "variants/kernels/table.py": "",
    "variants/kernels/window.py": "from variants import conformance",
    "variants/kernels/window.cpp": "",
    "variants/conformance/__init__.py": "",
    "variants/other.py": "",
    "bench/cost.py": "from harness.loop import never\nimport bench.report.page",
    "bench/baselines/rounds.json": "",
    "bench/report/page.py": "",
    "bench/results/one/rows.jsonl": "",
    "users/mine.py": "import helper\nfrom variants.other import Other\n",
    "users/mine.cpp": "",
    "users/helper.py": "import deep.er\n",
    "users/helper.cu": "",
    "users/deep/__init__.py": "",
    "users/deep/er.py": "",
    "users/apart.py": "",
    "users/package/__init__.py": "",
    "users/package/inner/kernel.cu": "",
}
REACHED = {
    *("train.py", "harness/__init__.py", "harness/loop/__init__.py", "harness/loop/step.py", "harness/loop/child.py"),
    *("harness/otherwise.py", "harness/record/checkpoint.py", "variants/__init__.py", "variants/contract.py"),
}
WINDOW = {
    *("variants/window.py", "variants/window.yaml", "variants/kernels/__init__.py", "variants/kernels/table.py"),
    *("variants/kernels/window.py", "variants/kernels/window.cpp"),
}
MEASURED = {"bench/cost.py", "bench/baselines/rounds.json", "harness/loop/never.py"}
MINE = {f"users/{name}" for name in ("mine.py", "mine.cpp", "helper.py", "helper.cu", "deep/__init__.py", "deep/er.py")}
PACKAGE = {"users/package/__init__.py", "users/package/inner/kernel.cu"}
CASES = {
    "a run": ({}, REACHED | WINDOW),
    "measuring": ({"measuring": True}, REACHED | WINDOW | MEASURED),
    "a trusted file": ({"trust": ("mine",)}, REACHED | WINDOW | MINE | {"variants/other.py"}),
    "a trusted package": ({"trust": ("package",)}, REACHED | WINDOW | PACKAGE),
}
CONFIG = {"variant": {"attention": {"_partial_": True, "parts": [{"_target_": "variants.window.Window"}]}}}


@pytest.fixture(autouse=True)
def new_process():
    """What a process remembers is forgotten, now and afterwards."""
    source.forget()
    yield
    source.forget()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for name, text in CHECKOUT.items():
        write(tmp_path / name, inspect.cleandoc(text))
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "users")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_closure_follows_what_is_written(checkout):
    def names(targets, **trust):
        return {name for name, _ in closure(targets, **trust)[0]}

    assert names(()) == REACHED
    assert names(["variants.window.Window", "torch.optim.AdamW", "nowhere.At"]) == REACHED | WINDOW
    assert names(["harness.loop.never.Class.Inner"]) == REACHED | {"harness/loop/never.py"}
    assert {name for name, _ in mechanism_files(CONFIG)} == WINDOW | {"variants/__init__.py", "variants/contract.py"}


@pytest.mark.parametrize("case", CASES)
def test_a_byte_of_a_file_that_counts_is_another_source_and_of_no_other(checkout, case):
    asked, counting = CASES[case]
    before = digest(CONFIG, **asked)
    for name in CHECKOUT:
        text = (checkout / name).read_text()
        write(checkout / name, f"{text}\n# edited")
        assert digest(CONFIG, **asked) == before, "a process remembers what it read"
        source.forget()
        assert (digest(CONFIG, **asked) != before) == (name in counting), name
        write(checkout / name, text)
        source.forget()
        assert digest(CONFIG, **asked) == before
    for name in ("variants/__pycache__/window.pyc", "variants/.window.py.swp", "bench/.cost.py.swp", "variants/new.py"):
        write(checkout / name, "new")
    source.forget()
    assert digest(CONFIG, **asked) == before


def test_the_same_files_elsewhere_have_the_same_digest(checkout, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("zz")
    for name in reversed(CHECKOUT):
        write(other / name, (checkout / name).read_text())
    before = digest(CONFIG, measuring=True)
    monkeypatch.setattr(source, "ROOT", other)
    source.forget()
    assert digest(CONFIG, measuring=True) == before


def test_modules_that_are_odd(checkout, monkeypatch):
    with pytest.raises(ValueError, match="trust=nowhere_at_all"):
        digest({}, trust=("nowhere_at_all",))
    write(checkout / "users/broken.py", "def (\n")
    assert digest({}, trust=("broken",)) != digest({})
    # What lies beside an installed file is not followed: else all of torch would be read.
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(checkout / "users"))
    source.forget()
    before = digest({}, trust=("mine",))
    source.forget()
    write(checkout / "users/helper.py", "edited")
    assert digest({}, trust=("mine",)) == before


@pytest.mark.parametrize("edited", ["late.py", "late.cpp"])
def test_a_module_that_was_edited_before_it_was_loaded_is_refused(tmp_path, monkeypatch, edited):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("__init__.py", "early.py", "late.py", "late.cpp"):
        write(tmp_path / "outside" / name, "")
    importlib.import_module("outside.early")
    before = digest({}, trust=("outside",))
    write(tmp_path / "outside" / "early.py", "EDITED = True\n")
    assert digest({}, trust=("outside",)) == before
    write(tmp_path / "outside" / edited, "EDITED = True\n")
    assert digest({}, trust=("outside",)) == before  # it has not been read
    importlib.import_module("outside.late")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{edited} was edited while this process ran; the same command again"):
            digest({}, trust=("outside",))
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


# What the command line makes of it

HARMLESS = (
    *("variants/reformer.py", "variants/adaptive_span.py", "variants/conformance/suite.py", "bench/cost.py"),
    *("bench/report/figures.py", "harness/record/figures.py", "harness/record/rows.yaml", "harness/compose/cli.py"),
    *("harness/loop/progress.py", "docs/metrics.md", "README.md", "tests/test_source.py"),
)
USED = ("variants/attention.py", "variants/kernels/window_cpu.cpp", "harness/loop/run.py", "harness/optim/muon.py")
USED += ("harness/record/checkpoint.py", "train.py")
WORDS = (*MADE, "variant=mhsa", "outputs=o")


def test_what_a_run_uses_makes_it_another_and_nothing_else_does(here, monkeypatch):
    tree = here / "tree"
    for name in ("variants", "harness", "bench", "docs", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("train.py", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    monkeypatch.setattr(source, "ROOT", tree)
    assert train(*WORDS).code == 0
    (run,) = run_folders(here / "o")
    for name in HARMLESS:
        with (tree / name).open("a") as file:
            file.write("\n# edited\n")
    write(tree / "variants/mine.py", "from variants.attention import Attention\n\n\nclass Mine(Attention): ...\n")
    assert "finished before" in train(*WORDS).out
    config = plan(*WORDS).config
    before = digest(config)
    for name in USED:
        text = (tree / name).read_text()
        write(tree / name, text + "\n")
        source.forget()
        assert digest(config) != before, name
        write(tree / name, text)
    with (tree / USED[0]).open("a") as file:
        file.write("\n")
    assert "finished before" not in train(*WORDS).out and len(run_folders(here / "o")) == 2


LOADED = """
import json, sys
from harness import source
from tests.command import MADE, train
from tests.composing import TINY, one_step, plan, recall

corpus, seen = recall(), set()
ended = train(*MADE, "record.figures=true", "variant=mhsa")
assert ended.code == 0, ended.err
for words in json.loads(sys.argv[1]):
    made = plan(*TINY, *words)
    one_step(made, corpus)
    counting = {str(path) for _, path in source.closure(source._targets(made.config))[0]}
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    ours = {file for file in loaded if file and source.OURS.match(file.removeprefix(f"{source.ROOT}/"))}
    left_out = {file for file in ours if source.LEFT_OUT.match(file.removeprefix(f"{source.ROOT}/"))}
    assert ours - left_out - seen <= counting, (words, ours - left_out - seen - counting)
    seen |= ours
    print(words, len(ours), len(left_out))
"""


def test_what_runs_of_all_variants_load_is_in_their_closures_or_left_out(tmp_path):
    """A whole run, and a step of every variant, scheme and optimizer: what each of them is the first to load."""
    names = {
        group: sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
        for group in ("variant", "position", "optim")
    }
    words = [
        [f"{group}={name}", *(small(name) if group == "variant" else ())] for group in names for name in names[group]
    ]
    words.sort(key=lambda chosen: chosen != ["variant=mhsa"])
    command = [sys.executable, "-c", LOADED, json.dumps(words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == len(words) > 20, ended.stdout
