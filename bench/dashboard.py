"""A dashboard of all runs: ``python -m bench.dashboard entity=me project=attention-windtunnel``.

With an API key it saves a workspace (live, for who watches) and a report (for who reads) in W&B; this needs the extra
``dashboard``. Without one, with ``mode=offline``, or where W&B cannot be reached, it writes the same sections and panels
as a page, ``outputs/dashboard/index.html``, from the run folders, which opens from disk and needs no server.
Both are written from ``bench/dashboards/layout.py``.
"""

import os
import shlex
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

MODES = ("auto", "online", "offline")


@hydra.main(version_base="1.3", config_path=CONF, config_name="dashboard")
def main(cfg: DictConfig) -> None:
    from harness.plan.settings import checked  # late, as everything slow, so that --help is quick

    texts = {key: checked(cfg[key], str, key=key) for key in ("project", "name", "mode", "out")}
    entity = checked(cfg.entity, str | None, key="entity")
    if texts["mode"] not in MODES:
        raise ValueError(f"mode={texts['mode']}: allowed are {', '.join(MODES)}")
    folders = [str(folder) for folder in ([cfg.folders] if isinstance(cfg.folders, str) else cfg.folders)]
    reason = "mode=offline" if texts["mode"] == "offline" else _no_key()
    if texts["mode"] == "online" and reason:
        raise ValueError(f"mode=online: {reason}; allowed without one are auto and offline")
    if not reason:
        reason = _save(entity=entity, project=texts["project"], name=texts["name"], must=texts["mode"] == "online")
    if reason:
        _write(folders, Path(texts["out"]))
        print(
            f"W&B has nothing new: {reason}. For a workspace and a report there: wandb login, wandb sync (the run's "
            f"last line says of what), then python -m bench.dashboard entity={entity or 'YOU'} project={texts['project']}"
        )


def _no_key() -> str:
    """Why W&B is not asked, or nothing."""
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={os.environ['WANDB_MODE']}"
    return "" if wandb.login(prompt=False, verify=False) else "no API key is configured"


def _save(*, entity: str | None, project: str, name: str, must: bool) -> str:
    """Save both and say where they are; returns why they were not, unless it ``must``."""
    try:
        from bench.dashboards import online
    except ImportError as error:
        missing = f"{error.name} is not installed; pip install 'attention-windtunnel[dashboard]'"
        if must:
            raise ValueError(f"mode=online: {missing}") from error
        return missing
    try:
        owner = entity or _default_entity()
        for kind, make in (("workspace", online.workspace), ("report", online.report)):
            made = make(entity=owner, project=project, name=name)
            made.save()
            print(f"{kind}: {made.url}")
    except Exception as error:  # whatever W&B, the network or a proxy raises: the page needs none of them
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if must:
            raise ValueError(f"entity={entity} project={project}: W&B refused ({said})") from error
        return said
    return ""


def _default_entity() -> str:
    import wandb

    return wandb.Api().default_entity


def _write(folders: list[str], out: Path) -> None:
    from bench.dashboards.page import write_dashboard
    from bench.report.gather import gather

    typed = shlex.join(["python", "-m", "bench.dashboard", *sys.argv[1:]])
    print(
        f"{write_dashboard(gather([Path(folder) for folder in folders]), out, commands=[typed])}: the dashboard as a page"
    )


if __name__ == "__main__":
    run_command(main)
