"""The panels of ``conf/dashboard.yaml`` as W&B objects: a workspace for who watches, and a report for who reads.

Both are built without a server; only ``save`` of what is returned speaks to one. Needs ``wandb-workspaces``. A test
trains runs and finds every metric that a panel names in them, and says why each other that a run logs is not here.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from omegaconf import OmegaConf

from bench import CONF

OVER_THE_RUN = ("curve", "histogram")
"""Kinds whose metrics are in rows; those of the others are in a run's summary, or are keys of its configuration."""
OF_CONFIG = "config:"
"""Begins the name of a key of the configuration: ``config:optim.lr``."""
COLUMNS, ROW_HEIGHT, GRID_WIDTH = 3, 9, 24
"""Panels beside each other; a panel's height and the report's width in W&B's own units."""
HONEST = (
    "Compare runs of equal data, protocol and budget only: filter by data/sha256 and protocol/* of the summary, or by group. "
    "Seconds, bytes per second and memory compare on one machine only. A score of a prefix of a split (capped/*) is no result."
)


ABSENT = {"y": [], "x": None, "x_label": "", "log_x": False}
"""Keys that a panel of some kind may lack."""
SECTIONS = [
    SimpleNamespace(**section | {"panels": [SimpleNamespace(**ABSENT | panel) for panel in section["panels"]]})
    for section in OmegaConf.to_container(OmegaConf.load(Path(CONF) / "dashboard.yaml").sections)
]


def workspace(*, entity: str, project: str, name: str) -> ws.Workspace:
    """A saved view of the project's page; runs and panels stay live."""
    sections = [
        ws.Section(
            name=section.title,
            panels=[_drawn(panel) for panel in section.panels],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=-(-len(section.panels) // COLUMNS)),
        )
        for section in SECTIONS
    ]
    settings = ws.WorkspaceSettings(x_axis="bytes_seen", remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def report(*, entity: str, project: str, name: str) -> wr.Report:
    """A page with a text beside each section's panels."""
    blocks = [wr.P(text=HONEST), wr.TableOfContents()]
    width = GRID_WIDTH // COLUMNS
    for section in SECTIONS:
        panels = [_drawn(panel) for panel in section.panels]
        for index, panel in enumerate(panels):
            across, down = index % COLUMNS, index // COLUMNS
            panel.layout = wr.Layout(x=width * across, y=ROW_HEIGHT * down, w=width, h=ROW_HEIGHT)
        grid = wr.PanelGrid(runsets=[wr.Runset(entity=entity, project=project, name="runs")], panels=panels)
        blocks += [wr.H1(text=section.title), wr.P(text=section.about), grid]
    return wr.Report(entity=entity, project=project, title=name, description=HONEST, blocks=blocks, width="fluid")


def pattern_of(metric: str) -> str:
    """A regular expression of the names that a panel's metric stands for; ``*`` is one sublayer, never the pool of all."""
    return "^" + re.escape(metric).replace(r"\*", r".*\..*") + "$"


def _drawn(panel: SimpleNamespace):
    """W&B's object of the panel's kind."""
    match panel.kind:
        case "curve" | "histogram":  # W&B draws a histogram's key over steps as a heat map
            return wr.LinePlot(
                title=panel.title,
                x=panel.x,
                y=[name for name in panel.y if "*" not in name],
                metric_regex="|".join(pattern_of(name) for name in panel.y if "*" in name) or None,
                title_x=panel.x_label,
                log_x=panel.log_x or None,
                smoothing_type="none",  # a smoothed curve is another number than the one that was measured
            )
        case "bars":
            return wr.BarPlot(title=panel.title, metrics=panel.y, orientation="h")
        case "scatter":
            x, y = wr.SummaryMetric(panel.x), wr.SummaryMetric(panel.y[0])
            return wr.ScatterPlot(title=panel.title, x=x, y=y, log_x=panel.log_x, regression=False)
        case "parallel":
            return wr.ParallelCoordinatesPlot(title=panel.title, columns=[_axis(name) for name in panel.y])
        case "runs":
            return wr.RunComparer(diff_only="split")
        case "images":
            return wr.MediaBrowser(title=panel.title, media_keys=panel.y, num_columns=1)
        case "table":
            return wr.WeavePanelSummaryTable(table_name=panel.y[0])


def _axis(name: str) -> wr.ParallelCoordinatesPlotColumn:
    plain = name.removeprefix(OF_CONFIG)
    metric = wr.Config(plain) if name.startswith(OF_CONFIG) else wr.SummaryMetric(plain)
    return wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=plain)
