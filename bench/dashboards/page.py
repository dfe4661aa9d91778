"""The layout as a page from run folders: no server, no key, no W&B. The page itself is the report's.

Runs that may be compared, by data, protocol, budget and machine, share the drawings of a section; others have their own.
"""

import base64
import os
import struct
from pathlib import Path

from bench.dashboards.layout import IMAGES, RUNS, SECTIONS, TABLE, Panel
from bench.dashboards.plots import draw_section
from bench.report.gather import Found, RunRow
from bench.report.grouping import comparable, grouped, run_row, tag
from bench.report.page import write_page
from bench.report.plot_style import looks
from bench.report.shown import Cell, Column, Drawing, Table
from bench.report.tables_runs import run_tables
from bench.rows import ground
from harness.record.wandb_rows import span_rows

TITLE = "attention-windtunnel dashboard"
MOST_IMAGES = 8
"""Runs whose own figures are in the page; those of all are in their folders."""


def write_dashboard(found: Found, out: Path, *, commands: list[str]) -> Path:
    """Write ``index.html`` and return where it is.

    Args:
        found: from ``bench.report.gather``; only runs are shown.
        out: a folder, made if it is not there.
        commands: what to type, shown at the end: first those of the runs.

    Raises:
        ValueError: no finished run, or ``out`` cannot be written.
    """
    if not found.runs:
        raise ValueError("no finished run to show; " + "; ".join([*found.unfinished, *found.refused]))
    drawings, tables, notes = _drawings(found.runs), _tables(found.runs), []
    drawn = {drawing.name.partition("-")[0] for drawing in drawings}
    for section in SECTIONS[:-1]:
        if section.name not in drawn:
            notes.append(f"{section.title}: no run here logs what this section shows.")
    notes += [f"Not finished, not shown: {line}" for line in found.unfinished]
    notes += [f"Refused: {line}" for line in found.refused]
    typed = list(dict.fromkeys([*(run.provenance["command"] for run in found.runs), *commands]))
    try:
        out.mkdir(parents=True, exist_ok=True)
        passing = out / f"index.html.{os.getpid()}.tmp"
        parts = {"tables": tables, "drawings": drawings, "notes": notes, "commands": typed}
        write_page(passing, title=TITLE, **parts, figures_first=True)
        return passing.replace(out / "index.html")
    except OSError as error:
        raise ValueError(f"out={out}: cannot be written ({error.strerror})") from error


def _drawings(runs: list[RunRow]) -> list[Drawing]:
    look = looks(run.summary["variant"] for run in runs)
    groups = grouped(runs, key=lambda run: (comparable(run), ground(run_row(run))))
    found = []
    for section in SECTIONS:
        for key, some in groups.items():
            drawing = draw_section(section, some, look=look, name=f"{section.name}-{tag(key)}")
            found += [drawing] if drawing else []
        for panel in section.panels:
            found += _images(panel, runs) if panel.kind == IMAGES else []
    return found


def _images(panel: Panel, runs: list[RunRow]) -> list[Drawing]:
    """What the runs drew themselves at their end."""
    found = []
    for run in runs[-MOST_IMAGES:]:
        for name in panel.y:
            path = run.folder / f"{name.removeprefix('figures/')}.png"
            if path.exists():
                content = path.read_bytes()
                title = f"{run.folder.name}: {path.stem.replace('_', ' ')}"
                caption = f"Drawn by the run at its end: {path}"
                drawing = {"name": f"{panel.kind}-{run.folder.name}-{path.stem}", "title": title, "caption": caption}
                found.append(Drawing(**drawing, svg=_framed(content), png=content))
    return found


def _framed(png: bytes) -> bytes:
    """A PNG file as an SVG of its size."""
    width, height = struct.unpack(">II", png[16:24])
    inside = base64.b64encode(png).decode()
    size = f'width="{width}" height="{height}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">'
    return f'{frame}<image {size} href="data:image/png;base64,{inside}"/></svg>'.encode()


def _tables(runs: list[RunRow]) -> list[Table]:
    found = []
    for panel in (panel for section in SECTIONS for panel in section.panels):
        if panel.kind == RUNS:
            found += run_tables(runs)
        elif panel.kind == TABLE:
            table = _TABLES[panel.y[0]](panel, runs)
            found += [table] if table.rows else []
    return found


def _spans_table(panel: Panel, runs: list[RunRow]) -> Table:
    rows = []
    for run in runs:
        for place, head, span, ramped in span_rows(run.summary.get("valid_metrics") or {}):
            values = [
                Cell(text=f"{value:.1f}", value=value) if value is not None else Cell(text="")
                for value in (span, ramped)
            ]
            rows.append((Cell(text=run.folder.name), Cell(text=place), Cell(text=str(head), value=head), *values))
    columns = (
        Column(heading="run", number=False),
        Column(heading="sublayer", number=False),
        Column(heading="head"),
        Column(heading="span", explained="Learned span z in positions, of the best weights."),
        Column(heading="with ramp", explained="Positions that are computed: z and the ramp behind it."),
    )
    caption = "The best weights of each run, as scored at its end."
    return Table(name="spans", title=panel.title, caption=caption, columns=columns, rows=tuple(rows))


def _costs_table(panel: Panel, runs: list[RunRow]) -> Table:
    columns = (
        Column(heading="run", number=False),
        Column(
            heading="where", number=False, explained="Device, precision and path: time and memory compare on one only."
        ),
        *(Column(heading=heading, explained=explained) for heading, _, explained in _COSTS),
    )
    rows = []
    for run in runs:
        s = run.summary
        where = f"{s['device']}, {s['precision']}, {s['path']}"
        cells = []
        for _, (section, key), _ in _COSTS:
            value = s[section].get(key)
            cells.append(Cell(text="") if value is None else Cell(text=f"{value:,.0f}", value=value))
        rows.append((Cell(text=run.folder.name), Cell(text=where), *cells))
    caption = "Costs of each run; what was counted and how is said at the columns."
    return Table(name="costs", title=panel.title, caption=caption, columns=columns, rows=tuple(rows))


_COSTS = (
    ("parameters", ("parameters", "total"), "All of them."),
    ("touched", ("parameters", "touched"), "Parameters that one byte reads."),
    ("executed FLOPs", ("flops_per_byte", "executed"), "Forward, per byte: what the code runs, counted."),
    ("ideal FLOPs", ("flops_per_byte", "ideal"), "Forward, per byte: what the mechanism needs."),
    ("peak bytes", ("memory", "peak_bytes"), "Highest in a training step; on CPU approximate."),
    ("state bytes", ("memory", "state_bytes"), "Carried from segment to segment, one stream."),
    ("optimizer bytes", ("memory", "optimizer_bytes"), "Kept by the optimizers."),
)
_TABLES = {"tables/spans": _spans_table, "tables/costs": _costs_table}
