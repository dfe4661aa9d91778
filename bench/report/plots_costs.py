"""Cost against length of context, on logarithmic axes: time, memory, FLOPs and latency of ``bench.cost``.

One drawing for each ground, setting of freed memory, mode, number of streams and data digest. Line style is ``backend``
and where spans are, if not as learned; what ran out of memory is a cross at the upper edge. Thin grey slopes show growth
with the length and with its square.
"""

import json
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.axes import Axes

from bench.report.comparison import Arm, arms, grouped, number, other_in_evaluation, tag
from bench.report.plot_style import (
    LINES,
    Look,
    entry,
    finish,
    legend_below,
    log_axis,
    memory_unit,
    plain_number,
    ticks_at,
)
from bench.report.words import data_words, freed_words, machine_words
from bench.rows import ground
from harness.record.drawing import GREY, INK, panels
from harness.record.table import Drawing

LENGTHS = ("model.span", "batch.segment", "batch.carry", "runtime.backend", "runtime.allocator")
"""Keys of the configuration that the cells of one line differ in, or that follow from the drawing."""
MOST_TICKS = 9
RAISED = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
LINE_POINTS = 11
"""Height of a line of text, in typographic points."""
OUT = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One panel: a number of a row at ``keys``, and the powers of the length drawn as slopes."""

    label: str
    keys: tuple[str, ...]
    powers: tuple[int, ...]
    is_memory: bool = False
    ideal: tuple[str, ...] = ()


MEASURES = (
    Measure(label="training step [ms]", keys=("time", "train_ms", "p50"), powers=(1, 2)),
    Measure(label="peak memory of training", keys=("memory", "train_peak_bytes"), powers=(1, 2), is_memory=True),
    Measure(
        label="forward FLOPs per byte",
        keys=("flops", "executed_per_byte"),
        powers=(1,),
        ideal=("flops", "ideal_per_byte"),
    ),
    Measure(label="generation [ms per byte]", keys=("time", "generate_ms", "p50"), powers=(1,)),
)


def draw_costs(costs: list[dict], *, look: dict[str, Look]) -> list[Drawing]:
    """One drawing for each group of rows whose cost may be compared."""

    def same(row: dict) -> tuple:
        return (*ground(row), freed_words(row)), row["mode"], row["streams"], row["data"]["sha256"]

    found = grouped(costs, key=same)
    return [_costs(rows, look=look, name=f"cost-{same[1]}-{tag(same)}") for same, rows in found.items()]


def _costs(rows: list[dict], *, look: dict[str, Look], name: str) -> Drawing:
    rows = sorted(rows, key=lambda row: (row["length"], json.dumps(row, sort_keys=True)))
    first = rows[0]
    title = f"Cost against length of context: {_mode(first)}"
    size = {"width": 10.5, "height": 8.6}
    figure, axes = panels(2, 2, title=title, subtitle=f"{machine_words(first)}\n{data_words(rows)}", **size)
    by_backend = grouped(rows, key=_ran)
    lines = [line for found in by_backend.values() for line in arms(found, without=LENGTHS)]
    backends = {backend: LINES[index % len(LINES)] for index, backend in enumerate(by_backend)}
    lengths = sorted({row["length"] for row in rows})
    ends = [
        _draw_measure(ax, lines, measure=measure, backends=backends, look=look, lengths=lengths)
        for ax, measure in zip(axes, MEASURES, strict=True)
    ]
    handles = [entry(f"{line.label}, {_told(line)}", **_style(line, backends=backends, look=look)) for line in lines]
    handles.append(entry("ideal FLOPs", color=GREY, marker="o", fillstyle="none"))
    if any(row["status"] == OUT for row in rows):
        handles.append(entry(OUT, color=GREY, marker="x", markersize=7))
    handles.append(entry("growth with L and L²", color=GREY, linestyle="-", linewidth=0.8))
    legend_below(figure, handles)
    figure.draw_without_rendering()  # from now on the panels stay as large as they are
    for ax, found in zip(axes, ends, strict=True):
        _write_beside(ax, found)
    return finish(figure, name=name, title=title, caption=_caption(rows))


def _mode(row: dict) -> str:
    streams = f"{row['streams']} stream{'s' if row['streams'] > 1 else ''}"
    if row["mode"] == "cold":
        return f"segment = span = L, {streams}, no past"
    return f"span = L, segment of {row['segment']} bytes, {streams}, warm"


def _ran(row: dict) -> str:
    kind = row.get("spans_from")
    return row["backend"] if kind in (None, "learned") else f"{row['backend']}, {kind}"


def _backend(line: Arm) -> str:
    return _ran(line.members[0])


def _told(line: Arm) -> str:
    other = other_in_evaluation(line.members[0])
    return f"{_backend(line)} ({other} in evaluation)" if other else _backend(line)


def _style(line: Arm, *, backends: dict[str, str], look: dict[str, Look]) -> dict:
    chosen = look[line.variant]
    return {"color": chosen.colour, "marker": chosen.marker, "linestyle": backends[_backend(line)], "linewidth": 1.4}


def _draw_measure(
    ax: Axes, lines: list[Arm], *, measure: Measure, backends: dict[str, str], look: dict[str, Look], lengths: list[int]
) -> list[tuple[float, float, str, str]]:
    """Draw one panel; what is to be written beside the ends of its lines: where, text and colour."""
    rows = [row for line in lines for row in line.members]
    drawn = (measure.keys, measure.ideal) if measure.ideal else (measure.keys,)
    values = [value for row in rows for keys in drawn if (value := number(row, *keys))]
    divisor, unit = memory_unit(max(values, default=0)) if measure.is_memory else (1, "")
    ends = []
    for line in lines:
        style = _style(line, backends=backends, look=look)
        middle = _draw_line(ax, line, measure=measure, divisor=divisor, style=style)
        if (power := exponent(middle)) is not None:
            ends.append((*middle[-1], f"L{f'{power:.1f}'.translate(RAISED)}", style["color"]))
    shown = [value / divisor for value in values]
    ax.set_xscale("log", base=2)
    ax.set_xlim(lengths[0] / 1.35, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.12 * 1.2)  # room for the exponents
    ticks_at(ax.xaxis, lengths[::-1], most=MOST_TICKS, text=lambda at: f"{at:.0f}" if at < 1e5 else plain_number(at))
    ax.set(xlabel="length of context L [bytes]", ylabel=f"{measure.label} [{unit}]" if unit else measure.label)
    if shown:
        log_axis(ax.yaxis, values=shown)
        rows_of_crosses = sum(any(row["status"] == OUT for row in line.members) for line in lines)
        low, high = min(shown) / 1.6, max(shown) * 1.6
        ax.set_ylim(low, high * (high / low) ** (0.05 * rows_of_crosses))
        for power in measure.powers if len(lengths) > 1 else ():
            ends.append(_draw_slope(ax, start=(lengths[0], min(shown) / 1.25), end=lengths[-1], power=power))
    else:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "nothing was measured", transform=ax.transAxes, ha="center", color=GREY)
    _draw_crosses(ax, lines, look=look)
    return ends


def _draw_line(ax: Axes, line: Arm, *, measure: Measure, divisor: float, style: dict) -> list[tuple[float, float]]:
    """Every row is a dot; where a length was measured several times, the line goes through the median, which is returned."""
    measured = [(row["length"], value / divisor, row) for row in line.members if (value := number(row, *measure.keys))]
    by_length = grouped(measured, key=lambda item: item[0])
    middle = sorted((length, median(value for _, value, _ in found)) for length, found in by_length.items())
    if not middle:
        return []
    ax.plot(*zip(*middle, strict=True), **style | {"marker": ""})
    ax.plot([x for x, _, _ in measured], [y for _, y, _ in measured], **style | {"linestyle": "none"}, markersize=5)
    ranges = [
        (x, number(row, *measure.keys[:-1], "p20"), number(row, *measure.keys[:-1], "p80")) for x, _, row in measured
    ]
    for length, low, high in ranges:
        if low is not None and high is not None:
            ax.vlines(length, low / divisor, high / divisor, color=style["color"], linewidth=3, alpha=0.3)
    ideal = [(row["length"], value) for row in line.members if measure.ideal and (value := number(row, *measure.ideal))]
    if ideal:
        ax.plot(*zip(*ideal, strict=True), **style | {"linestyle": "none"}, fillstyle="none", markersize=7)
    return middle


def exponent(curve: list[tuple[float, float]]) -> float | None:
    """The power of the length by which ``(length, cost)`` grows over its longer half, by least squares; None of one length."""
    half = [(length, cost) for length, cost in curve[:-2] if length**2 >= curve[0][0] * curve[-1][0]] + curve[-2:]
    return float(np.polyfit(*np.log(half).T, 1)[0]) if len(half) > 1 else None


def _draw_slope(ax: Axes, *, start: tuple[float, float], end: float, power: int) -> tuple[float, float, str, str]:
    """y proportional to length^power from ``start``: where it leaves the panel, and its label."""
    top = ax.get_ylim()[1] / 1.15
    far = min(end, start[0] * (top / start[1]) ** (1 / power))
    height = start[1] * (far / start[0]) ** power
    ax.plot([start[0], far], [start[1], height], color=GREY, linewidth=0.8, zorder=1)
    return far, height, "∝ L" if power == 1 else "∝ L²", GREY


def _write_beside(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Each text right of its place, in its colour, and none over another: at one length they stand a line apart."""
    pixels_a_point = ax.figure.dpi / 72
    for found in grouped(ends, key=lambda end: end[0]).values():
        places = sorted((ax.transData.transform(end[:2])[1] / pixels_a_point, end) for end in found)
        at = -np.inf
        for height, (x, y, text, colour) in places:
            at = max(at + LINE_POINTS, height)
            style = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": colour}
            ax.annotate(text, (x, y), xytext=(7, at - height), **style).set_in_layout(False)


def _draw_crosses(ax: Axes, lines: list[Arm], *, look: dict[str, Look]) -> None:
    """Cells that ran out of memory, at the upper edge, one row of crosses a line, named at the first cross."""
    out = [(line, sorted({row["length"] for row in line.members if row["status"] == OUT})) for line in lines]
    out = [(line, lengths) for line, lengths in out if lengths]
    for index, (line, lengths) in enumerate(out):
        height = 0.985 - 0.035 * index
        style = {"color": look[line.variant].colour, "marker": "x", "linestyle": "none", "markeredgewidth": 2}
        ax.plot(lengths, [height] * len(lengths), **style, transform=ax.get_xaxis_transform(), clip_on=False, zorder=5)
        place = {"xycoords": ax.get_xaxis_transform(), "xytext": (-6, 0), "textcoords": "offset points"}
        place |= {"ha": "right", "va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
        ax.annotate(f"{lengths[0]}, {_backend(line)}", (lengths[0], height), **place, fontsize=7.5, color=INK)


def _caption(rows: list[dict]) -> str:
    failed = sorted(
        {f"{row['variant']} at {row['length']} ({row.get('reason')})" for row in rows if row["status"] == "failed"}
    )
    approximate = any((row.get("memory") or {}).get("approximate") for row in rows)
    return (
        "Cost of the trainer's own step against length of context L, both logarithmic; a steeper line grows faster: beside its "
        "end is the power of L with which it grew over the longer half of the lengths. Line style "
        "is the backend, with where spans are if not where a run has learned them. Times are medians with bars from the "
        "20th to the 80th percentile; FLOPs are forward and executed, hollow marks ideal; generation is one byte of one "
        "stream. Crosses at the upper edge: out of memory, with the first such length and the backend."
        + (" Memory is a process's high-water mark, approximate." if approximate else "")
        + (f" Failed: {'; '.join(failed)}." if failed else "")
    )
