"""Bits per byte against what they cost, with the Pareto front: FLOPs, memory and seconds of training runs.

One drawing for each data digest, protocol, budget and capping, for only such runs compare; where they were measured on
several machines, time and memory get a drawing for each (``comparison.split_by_ground``). Every seed is a dot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.report.comparison import Arm, arms, comparable, grouped, number, split_by_ground, tag
from bench.report.plot_style import (
    FILLS,
    Look,
    entry,
    finish,
    label_points,
    legend_below,
    log_axis,
    memory_unit,
    plain_axis,
)
from bench.report.words import budget_words, data_words, machine_words, scored_words
from harness.record.drawing import GREY, count_axis, panels
from harness.record.table import Drawing

MOST_LABELS = 12
"""Arms from which on labels beside dots give way to a legend."""
WIDE_RANGE = 8
"""Ratio of largest to smallest cost from which on the axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One panel's horizontal axis: a number of ``summary.json`` at ``keys``."""

    label: str
    keys: tuple[str, ...]
    is_memory: bool = False


FREE = (
    Cost(label="ideal FLOPs per byte (forward)", keys=("flops_per_byte", "ideal")),
    Cost(label="executed FLOPs per byte (forward)", keys=("flops_per_byte", "executed")),
)
"""The same on every machine."""
MEASURED = (
    Cost(label="peak memory of training", keys=("memory", "peak_bytes"), is_memory=True),
    Cost(label="time of training [s]", keys=("seconds",)),
)


def draw_trade_offs(runs: list, *, look: dict[str, Look]) -> list[Drawing]:
    """Bits per byte against FLOPs, memory and seconds, one drawing for each group of comparable runs."""
    drawings = []
    for key, group in grouped(runs, key=lambda run: comparable(run)).items():
        split, usable = final_split(group)
        for suffix, some, free, measured in split_by_ground(usable):
            costs = (*(FREE if free else ()), *(MEASURED if measured else ()))
            costs = [cost for cost in costs if any(number(run.summary, *cost.keys) is not None for run in some)]
            if costs:
                name = f"trade-off-{tag(key)}{suffix}"
                left_out = len(group) - len(usable)
                drawings.append(_trade_off(some, split=split, costs=costs, look=look, name=name, left_out=left_out))
    return drawings


def final_split(group: list) -> tuple[str, list]:
    """``test`` if all runs that have a score have that, else ``valid``; and the runs that have that number."""
    with_score = {
        split: [run for run in group if number(run.summary, f"{split}_bits_per_byte") is not None]
        for split in ("test", "valid")
    }
    split = "test" if len(with_score["test"]) >= len(with_score["valid"]) else "valid"
    return split, with_score[split]


def capped_bytes(run, split: str) -> int | None:
    """Bytes of the split that were scored, where that is not all of it."""
    return (run.summary.get("capped") or {}).get(split)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, smaller being better, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _trade_off(
    runs: list, *, split: str, costs: list[Cost], look: dict[str, Look], name: str, left_out: int
) -> Drawing:
    columns = min(2, len(costs))
    rows = -(-len(costs) // columns)
    title, subtitle = "Bits per byte against cost", _subtitle(runs, costs=costs)
    size = {"width": 5.2 * columns, "height": 3.7 * rows + 0.9}
    figure, axes = panels(rows, columns, title=title, subtitle=subtitle, **size)
    compared = arms(runs)
    texts = {arm.label: f"{arm.label} (n={len(arm.members)})" for arm in compared}
    labelled, mark = [], "*" if capped_bytes(runs[0], split) else ""
    for ax, cost in zip(axes, costs, strict=False):
        shown, means, dots = _scatter(ax, compared, cost=cost, bits=f"{split}_bits_per_byte", look=look)
        ax.set_ylabel(f"{split} bits per byte{mark}")
        labelled.append((ax, means, [texts[arm.label] for arm in shown], dots))
    for ax in axes[len(costs) :]:
        ax.set_visible(False)
    handles = [entry("Pareto front of the means; what is shaded is beaten", color=GREY, linestyle="-", linewidth=1)]
    handle = legend_below(figure, handles)
    figure.draw_without_rendering()
    # where one label fits in no free place, all panels are told apart by a legend
    if len(compared) > MOST_LABELS or not all(
        label_points(ax, points=means, texts=texts, avoid=dots) for ax, means, texts, dots in labelled
    ):
        for ax in axes:
            for note in list(ax.texts):
                note.remove()
        handle.remove()
        legend_below(figure, [*(_handle(arm, look=look, label=texts[arm.label]) for arm in compared), *handles])
    caption = _caption(runs, split=split, costs=costs, left_out=left_out)
    return finish(figure, name=name, title=title, caption=caption)


def _scatter(
    ax: Axes, compared: list[Arm], *, cost: Cost, bits: str, look: dict[str, Look]
) -> tuple[list[Arm], list[tuple[float, float]], list[tuple[float, float]]]:
    """Draw one panel: the arms it shows, where their means are, and the points of dots and front, to be kept free."""
    largest = max(number(run.summary, *cost.keys) or 0 for arm in compared for run in arm.members)
    divisor, unit = memory_unit(largest) if cost.is_memory else (1, "")
    shown, means, dots = [], [], []
    for arm in compared:
        pairs = [(number(run.summary, *cost.keys), number(run.summary, bits)) for run in arm.members]
        found = [(x / divisor, y) for x, y in pairs if x is not None]
        if not found:
            continue
        means.append((mean(x for x, _ in found), mean(y for _, y in found)))
        style = _marks(arm, look=look)
        if len(found) > 1:
            ax.plot(*zip(*found, strict=True), **style, markersize=4, alpha=0.6)
        ax.plot(*means[-1], **style, markersize=9, zorder=4)
        shown.append(arm)
        dots += found
    ax.set_xlabel(f"{cost.label} [{unit}]" if unit else cost.label)
    xs = [x for x, _ in dots]
    if min(xs) > 0 and max(xs) > WIDE_RANGE * min(xs):
        log_axis(ax.xaxis, values=xs)
    elif cost in FREE:
        count_axis(ax.xaxis)
    else:
        plain_axis(ax.xaxis)
    ax.margins(x=0.22)
    ys = [value for arm in compared for run in arm.members if (value := number(run.summary, bits)) is not None]
    margin = 0.2 * (max(ys) - min(ys)) or 0.1
    ax.set_ylim(min(ys) - margin, max(ys) + margin)  # the same in all panels, also where a run lacks one cost
    return shown, means, dots + _draw_front(ax, pareto(means))


def _draw_front(ax: Axes, front: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The step between what is reached and what is not, out to the edges; points along it, densely."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    xs = [front[0][0], *(x for x, _ in front), right]
    ys = [top, *(y for _, y in front), front[-1][1]]
    ax.step(xs, ys, where="post", color=GREY, linewidth=1, zorder=1)
    ax.fill_between(xs, ys, top, step="post", color=GREY, alpha=0.1, linewidth=0, zorder=0)
    ax.set(xlim=(left, right), ylim=(bottom, top))
    corners = [place for x, (y0, y1) in zip(xs[1:], pairwise(ys), strict=True) for place in ((x, y0), (x, y1))]
    return [
        (x0 + (x1 - x0) * part / 50, y0 + (y1 - y0) * part / 50)
        for (x0, y0), (x1, y1) in pairwise([(xs[0], ys[0]), *corners])
        for part in range(51)
    ]


def _marks(arm: Arm, *, look: dict[str, Look]) -> dict:
    chosen = look[arm.variant]
    fill = FILLS[arm.order % len(FILLS)]
    return {"color": chosen.colour, "marker": chosen.marker, "linestyle": "none", "fillstyle": fill}


def _handle(arm: Arm, *, look: dict[str, Look], label: str) -> Line2D:
    return entry(label, **_marks(arm, look=look), markersize=8)


def _subtitle(runs: list, *, costs: list[Cost]) -> str:
    measured = any(cost in MEASURED for cost in costs)
    return data_words(run.summary for run in runs) + (f"\n{machine_words(runs[0].provenance)}" if measured else "")


def _caption(runs: list, *, split: str, costs: list[Cost], left_out: int) -> str:
    first, capped = runs[0].summary, capped_bytes(runs[0], split)
    approximate = any((run.summary.get("memory") or {}).get("approximate") for run in runs)
    memory = ", memory approximate (a process's high-water mark)" if MEASURED[0] in costs and approximate else ""
    missing = f" Left out, having no {split} bits per byte: {left_out} runs." if left_out else ""
    scored = scored_words(split, capped)
    return (
        f"Bits per byte of {scored} against cost: lower and further left is better. Small marks are single seeds, large "
        f"marks means over the n seeds of a variant, the grey step is the Pareto front of the means. Forward FLOPs, "
        f"warm state{memory}. Held equal: data, protocol and budget ({budget_words(first.get('budget'))}).{missing}"
    )
