"""Insides of a run, one drawing a run or a group: spans of heads, and use of product-key memories.

Numbers come from the metrics of valid rows, ``layers.3.attention.span`` and ``layers.2.memory.usage_percent``. Spans are
drawn of the first seed only: heads of different seeds have no common order.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np
from matplotlib.axes import Axes

from bench.report.comparison import arms, comparable, grouped, number, tag
from bench.report.plot_style import LINES, Look, entry, entry_of, finish, legend_below
from bench.report.plots_curves import prefixes
from bench.report.words import data_words
from harness.record.drawing import (
    GREY,
    INK,
    count_axis,
    draw_span_bars,
    draw_span_cells,
    layer_names,
    panels,
    span_grid,
    spans_of,
)
from harness.record.table import Drawing

USAGE, KL = "usage_percent", ("kl_weighted_nats", "kl_count_nats")


def last_metrics(run) -> dict:
    """Metrics of the last score of the valid split."""
    rows = [row["metrics"] for row in run.rows if row["kind"] == "valid" and row.get("metrics")]
    return run.summary.get("valid_metrics") or (rows[-1] if rows else {})


def draw_spans(runs: list) -> list[Drawing]:
    """Layers by heads, at the end of the first seed of every arm that has spans."""
    with_spans = [run for run in runs if np.isfinite([*_all_spans(run)]).any()]
    return [_spans(arm.members[0], arm.label, len(arm.members)) for arm in arms(with_spans)]


def _all_spans(run) -> Iterator[float]:
    return chain.from_iterable(spans_of(last_metrics(run)).values())


def _spans(run, label: str, seeds: int) -> Drawing:
    found = spans_of(last_metrics(run))
    names, grid = layer_names(found), span_grid(found)
    limit = number(run.summary, "protocol", "span") or max(1.0, np.nanmax(grid))
    seed, average = run.summary["seed"], np.nanmean(grid)
    title = f"Learned spans at the end: {label}, seed {seed}"
    subtitle = f"mean over heads {average:.1f} of {limit:,.0f} positions; {data_words([run.summary])}"
    height = max(3.8, 1.5 + 0.32 * len(names))
    figure, (cells, heads) = panels(1, 2, width=11.0, height=height, title=title, subtitle=subtitle)
    draw_span_cells(cells, found, limit=limit)
    draw_span_bars(heads, found, limit=limit)
    heads.axhline(average, color=INK, linewidth=1, linestyle="--", label="mean of all heads")
    legend_below(figure, heads.get_legend_handles_labels()[0])
    of_seeds = f" Only the first of {seeds} seeds is drawn." if seeds > 1 else ""
    caption = (
        f"Span z of every head in positions at the end of training, heads of a layer sorted by span; dark is short. "
        f"The scale is logarithmic and ends at the longest possible span. Behind z the mask falls over a ramp, "
        f"which is not counted here.{of_seeds} Right: a bar a head, the heads of a layer beside each other, on a logarithmic "
        f"axis that is even below 1; a line across a layer is its mean."
    )
    name = f"spans-{run.summary['variant']}-{tag(label, comparable(run))}"
    return finish(figure, name=name, title=title, caption=caption)


def draw_memories(runs: list, *, look: dict[str, Look]) -> list[Drawing]:
    """Use of product-key memories over training and at the end; the number of bytes it is counted over is a key."""
    with_memory = [run for run in runs if any(name.endswith(f".{USAGE}") for name in last_metrics(run))]
    found = grouped(with_memory, key=lambda run: (comparable(run), prefixes(run.rows)))
    return [_memories(some, look=look, name=f"memory-{tag(key)}") for key, some in found.items()]


def _memories(runs: list, *, look: dict[str, Look], name: str) -> Drawing:
    title = "Use of product-key memories"
    figure, axes = panels(1, 2, width=10, height=4.7, title=title, subtitle=data_words(run.summary for run in runs))
    compared = arms(runs)
    places = sorted({key.rpartition(".")[0] for run in runs for key in last_metrics(run) if key.endswith(f".{USAGE}")})
    for arm in compared:
        for run in arm.members:
            for index, place in enumerate(places):
                style = {"color": look[arm.variant].colour, "linestyle": LINES[index % len(LINES)]}
                _draw_metric(axes[0], run, f"{place}.{USAGE}", marker=look[arm.variant].marker, **style)
                for metric, marker in zip(KL, ("o", "x"), strict=True):
                    _draw_metric(axes[1], run, f"{place}.{metric}", marker=marker, **style)
    for ax, label in zip(axes, ("slots used [%]", "divergence from even use [nats]"), strict=True):
        ax.set(xlabel="bytes seen", ylabel=label)
        ax.set_xlim(left=0)
        count_axis(ax.xaxis, unit="B")
    axes[0].set_ylim(0, 103)
    axes[1].set_ylim(bottom=0)
    handles = [entry_of(arm, look=look[arm.variant], linestyle="-") for arm in compared]
    handles += [
        entry(place.removeprefix("layers."), color=GREY, linestyle=LINES[index % len(LINES)])
        for index, place in enumerate(places)
    ]
    handles.append(entry("divergence, reads by weight", color=GREY, marker="o"))
    handles.append(entry("divergence, reads counted", color=GREY, marker="x"))
    legend_below(figure, handles)
    return finish(figure, name=name, title=title, caption=_memory_caption(runs))


def _draw_metric(ax: Axes, run, key: str, *, color: str, linestyle: str, marker: str) -> None:
    """A line over the run, and the number at the end, over more bytes, apart from it."""
    rows = [row for row in run.rows if row["kind"] == "valid" and not row.get("final") and "bytes_seen" in row]
    found = [(row["bytes_seen"], value) for row in rows if (value := number(row, "metrics", key)) is not None]
    style = {"color": color, "marker": marker}
    if found:
        ax.plot(*zip(*found, strict=True), **style, linestyle=linestyle, linewidth=1.2, markersize=4, alpha=0.8)
    last, end = number(run.summary, "valid_metrics", key), number(run.summary, "bytes_seen")
    if last is not None and end is not None:
        ax.plot(end, last, **style, linestyle="none", markersize=9, clip_on=False)


def _memory_caption(runs: list) -> str:
    def counted(metrics: dict) -> set[float]:
        return {value for key, value in metrics.items() if key.endswith(".usage_bytes") and value is not None}

    on_the_way = set().union(
        *(counted(row.get("metrics") or {}) for run in runs for row in run.rows if row["kind"] == "valid")
    )
    at_end = set().union(*(counted(last_metrics(run)) for run in runs))

    def words(found: set[float]) -> str:
        return " or ".join(f"{count:,.0f}" for count in sorted(found)) or "an unknown number of"

    return (
        f"Left: slots with any weight, right: ln M + sum p ln p over slots, 0 where all M slots are used evenly and ln M "
        f"where all is in one. Small marks, joined: counted over {words(on_the_way - at_end or at_end)} bytes of the valid "
        f"split on the way; large marks: over {words(at_end)} bytes at the end, which touch more slots. One line a seed."
    )
