"""Runs and sweeps that end by a signal at any operation on a file or in the middle of a write
are resumed exactly."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from harness.record.rows import RECORD, SUMMARY
from tests.support.command_line import ROOT, run_folders
from tests.support.script_process import exit_code, started
from tests.support.small_runs import SMALL, temporary_cwd  # noqa: F401 - a fixture

WORDS = (
    "variant=mhsa",
    "budget.steps=8",
    "record.every_steps=2",
    "checkpoint.every_steps=3",
    "eval.every=0.5",
)
WORDS += ("eval.test=false", "model.dropout=0.1", "batch.carry=true")
KILLED_PROGRAM = """
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

def watch(event, arguments):
    changes = ("open", "os.rename", "os.remove", "os.symlink", "os.mkdir", "os.truncate")
    if event in changes and "outputs" in str(arguments[0]):
        moment()

def write_in_halves(file, content):
    view = memoryview(content).cast("B")
    inner(file, view[: len(view) // 2])
    if "outputs" in str(file.name):
        moment()
    inner(file, view[len(view) // 2 :])

inner = cache.write_all
for module in (cache, folder):
    module.write_all = write_in_halves
sys.addaudithook(watch)
sys.argv[0] = os.environ["PROGRAM"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    open("moments", "w").write(str(count))
"""


def run_program(
    *words: str, moments: tuple[int, ...] = (), signal_number: int = 0
) -> tuple[int, str]:
    """Return the exit code and output of a training command that sends itself a signal at
    ``moments``: operations on files in ``outputs`` and middles of writes to them, counted from
    1."""
    program, printed, train = Path("program.py").absolute(), Path("printed"), str(ROOT / "train.py")
    program.write_text(KILLED_PROGRAM)
    variables = {
        "MOMENTS": " ".join(map(str, moments)),
        "SIGNAL": str(int(signal_number)),
        "PROGRAM": train,
    }
    printed.unlink(missing_ok=True)
    with started(
        program, *words, out=printed, environment=os.environ | variables | {"COLUMNS": "200"}
    ) as process:
        return exit_code(process), printed.read_text()


def rows_in(outputs: Path) -> dict[str, list[dict]]:
    """Return, by run folder, the rows without keys that may differ; ``config`` has the random name
    of a sweep's group."""
    records = {
        path.name: [json.loads(line) for line in (path / RECORD).open()]
        for path in run_folders(outputs)
    }
    ignored = ("clock", "memory", "command", "commit", "config")
    return {
        name: [{key: row[key] for key in row.keys() - ignored} for row in rows]
        for name, rows in records.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, tuple[int, dict[str, list[dict]]]]:
    """For an undisturbed run and an undisturbed sweep, the number of moments, and the rows by
    run folder."""
    records = {}
    with pytest.MonkeyPatch.context() as patched:
        for name, words in COMMANDS.items():
            patched.chdir(tmp_path_factory.mktemp("undisturbed"))
            code, printed = run_program(*words)
            assert code == 0, printed
            records[name] = int(Path("moments").read_text()), rows_in(Path("outputs"))
    return records


COMMANDS = {"run": (*SMALL, *WORDS), "sweep": ("-m", *SMALL, *WORDS, "seed=0,1")}
EXIT_CODES = {signal.SIGKILL: {-9}, signal.SIGTERM: {-15, 143}, signal.SIGINT: {130}}
TRIES = [
    ("run", signal.SIGKILL, 1, 12),
    ("run", signal.SIGTERM, 1, 4),
    ("run", signal.SIGINT, 1, 4),
]
TRIES += [
    ("run", signal.SIGINT, 2, 4),
    ("sweep", signal.SIGKILL, 1, 3),
    ("sweep", signal.SIGINT, 1, 2),
]


def kill_and_resume(
    words: tuple[str, ...], rows: dict, moments: tuple[int, ...], signal_number: int
) -> list[str]:
    """Send a command the signals, repeat it and compare its rows. Returns the status of each run
    that had ended."""
    code, printed = run_program(*words, moments=moments, signal_number=signal_number)
    summaries = [
        path / SUMMARY for path in run_folders(Path("outputs")) if (path / SUMMARY).exists()
    ]
    finished = [json.loads(path.read_text())["status"] for path in summaries]
    assert code in EXIT_CODES[signal_number] or (code == 0 and finished), (moments, code, printed)
    assert "Traceback" not in printed and set(finished) <= {"finished"}, (moments, printed)
    code, printed = run_program(*words)
    assert code == 0 and rows_in(Path("outputs")) == rows, (moments, printed)
    leftovers = [
        path.name for path in Path("outputs").rglob("*") if path.name.endswith((".tmp", ".part"))
    ]
    assert not leftovers and Path("outputs/latest").exists(), (moments, leftovers)
    return finished


def test_a_sweep_that_is_killed_in_its_second_job_is_resumed(undisturbed, cwd):
    n_moments, rows = undisturbed["sweep"]
    words = (*COMMANDS["sweep"], "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    assert kill_and_resume(words, rows, (n_moments * 3 // 4,), signal.SIGKILL) == ["finished"]


@pytest.mark.faults
@pytest.mark.parametrize("command, signal_number, sent, tries", TRIES)
def test_the_same_command_resumes_after_a_signal(
    undisturbed, tmp_path, monkeypatch, command, signal_number, sent, tries
):
    (n_moments, rows), draw = (
        undisturbed[command],
        random.Random(f"{command} {signal_number} {sent}"),
    )
    for at in draw.sample(range(1, n_moments + 1), tries):
        (tmp_path / str(at)).mkdir()
        monkeypatch.chdir(tmp_path / str(at))
        kill_and_resume(COMMANDS[command], rows, tuple(range(at, at + sent)), signal_number)
