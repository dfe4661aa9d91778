"""W&B beside the run and never in its way: one W&B run per job, fed by a thread of its own.

The thread imports wandb (a second), starts the run and sends rows; the training loop only puts plain numbers into a
queue. So a server that does not answer, a full disk or a bug in wandb costs no step, and finishing gives up after a
while. Whatever fails is said in one line on stderr, and then nothing more.

``WANDB_*`` variables win over what is given, nothing ever asks for a key, and nothing is printed but our own lines.
W&B's step counter is not used, because a resumed run repeats steps: the x axis of everything is ``bytes_seen``.
"""

import json
import os
import queue
import secrets
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from harness.cache import cache_folder
from harness.record.wandb_rows import PLACE, facts, numbers, span_rows

MODES = ("auto", "online", "offline", "disabled")
START_SECONDS = 3.0
"""How long the job waits for W&B before it goes on; an offline start takes about one second."""
INIT_SECONDS = 15.0
"""How long to try to reach the server."""
FINISH_SECONDS = 30.0
"""How long the end of a run waits for uploads."""
LONGEST_TAG = 64
"""Characters of a tag."""
VARIABLES = {
    **{"dir": "WANDB_DIR", "project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "name": "WANDB_NAME"},
    **{"group": "WANDB_RUN_GROUP", "job_type": "WANDB_JOB_TYPE", "tags": "WANDB_TAGS"},
}
"""Keywords of ``wandb.init`` that a variable may give."""

_Task = Callable[[ModuleType, Any], None]


class WandbRun:
    """One job's run in W&B. Use it in a ``with`` statement, so that it is finished whatever happens.

    Args:
        folder: the run folder; W&B writes into its subfolder ``wandb``.
        config: plain nested dictionary; the numbers of layers that are keys in it become text, as in the record.
        mode: ``auto`` (online if an API key is configured, else offline), ``online``, ``offline`` or ``disabled``.
        id: that of the run to continue, from a checkpoint; None makes a new one.
        every_seconds: train rows that come sooner after the last one are left out; other rows never are.
        system_statistics: whether W&B samples processors, memory and devices; it would be measured with the run.
        tags: those that W&B would refuse are left out or cut.
        given: project, entity, name, group and job_type as W&B means them; None leaves the choice to W&B.

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
        id: str | None = None,
        every_seconds: float = 1.0,
        system_statistics: bool = False,
        tags: Iterable[str] = (),
        **given: str | None,
    ):
        if mode not in MODES:
            raise ValueError(f"record.wandb.mode={mode!r}: allowed are {', '.join(MODES)}")
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
        # W&B refuses a run for a tag that is empty or too long, or that is given twice.
        tags = list(dict.fromkeys(str(tag)[:LONGEST_TAG] for tag in tags if tag))
        given |= {"tags": tags or None, "dir": str(folder), "id": self.id}
        given |= {"config": json.loads(json.dumps(config))}
        ready = threading.Event()
        start = partial(_start, mode=mode, given=given, system_statistics=system_statistics)
        self._thread = threading.Thread(target=self._work, args=(start, ready), name="wandb", daemon=True)
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
        self._put(partial(_send_row, row=row))

    def log_end(self, *, summary: dict, figures: list[Path]) -> None:
        """Send the last train row, if it was left out, and the run's summary, tables and figures."""
        if self._held:
            self._put(partial(_send_row, row=self._held))
        self._put(partial(_send_end, summary=summary, figures=figures))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Finish the run; gives up on a server that does not answer."""
        if self._running:
            self._exit_code = int(kind is not None)
            self._tasks.put(None)
            self._thread.join(FINISH_SECONDS + 5)
            if self._thread.is_alive():
                self._complain("it does not finish and is left behind")
        self._running = False

    def _put(self, task: _Task) -> None:
        if self._running:
            self._tasks.put(task)

    def _complain(self, reason: str) -> None:
        if self._running:
            print(f"wandb: {' '.join(reason.split())[:200]} (the run itself goes on)", file=sys.stderr)
        self._running = False

    def _work(self, start: Callable[[ModuleType], Any], ready: threading.Event) -> None:
        """The thread: start, send until told to stop, finish."""
        run = None
        try:
            import wandb

            run = start(wandb)
            self.hint = _hint(run)
            ready.set()
            while (task := self._tasks.get()) is not None:
                task(wandb, run)
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # wandb may also raise SystemExit, and nobody else would hear of it here
            self._complain(f"{type(error).__name__}: {error}")
            if run is not None:
                self.hint = _hint(run, uploaded=False)
                _finish_quietly(wandb, run)
        finally:
            ready.set()


def _start(wandb: ModuleType, *, mode: str, given: dict, system_statistics: bool):
    """The started run: online if wanted and possible, else offline, with a line on stderr where that was not wanted."""
    keywords = {key: value for key, value in given.items() if not os.environ.get(VARIABLES.get(key, ""))}
    # finish_previous: without it a second job in this process would silently log into the first job's run
    init = partial(wandb.init, **keywords, resume="allow", reinit="finish_previous")
    _find_room()
    _quieten(wandb, system_statistics=system_statistics)
    if mode == "auto":
        mode = wandb.setup().settings.mode  # offline where somebody typed `wandb offline` in this folder
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
    elif mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False, verify=False):
        print("wandb: no API key is configured, so this run is written offline", file=sys.stderr)
        mode = "offline"
    try:
        run = init(mode=mode)
    except wandb.errors.CommError as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        print(f"wandb: cannot go online, so this run is written offline: {reason[:160]}", file=sys.stderr)
        wandb.teardown()  # the failed start keeps the id to itself
        _quieten(wandb, system_statistics=system_statistics)
        run = init(mode="offline")
    run.define_metric("bytes_seen")
    run.define_metric("*", step_metric="bytes_seen")
    run.define_metric("valid/bits_per_byte", step_metric="bytes_seen", summary="min")
    return run


def _find_room() -> None:
    """Where no folder can be made in the user's home, W&B has a temporary one: else its server says so in twenty lines."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        names = [name for name in ("CACHE", "CONFIG", "DATA") if f"WANDB_{name}_DIR" not in os.environ]
        os.environ.update({f"WANDB_{name}_DIR": tempfile.mkdtemp(prefix="wandb-") for name in names})


def _quieten(wandb: ModuleType, *, system_statistics: bool) -> None:
    settings = {"silent": True, "console": "off", "init_timeout": INIT_SECONDS}
    settings |= {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
    settings |= {"x_disable_stats": not system_statistics}
    settings = {key: value for key, value in settings.items() if f"WANDB_{key.upper()}" not in os.environ}
    wandb.setup(settings=wandb.Settings(**settings))


def _send_row(wandb: ModuleType, run, *, row: dict) -> None:
    """Log one row, or store what a run says of itself before its first step."""
    if row["kind"] == "provenance":  # the configuration is there already
        run.summary.update(facts({key: value for key, value in row.items() if key not in ("kind", "config")}))
        return
    found = numbers(row)
    sent = {key: wandb.Histogram(value) if isinstance(value, list) else value for key, value in found.items()}
    if sent.keys() - set(PLACE):
        run.log(sent)


def _send_end(wandb: ModuleType, run, *, summary: dict, figures: list[Path]) -> None:
    """Store the summary's numbers and texts, and log tables and figures."""
    run.summary.update(facts(summary))
    place = {key: value for key, value in facts(summary).items() if key == "bytes_seen"}
    images = {}
    for path in figures:
        with suppress(Exception):  # a picture that cannot be read takes nothing else away
            images[f"figures/{path.stem}"] = wandb.Image(str(path))
    if images:
        run.log(place | images)
    spans = span_rows(summary.get("valid_metrics") or {})
    tables = _table(wandb, "spans", ["sublayer", "head", "span", "span_with_ramp"], spans)
    costs = [[name, value] for name, value in facts(_costs(summary)).items() if not isinstance(value, str | bool)]
    tables |= _table(wandb, "costs", ["what", "value"], costs)
    if tables:  # last: online, W&B asks its server before it takes a table
        run.log(place | tables)


def _costs(summary: dict) -> dict:
    """Memory, FLOPs, sizes and time, less the long list of operations without a formula."""
    kept = ("parameters", "memory", "training_flops", "seconds", "bytes_per_second", "compressors")
    flops = {key: value for key, value in (summary.get("flops_per_byte") or {}).items() if key in ("executed", "ideal")}
    return {key: summary[key] for key in kept if key in summary} | {"flops_per_byte": flops}


def _table(wandb: ModuleType, name: str, columns: list[str], rows: list[list]) -> dict:
    return {f"tables/{name}": wandb.Table(columns=columns, data=rows)} if rows else {}


def _hint(run, *, uploaded: bool = True) -> str:
    """One line: where the run is, or how to upload it. The parts of a resumed offline run go up together."""
    if run.disabled:
        return ""
    if uploaded and not run.offline:
        return f"wandb: {run.url}"
    here = Path(run.dir).parent
    several = len(list(here.parent.glob(f"offline-run-*-{run.id}*"))) > 1
    where = str(here.parent if several else here)
    shown = shlex.quote(min(where, os.path.relpath(where), key=len))
    return f"wandb sync {shown}" + (f"/offline-run-*-{run.id}*" if several else "")


def _finish_quietly(wandb: ModuleType, run) -> None:
    """End a run that has failed already, so that the next job of this process starts afresh.

    W&B's own process goes, too: if it is that which died, W&B would print a trace when Python exits.
    """
    for end in (partial(run.finish, exit_code=1), wandb.teardown):
        with suppress(BaseException):  # what there is to say was said
            end()
