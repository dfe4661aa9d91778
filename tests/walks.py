"""Counts functions of ours between two places, by tracing: ``python -m tests.walks [names]``.

Python 3.11 only. Comprehensions, generator expressions, tests and packages do not count; lambdas
do. A function *carries* a number if it returns or yields a value that contains it, also as text."""

import contextlib
import math
import os
import pickle
import struct
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

from bench import evidence, front_page
from bench.report import all_tables
from bench.tables.frame import Rows
from harness.record.table import Cell
from tests.support.command_line import ROOT
from tests.support.small_runs import make_run, run_to_end

PRODUCT = ("bench", "harness", "train.py", "variants", "windtunnel")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
QUIET = ("record.wandb.mode=disabled", "batch.accumulate=1")
RAMP = 61_681  # a ramp that no other number of the configuration equals


def is_ours(code: CodeType) -> bool:
    """Return whether this is the code of a function or lambda of the product."""
    path = Path(code.co_filename)
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT
    return inside and code.co_name not in COMPREHENSIONS


class Walk(contextlib.AbstractContextManager):
    """Traces functions of ours: ``called`` are all, ``carrying`` those that return a ``number``,
    and ``stack`` those that led to the last call of the function ``target``. None is carrying any
    more after ``target`` was called, or after a cell that begins with ``end`` was returned."""

    def __init__(self, number: float = math.nan, *, target: str | None = None, end: str = ""):
        self.called: set[CodeType] = set()
        self.carrying: set[CodeType] = set()
        self.stack: set[CodeType] = set()
        self.marks = [pickle.dumps(number)[11:-1], struct.pack("<d", number)]
        self.target = target
        self.end = end
        self.has_ended = False

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object):
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object):
        code = frame.f_code
        name = argument.__name__ if event == "c_call" else code.co_qualname
        if name == self.target and event in ("call", "c_call"):
            self.has_ended = True
            self.stack = set()
            while frame:
                self.stack |= {frame.f_code} if is_ours(frame.f_code) else set()
                frame = frame.f_back
        if event == "call" and is_ours(code):
            self.called.add(code)
        if event == "return" and is_ours(code) and not self.has_ended and self._contains(argument):
            self.carrying.add(code)
            text = argument.text if isinstance(argument, Cell) else argument
            self.has_ended = bool(self.end) and isinstance(text, str) and text.startswith(self.end)

    def _contains(self, returned: object) -> bool:
        try:
            content = pickle.dumps(returned)
        except Exception:  # an open file, for instance
            return False
        marks = [*self.marks, self.end.encode()] if self.end else self.marks
        return any(mark in content for mark in marks)


def walks_of_run(path: Path) -> dict[str, set[CodeType]]:
    """Return the walks of a run that is trained in the folder ``path`` and published by
    ``bench.evidence``."""
    words = ("variant=mhsa", "seed=0", f"outputs={path / 'mhsa-0'}", *QUIET)
    number = run_to_end(make_run(*words))["test_bits_per_byte"]
    fused = make_run(*words, "runtime.backend=fused", "force=true").trainer
    with Walk(target="scaled_dot_product_attention") as to_operator:
        fused.step()
    run = make_run(*words, "force=true")
    with run.open_record(), run.stop_signal:
        run.step()
        with Walk() as step:
            run.trainer.step()
        run.step()
        with Walk() as save:
            run.save()
        while not run.trainer.finished:
            run.step()
        with Walk(number) as finish:
            run.finish()
    runner = evidence.Runner(outputs=path, path=None)
    runner.run_python = lambda *words: 0  # the run has been trained
    cell = evidence.Cell(words=words[:2], file=path / "rows/front_page.jsonl", score_context=False)
    cell.file.parent.mkdir()
    with Walk(number) as publish:
        runner.run(cell)
    with Walk(number, end=f"{number:.4f}") as readme:
        front_page.readme_table(cell.file.parent)
    with Walk(number, end=f"{number:.4f}") as report:
        all_tables(Rows([path / "mhsa-0"]))
    assert readme.has_ended and report.has_ended
    return {
        "carry a score to README's cell": finish.carrying | publish.carrying | readme.carrying,
        "carry a score to the report's cell": finish.carrying | report.carrying,
        "frames from Trainer.step to scaled_dot_product_attention": to_operator.stack,
        "are called in one step of mhsa": step.called,
        "are called to save a checkpoint": save.called,
    }


def walk_of_key() -> set[CodeType]:
    """Return the functions that carry ``variant.attention.span.ramp``, or lead to
    ``AdaptiveSpan``."""
    sizes = ("variant=adaptive_span", f"variant.attention.span.ramp={RAMP}", "batch.segment=16")
    with Walk(RAMP, target="AdaptiveSpan.__init__") as key:
        make_run(*sizes, *QUIET)
    assert key.stack
    return key.carrying | key.stack


def main():
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        walks = walks_of_run(Path(folder))
        walks["carry a key to AdaptiveSpan, or lead to it"] = walk_of_key()
        os.chdir(ROOT)
    print("functions  files")
    for label, walk in walks.items():
        print(f"{len(walk):9}  {len({code.co_filename for code in walk}):5}  {label}")
        if "names" in sys.argv:
            print(" " * 17, ", ".join(sorted(code.co_qualname for code in walk)))


if __name__ == "__main__":
    main()
