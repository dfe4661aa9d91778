"""A session that ends, by a signal or because nobody reads its output, leaves a checkpoint and
an unfinished run."""

import io
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.device.stop_signal import StopSignal
from harness.record import checkpoint
from tests.support import command_line
from tests.support.command_line import GENERATED, ROOT, run_folders
from tests.support.small_runs import after_step, make_run, run_to_end, temporary_cwd  # noqa: F401

STOPPING = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Closed(io.StringIO):
    """A stream whose reader has gone, or whose terminal was closed, after its first line."""

    error = BrokenPipeError(32, "Broken pipe")

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise self.error
        return super().write(text)


@pytest.fixture(autouse=True)
def default_signals():
    """Handlers of an ordinary session, also where ``nohup`` has started these tests."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_every_signal_that_ends_a_session_saves_a_checkpoint(number):
    handler = signal.getsignal(number)
    run = after_step(
        make_run("budget.steps=4", "outputs=o"), 2, lambda: signal.raise_signal(number)
    )
    with pytest.raises(SystemExit) as caught:
        run_to_end(run)
    assert caught.value.code == 128 + number and signal.getsignal(number) is handler
    assert checkpoint.newest(run.folder.path).name == "step-000000002.pt"
    assert not (run.folder.path / "summary.json").exists()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_signal_that_is_ignored_or_has_a_handler_is_left_alone(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopSignal() as stop_signal:
            signal.raise_signal(signal.SIGHUP)
        assert stop_signal.signal_number is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_a_second_signal_of_the_user_stops_at_once():
    with StopSignal() as stop_signal:
        # as a closed session sends them
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop_signal.signal_number == signal.SIGHUP
    with StopSignal(), pytest.raises(KeyboardInterrupt):
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "I/O"), OSError(28, "No space")]
)
def test_a_run_whose_output_is_closed_saves_a_checkpoint(cwd, monkeypatch, error):
    monkeypatch.setattr(Closed, "error", error)
    monkeypatch.setattr(command_line, "io", SimpleNamespace(StringIO=Closed))
    outcome = command_line.train(*GENERATED, "record.every_steps=1", "record.progress_seconds=0")
    (run,) = run_folders(cwd / "outputs")
    assert (
        outcome.code == 128 + signal.SIGPIPE
        and outcome.out.startswith("training: ")
        and not outcome.err
    )
    assert (
        checkpoint.newest(run).name == "step-000000001.pt" and not (run / "summary.json").exists()
    )
    monkeypatch.undo()
    monkeypatch.chdir(cwd)
    assert command_line.train(*GENERATED, "record.wandb.mode=disabled").code == 0  # resumes


@pytest.mark.faults
@pytest.mark.parametrize("redirection", ["| head -1", ">&- 2>&-", "> /dev/full 2>&1"])
def test_a_process_with_closed_output_ends_as_it_should(cwd, redirection):
    words = (
        sys.executable,
        str(ROOT / "train.py"),
        *command_line.TINY,
        *GENERATED,
        "record.progress_seconds=0",
    )
    script = f"set -o pipefail; {shlex.join(words)} record.every_steps=1 {redirection}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    closed_before = redirection.startswith(">&-")
    assert (
        process.returncode == (0 if closed_before else 128 + signal.SIGPIPE) and not process.stderr
    ), process
    (run,) = run_folders(cwd / "outputs")
    assert (run / "summary.json").exists() == closed_before and checkpoint.newest(run)
    assert {line[:8] for line in (run / "record.jsonl").read_text().splitlines()} == {'{"kind":'}
