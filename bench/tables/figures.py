"""The report's figures of comparable rows: bits per byte against cost, learning curves, learned
spans, and cost against context."""

from collections.abc import Iterable, Iterator
from itertools import cycle

import pandas as pd
from matplotlib.ticker import EngFormatter, MaxNLocator

from bench.tables.compare import (
    arms_of,
    budget_words,
    cost_key,
    data_words,
    precision_word,
)
from bench.tables.costs import cost_groups
from bench.tables.drawing import (
    LINE_STYLES,
    add_legend,
    drawing_of,
    panels,
    plain_number,
    scale_axis,
    styled,
    variant_styles,
)
from bench.tables.frame import Rows
from bench.tables.means import BITS
from bench.tables.runs import arm_means, run_groups
from bench.tables.spans import span_curves, span_figure
from harness.record.cells import MIB, join_words, pluralize, score_unit
from harness.record.table import Drawing

RUN_COSTS = {
    "executed FLOPs per byte (forward)": "flops_per_byte.executed",
    "peak memory of training [MiB]": "memory.peak_bytes",
    "time of training [s]": "seconds",
}
"""Column of the frame for each horizontal axis of a trade-off. All but the first depend on the
machine."""
CONTEXT_COSTS = {
    "training step [ms]": "time.train_ms.p50",
    "peak memory of training [MiB]": "memory.train_peak_bytes",
    "executed FLOPs per byte (forward)": "flops.executed_per_byte",
    "generation [ms per byte]": "time.generate_ms.p50",
}
"""Column of the frame for each panel of cost against context."""
LINE_KEYS = ("model.span", "batch.segment", "batch.carry", "runtime.backend", "runtime.allocator")
"""Keys of the configuration that may differ between the points of one line, or that the figure
shows."""
SERIES = {"valid": "a sample of valid", "train": "train"}
"""Names of what a learning curve shows, by the kind of its rows."""
OUT_OF_MEMORY = "out of memory"
MAX_POINTS = 200  # of a curve, approximately
# the first fifth of a curve, where it falls from 8 bits, does not set the limits of the axes
FREE_SHARE = 0.2


def draw_all(rows: Rows) -> dict[str, list[Drawing]]:
    """Return by the name of each table of runs or costs the figures of its rows. Equal rows give
    equal files."""
    costs = rows.frame["row"][rows.frame["kind"] == "cost"].tolist()
    drawings = {}
    with styled():
        for index, arms in enumerate(run_groups(rows), start=1):
            newest = arms.drop_duplicates(["arm", "seed"], keep="last")
            drawings[f"runs-{index}"] = [
                *trade_off(arms, name=f"trade-off-{index}"),
                *curves(newest, name=f"curves-{index}"),
                *learned_spans(newest, name=f"spans-{index}"),
            ]
        for index, group in cost_groups(costs):
            if group["length"].nunique() > 1:
                drawings[f"cost-{index}"] = [_cost_drawing(group, name=f"context-{index}")]
    return drawings


def trade_off(arms: pd.DataFrame, *, name: str) -> Iterator[Drawing]:
    """Yield bits per byte with the range over seeds, against FLOPs and, if costs are comparable,
    against memory and time."""
    rows, split, _ = arm_means(arms[arms["valid_bits_per_byte"].notna()])
    last = arms["row"].iloc[-1]
    one_environment = arms["row"].map(cost_key).nunique() == 1
    costs = {}
    for label, key in RUN_COSTS.items():
        if (one_environment or "FLOPs" in label) and all(key in row for row in rows):
            costs[label] = key
    if len(rows) < 2 or not costs:
        return
    styles = variant_styles(row["variant"] for row in rows)
    machine = ""
    if len(costs) > 1:
        machine = _machine(last)
    unit = score_unit(last)
    title = f"{unit.capitalize()} against cost"
    figure, axes = panels(
        1,
        len(costs),
        width=3.4 * len(costs) + 2.6,
        height=max(4.2, 1.4 + 0.19 * len(rows)),
        title=title,
        subtitle=f"{data_words(arms['row'])}\n{machine}".strip(),
    )
    for ax, (label, key) in zip(axes, costs.items(), strict=True):
        divisor = 1.0
        if "MiB" in label:
            divisor = MIB
        for row in rows:
            style = styles[row["variant"]]
            bits = row["runs"][f"{split}_{BITS}"]
            x = row[key] / divisor
            ax.vlines(x, bits.min(), bits.max(), color=style["color"], linewidth=1)
            arm = f"{row['arm']} (n={row['n']})"
            ax.plot(x, bits.mean(), **style, linestyle="none", markersize=7, alpha=0.85, label=arm)
        scale_axis(ax.xaxis, [row[key] / divisor for row in rows])
        ax.set(xlabel=label, ylabel=f"{split} {unit}")
    add_legend(axes[-1])
    caption = "Lower and further left is better. Vertical lines are the range over seeds. "
    caption += f"Budget: {budget_words(last['budget'])}."
    yield drawing_of(figure, name=name, title=title, caption=caption)


def curves(arms: pd.DataFrame, *, name: str) -> Iterator[Drawing]:
    """Yield bits per byte during training, means over seeds, with the final scores as words."""
    means = {
        arm: _mean_curve(row["record"] for row in runs["row"])
        for arm, runs in arms.groupby("arm", sort=False)
    }
    means = {arm: curve for arm, curve in means.items() if len(curve)}
    if not means:
        return
    styles = variant_styles(arms["variant"])
    levels = []
    unit = score_unit(arms["row"].iloc[-1])
    title = "Learning curves"
    height = max(4.6, 1.6 + 0.17 * len(means))
    subtitle = data_words(arms["row"])
    figure, (ax,) = panels(1, 1, width=8.5, height=height, title=title, subtitle=subtitle)
    for arm, curve in means.items():
        runs = arms[arms["arm"] == arm]
        label = arm
        if curve.name == "train":
            label += " (train)"
        final = runs[f"valid_{BITS}"].mean()
        if pd.notna(final):
            label += f": {final:.4f}"
        ax.plot(
            curve,
            **styles[runs["variant"].iloc[0]],
            linestyle=LINE_STYLES[runs["order"].iloc[0] % len(LINE_STYLES)],
            linewidth=1.4,
            markersize=3,
            alpha=0.9,
            label=label,
        )
        levels += [*curve[curve.index >= FREE_SHARE * curve.index.max()]]
    margin = 0.05 * (max(levels) - min(levels)) or 0.1
    series = join_words(sorted({SERIES[curve.name] for curve in means.values()}))
    ax.set(xlabel="bytes seen", xlim=(0, None), ylabel=f"{unit} of {series}")
    ax.set_ylim(min(levels) - margin, max(levels) + margin)
    ax.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    ax.xaxis.set_major_locator(MaxNLocator(6))
    add_legend(ax, title=f"name: final {unit} of valid")
    caption = (
        f"Mean {unit} of {series} over seeds, during training. The first fifth of a line "
        "may lie outside the axes. Numbers in the legend are the final scores, of the selected "
        "weights on the bytes of valid that do not select them, so they are no points of the lines."
    )
    yield drawing_of(figure, name=name, title=title, caption=caption)


def _mean_curve(records: Iterable[list[dict]]) -> pd.Series:
    """Return the mean bits per byte on valid by bytes seen; on train for runs that did not score
    valid during training. Its name says which."""
    rows = pd.DataFrame([row for record in records for row in record if not row.get("final")])
    rows = rows.reindex(columns=["kind", "bytes_seen", "bits_per_byte"]).dropna()
    kind = "train"
    if (rows["kind"] == "valid").any():
        kind = "valid"
    means = rows[rows["kind"] == kind].groupby("bytes_seen")["bits_per_byte"].mean().rename(kind)
    step = 1 + len(means) // MAX_POINTS
    return means.iloc[(len(means) - 1) % step :: step]  # with the last point


def learned_spans(arms: pd.DataFrame, *, name: str) -> Iterator[Drawing]:
    """Yield for each arm with learned spans those of its first seed."""
    for index, run in enumerate(arms.drop_duplicates("arm").itertuples(), start=1):
        if heads := span_curves(run.row["record"]):
            title = f"Learned spans: {run.arm}, seed {run.seed:.0f}"
            caption = (
                "Each line is a head, which attends to the last z bytes; further back its mask "
                "falls to 0 over the ramp. windtunnel inspect draws other seeds."
            )
            figure = span_figure(heads, title=title)
            yield drawing_of(figure, name=f"{name}-{index}", title=title, caption=caption)


def _cost_drawing(rows: pd.DataFrame, *, name: str) -> Drawing:
    """Return a figure of ``CONTEXT_COSTS`` against the length of context, with a line for each arm
    and backend."""
    first = rows["row"].iloc[0]
    styles = variant_styles(rows["variant"])
    labels = rows["row"].map(_backend_label)
    points = pd.concat([arms_of(group, without=LINE_KEYS) for _, group in rows.groupby(labels)])
    points = rows.join(points).assign(label=labels, line=points["arm"] + ", " + labels)
    points = points.reindex(columns=points.columns.union(CONTEXT_COSTS.values(), sort=False))
    line_styles = dict(zip(sorted(set(labels)), cycle(LINE_STYLES)))
    title = (
        f"Cost against length of context: {first['mode']}, {pluralize(first['streams'], 'stream')}"
    )
    height = max(8.2, 2.4 + 0.36 * points["line"].nunique())
    subtitle = f"{_machine(first)}\n{data_words([first])}"
    figure, axes = panels(2, 2, width=13.5, height=height, title=title, subtitle=subtitle)
    for ax, (label, key) in zip(axes, CONTEXT_COSTS.items(), strict=True):
        divisor = 1.0
        if "MiB" in label:
            divisor = MIB
        for line, group in points.groupby("line", sort=False):
            style = styles[group["variant"].iloc[0]] | {
                "linestyle": line_styles[group["label"].iloc[0]]
            }
            medians = group.groupby("length")[key].median().dropna()
            ax.plot(medians / divisor, **style, linewidth=1.4, markersize=5, label=line)
            lengths = group[group["status"] == OUT_OF_MEMORY]["length"]
            ax.plot(
                lengths,
                [0.97] * len(lengths),
                "x",
                color=style["color"],
                transform=ax.get_xaxis_transform(),
            )
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(plain_number)
        ax.set(xlabel="length of context L [bytes]", ylabel=label)
        scale_axis(ax.yaxis, [*(points[key].dropna() / divisor)], log=True)
        add_legend(ax)
    caption = "Medians. Both axes are logarithmic. A cross at the upper edge means out of memory."
    return drawing_of(figure, name=name, title=title, caption=caption)


def _backend_label(row: dict) -> str:
    if row.get("spans_from") in (None, "learned"):
        return row["backend"]
    return f"{row['backend']}, {row['spans_from']}"


def _machine(row: dict) -> str:
    threads = pluralize(row["threads"], "thread")
    return f"{row['device']}, {threads}, {precision_word(row)}{', compiled' * row['compile']}"
