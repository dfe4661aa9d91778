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
from tests.command import MADE, ROOT, TINY, empty_folder, forget_source, train  # noqa: F401
from tests.composing import small

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
    "bench/baselines/rounds.py": "",
    "bench/baselines/rounds.json": "",
    "bench/report/page.py": "",
    "bench/report/page.css": "",
    "bench/results/one/rows.jsonl": "",
}
REACHED = {
    *("train.py", "harness/__init__.py", "harness/loop/__init__.py", "harness/loop/step.py", "harness/loop/child.py"),
    *("harness/otherwise.py", "harness/record/checkpoint.py", "variants/__init__.py", "variants/contract.py"),
}
WINDOW = {
    *("variants/window.py", "variants/window.yaml", "variants/kernels/__init__.py", "variants/kernels/table.py"),
    *("variants/kernels/window.py", "variants/kernels/window.cpp"),
}
MEASURED = {"bench/cost.py", "bench/baselines/rounds.py", "bench/baselines/rounds.json", "harness/loop/never.py"}
CONFIG = {"variant": {"attention": {"_partial_": True, "parts": [{"_target_": "variants.window.Window"}]}}}


@pytest.fixture(autouse=True)
def new_process():
    """What a process remembers is forgotten, now, by calls and afterwards."""
    forget_source()
    yield forget_source
    forget_source()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for name, text in CHECKOUT.items():
        write(tmp_path / name, inspect.cleandoc(text))
    monkeypatch.setattr(source, "ROOT", tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_closure_follows_what_is_written(checkout):
    assert {name for name, _ in closure(())} == REACHED
    names = [name for name, _ in closure(["variants.window.Window", "torch.optim.AdamW", "nowhere.At"])]
    assert names == sorted(REACHED | WINDOW)
    assert {name for name, _ in mechanism_files(CONFIG)} == WINDOW | {"variants/__init__.py", "variants/contract.py"}
    assert {name for name, _ in closure(["harness.loop.never.Class.Inner"])} == REACHED | {"harness/loop/never.py"}


@pytest.mark.parametrize("measuring", [False, True])
def test_one_byte_of_a_file_that_counts_is_another_source_and_of_no_other(checkout, new_process, measuring):
    counting = REACHED | WINDOW | (MEASURED if measuring else set())
    before = digest(CONFIG, measuring=measuring)
    for name in CHECKOUT:
        text = (checkout / name).read_text()
        write(checkout / name, f"{text}\n# edited")
        new_process()
        assert (digest(CONFIG, measuring=measuring) != before) == (name in counting), name
        write(checkout / name, text)
    for name in ("variants/__pycache__/window.pyc", "variants/.window.py.swp", "bench/.cost.py.swp", "variants/new.py"):
        write(checkout / name, "new")
    new_process()
    assert digest(CONFIG, measuring=measuring) == before


def test_the_same_files_elsewhere_have_the_same_digest(checkout, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("zz")
    for name in reversed(CHECKOUT):
        write(other / name, (checkout / name).read_text())
    before = digest(CONFIG, measuring=True)
    monkeypatch.setattr(source, "ROOT", other)
    forget_source()
    assert digest(CONFIG, measuring=True) == before


def test_a_process_remembers_what_it_read(checkout, new_process):
    """A sweep whose source is edited midway goes on with the modules that it has loaded, and says so."""
    before = digest(CONFIG)
    write(checkout / "variants/kernels/window.py", "from variants import other")
    assert digest(CONFIG) == before
    new_process()
    assert digest(CONFIG) != before


# What the command line makes of it

HARMLESS = (
    *("variants/reformer.py", "variants/adaptive_span.py", "variants/conformance/suite.py", "bench/cost.py"),
    *("bench/report/figures.py", "harness/record/figures.py", "harness/record/rows.yaml", "harness/compose/cli.py"),
    *("harness/loop/progress.py", "docs/numbers.md", "README.md", "tests/test_source.py"),
)
CHOICES = ("variant", "position", "optim")
WORDS = (*MADE, "variant=mhsa", "outputs=o")


def copy_tree(to: Path) -> Path:
    for name in ("variants", "harness", "bench", "conf", "docs", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("train.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to / name)
    return to


def test_what_a_run_does_not_use_leaves_it_finished(tmp_path):
    tree = copy_tree(tmp_path / "tree")

    def run(*words: str) -> str:
        command = [sys.executable, tree / "train.py", *TINY, *WORDS, *words]
        return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert "finished before" not in run()
    for name in HARMLESS:
        with (tree / name).open("a") as file:
            file.write("\n# edited\n")
    with (tree / "variants/kernels/product_search.cpp").open("a") as file:
        file.write("\n// edited\n")
    write(tree / "variants/mine.py", "from variants.attention import Attention\n\n\nclass Mine(Attention): ...\n")
    write(tree / "conf/sublayer/mine.yaml", "defaults: [mhsa]\n_target_: variants.mine.Mine\n")
    text = (tree / "conf/variant/mhsa.yaml").read_text()
    write(tree / "conf/variant/mine.yaml", text.replace("mhsa", "mine"))
    assert "finished before" in run()
    assert "finished before" not in run("variant=mine")


def test_what_a_run_uses_makes_it_another(here, monkeypatch):
    tree = copy_tree(here / "tree")
    monkeypatch.setattr(source, "ROOT", tree)
    assert train(*WORDS).code == 0
    used = ("variants/attention.py", "variants/position.py", "variants/kernels/window_cpu.cpp", "harness/loop/run.py")
    for name in (*used, "harness/optim/muon.py", "harness/record/checkpoint.py", "harness/data/streams.py", "train.py"):
        before = (tree / name).read_text()
        write(tree / name, before + "\n")
        ended = train(*WORDS)
        assert "the source changed since" in ended.out and "finished before" not in ended.out, name
        write(tree / name, before)
    assert "finished before" in train(*WORDS).out


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
    counting = {str(path) for _, path in source.closure(source._targets(made.config))}
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    ours = {file for file in loaded if file and source.OURS.match(file.removeprefix(f"{source.ROOT}/"))}
    left_out = {file for file in ours if source.LEFT_OUT.match(file.removeprefix(f"{source.ROOT}/"))}
    assert ours - left_out - seen <= counting, (words, ours - left_out - seen - counting)
    seen |= ours
    print(words, len(ours), len(left_out))
"""


def test_what_runs_of_all_variants_load_is_in_their_closures_or_left_out(tmp_path):
    """A whole run, and a step of every variant, scheme and optimizer: what each of them is the first to load."""
    names = {group: sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml")) for group in CHOICES}
    words = [
        [f"{group}={name}", *(small(name) if group == "variant" else ())] for group in names for name in names[group]
    ]
    words.sort(key=lambda chosen: chosen != ["variant=mhsa"])
    command = [sys.executable, "-c", LOADED, json.dumps(words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == len(words) > 20, ended.stdout


# Modules that the user named


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
        with pytest.raises(
            ValueError, match=f"{edited} was edited while this process ran; the same command again runs"
        ):
            digest({}, trust=("outside",))
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


def test_trusted_modules_are_source_too(tmp_path, monkeypatch, new_process):
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "one_file.py": "import helper, os\nfrom torch import nn\n",
        "one_file.cpp": "",
        "helper.py": "import deep.er\n",
    }
    files |= {"helper.cu": "", "deep/__init__.py": "", "deep/er.py": "", "one_package/__init__.py": ""}
    files |= {"one_package/part.py": "", "one_package/inner/kernel.cu": "", "apart.py": "", "one_package/table.bin": ""}
    for name, text in files.items():
        write(tmp_path / name, text)
    found = {trust: digest({}, trust=trust) for trust in ((), ("one_file",), ("one_package",))}
    assert len(set(found.values())) == 3
    for name in files:
        new_process()
        write(tmp_path / name, files[name] + "# edited\n")
        changed = {trust for trust, before in found.items() if digest({}, trust=trust) != before}
        owner = () if name == "apart.py" else ("one_package",) if name.startswith("one_package") else ("one_file",)
        assert changed == ({owner} if owner else set()), name
        write(tmp_path / name, files[name])
    with pytest.raises(ValueError, match="trust=nowhere_at_all"):
        digest({}, trust=("nowhere_at_all",))


def test_what_lies_beside_an_installed_file_is_not_followed(tmp_path, monkeypatch, new_process):
    """Else all of torch would be read."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    write(tmp_path / "installed.py", "import other\n")
    write(tmp_path / "other.py", "")
    before = digest({}, trust=("installed",))
    new_process()
    write(tmp_path / "other.py", "edited")
    assert digest({}, trust=("installed",)) == before


def test_a_trusted_file_with_an_error_has_a_digest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "broken.py", "def (\n")
    assert digest({}, trust=("broken",)) != digest({})


@pytest.mark.parametrize("text", ["from variants.other import Other", "import variants.window, variants.other"])
def test_what_a_trusted_module_imports_of_ours_is_followed(checkout, monkeypatch, new_process, text):
    monkeypatch.syspath_prepend(checkout / "users")
    write(checkout / "users/mine.py", text)
    before = digest(CONFIG), digest(CONFIG, trust=("mine",))
    assert "variants/other.py" in {name for name, _ in mechanism_files(CONFIG, trust=("mine",))}
    write(checkout / "variants/other.py", "edited")
    new_process()
    assert digest(CONFIG) == before[0] and digest(CONFIG, trust=("mine",)) != before[1]
