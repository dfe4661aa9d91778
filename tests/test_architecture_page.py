"""``docs/architecture.md``: the files through which a batch reaches the kernel, and a score
reaches its row."""

import re
import traceback
from pathlib import Path
from types import CodeType

import pytest

from harness.objective import causal_lm
from harness.record import rows
from tests.support import small_runs
from tests.support.command_line import (
    GENERATED,
    ROOT,
    empty_folder,  # noqa: F401 - a fixture
    train,
)
from tests.walks import Walk
from variants.kernels import window_cpu

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def files_on_page(title: str) -> list[str]:
    """Return the files in the block under a title of the page, in order."""
    block = re.search(rf"^## {title}\n.*?^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    return [line.split()[0] for line in block.splitlines() if not line.startswith(" ")]


def files_on_stack() -> list[str]:
    """Return the product's files on the call stack, from the outermost."""
    paths = (frame.filename for frame in traceback.extract_stack())
    ours = (
        path.removeprefix(f"{ROOT}/")
        for path in paths
        if path.startswith(f"{ROOT}/") and ".venv" not in path
    )
    return list(dict.fromkeys(path for path in ours if not path.startswith("tests/")))


def test_the_page_names_the_files_of_the_call_stacks(cwd, monkeypatch):
    stacks: dict[str, list[list[str]]] = {"kernel": [], "score": [], "row": []}

    def watch(module, name: str, label: str):
        function = getattr(module, name)
        file = Path(function.__code__.co_filename).relative_to(ROOT).as_posix()

        def watched(*args, **kwargs):
            stacks[label].append([*files_on_stack(), file])
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(window_cpu, "_call", "kernel")
    watch(causal_lm, "score_stream", "score")
    watch(rows.Record, "append", "row")
    outcome = train(*GENERATED, "variant=mhsa", "eval.every=0.5")
    assert outcome.code == 0, outcome
    steps = [
        stack
        for stack in stacks["kernel"]
        if {"harness/loop/step.py", "harness/loop/run.py"} <= {*stack}
    ]
    assert (
        list(dict.fromkeys(steps[0])) == files_on_page("A batch")
        and len(files_on_page("A batch")) <= 14
    )
    folders = ("harness/loop", "harness/objective", "harness/record/rows")
    listed_files = [path for path in files_on_page("A number") if path.startswith(folders)]
    visited = {path for stack in stacks["score"] + stacks["row"] for path in stack}
    outer_files = {"train.py", "harness/compose/cli.py", "harness/device/processes.py"}
    assert visited - outer_files == set(listed_files) and len(listed_files) <= 5


def file_of(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(ROOT).as_posix()


@pytest.mark.parametrize("variant", small_runs.VARIANTS)
def test_a_step_calls_the_functions_that_the_page_names_for_equations(variant):
    row = re.compile(rf"^\| `{variant}` .*\| `(\S+)` \| `(\S+)` \|$", re.MULTILINE)
    plain = small_runs.make_trainer(*small_runs.VARIANTS[variant], "runtime.backend=plain")
    with Walk() as step:
        plain.step()
    called = {(file_of(code), code.co_qualname) for code in step.called}
    assert len(row.findall(PAGE)) >= 2 and {*row.findall(PAGE)} <= called


def test_a_step_of_adaptive_span_passes_the_same_files():
    adaptive = small_runs.make_trainer(*small_runs.VARIANTS["adaptive_span"])
    with Walk(target="_forward") as step:  # the kernel's last forward pass
        adaptive.step()
    inner = {*files_on_page("A batch")} - {
        "train.py",
        "harness/compose/cli.py",
        "harness/loop/run.py",
    }
    assert {file_of(code) for code in step.stack} == inner
