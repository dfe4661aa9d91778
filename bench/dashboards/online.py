"""The layout as W&B objects: a workspace for who watches, and a report for who reads. Needs ``wandb-workspaces``.

Both are built without a server; only ``save`` of what is returned speaks to one.
"""

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

from bench.dashboards.layout import (
    BARS,
    IMAGES,
    OF_CONFIG,
    OVER_THE_RUN,
    PARALLEL,
    RUNS,
    SCATTER,
    SECTIONS,
    TABLE,
    Panel,
    Section,
    pattern_of,
)

COLUMNS, ROW_HEIGHT, GRID_WIDTH = 3, 9, 24
"""Panels beside each other; a panel's height and the report's width in W&B's own units."""
TITLE = "attention-windtunnel"
HONEST = (
    "Compare runs of equal data, protocol and budget only: filter by data/sha256 and protocol/* of the summary, or by group. "
    "Seconds, bytes per second and memory compare on one machine only. A score of a prefix of a split (capped/*) is no result."
)


def workspace(*, entity: str, project: str, name: str = TITLE) -> ws.Workspace:
    """A saved view of the project's page; runs and panels stay live."""
    sections = [
        ws.Section(
            name=section.title,
            panels=[_panel(panel) for panel in section.panels],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=-(-len(section.panels) // COLUMNS)),
        )
        for section in SECTIONS
    ]
    settings = ws.WorkspaceSettings(x_axis="bytes_seen", remove_legends_from_panels=False)
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def report(*, entity: str, project: str, name: str = TITLE) -> wr.Report:
    """A page with a text beside each section's panels."""
    blocks = [wr.P(text=HONEST), wr.TableOfContents()]
    for section in SECTIONS:
        blocks += [wr.H1(text=section.title), wr.P(text=section.about), _grid(section, entity=entity, project=project)]
    return wr.Report(entity=entity, project=project, title=name, description=HONEST, blocks=blocks, width="fluid")


def _grid(section: Section, *, entity: str, project: str) -> wr.PanelGrid:
    width, panels = GRID_WIDTH // COLUMNS, []
    for index, panel in enumerate(section.panels):
        made = _panel(panel)
        place = {"x": width * (index % COLUMNS), "y": ROW_HEIGHT * (index // COLUMNS), "w": width, "h": ROW_HEIGHT}
        made.layout = wr.Layout(**place)
        panels.append(made)
    return wr.PanelGrid(runsets=[wr.Runset(entity=entity, project=project, name="runs")], panels=panels)


def _panel(panel: Panel):
    return {
        **dict.fromkeys(OVER_THE_RUN, _lines),  # W&B draws a histogram's key over steps as a heat map
        BARS: _bars,
        SCATTER: _scatter,
        PARALLEL: _parallel,
        RUNS: lambda _: wr.RunComparer(diff_only="split"),
        IMAGES: lambda panel: wr.MediaBrowser(title=panel.title, media_keys=list(panel.y), num_columns=1),
        TABLE: lambda panel: wr.WeavePanelSummaryTable(table_name=panel.y[0]),
    }[panel.kind](panel)


def _lines(panel: Panel) -> wr.LinePlot:
    plain = [name for name in panel.y if "*" not in name]
    patterns = [pattern_of(name) for name in panel.y if "*" in name]
    return wr.LinePlot(
        title=panel.title,
        x=panel.x,
        y=plain,
        metric_regex="|".join(patterns) or None,
        title_x=panel.x_label,
        log_x=panel.log_x or None,
        smoothing_type="none",  # a smoothed curve is another number than the one that was measured
    )


def _bars(panel: Panel) -> wr.BarPlot:
    return wr.BarPlot(title=panel.title, metrics=list(panel.y), orientation="h")


def _scatter(panel: Panel) -> wr.ScatterPlot:
    (y,) = panel.y
    x = wr.SummaryMetric(panel.x)
    return wr.ScatterPlot(title=panel.title, x=x, y=wr.SummaryMetric(y), log_x=panel.log_x, regression=False)


def _parallel(panel: Panel) -> wr.ParallelCoordinatesPlot:
    columns = []
    for name in panel.y:
        of_config = name.startswith(OF_CONFIG)
        plain = name.removeprefix(OF_CONFIG)
        metric = wr.Config(plain) if of_config else wr.SummaryMetric(plain)
        columns.append(wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=plain))
    return wr.ParallelCoordinatesPlot(title=panel.title, columns=columns)
