"""One drawing a section for runs that may be compared: the panels of the layout, as W&B would show them.

What is drawn are the very numbers that W&B gets, by name, from the rows on disk. Colours and markers are the report's.
"""

from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.dashboards.layout import BARS, CURVE, HISTOGRAM, OF_CONFIG, PARALLEL, SCATTER, Panel, Section, matching
from bench.report.gather import RunRow
from bench.report.grouping import Arm, arms, data_words, flat, ground_words, number, run_row
from bench.report.plot_style import (
    GREY,
    LINES,
    Look,
    count_axis,
    finish,
    legend_below,
    log_axis,
    panels,
    plain_axis,
    plain_number,
    styled,
)
from bench.report.shown import Drawing
from harness.record.wandb_rows import facts, numbers

COLUMNS = 3
MOST_POINTS = 400
"""Of one line: of longer ones every n-th is drawn, and the last."""
SETTLED = 0.2
"""Fraction of the horizontal axis before which bits per byte may leave the frame above: the fall from 8 bits."""
WIDE = 4
"""Ratio of the largest value to the smallest from which on a scatter's axis is logarithmic."""
DRAWN = (CURVE, HISTOGRAM, BARS, SCATTER, PARALLEL)
ALPHAS = (1.0, 0.55, 0.3, 0.15)
"""Of several metrics in one panel of bars."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What one run tells W&B.

    Attributes:
        arm: what it is a seed of.
        rows: numbers of each row, by name.
        facts: its summary, and its configuration as ``config:optim.lr``.
        names: of all that is in rows, in order of first appearance.
    """

    arm: Arm
    rows: list[dict]
    facts: dict
    names: list[str] = field(default_factory=list)


def logged(runs: list[RunRow]) -> list[Logged]:
    """The runs as W&B sees them, by arm and seed."""
    found = []
    for arm in arms(runs, row=run_row):
        for run in arm.members:
            rows = [numbers(row) for row in run.rows if row["kind"] != "provenance"]
            config = {f"{OF_CONFIG}{key}": value for key, value in flat(run.provenance["config"]).items()}
            names = list(dict.fromkeys(name for row in rows for name in row))
            found.append(Logged(arm=arm, rows=rows, facts=facts(run.summary) | config, names=names))
    return found


def has_data(panel: Panel, found: list[Logged]) -> bool:
    """Whether any run has what the panel shows; figures and tables are not drawn here."""
    if panel.kind in (CURVE, HISTOGRAM):
        return any(matching(name, run.names) for run in found for name in panel.y)
    return panel.kind in DRAWN and any(number(run.facts, name) is not None for run in found for name in panel.y)


def draw_section(section: Section, runs: list[RunRow], *, look: dict[str, Look], name: str) -> Drawing | None:
    """The section's panels, or None if these runs have nothing that it is about."""
    found = logged(runs)
    shown = [panel for panel in section.panels if has_data(panel, found)]
    if not shown:
        return None
    subtitle = f"{data_words(run.summary for run in runs)}\n{ground_words(runs[0].provenance)}"
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    size = {"width": max(4.6 * columns, 6.5), "height": 3.4 * rows + 1.1}
    with styled():
        figure, axes = panels(rows, columns, title=section.title, subtitle=subtitle, **size)
        for ax, panel in zip(axes, shown, strict=False):
            ax.set_title(panel.title)
            _DRAW[panel.kind](ax, panel, found, look)
            if panel.kind == BARS and not ax.get_subplotspec().is_first_col():
                ax.set_yticklabels([])  # the colours say it, and the legend
        for ax in axes[len(shown) :]:
            ax.set_axis_off()
        legend_below(figure, _handles(found, look))
        missing = [panel.title for panel in section.panels if panel.kind in DRAWN and panel not in shown]
        nothing = f" Of these runs none has: {', '.join(missing)}." if missing else ""
        return finish(figure, name=name, title=section.title, caption=section.about + nothing)


def _handles(found: list[Logged], look: dict[str, Look]) -> list[Line2D]:
    by_label = {run.arm.label: run.arm for run in found}
    return [
        Line2D(
            [],
            [],
            color=look[arm.variant].colour,
            marker=look[arm.variant].marker,
            linestyle=_line(arm),
            label=f"{label} (n={len(arm.members)})",
        )
        for label, arm in by_label.items()
    ]


def _line(arm: Arm) -> str:
    return LINES[arm.order % len(LINES)]


def _curves(ax: Axes, panel: Panel, found: list[Logged], look: dict[str, Look]) -> None:
    """A line for each run, metric and sublayer; of several metrics the later ones are thin, upper layers are darker."""
    reached = []
    for run in found:
        for index, metric in enumerate(panel.y):
            names = matching(metric, run.names)
            for place, name in enumerate(names):
                points = [(row[panel.x], row[name]) for row in run.rows if name in row and panel.x in row]
                if not points:
                    continue
                at, values = _thinned(points)
                style = {"color": look[run.arm.variant].colour, "linestyle": _line(run.arm)}
                alpha = 0.35 + 0.55 * (place + 1) / len(names) if index == 0 else 0.5
                few = (
                    {"marker": look[run.arm.variant].marker, "markersize": 3.5} if len(at) <= 20 and index == 0 else {}
                )
                ax.plot(at, values, **style, **few, linewidth=1.4 if index == 0 else 0.8, alpha=alpha)
                reached += [value for x, value in points if x >= SETTLED * max(at)]
    if any(metric.endswith("bits_per_byte") for metric in panel.y) and reached:
        low, high = min(reached), max(reached)
        margin = 0.06 * (high - low) or 0.1
        ax.set_ylim(low - margin, high + margin)
    _x_axis(ax, panel)


def _thinned(points: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    step = -(-len(points) // MOST_POINTS)
    kept = np.array([*points[:-1:step], points[-1]], dtype=float)
    return kept[:, 0], kept[:, 1]


def _x_axis(ax: Axes, panel: Panel) -> None:
    ax.set_xlabel(panel.x_label)
    ax.set_xlim(left=0)
    plain_axis(ax.xaxis) if panel.x == "seconds" else count_axis(ax.xaxis, unit="B" if panel.x == "bytes_seen" else "")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    if max(map(abs, ax.get_ylim())) >= 1e4:
        count_axis(ax.yaxis)


def _histogram(ax: Axes, panel: Panel, found: list[Logged], look: dict[str, Look]) -> None:
    """Every head is a dot: no bins, so nothing hides between them."""
    (name,) = panel.y
    for run in found:
        at = [row[panel.x] for row in run.rows if name in row for _ in row[name]]
        values = [value for row in run.rows if name in row for value in row[name]]
        ax.plot(at, values, ".", markersize=2.5, alpha=0.35, color=look[run.arm.variant].colour)
    _x_axis(ax, panel)


def _bars(ax: Axes, panel: Panel, found: list[Logged], look: dict[str, Look]) -> None:
    """The mean of each arm, one dot a seed; several metrics lie under each other, paler. Bits per byte have no bars, which
    would have to begin at 0."""
    bare = all(name.endswith("bits_per_byte") for name in panel.y)
    with_any = {run.arm.label: run.arm for run in found if any(number(run.facts, name) is not None for name in panel.y)}
    height = 0.8 / len(panel.y)
    for place, arm in enumerate(with_any.values()):
        for index, name in enumerate(panel.y):
            of_seeds = [value for run in found if run.arm is arm and (value := number(run.facts, name)) is not None]
            if not of_seeds:
                continue
            at, colour, alpha = (
                place - 0.4 + height * (index + 0.5),
                look[arm.variant].colour,
                ALPHAS[index % len(ALPHAS)],
            )
            if bare:
                ax.plot(np.mean(of_seeds), at, "|", color=colour, alpha=alpha, markersize=14, markeredgewidth=3)
            else:
                ax.barh(at, np.mean(of_seeds), height, color=colour, alpha=alpha)
            ax.plot(of_seeds, [at] * len(of_seeds), ".", color=GREY, markersize=4)
    ax.set_yticks(range(len(with_any)), list(with_any), fontsize=8.5)
    ax.set_ylim(len(with_any) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    _number_axis(ax.xaxis)
    if len(panel.y) > 1:
        labels = [name.removesuffix("_bytes").rpartition("/")[2].replace("_", " ") for name in panel.y]
        ax.set_xlabel("from dark to pale: " + ", ".join(labels), fontsize=7.5)


def _number_axis(axis) -> None:
    """Few ticks, because three panels stand beside each other; ``200 k`` where numbers are large."""
    count_axis(axis) if max(map(abs, axis.get_view_interval())) >= 1e4 else plain_axis(axis)
    axis.set_major_locator(MaxNLocator(4))


def _scatter(ax: Axes, panel: Panel, found: list[Logged], look: dict[str, Look]) -> None:
    (name,), values = panel.y, []
    for run in found:
        x, y = number(run.facts, panel.x), number(run.facts, name)
        if x is not None and y is not None:
            values.append(x)
            seen = look[run.arm.variant]
            fill = "none" if run.arm.order % 2 else seen.colour
            ax.plot(x, y, seen.marker, color=seen.colour, markerfacecolor=fill, markersize=7, alpha=0.85)
    ax.set(xlabel=panel.x_label, ylabel="bits per byte")
    ax.margins(x=0.12, y=0.12)
    if values and min(values) > 0 and max(values) > WIDE * min(values):
        log_axis(ax.xaxis, values=values)
    else:
        _number_axis(ax.xaxis)


def _parallel(ax: Axes, panel: Panel, found: list[Logged], look: dict[str, Look]) -> None:
    """A line a run from choice to result; each column goes from its smallest value to its largest."""
    columns = [[number(run.facts, name) for run in found] for name in panel.y]
    for place, column in enumerate(columns):
        known = [value for value in column if value is not None]
        if known:
            for at, value in ((0, min(known)), (1, max(known)))[: 1 if min(known) == max(known) else 2]:
                up = {"va": "top" if at == 0 else "bottom", "ha": "center", "fontsize": 7.5}
                ax.text(place, at - 0.03 if at == 0 else at + 0.03, plain_number(float(f"{value:.4g}")), **up)
        ax.axvline(place, color=GREY, linewidth=0.7)
    for index, run in enumerate(found):
        line = [_between(column, index) for column in columns]
        ax.plot(range(len(line)), line, color=look[run.arm.variant].colour, linestyle=_line(run.arm), alpha=0.8)
    labels = [name.removeprefix(OF_CONFIG).replace("/", "\n").replace("_", " ") for name in panel.y]
    ax.set_xticks(range(len(labels)), labels, fontsize=7, rotation=30, ha="right")
    ax.set_yticks([])
    ax.set_ylim(-0.15, 1.15)
    ax.grid(visible=False)


def _between(column: list[float | None], index: int) -> float:
    """Where a value lies between the column's smallest and largest."""
    known, value = [one for one in column if one is not None], column[index]
    if value is None:
        return float("nan")
    low, high = min(known), max(known)
    return 0.0 if low == high else (value - low) / (high - low)


_DRAW = {CURVE: _curves, HISTOGRAM: _histogram, BARS: _bars, SCATTER: _scatter, PARALLEL: _parallel}
