"""The report's figures: learning curves, trade-offs and cost by context; ``compare`` decides which rows share one."""

import hashlib
from collections.abc import Iterable, Iterator

import pandas as pd
from matplotlib.ticker import EngFormatter, MaxNLocator

from bench.report import drawing
from bench.report.compare import budget_words, cost_ground, data_words, precision_word, results, with_arms
from bench.report.drawing import LINES, finish, legend, looks, plain_number, styled, value_axis
from bench.report.frame import Rows
from bench.report.tables import bits_by_seed, compare, summed
from harness.record.cells import pluralize
from harness.record.comparison import code_digest, cost_conditions
from harness.record.table import Drawing

COSTS = {
    "ideal FLOPs per byte (forward)": "flops_per_byte.ideal",
    "peak memory of training [MiB]": "memory.peak_bytes",
    "time of training [s]": "seconds",
}
"""Horizontal axes of trade-offs; all but the first depend on the machine."""
MEASURES = {
    "training step [ms]": "time.train_ms.p50",
    "peak memory of training [MiB]": "memory.train_peak_bytes",
    "executed FLOPs per byte (forward)": "flops.executed_per_byte",
    "generation [ms per byte]": "time.generate_ms.p50",
}
OF_A_LINE = ("model.span", "batch.segment", "batch.carry", "runtime.backend", "runtime.allocator")
"""Keys of the configuration in which the cells of one line differ, or that the drawing shows."""
OUT, MIB = "out of memory", 2.0**20
SETTLED = 0.2
"""Fraction of the bytes before which a curve may leave the frame: the fall from 8 bits would flatten the rest."""
MOST_POINTS = 200
"""Of one curve, about: every step of a long run is in a record."""


def draw_all(rows: Rows) -> list[Drawing]:
    """Every figure that the rows allow; equal rows give equal files."""
    with styled():
        drawings = []
        for index, runs, _ in results(rows.of("run")):
            arms = with_arms(runs)
            drawings += [*trade_off(arms, name=f"trade-off-{index}"), *curves(arms, name=f"curves-{index}")]
        return [*drawings, *_of_costs(rows.of("cost"))]


def trade_off(arms: pd.DataFrame, *, name: str) -> Iterator[Drawing]:
    """Bits per byte against FLOPs and, where all are of one ground, memory and time; with the seeds' range."""
    rows = [row for row in summed(arms) if "valid_bits_per_byte" in row]
    split, last = compare(rows)[1], arms["row"].iloc[-1]
    alone = len({cost_ground(row) for row in arms["row"]}) == 1
    shown = {label: key for label, key in COSTS.items() if all(key in row for row in rows)}
    shown = {label: key for label, key in shown.items() if alone or "FLOPs" in label}
    if not rows or not shown:
        return
    look, machine = looks(row["variant"] for row in rows), _machine(last) if len(shown) > 1 else ""
    size = {"width": 3.4 * len(shown) + 2.6, "height": max(4.2, 1.4 + 0.19 * len(rows))}
    title, about = "Bits per byte against cost", f"{data_words(arms['row'])}\n{machine}".strip()
    figure, axes = drawing.panels(1, len(shown), title=title, subtitle=about, **size)
    for ax, (label, key) in zip(axes, shown.items(), strict=True):
        divisor = MIB if "MiB" in label else 1.0
        for row in rows:
            style, seeds, x = look[row["variant"]], bits_by_seed(row["runs"], split), row[key] / divisor
            ax.vlines(x, seeds.min(), seeds.max(), color=style["color"], linewidth=1)
            label_of = f"{row['arm']} (n={row['n']})"
            ax.plot(x, seeds.mean(), **style, linestyle="none", markersize=7, alpha=0.85, label=label_of)
        value_axis(ax.xaxis, [row[key] / divisor for row in rows])
        ax.set(xlabel=label, ylabel=f"{split} bits per byte")
    legend(axes[-1])
    caption = "Lower and further left is better; upright lines are the seeds' range. "
    yield finish(figure, name=name, title=title, caption=f"{caption}Budget: {budget_words(last['budget'])}.")


def curves(arms: pd.DataFrame, *, name: str) -> Iterator[Drawing]:
    """Bits per byte while training, means over seeds, and of valid at the end, which may be of more bytes."""
    means = {arm: _mean_curve(runs["record"]) for arm, runs in arms.groupby("arm", sort=False)}
    means = {arm: curve for arm, curve in means.items() if len(curve)}
    if not means:
        return
    look, levels = looks(arms["variant"]), []
    size = {"width": 8.5, "height": max(4.6, 1.6 + 0.17 * len(means))}
    figure, (ax,) = drawing.panels(1, 1, title="Learning curves", subtitle=data_words(arms["row"]), **size)
    for arm, curve in means.items():
        runs = arms[arms["arm"] == arm]
        style, dashes = look[runs["variant"].iloc[0]], LINES[runs["order"].iloc[0] % len(LINES)]
        ax.plot(curve.index, curve, **style, linestyle=dashes, linewidth=1.4, markersize=3, alpha=0.9, label=arm)
        levels += [*curve[curve.index >= SETTLED * curve.index.max()]]
        ends = runs.reindex(columns=["bytes_seen", "valid_bits_per_byte"]).mean().dropna()
        if len(ends) == 2:
            ax.plot(*ends, **style, linestyle="none", markersize=7, alpha=0.8, clip_on=False)
            levels.append(ends.iloc[1])
    margin = 0.05 * (max(levels) - min(levels)) or 0.1
    ax.set(xlabel="bytes seen", xlim=(0, None), ylabel="bits per byte")
    ax.set_ylim(min(levels) - margin, max(levels) + margin)
    ax.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    ax.xaxis.set_major_locator(MaxNLocator(6))
    legend(ax)
    caption = (
        "Bits per byte, means over seeds: of valid on the way, where a prefix of the split may be scored (of train, "
        "where nothing was scored), and of valid at the end, a large mark. The first fifth may leave the frame."
    )
    yield finish(figure, name=name, title="Learning curves", caption=caption)


def _mean_curve(records: Iterable[list[dict]]) -> pd.Series:
    """Mean bits per byte by bytes seen: of valid, or of train where a run has no others."""
    rows = pd.DataFrame([row for record in records for row in record if not row.get("final")])
    rows = rows.reindex(columns=["kind", "bytes_seen", "bits_per_byte"]).dropna()
    kind = "valid" if (rows["kind"] == "valid").any() else "train"
    means = rows[rows["kind"] == kind].groupby("bytes_seen")["bits_per_byte"].mean()
    return means.iloc[:: 1 + len(means) // MOST_POINTS]


def _of_costs(costs: pd.DataFrame) -> Iterator[Drawing]:
    """Cost against context; a figure for each ground, code, mode, streams and data, whose digest is in its name."""

    def same(row: dict) -> str:
        return repr((cost_conditions(row), code_digest(row), row["mode"], row["streams"], row["data"]["sha256"]))

    for key, rows in costs.groupby([same(row) for row in costs["row"]], sort=False) if len(costs) else ():
        digits = hashlib.sha256(key.encode()).hexdigest()[:6]
        yield _costs(rows, name=f"cost-{rows['row'].iloc[0]['mode']}-{digits}")


def _costs(rows: pd.DataFrame, *, name: str) -> Drawing:
    first, look = rows["row"].iloc[0], looks(rows["variant"])
    spans_from = rows.get("spans_from", pd.Series(None, index=rows.index)).replace("learned", None)
    ran = rows["backend"] + spans_from.map(lambda where: f", {where}" if isinstance(where, str) else "")
    lines = pd.concat([with_arms(some, without=OF_A_LINE) for _, some in rows.groupby(ran)])
    lines = lines.assign(ran=ran, line=lines["arm"] + ", " + ran)
    dashes = {backend: LINES[place % len(LINES)] for place, backend in enumerate(sorted(set(ran)))}
    title = f"Cost against length of context: {first['mode']}, {pluralize(first['streams'], 'stream')}"
    size = {"width": 13.5, "height": max(8.2, 2.4 + 0.36 * lines["line"].nunique())}
    figure, axes = drawing.panels(2, 2, title=title, subtitle=f"{_machine(first)}\n{data_words([first])}", **size)
    for ax, (label, key) in zip(axes, MEASURES.items(), strict=True):
        values = rows[key].dropna() if key in rows else pd.Series(dtype=float)
        divisor = MIB if "MiB" in label else 1.0
        for line, cells in lines.groupby("line", sort=False):
            style = look[cells["variant"].iloc[0]] | {"linestyle": dashes[cells["ran"].iloc[0]]}
            middle = cells.groupby("length")[key].median().dropna() if key in cells else values[:0]
            ax.plot(middle.index, middle / divisor, **style, linewidth=1.4, markersize=5, label=line)
            lost = cells[cells["status"] == OUT]["length"]
            ax.plot(lost, [0.97] * len(lost), "x", color=style["color"], transform=ax.get_xaxis_transform())
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(plain_number)
        ax.set(xlabel="length of context L [bytes]", ylabel=label)
        value_axis(ax.yaxis, [*(values / divisor)], log=True)
        legend(ax)
    caption = "Medians against the length, both axes logarithmic; x at the upper edge: out of memory."
    return finish(figure, name=name, title=title, caption=caption)


def _machine(row: dict) -> str:
    return f"{row['device']}, {row['threads']} threads, {precision_word(row)}{', compiled' * row['compile']}"
