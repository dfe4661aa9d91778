"""What is said to wandb: start, rows, end, and how to upload an offline run. Only ``WandbRun`` calls this.

``WANDB_*`` variables win over what is given, nothing ever asks for a key, and nothing is printed but our own lines.
W&B's step counter is not used, because a resumed run repeats steps: the x axis of everything is ``bytes_seen``.
"""

import os
import shlex
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

from harness.cache import cache_folder
from harness.record.wandb_rows import PLACE, facts, numbers, span_rows

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
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",
}


def start(wandb: ModuleType, *, mode: str, given: dict, system_statistics: bool = False):
    """The started run: online if wanted and possible, else offline, with a line on stderr where that was not wanted.

    Args:
        wandb: the module.
        mode: ``auto`` or any that W&B knows.
        given: keywords of ``wandb.init``.
        system_statistics: whether W&B may sample processors, memory and devices beside the run.
    """
    keywords = {key: value for key, value in given.items() if not os.environ.get(_VARIABLES.get(key, ""))}
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


def send_row(wandb: ModuleType, run, *, row: dict) -> None:
    """Log one row, or store what a run says of itself before its first step."""
    if row["kind"] == "provenance":  # the configuration is there already
        run.summary.update(facts({key: value for key, value in row.items() if key not in ("kind", "config")}))
        return
    found = numbers(row)
    sent = {key: wandb.Histogram(value) if isinstance(value, list) else value for key, value in found.items()}
    if sent.keys() - set(PLACE):
        run.log(sent)


def send_end(wandb: ModuleType, run, *, summary: dict, figures: list[Path]) -> None:
    """Store the summary's numbers and texts, and log tables and figures."""
    run.summary.update(facts(summary))
    place = {key: value for key, value in facts(summary).items() if key == "bytes_seen"}
    if figures:
        run.log(place | {f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
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


def finish_quietly(wandb: ModuleType, run) -> None:
    """End a run that has failed already, so that the next job of this process starts afresh.

    W&B's own process goes, too: if it is that which died, W&B would print a trace when Python exits.
    """
    for end in (partial(run.finish, exit_code=1), wandb.teardown):
        with suppress(BaseException):  # what there is to say was said
            end()
