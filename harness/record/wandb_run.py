"""W&B: a run per job, online with a key, else offline; failures are a line on stderr. ``WANDB_*`` wins over arguments.

Metrics: those of ``PLACE``, with ``bytes_seen`` as the x axis; ``train/learning_rate``, a number of a row by the row's
kind; ``valid_bits_per_byte``, a final score; ``train_span/layers.0.attention``, a sublayer's metric, or of a list
``/mean``, ``/min`` and ``/max``; ``train_span/mean``, of all sublayers.
"""

import os
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from harness.record.shapes import flat, is_number

PLACE = ("bytes_seen", "step", "epochs", "fraction", "training_flops", "seconds", "bytes_per_second")
INIT_SECONDS, FINISH_SECONDS = 15.0, 30.0
"""Longest waits for the server, and for uploads at a run's end."""


class WandbRun:
    """One job's run in W&B, a context that finishes it.

    Args:
        folder: the run folder; W&B writes into its subfolder ``wandb``.
        mode: ``auto`` (online if an API key is configured, else offline), ``online``, ``offline`` or ``disabled``.
        id: of the run to continue, from a checkpoint, or None.
        tags, more: as of ``wandb.init``; tags that it would refuse are left out or cut.

    Attributes:
        id: for the checkpoint.
        hint: one line with the run's place or how to upload it; empty without W&B.
    """

    def __init__(self, folder: Path, *, mode: str = "auto", id: str | None = None, tags: Iterable[str] = (), **more):
        self.id, self.hint, self._run = os.environ.get("WANDB_RUN_ID") or id or secrets.token_hex(4), "", None
        mode = os.environ.get("WANDB_MODE") or mode
        if mode != "disabled":
            tags = list(dict.fromkeys(str(tag)[:64] for tag in tags if tag)) or None  # W&B refuses others
            with self._harmless():
                self._run = _start(mode, more | {"tags": tags, "dir": str(folder)}, id=self.id)
                self.hint = _hint(self._run)

    def log(self, row: dict) -> None:
        """Send the numbers of a row that ``Record.append`` returned; a provenance row goes into the run's summary."""
        if self._run is None:
            return
        with self._harmless():
            if row["kind"] == "provenance":
                self.log_end(summary={key: row[key] for key in row if key not in ("kind", "config")})
            elif (metrics := numbers(row)).keys() - set(PLACE):
                self._run.log(metrics)

    def log_end(self, *, summary: dict) -> None:
        """Send the run's summary."""
        if self._run is not None:
            with self._harmless():
                self._run.summary.update(facts(summary))

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """W&B's exceptions, also SystemExit, become one line and end W&B for this job."""
        try:
            yield
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"wandb: {reason} (the run itself goes on)", file=sys.stderr)
            run, self._run = self._run, None
            if run is not None:
                self.hint = _hint(run, uploaded=False)
                with suppress(Exception, SystemExit):
                    run.finish(exit_code=1)
                with suppress(Exception, SystemExit):
                    sys.modules["wandb"].teardown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Finish the run, without waiting long for the server."""
        if self._run is not None:
            with self._harmless():
                self._run.finish(exit_code=int(kind is not None))
        self._run = None


def _start(mode: str, keywords: dict, *, id: str):
    """The started run: online if possible, else offline, with a line on stderr unless that was asked for."""
    import wandb  # late: it takes a second

    settings = {"silent": True, "console": "off", "init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
    settings |= {"finish_timeout_raises": True, "x_disable_stats": True}  # samples would be measured with the run
    of_user = {key for key in settings if os.environ.get(f"WANDB_{key.upper()}")}
    settings, reason = wandb.Settings(**{key: value for key, value in settings.items() if key not in of_user}), None
    session = wandb.setup(settings=settings)
    wanted, mode = mode, session.settings.mode if mode == "auto" else mode  # `wandb offline` was typed here
    if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False, verify=False):
        mode, reason = "offline", "no API key is configured" if wanted != "auto" else None
    # W&B itself takes a variable for less than a keyword.
    names = {key: "WANDB_RUN_GROUP" if key == "group" else f"WANDB_{key.upper()}" for key in keywords}
    keywords = {key: keywords[key] for key, name in names.items() if not os.environ.get(name)}
    start = partial(wandb.init, id=id, resume="allow", reinit="finish_previous", **keywords)
    try:
        run = start(mode=mode)
    except wandb.errors.CommError as error:
        reason = f"cannot go online: {' '.join(str(error).split())[:160]}"
        wandb.teardown()  # the failed start keeps the id to itself
        wandb.setup(settings=settings)
        run = start(mode="offline")
    if reason:
        print(f"wandb: {reason}; this run is written offline", file=sys.stderr)
    run.define_metric("bytes_seen")
    run.define_metric("*", step_metric="bytes_seen")
    run.define_metric("valid/bits_per_byte", step_metric="bytes_seen", summary="min")
    return run


def _hint(run, *, uploaded: bool = True) -> str:
    """The run's URL, or the command to upload it with all parts of a resumed run."""
    if run.disabled or (uploaded and not run.offline):
        return "" if run.disabled else f"wandb: {run.url}"
    folder = str(Path(run.dir).parents[1])
    return f"wandb sync {shlex.quote(min(folder, os.path.relpath(folder), key=len))}/*run-*-{run.id}*"


def numbers(row: dict) -> dict[str, float]:
    """Numbers of a row by metric, without texts, and without lists but those of a number for each head."""
    kind, row = row["kind"], row | (row.get("clock") or {})
    metrics = {name: row.get(name) for name in PLACE}
    if row.get("final"):
        return facts(metrics | {f"{kind}_{name}": row[name] for name in row if name.endswith("bits_per_byte")})
    rest = {name: number for name, number in row.items() if name not in (*PLACE, "kind", "metrics", "clock")}
    metrics, pooled = metrics | flat(rest, separator="/", prefix=f"{kind}/"), {}
    for name, metric in (row.get("metrics") or {}).items():
        place, _, word = name.rpartition(".")
        heads = [number for number in (metric if isinstance(metric, list) else [metric]) if is_number(number)]
        pooled.setdefault(f"{kind}_{word}", []).extend(heads)
        key = f"{kind}_{word}/{place or 'model'}"
        metrics |= _extent(key, heads) if isinstance(metric, list) else {key: metric}
    for section, heads in pooled.items():
        metrics |= _extent(section, heads)
    return {name: number for name, number in facts(metrics).items() if not isinstance(number, str | bool)}


def facts(summary: dict) -> dict[str, float | str]:
    """Numbers, truths and texts of a summary or provenance row: ``{"memory/peak_bytes": 12345, "variant": "mhsa"}``."""
    stored = {
        key: leaf
        for key, leaf in flat(summary, separator="/").items()
        if isinstance(leaf, str | bool) or is_number(leaf)
    }
    # Readers make floats of larger integers anyway.
    return {key: float(leaf) if type(leaf) is int and abs(leaf) > 2**53 else leaf for key, leaf in stored.items()}


def _extent(name: str, heads: list[float]) -> dict[str, float]:
    extent = {"mean": sum(heads) / len(heads), "min": min(heads), "max": max(heads)} if heads else {}
    return {f"{name}/{key}": number for key, number in extent.items()}
