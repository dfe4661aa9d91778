"""W&B's dashboard of all runs: ``python -m bench.dashboard entity=me project=attention-windtunnel``.

It saves a workspace (live, for who watches) and a report (for who reads), both of the panels in ``conf/dashboard.yaml``.
This needs an API key, a server and the extra ``dashboard``; ``python -m bench.report`` makes a page without any of them.
"""

import os

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="dashboard")
def main(cfg: DictConfig) -> None:
    from harness.plan.settings import checked  # late, as everything slow, so that --help is quick

    project, name = (checked(cfg[key], str, key=key) for key in ("project", "name"))
    entity = checked(cfg.entity, str | None, key="entity")
    if reason := _no_key():
        raise ValueError(
            f"{reason}, so nothing is saved in W&B. For a workspace and a report there: wandb login, wandb sync (the run's "
            f"last line says of what), then python -m bench.dashboard entity={entity or 'YOU'} project={project}. "
            "For a page without a server: python -m bench.report"
        )
    import wandb

    try:
        from bench.dashboards import panels
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'attention-windtunnel[dashboard]'") from error
    try:
        owner = entity or wandb.Api().default_entity
        for kind, make in (("workspace", panels.workspace), ("report", panels.report)):
            made = make(entity=owner, project=project, name=name)
            made.save()
            print(f"{kind}: {made.url}")
    except Exception as error:  # whatever W&B, the network or a proxy raises is the server's, not a bug of ours
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"entity={entity} project={project}: W&B refused ({said})") from error


def _no_key() -> str:
    """Why W&B is not asked, or nothing."""
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={os.environ['WANDB_MODE']}"
    return "" if wandb.login(prompt=False, verify=False) else "no API key is configured"


if __name__ == "__main__":
    run_command(main)
