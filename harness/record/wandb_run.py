"""W&B beside the run and never in its way: one W&B run per job, fed by a thread of its own.

The thread imports wandb (a second), starts the run and sends rows; the training loop only puts plain numbers into a
queue. So a server that does not answer, a full disk or a bug in wandb costs no step, and finishing gives up after a
while. Whatever fails is said in one line on stderr, and then nothing more.
"""

import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from harness.record import wandb_client

MODES = ("auto", "online", "offline", "disabled")
START_SECONDS = 3.0
"""How long the job waits for W&B before it goes on; an offline start takes about one second."""

LONGEST_TAG = 64
"""Characters of a tag."""

_Task = Callable[[ModuleType, Any], None]


def check_mode(mode: str) -> None:
    """ValueError unless ``record.wandb.mode`` is one of ``MODES``."""
    if mode not in MODES:
        raise ValueError(f"record.wandb.mode={mode!r}: allowed are {', '.join(MODES)}")


class WandbRun:
    """One job's run in W&B. Use it in a ``with`` statement, so that it is finished whatever happens.

    Args:
        folder: the run folder; W&B writes into its subfolder ``wandb``.
        config: plain nested dictionary; the numbers of layers that are keys in it become text, as in the record.
        mode: ``auto`` (online if an API key is configured, else offline), ``online``, ``offline`` or ``disabled``.
        project, entity, name, group, job_type, tags: as W&B means them; None leaves the choice to W&B.
        id: that of the run to continue, from a checkpoint; None makes a new one.
        every_seconds: train rows that come sooner after the last one are left out; other rows never are.
        system_statistics: whether W&B samples processors, memory and devices; it would be measured with the run.

    ``WANDB_*`` variables win over all of these.

    Attributes:
        id: for the checkpoint.
        hint: one line that says where the run is or how to upload it, for the end; empty without W&B.

    Raises:
        ValueError: an unknown mode. Nothing else: W&B never stops a run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: dict,
        mode: str = "auto",
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: tuple[str, ...] = (),
        id: str | None = None,
        every_seconds: float = 1.0,
        system_statistics: bool = False,
    ):
        check_mode(mode)
        self.id = os.environ.get("WANDB_RUN_ID") or id or secrets.token_hex(4)
        self.hint = ""
        self._every_seconds = every_seconds
        self._last_train_seconds = float("-inf")
        self._held: dict | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._exit_code = 0
        mode = os.environ.get("WANDB_MODE") or mode
        self._running = mode != "disabled"
        if not self._running:
            return
        given = {"project": project, "entity": entity, "name": name, "group": group, "job_type": job_type}
        given |= {"tags": _legal(tags) or None, "dir": str(folder), "id": self.id}
        given |= {"config": json.loads(json.dumps(config))}
        ready = threading.Event()
        start = partial(wandb_client.start, mode=mode, given=given, system_statistics=system_statistics)
        self._thread = threading.Thread(
            target=self._work, kwargs={"start": start, "ready": ready}, name="wandb", daemon=True
        )
        self._thread.start()
        ready.wait(START_SECONDS)

    def log(self, row: dict) -> None:
        """Send the numbers of one row, as ``Record.append`` returned it."""
        if row["kind"] == "train":
            now = time.monotonic()
            too_soon = now - self._last_train_seconds < self._every_seconds
            self._held = row if too_soon else None
            if too_soon:
                return
            self._last_train_seconds = now
        self._put(partial(wandb_client.send_row, row=row))

    def log_end(self, *, summary: dict, figures: list[Path]) -> None:
        """Send the last train row, if it was left out, and the run's summary, tables and figures."""
        if self._held:
            self._put(partial(wandb_client.send_row, row=self._held))
        self._put(partial(wandb_client.send_end, summary=summary, figures=figures))

    def close(self, *, failed: bool = False) -> None:
        """Finish the run; gives up on a server that does not answer."""
        if self._running:
            self._exit_code = int(failed)
            self._tasks.put(None)
            self._thread.join(wandb_client.FINISH_SECONDS + 5)
            if self._thread.is_alive():
                self._complain("it does not finish and is left behind")
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close(failed=kind is not None)

    def _put(self, task: _Task) -> None:
        if self._running:
            self._tasks.put(task)

    def _complain(self, reason: str) -> None:
        if self._running:
            print(f"wandb: {' '.join(reason.split())[:200]} (the run itself goes on)", file=sys.stderr)
        self._running = False

    def _work(self, *, start: Callable[[ModuleType], Any], ready: threading.Event) -> None:
        """The thread: start, send until told to stop, finish."""
        run = None
        try:
            import wandb

            run = start(wandb)
            self.hint = wandb_client.hint(run)
            ready.set()
            while (task := self._tasks.get()) is not None:
                task(wandb, run)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # wandb may also raise SystemExit, and nobody else would hear of it here
            self._complain(f"{type(error).__name__}: {error}")
            if run is not None:
                self.hint = wandb_client.hint(run, uploaded=False)
                wandb_client.finish_quietly(wandb, run)
        finally:
            ready.set()


def _legal(tags: Iterable[str]) -> list[str]:
    """W&B refuses a run for a tag that is empty or too long, or that is given twice."""
    return list(dict.fromkeys(str(tag)[:LONGEST_TAG] for tag in tags if tag))
