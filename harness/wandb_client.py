"""What is said to wandb: start, rows, end, and how to upload an offline run. Only ``WandbRun`` calls this.

``WANDB_*`` variables win over what is given, nothing ever asks for a key, and nothing is printed but our own lines.
W&B's step counter is not used, because a resumed run repeats steps: the x axis of everything is ``bytes_seen``.
"""

import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

INIT_SECONDS = 15.0
"""How long to try to reach the server."""

FINISH_SECONDS = 30.0
"""How long the end of a run waits for uploads."""

_VARIABLES = {
    "dir": "WANDB_DIR",
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
}


def start(wandb: ModuleType, *, mode: str, given: dict):
    """The started run: online if wanted and possible, else offline, with a line on stderr where that was not wanted.

    Args:
        wandb: the module.
        mode: ``auto`` or any that W&B knows.
        given: keywords of ``wandb.init``.
    """
    keywords = {key: value for key, value in given.items() if not os.environ.get(_VARIABLES.get(key, ""))}
    # finish_previous: without it a second job in this process would silently log into the first job's run
    init = partial(wandb.init, **keywords, resume="allow", reinit="finish_previous")
    _quieten(wandb)
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
        _quieten(wandb)
        run = init(mode="offline")
    run.define_metric("bytes_seen")
    run.define_metric("*", step_metric="bytes_seen")
    run.define_metric("valid/bits_per_byte", step_metric="bytes_seen", summary="min")
    return run


def _quieten(wandb: ModuleType) -> None:
    settings = {"silent": True, "console": "off", "init_timeout": INIT_SECONDS}
    settings |= {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
    settings = {key: value for key, value in settings.items() if f"WANDB_{key.upper()}" not in os.environ}
    wandb.setup(settings=wandb.Settings(**settings))


def numbers(row: dict) -> dict[str, float | list]:
    """What W&B gets of one row: ``{"train/loss": 1.0, "bytes_seen": 4096, "train_span/layers.0.attention": [..]}``.

    ``bytes_seen`` and ``step`` keep their names. A metric ``layers.0.attention.span`` goes into the section of its last
    word, so that the spans of all layers stand together. Texts and lists that are no metrics are left out.
    """
    kind, found, metrics = row["kind"], {}, {}
    for key, value in row.items():
        if key == "metrics":
            for name, metric in value.items():
                place, _, word = name.rpartition(".")
                metrics[f"{kind}_{word}/{place or 'model'}"] = metric
        elif key in ("bytes_seen", "step"):
            found[key] = value
        else:
            found |= _flat(value, name=f"{kind}/{key}")
    found = {key: value for key, value in found.items() if _is_number(value)}
    return found | {key: value for key, value in metrics.items() if isinstance(value, list) or _is_number(value)}


def send_row(wandb: ModuleType, run, *, row: dict) -> None:
    """Log one row; a list, one entry a head, becomes a histogram with mean, smallest and largest beside it."""
    sent = {}
    for key, value in numbers(row).items():
        if not isinstance(value, list):
            sent[key] = value
        elif finite := [entry for entry in value if _is_number(entry)]:
            sent |= {f"{key}/mean": sum(finite) / len(finite), f"{key}/min": min(finite), f"{key}/max": max(finite)}
            sent[key] = wandb.Histogram(finite)
    if sent.keys() - {"bytes_seen", "step"}:
        run.log(sent)


def send_end(wandb: ModuleType, run, *, summary: dict, figures: list[Path]) -> None:
    """Store the summary's numbers and texts and upload the figures."""
    flat = {}
    for key, value in summary.items():
        flat |= _flat(value, name=key)
    run.summary.update({key: value for key, value in flat.items() if isinstance(value, int | float | str)})
    if figures:
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})


def hint(run, *, uploaded: bool = True) -> str:
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


def finish_quietly(run) -> None:
    """End a run that has failed already, so that the next job of this process starts afresh."""
    with suppress(BaseException):  # what there is to say was said
        run.finish(exit_code=1)


def _flat(value, *, name: str) -> dict:
    if not isinstance(value, dict):
        return {name: value}
    return {key: item for inner, part in value.items() for key, item in _flat(part, name=f"{name}/{inner}").items()}


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
