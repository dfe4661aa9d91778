"""Runs the commands of ``bench.evidence`` within a time, keeps the log, and packs what is small enough to travel."""

import ctypes
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from bench.evidence_plan import Command

OK, FAILED, OUT_OF_TIME = "ok", "failed", "out of time"
GRACE_SECONDS = 20
"""Between the request to stop, upon which a training run writes its checkpoint, and the end."""
LEAST_SECONDS = 15
"""With less left, no command is begun."""
PACK = "evidence.tar.gz"
PACKED = ("log.jsonl", "logs/*.txt", "rows/*/*/rows.jsonl")
PACKED += tuple(f"runs/*/*-s*-*/{name}" for name in ("config.yaml", "record.jsonl", "summary.json", "*.png"))
LARGEST_LOG = 2**18
ENVIRONMENT = {
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
    # Asked the usual way whether there is a device, a process that forks others has spoilt CUDA for them.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PARENT_DEATH_SIGNAL = 1
"""Of ``prctl``."""
ROOT = Path(__file__).resolve().parent.parent


class Calls:
    """One call of ``bench.evidence``.

    Args:
        outputs: folder of everything.
        seconds: of this call, from now.
        pack: folder for the pack, or None.
    """

    def __init__(self, outputs: Path, *, seconds: float, pack: Path | None):
        self.outputs, self.pack, self.end = outputs, pack, time.monotonic() + seconds
        self.log = outputs / "log.jsonl"

    @property
    def left(self) -> float:
        """Seconds of this call."""
        return self.end - time.monotonic()

    def begin(self, *, earlier: str | None, corpus: Path | None, plain: Path | None) -> None:
        """Take up an earlier pack where nothing is here yet, and unpack the corpus once. ValueError for a bad file."""
        (self.outputs / "logs").mkdir(parents=True, exist_ok=True)
        if earlier is not None and not self.log.exists():
            try:
                with tarfile.open(earlier) as pack:
                    pack.extractall(self.outputs, filter="data")
            except (OSError, tarfile.TarError) as error:
                raise ValueError(f"earlier={earlier}: must be a {PACK} of an earlier call ({error})") from error
        if plain is not None and not plain.exists():
            plain.parent.mkdir(parents=True, exist_ok=True)
            passing = plain.with_suffix(".part")
            with lzma.open(corpus) if corpus.suffix == ".xz" else corpus.open("rb") as source, passing.open("wb") as to:
                shutil.copyfileobj(source, to, 2**24)
            passing.replace(plain)

    def entries(self) -> list[dict]:
        """Lines of the log so far."""
        if not self.log.exists():
            return []
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [entry for entry in map(_entry, lines) if entry is not None]

    def run(self, planned: list[Command], *, redo: set[str]) -> int:
        """What is not done yet, what failed last. Returns how many are still not done."""
        past = self.entries()
        done = {entry["name"] for entry in past if entry["status"] == OK} - redo
        failures = {c.name: sum(e["name"] == c.name and e["status"] == FAILED for e in past) for c in planned}
        waiting = sorted((c for c in planned if c.name not in done), key=lambda c: failures[c.name])
        for command in list(waiting):
            if self.left < LEAST_SECONDS + GRACE_SECONDS:
                break
            if self._one(command) == OK:
                waiting.remove(command)
            self._pack()
        return len(waiting)

    def _one(self, command: Command) -> str:
        began, said = time.monotonic(), self.outputs / "logs" / f"{command.name}.txt"
        try:
            command = command.filled(self.outputs / "runs")
            status, reason = self._process(command, said)
        except ValueError as error:
            status, reason = FAILED, str(error)
        if status == OK:  # a finished run is not resumed, and its carried state may be gigabytes
            for path in self.outputs.glob(f"runs/{command.name}/*-s*-*/checkpoints/step-*.pt"):
                path.unlink()
        entry = {"name": command.name, "stage": command.stage, "status": status, "reason": reason}
        entry |= {"seconds": round(time.monotonic() - began, 1), "command": ["python", *command.arguments]}
        with self.log.open("a", encoding="utf-8") as file:
            cut = self.log.stat().st_size and not self.log.read_bytes().endswith(b"\n")
            file.write(("\n" if cut else "") + json.dumps(entry) + "\n")
        print(f"{status:12}{entry['seconds']:7.1f} s  {command.name}" + (f": {reason}" if reason else ""), flush=True)
        return status

    def _process(self, command: Command, said: Path) -> tuple[str, str | None]:
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command.arguments],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it starts itself is ended with it
                preexec_fn=_end_with_this_process if LIBC else None,
            )
            late = False
            try:
                process.wait(min(command.seconds, self.left - GRACE_SECONDS))
            except subprocess.TimeoutExpired:
                late = True
            finally:  # also where this call itself is stopped: nothing may go on unseen, in the next call's folders
                _end(process)
        if process.returncode == 0:
            return OK, None
        return (OUT_OF_TIME if late else FAILED), _last_words(said)

    def _pack(self) -> None:
        """All that is small, in one file that is whole at any time."""
        if self.pack is None:
            return
        self.pack.mkdir(parents=True, exist_ok=True)
        passing = self.pack / f".{PACK}"
        with tarfile.open(passing, "w:gz", compresslevel=6) as pack:
            for path in sorted(path for pattern in PACKED for path in self.outputs.glob(pattern)):
                if path.suffix != ".txt" or path.stat().st_size <= LARGEST_LOG:
                    pack.add(path, arcname=str(path.relative_to(self.outputs)), recursive=False)
        passing.replace(self.pack / PACK)

    def summary(self, planned: list[Command]) -> str:
        """How many are done."""
        last = {entry["name"]: entry["status"] for entry in self.entries()}
        done = [command.name for command in planned if last.get(command.name) == OK]
        return f"{len(done)} of {len(planned)} done; log, rows and runs: {self.outputs}"


def _end_with_this_process() -> None:
    """SIGTERM for the command if this process is killed: it would hold the GPU and its folder with nobody to end it."""
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _end(process: subprocess.Popen) -> None:
    """Have a command write its checkpoint, and end it with all that it started."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _entry(line: str) -> dict | None:
    """A line of the log, or None for one that was cut short when the machine or this process ended."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"name", "status"} <= set(found) else None


def _last_words(said: Path) -> str:
    """The message of a mistake where there is one, else the last line."""
    lines = [line.strip() for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    mistakes = [line for line in lines if line.startswith(("error:", "FAIL"))]
    return (mistakes or lines or ["nothing said"])[-1][:400]
