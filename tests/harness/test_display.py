"""What a person sees while a run works: a bar on a terminal, plain lines elsewhere."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from unittest.mock import patch

import pytest

from harness.record import cells
from harness.record.display import JOB, Display, job_label
from tests.support.small_runs import make_run, run_to_end, temporary_cwd  # noqa: F401 - a fixture


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return all that was shown at some time, without the terminal's control sequences."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]", text) if line.strip()]


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """Context in which stdout is a terminal."""
    with (
        patch.dict("os.environ", {"TERM": "xterm", "COLUMNS": "120"}),
        redirect_stdout(Terminal()) as terminal,
    ):
        yield terminal


def test_a_run_on_a_terminal_names_its_phases_and_shows_score_speed_and_time_left():
    with on_terminal() as terminal:
        run_to_end(make_run("budget.steps=8"))
    shown = "\n".join(terminal.lines())
    for phase in (
        "reading the corpus",
        "compiling the kernels",
        "training",
        "scoring valid",
        "scoring test",
    ):
        assert phase in shown
    assert re.search(r"100% \d\.\d{4} bits/byte, [\d,]+ bytes/s 0:00:00", shown)
    assert re.search(
        r"^ *sample \d\.\d{4} bits/byte after 512 bytes \(\d+ bytes of valid\)$",
        shown,
        re.MULTILINE,
    )
    assert "mean of" not in shown, "the bar replaces the lines of a log"


def test_an_error_in_the_preparation_removes_the_bar():
    with on_terminal() as terminal, pytest.raises(ValueError, match="model.heads=3"):
        make_run("model.heads=3")
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_log_has_plain_lines_that_name_each_number(capsys):
    run_to_end(make_run("budget.steps=8", "record.progress_seconds=0"))
    printed = capsys.readouterr().out
    number = r"\d\.\d{4} bits/byte after 256 bytes"
    speed = r"\(mean of 2 steps\), [\d,]+ bytes/s, \d+ s left"
    assert re.search(rf"^ 50% train  {number} {speed}$", printed, re.MULTILINE)
    assert re.search(rf"^ +sample {number} \(\d+ bytes of valid\)$", printed, re.MULTILINE)


def test_a_long_line_above_the_bar_is_not_wrapped():
    command = "python train.py " + "data=recall " * 30
    with on_terminal() as terminal:
        display = Display()
        display.advance(0.5)
        display.print(command)
        display.stop()
    assert command.rstrip() in terminal.lines()


def test_jobs_of_a_sweep_are_numbered_and_parallel_jobs_have_no_bar(monkeypatch):
    monkeypatch.setenv(JOB, "job {} of 4: ")
    with on_terminal() as terminal:
        display = Display(label=job_label(1))
        display.advance(0.25)
        display.stop()
        monkeypatch.setenv(JOB, "")
        assert not Display(label=job_label(1)).is_shown
    assert any(
        line.startswith("job 2 of 4: training") and " 25%" in line for line in terminal.lines()
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7799, "2 h 9 min")]
)
def test_durations(seconds, text):
    assert cells.duration(seconds) == text


def test_an_error_of_a_locked_folder_removes_the_bar(monkeypatch):
    def refuse():
        raise ValueError("another process works in this folder")

    with on_terminal() as terminal:
        run = make_run("budget.steps=2")
        monkeypatch.setattr(run.folder, "lock", refuse)
        with pytest.raises(ValueError, match="another process"):
            run.lock_folder()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is erased"
