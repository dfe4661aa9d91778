"""W&B's dashboard of all runs: ``python -m bench.dashboard entity=me project=attention-windtunnel``.

It saves a workspace with the panels of ``conf/dashboard.yaml``. It needs an API key, a server and the extra
``dashboard``; ``python -m bench.report`` makes a page without them.
"""

import os
import re

import hydra
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command

COLUMNS = 3  # panels side by side


@hydra.main(version_base="1.3", config_path=CONF, config_name="dashboard")
def main(cfg: DictConfig) -> None:
    import wandb  # late, as everything slow, so that --help is quick

    from harness.plan.settings import parse_setting

    project, name = (parse_setting(cfg[key], str, key=key) for key in ("project", "name"))
    entity, offline = parse_setting(cfg.entity, str | None, key="entity"), os.environ.get("WANDB_MODE")
    if offline in ("offline", "disabled", "dryrun") or not wandb.login(prompt=False, verify=False):
        reason = f"WANDB_MODE={offline}" if offline else "no API key is configured"
        raise ValueError(
            f"{reason}, so nothing is saved in W&B; wandb login first. python -m bench.report needs no server"
        )
    try:
        place = {"entity": entity or wandb.Api().default_entity, "project": project, "name": name}
        saved = workspace(OmegaConf.to_container(cfg.sections), **place)
        saved.save()
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'attention-windtunnel[dashboard]'") from error
    except Exception as error:  # whatever W&B, the network or a proxy raises is the server's, not a bug of ours
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"entity={entity} project={project}: W&B refused ({words})") from error
    print(f"workspace: {saved.url}")


def workspace(sections: list[dict], *, entity: str, project: str, name: str):
    """A ``Workspace`` of W&B; its ``save`` sends it. A panel's ``type`` is a class of W&B, its other keys are the
    class's keywords; the metrics ``y`` of a curve may have a ``*``."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def panel(*, type: str, y: tuple[str, ...] = (), **options):
        if type == "LinePlot":  # a smoothed curve shows numbers that nobody measured
            patterns = "|".join(pattern_of(metric) for metric in y if "*" in metric) or None
            options |= {"y": [metric for metric in y if "*" not in metric], "metric_regex": patterns}
            options |= {"smoothing_type": "none"}
        elif type == "ScatterPlot":
            options |= {"x": wr.SummaryMetric(options["x"]), "y": wr.SummaryMetric(*y)}
        elif y:
            options["media_keys" if type == "MediaBrowser" else "metrics"] = y
        return getattr(wr, type)(**options)

    layout = ws.SectionLayoutSettings(columns=COLUMNS, rows=2)
    shown = {section["title"]: [panel(**options) for options in section["panels"]] for section in sections}
    made = [
        ws.Section(name=title, panels=panels, is_open=True, layout_settings=layout) for title, panels in shown.items()
    ]
    settings = ws.WorkspaceSettings(x_axis="bytes_seen", remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=name, sections=made, settings=settings)


def pattern_of(metric: str) -> str:
    """A regular expression for a panel's metric; ``*`` matches one sublayer, never the pool of all."""
    return "^" + re.escape(metric).replace(r"\*", r".*\..*") + "$"


if __name__ == "__main__":
    run_command(main)
