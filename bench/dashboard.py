"""W&B's dashboard of all runs: ``python -m bench.dashboard entity=me project=attention-windtunnel``.

It saves a workspace with the panels of ``conf/dashboard.yaml``; W&B makes a report out of it on its page. This needs an
API key, a server and the extra ``dashboard``; ``python -m bench.report`` makes a page without any of them.
"""

import os
import re

import hydra
from omegaconf import DictConfig, OmegaConf

from bench import CONF
from harness.compose.cli import run_command

OF_CONFIG = "config:"  # begins the name of a key of the configuration: config:optim.lr
COLUMNS = 3  # panels beside each other


@hydra.main(version_base="1.3", config_path=CONF, config_name="dashboard")
def main(cfg: DictConfig) -> None:
    import wandb  # late, as everything slow, so that --help is quick

    from harness.plan.settings import checked

    project, name = (checked(cfg[key], str, key=key) for key in ("project", "name"))
    entity, offline = checked(cfg.entity, str | None, key="entity"), os.environ.get("WANDB_MODE")
    if offline in ("offline", "disabled", "dryrun") or not wandb.login(prompt=False, verify=False):
        reason = f"WANDB_MODE={offline}" if offline else "no API key is configured"
        raise ValueError(
            f"{reason}, so nothing is saved in W&B. For a workspace there: wandb login, wandb sync (the run's last "
            f"line says of what), then python -m bench.dashboard entity={entity or 'YOU'} project={project}. For a "
            "page without a server: python -m bench.report"
        )
    sections = OmegaConf.to_container(cfg.sections)
    try:
        made = workspace(sections, entity=entity or wandb.Api().default_entity, project=project, name=name)
        made.save()
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'attention-windtunnel[dashboard]'") from error
    except Exception as error:  # whatever W&B, the network or a proxy raises is the server's, not a bug of ours
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"entity={entity} project={project}: W&B refused ({words})") from error
    print(f"workspace: {made.url}")


def workspace(sections: list[dict], *, entity: str, project: str, name: str):
    """W&B's ``Workspace``, a live view of the project's page; nothing is sent before its ``save``."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def axis(metric: str):
        key = metric.removeprefix(OF_CONFIG)
        column = wr.Config(key) if metric.startswith(OF_CONFIG) else wr.SummaryMetric(key)
        return wr.ParallelCoordinatesPlotColumn(metric=column, display_name=key)

    def drawn(*, kind: str, title: str, y=(), x=None, x_label: str = "", log_x: bool = False):
        match kind:
            case "curve" | "histogram":  # W&B draws a histogram's key over steps as a heat map
                regex = "|".join(pattern_of(metric) for metric in y if "*" in metric) or None
                lines = {"y": [metric for metric in y if "*" not in metric], "metric_regex": regex}
                # A smoothed curve is another number than the one that was measured.
                style = {"x": x, "title_x": x_label, "log_x": log_x or None, "smoothing_type": "none"}
                return wr.LinePlot(title=title, **lines, **style)
            case "bars":
                return wr.BarPlot(title=title, metrics=y, orientation="h")
            case "scatter":
                metrics = {"x": wr.SummaryMetric(x), "y": wr.SummaryMetric(y[0])}
                return wr.ScatterPlot(title=title, **metrics, log_x=log_x, regression=False)
            case "parallel":
                return wr.ParallelCoordinatesPlot(title=title, columns=[axis(metric) for metric in y])
            case "runs":
                return wr.RunComparer(diff_only="split")
            case "images":
                return wr.MediaBrowser(title=title, media_keys=y, num_columns=1)

    made = []
    for node in sections:
        layout = ws.SectionLayoutSettings(columns=COLUMNS, rows=-(-len(node["panels"]) // COLUMNS))
        panels = [drawn(**panel) for panel in node["panels"]]
        made.append(ws.Section(name=node["title"], panels=panels, is_open=True, layout_settings=layout))
    settings = ws.WorkspaceSettings(x_axis="bytes_seen", remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=name, sections=made, settings=settings)


def pattern_of(metric: str) -> str:
    """A regular expression of the names behind a panel's metric; ``*`` is one sublayer, never the pool of all."""
    return "^" + re.escape(metric).replace(r"\*", r".*\..*") + "$"


if __name__ == "__main__":
    run_command(main)
