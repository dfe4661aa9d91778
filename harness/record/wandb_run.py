"""W&B: each job is a W&B run, online if an API key is configured, else offline. W&B's errors are
printed on stderr and do not end the job. Environment variables ``WANDB_*`` take precedence over
arguments.

Names of metrics:
    bytes_seen, step, ...           PROGRESS_KEYS of a row; bytes_seen is the x axis of all metrics
    train/learning_rate             a number of a row, as kind/key
    valid_bits_per_byte             a final score, as kind_key
    train_span/layers.0.attention   a sublayer's metric; for a list of heads, its /mean, /min and
    /max train_span/mean                 the mean over all sublayers and heads, likewise /min and
    /max"""

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from harness.failures import note
from harness.record.schema import flatten, is_number

PROGRESS_KEYS = (
    "bytes_seen",
    "step",
    "epochs",
    "fraction",
    "training_flops",
    "seconds",
    "bytes_per_second",
)
# longest waits: for the server at the start, and for uploads at the end
INIT_SECONDS = 15.0
FINISH_SECONDS = 30.0


class WandbRun(AbstractContextManager):
    """The W&B run of a job, a context that finishes it. ``hint`` is a line with the URL of the W&B
    run, or with the command that uploads it; it is empty if W&B is disabled.

    Args:
        folder: the run folder; W&B writes into its subfolder ``wandb``.
        mode: ``auto`` (online if an API key is configured, else offline), ``online``, ``offline``
            or ``disabled``.
        id: that of the W&B run to continue, from a checkpoint, or None.
        sweeping: whether this is a job of a sweep; then ``WANDB_RUN_ID`` does not count, because
            all jobs would have it.
        tags, more: as in ``wandb.init``; empty tags are left out, and long ones are cut."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: str = "auto",
        id: str | None = None,
        sweeping: bool = False,
        tags: Iterable[str] = (),
        **more,
    ):
        if not sweeping:
            id = os.environ.get("WANDB_RUN_ID") or id
        self.id = id or secrets.token_hex(4)
        self.hint = ""
        self._run = None
        self._step = 0
        variable = os.environ.get("WANDB_MODE") or mode
        if mode == "disabled" and variable != mode:
            note(f"wandb: WANDB_MODE={variable} overrides record.wandb.mode={mode}")
        mode = variable
        if mode != "disabled":
            # the lengths that W&B accepts
            tags = list(dict.fromkeys(str(tag)[:64] for tag in tags if tag)) or None
            with self._contain_errors():
                self._run = _start(mode, more | {"tags": tags, "dir": str(folder)}, id=self.id)
                self.hint = _hint(self._run)

    def log(self, row: dict) -> None:
        """Log the metrics of a row that ``Record.append`` returned. A provenance row is added to
        W&B's summary."""
        if self._run is None:
            return
        with self._contain_errors():
            if row["kind"] == "provenance":
                self.log_end(
                    summary={key: row[key] for key in row if key not in ("kind", "config")}
                )
            elif (metrics := metrics_of(row)).keys() - set(PROGRESS_KEYS):
                self._run.log(metrics, step=self._step)
                self._step += 1

    def resume(self, rows: Iterable[dict]) -> None:
        """Log the ``rows`` of the record up to the checkpoint again, so that this W&B run has each
        row once. A server ignores steps that it has. Offline, this part of the run is complete;
        earlier parts are removed, because ``wandb sync`` replaces a run's history by that of the
        part that it uploads last."""
        for row in rows:
            self.log(row)
        if self._run is not None:
            folder = Path(self._run.dir).parents[1]  # ``WANDB_DIR`` may have moved it
            for part in folder.glob(f"offline-run-*-{self.id}"):
                if part.name not in self._run.dir:
                    shutil.rmtree(part, ignore_errors=True)

    def log_end(self, *, summary: dict) -> None:
        """Add a run's summary to W&B's summary."""
        if self._run is not None:
            with self._contain_errors():
                self._run.summary.update(loggable(summary))

    @contextmanager
    def _contain_errors(self) -> Iterator[None]:
        """Context in which an exception of W&B, also SystemExit, is printed in one line and ends
        W&B for this job."""
        try:
            yield
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            note(f"wandb: {reason} (the run continues without W&B)")
            run = self._run
            self._run = None
            if run is not None:
                self.hint = _hint(run, uploaded=False)
                with suppress(Exception, SystemExit):
                    run.finish(exit_code=1)
                with suppress(Exception, SystemExit):
                    sys.modules["wandb"].teardown()

    def __exit__(self, error_type, error, trace) -> None:
        """Finish the W&B run, and wait at most ``FINISH_SECONDS`` for uploads."""
        if self._run is not None:
            with self._contain_errors():
                self._run.finish(exit_code=int(error_type is not None))
        self._run = None


def _start(mode: str, keywords: dict, *, id: str):
    """Start the W&B run, online if possible. If a run that should be online cannot be, print the
    reason on stderr."""
    import wandb  # late: it takes a second

    settings = {
        "silent": True,
        "console": "off",
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "finish_timeout_raises": True,
        "x_disable_stats": True,  # W&B's sampling would count as the run's cost
    }
    settings = wandb.Settings(**_without_variables(settings))
    reason = None
    session = wandb.setup(settings=settings)
    requested = mode
    if mode == "auto":
        mode = session.settings.mode  # offline after the command `wandb offline`
    if mode not in ("offline", "dryrun", "disabled") and not wandb.login(
        prompt=False, verify=False
    ):
        mode = "offline"
        if requested != "auto":
            reason = "no API key is configured"
    keywords = _without_variables(keywords)
    start = partial(wandb.init, id=id, resume="allow", reinit="finish_previous", **keywords)
    try:
        run = start(mode=mode)
    except wandb.errors.CommError as error:
        reason = f"cannot go online: {' '.join(str(error).split())[:160]}"
        wandb.teardown()  # otherwise the failed start still uses the id
        wandb.setup(settings=settings)
        run = start(mode="offline")
    if reason:
        note(f"wandb: {reason}; this run is written offline")
    run.define_metric("bytes_seen")
    run.define_metric("*", step_metric="bytes_seen")
    run.define_metric("valid/bits_per_byte", step_metric="bytes_seen", summary="min")
    return run


def _without_variables(keywords: dict) -> dict:
    """Return the keywords of which no environment variable is set: in W&B itself keywords take
    precedence over variables."""
    names = {"group": "RUN_GROUP"}
    return {
        key: keyword
        for key, keyword in keywords.items()
        if not os.environ.get(f"WANDB_{names.get(key, key.upper())}")
    }


def _hint(run, *, uploaded: bool = True) -> str:
    """Return a line with the URL of the W&B run, or the command that uploads it."""
    if run.disabled:
        return ""
    if uploaded and not run.offline:
        return f"wandb: {run.url}"
    folder = str(Path(run.dir).parent)
    return f"wandb sync {shlex.quote(min(folder, os.path.relpath(folder), key=len))}"


def metrics_of(row: dict) -> dict[str, float]:
    """Return the numbers of a row by the name of their metric. A list has a number for each
    head."""
    kind = row["kind"]
    row = row | (row.get("clock") or {})
    metrics = {name: row.get(name) for name in PROGRESS_KEYS}
    if row.get("final"):
        return loggable(
            metrics
            | {f"{kind}_{name}": row[name] for name in row if name.endswith("bits_per_byte")}
        )
    metrics[kind] = {
        name: leaf
        for name, leaf in row.items()
        if name not in (*PROGRESS_KEYS, "kind", "metrics", "clock")
    }
    pooled: dict[str, list[float]] = {}  # of each metric, the numbers of all sublayers and heads
    for name, metric in (row.get("metrics") or {}).items():
        sublayer, _, metric_name = name.rpartition(".")
        numbers = [
            number
            for number in (metric if isinstance(metric, list) else [metric])
            if is_number(number)
        ]
        pooled.setdefault(f"{kind}_{metric_name}", []).extend(numbers)
        key = f"{kind}_{metric_name}/{sublayer or 'model'}"
        metrics |= _statistics(key, numbers) if isinstance(metric, list) else {key: metric}
    for key, numbers in pooled.items():
        metrics |= _statistics(key, numbers)
    return {
        name: number
        for name, number in loggable(metrics).items()
        if not isinstance(number, str | bool)
    }


def loggable(summary: dict) -> dict[str, float | str]:
    """Return numbers, booleans and texts with flat keys: ``{"memory/peak_bytes": 12345,
    "variant": "mhsa"}``."""
    leaves = {}
    for key, leaf in flatten(summary, separator="/").items():
        if isinstance(leaf, str | bool) or is_number(leaf):
            large = type(leaf) is int and abs(leaf) > 2**53
            leaves[key] = float(leaf) if large else leaf  # W&B stores numbers as doubles
    return leaves


def _statistics(name: str, numbers: list[float]) -> dict[str, float]:
    if not numbers:
        return {}
    return {
        f"{name}/mean": sum(numbers) / len(numbers),
        f"{name}/min": min(numbers),
        f"{name}/max": max(numbers),
    }
