"""Kills: a run, or a sweep, whose process ends at any moment. The same command goes on, and the record is the same.

A moment is an operation on a file below ``outputs``, or the half of a write: their number does not depend on a clock.
"""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from harness.record.rows import RECORD, SUMMARY
from tests.command_line import run_folders
from tests.script_process import exit_code, started
from tests.small_runs import SMALL, temporary_cwd  # noqa: F401 - a fixture

pytestmark = pytest.mark.faults

GIVEN = ("variant=mhsa", "budget.steps=8", "record.every_steps=2", "checkpoint.every_steps=3", "eval.every=0.5")
GIVEN += ("eval.test=false", "model.dropout=0.1", "batch.carry=true")
AT_A_MOMENT = """
import os, runpy, sys
from harness import cache
from harness.record import folder, rows

moments = [int(word) for word in os.environ["MOMENTS"].split()]
count = 0

def moment():
    global count
    count += 1
    if count in moments:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))

def watch(event, given):
    if event in ("open", "os.rename", "os.remove", "os.symlink", "os.mkdir", "os.truncate") and "outputs" in str(given[0]):
        moment()

def write_in_halves(file, content):
    view = memoryview(content).cast("B")
    inner(file, view[: len(view) // 2])
    if "outputs" in str(file.name):
        moment()
    inner(file, view[len(view) // 2 :])

inner = cache.write_all
for module in (cache, folder, rows):
    module.write_all = write_in_halves
sys.addaudithook(watch)
sys.argv[0] = os.environ["PROGRAM"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    open("moments", "w").write(str(count))
"""


def ended(*words: str, moments: tuple[int, ...] = (), number: int = 0) -> tuple[int, str]:
    """Exit code and output of a training command that a signal reaches at some of its moments."""
    program, printed = Path("program.py").absolute(), Path("said")
    program.write_text(AT_A_MOMENT, encoding="utf-8")
    program_of = str(Path(__file__).resolve().parents[2] / "train.py")
    variables = {"MOMENTS": " ".join(map(str, moments)), "SIGNAL": str(int(number)), "PROGRAM": program_of}
    variables |= {"COLUMNS": "200"}
    printed.unlink(missing_ok=True)
    with started(program, *words, out=printed, environment=os.environ | variables) as process:
        return exit_code(process), printed.read_text()


def rows_in(outputs: Path) -> dict[str, list[dict]]:
    """What must be equal bit for bit, by run folder; the command is another program's here, and a sweep names its group."""
    records = {path.name: [json.loads(line) for line in (path / RECORD).open()] for path in run_folders(outputs)}
    mine = ("clock", "memory", "command", "commit", "config")
    return {name: [{key: row[key] for key in row.keys() - mine} for row in rows] for name, rows in records.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, tuple[int, dict[str, list[dict]]]]:
    """Of a run and of a sweep that nobody disturbs: their moments, and their records."""
    records = {}
    with pytest.MonkeyPatch.context() as patched:
        for name, words in COMMANDS.items():
            patched.chdir(tmp_path_factory.mktemp("undisturbed"))
            code, printed = ended(*words)
            assert code == 0, printed
            records[name] = int(Path("moments").read_text()), rows_in(Path("outputs"))
    return records


COMMANDS = {"run": (*SMALL, *GIVEN), "sweep": ("-m", *SMALL, *GIVEN, "seed=0,1")}
ENDS = {signal.SIGKILL: {-9}, signal.SIGTERM: {-15, 143}, signal.SIGINT: {130}}
TRIES = [("run", signal.SIGKILL, 1, 12), ("run", signal.SIGTERM, 1, 4), ("run", signal.SIGINT, 1, 4)]
TRIES += [("run", signal.SIGINT, 2, 4), ("sweep", signal.SIGKILL, 1, 3), ("sweep", signal.SIGINT, 1, 2)]


@pytest.mark.parametrize(("what", "number", "times", "tries"), TRIES)
def test_the_same_command_goes_on_after_any_end(undisturbed, tmp_path, monkeypatch, what, number, times, tries):
    (most, rows), chance = undisturbed[what], random.Random(f"{what} {number} {times}")
    for at in chance.sample(range(1, most + 1), tries):
        (tmp_path / str(at)).mkdir()
        monkeypatch.chdir(tmp_path / str(at))
        code, printed = ended(*COMMANDS[what], moments=tuple(range(at, at + times)), number=number)
        finished = [json.loads((path / SUMMARY).read_text())["status"] for path in run_folders(Path("outputs"))
                    if (path / SUMMARY).exists()]  # fmt: skip
        assert code in ENDS[number] or (code == 0 and finished), (at, code, printed)
        assert "Traceback" not in printed and set(finished) <= {"finished"}, (at, printed)
        code, printed = ended(*COMMANDS[what])
        assert code == 0 and rows_in(Path("outputs")) == rows, (at, printed)
        left = [path.name for path in Path("outputs").rglob("*") if path.name.endswith((".tmp", ".part"))]
        assert not left and Path("outputs/latest").exists(), (at, left)
