"""W&B beside the run and never in its way: one W&B run per job, online if a key is configured, else offline.

``WANDB_*`` variables win over what is given, nothing asks for a key, and nothing is printed but our own lines: what fails is
said in one line on stderr, and the run goes on without W&B. What was logged stays on disk for ``wandb sync``.

Metrics, which ``conf/dashboard.yaml`` names, too: ``bytes_seen``, the x axis of everything, as a resumed run repeats W&B's steps,
and the others of ``PLACE``; ``train/learning_rate``, a number of a row by the row's kind; ``valid_bits_per_byte``, a final
score; ``train_span/layers.0.attention``, a sublayer's metric, where a list, one entry a head, is a histogram beside ``/mean``,
``/min`` and ``/max``; ``train_span/mean``, the same of all sublayers, and ``train_span/all``, the histogram of all heads.
"""

import json
import math
import os
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

PLACE = ("bytes_seen", "step", "epochs", "fraction", "training_flops", "seconds", "bytes_per_second")
INIT_SECONDS, FINISH_SECONDS = 15.0, 30.0
"""How long to try to reach the server, and how long the end of a run waits for uploads."""


class WandbRun:
    """One job's run in W&B. Use it in a ``with`` statement, so that it is finished whatever happens.

    Args:
        folder: the run folder; W&B writes into its subfolder ``wandb``.
        config: plain nested dictionary; numbers of layers that are keys become text, as in the record.
        mode: ``auto`` (online if an API key is configured, else offline), ``online``, ``offline`` or ``disabled``.
        id: that of the run to continue, from a checkpoint; None makes a new one.
        system_statistics: whether W&B samples processors, memory and devices; it would be measured with the run.
        tags: those that W&B would refuse are left out or cut.
        more: project, entity, name, group and job_type as W&B means them; None leaves the choice to W&B.

    Attributes:
        id: for the checkpoint.
        hint: one line that says where the run is or how to upload it, for the end; empty without W&B.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: dict,
        mode: str = "auto",
        id: str | None = None,
        system_statistics: bool = False,
        tags: Iterable[str] = (),
        **more: str | None,
    ):
        self.id, self.hint, self._run = os.environ.get("WANDB_RUN_ID") or id or secrets.token_hex(4), "", None
        mode = os.environ.get("WANDB_MODE") or mode
        if mode == "disabled":
            return
        tags = list(dict.fromkeys(str(tag)[:64] for tag in tags if tag))  # W&B refuses others, and the run with them
        more |= {"tags": tags or None, "dir": str(folder), "config": json.loads(json.dumps(config))}
        settings = {"silent": True, "console": "off", "init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        settings |= {"finish_timeout_raises": True, "x_disable_stats": not system_statistics}
        with self._harmless():
            self._run = _start(mode, _unless_in_environment(more) | {"id": self.id}, _unless_in_environment(settings))
            self.hint = _hint(self._run)

    def log(self, row: dict) -> None:
        """Send the numbers of one row, as ``Record.append`` returned it; a provenance row goes into the run's summary."""
        if self._run is None:
            return
        with self._harmless():
            import wandb

            if row["kind"] == "provenance":
                self._run.summary.update(facts({key: row[key] for key in row if key not in ("kind", "config")}))
                return
            sent = {k: wandb.Histogram(v) if isinstance(v, list) else v for k, v in numbers(row).items()}
            if sent.keys() - set(PLACE):
                self._run.log(sent)

    def log_end(self, *, summary: dict, figures: list[Path]) -> None:
        """Send the run's summary and figures."""
        if self._run is None:
            return
        with self._harmless():
            import wandb

            self._run.summary.update(facts(summary))
            sent = {}
            for path in figures:
                with suppress(Exception):  # a picture that cannot be read takes nothing else away
                    sent[f"figures/{path.stem}"] = wandb.Image(str(path))
            if sent:
                self._run.log(sent | {"bytes_seen": summary.get("bytes_seen")})

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """What W&B raises, also to end the process, is one line and the end of W&B, so that the next job starts afresh."""
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
        """Finish the run; gives up on a server that does not answer."""
        if self._run is not None:
            with self._harmless():
                self._run.finish(exit_code=int(kind is not None))
        self._run = None


def _unless_in_environment(keywords: dict) -> dict:
    """W&B itself takes a variable for less than a keyword."""
    names = {key: "WANDB_RUN_GROUP" if key == "group" else f"WANDB_{key.upper()}" for key in keywords}
    return {key: value for key, value in keywords.items() if not os.environ.get(names[key])}


def _start(mode: str, keywords: dict, settings: dict):
    """The started run: online if wanted and possible, else offline, with a line on stderr where that was not wanted."""
    import wandb  # late: it takes a second

    # finish_previous: without it a second job in this process would silently log into the first job's run
    keywords |= {"resume": "allow", "reinit": "finish_previous"}
    wandb.setup(settings=wandb.Settings(**settings))
    wanted, mode = (
        mode,
        wandb.setup().settings.mode if mode == "auto" else mode,
    )  # `wandb offline` was typed in this folder
    if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False, verify=False):
        mode = "offline"
        if wanted != "auto":
            print("wandb: no API key is configured, so this run is written offline", file=sys.stderr)
    try:
        run = wandb.init(mode=mode, **keywords)
    except wandb.errors.CommError as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        print(f"wandb: cannot go online, so this run is written offline: {reason[:160]}", file=sys.stderr)
        wandb.teardown()  # the failed start keeps the id to itself
        wandb.setup(settings=wandb.Settings(**settings))
        run = wandb.init(mode="offline", **keywords)
    run.define_metric("bytes_seen")
    run.define_metric("*", step_metric="bytes_seen")
    run.define_metric("valid/bits_per_byte", step_metric="bytes_seen", summary="min")
    return run


def _hint(run, *, uploaded: bool = True) -> str:
    """One line: where the run is, or how to upload it. The parts of a resumed offline run go up together."""
    if run.disabled or (uploaded and not run.offline):
        return "" if run.disabled else f"wandb: {run.url}"
    folder = str(Path(run.dir).parents[1])
    return f"wandb sync {shlex.quote(min(folder, os.path.relpath(folder), key=len))}/*run-*-{run.id}*"


def numbers(row: dict) -> dict[str, float | list[float]]:
    """Numbers of one row by metric; a list is one of a head each, to become a histogram. Texts are left out."""
    kind, row = row["kind"], row | (row.get("clock") or {})
    sent = {name: row.get(name) for name in PLACE}
    if row.get("final"):
        return facts(sent | {f"{kind}_{name}": row[name] for name in row if name.endswith("bits_per_byte")})
    rest = {name: value for name, value in row.items() if name not in (*PLACE, "kind", "metrics", "clock")}
    sent, pooled, lists = sent | _flat(rest, name=kind), {}, {}
    for name, metric in (row.get("metrics") or {}).items():
        place, _, word = name.rpartition(".")
        values = [value for value in (metric if isinstance(metric, list) else [metric]) if _is_number(value)]
        section, key = f"{kind}_{word}", f"{kind}_{word}/{place or 'model'}"
        if values:
            pooled.setdefault(section, []).extend(values)
            if isinstance(metric, list):
                lists |= {key: values, f"{section}/all": pooled[section]}
                sent |= _extent(key, values)
            else:
                sent[key] = values[0]
    for section, values in pooled.items():
        sent |= _extent(section, values)
    return {name: value for name, value in facts(sent).items() if not isinstance(value, str | bool)} | lists


def facts(summary: dict) -> dict[str, float | str]:
    """Numbers, truths and texts of a summary or provenance row: ``{"memory/peak_bytes": 12345, "variant": "mhsa"}``."""
    stored = {key: item for key, item in _flat(summary).items() if isinstance(item, str | bool) or _is_number(item)}
    # Readers make floats of larger integers anyway.
    return {key: float(item) if type(item) is int and abs(item) > 2**53 else item for key, item in stored.items()}


def _flat(value: object, *, name: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` named ``x`` as ``{"x/a/b": 1}``."""
    if not isinstance(value, dict):
        return {name: value}
    before = name and f"{name}/"
    return {key: item for inner, part in value.items() for key, item in _flat(part, name=f"{before}{inner}").items()}


def _extent(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
