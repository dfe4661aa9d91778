"""The report's figures: learning curves, trade-offs and cost against context.

What may stand in one figure is decided in ``compare``.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import pandas as pd

from bench.report import drawing
from bench.report.compare import cost_ground, results, with_arms
from bench.report.frame import Rows
from bench.report.style import LINES, finish, legend, looks, plain_number, styled, value_axis
from bench.report.tables import bits_by_seed, compare, summed
from bench.report.words import budget_words, data_words, precision_word
from harness.record.cells import count_of
from harness.record.comparison import ground, tree_of
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
"""Keys of the configuration that the cells of one line differ in, or that follow from the drawing."""
KINDS = ("valid", "train")
"""Rows of a learning curve: those of train where a run has no others."""
OUT, MIB = "out of memory", 2.0**20


def draw_all(rows: Rows) -> list[Drawing]:
    """Every figure that the rows allow; equal rows give equal files."""
    with styled():
        return [*_of_runs(rows), *_of_costs(rows.of("cost"))]


def _of_runs(rows: Rows) -> Iterator[Drawing]:
    for index, runs, _ in results(rows.of("run")):
        arms = with_arms(runs)
        yield from trade_off(arms, name=f"trade-off-{index}")
        yield from curves(arms, name=f"curves-{index}")


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
    """Bits per byte of valid while training, means over seeds, and at the end."""
    drawn = {}
    for arm, runs in arms.groupby("arm", sort=False):
        points = {kind: [p for record in runs["record"] for p in drawing.points(record, kind=kind)] for kind in KINDS}
        kind = next((kind for kind in KINDS if points[kind]), None)
        if kind:
            means = pd.DataFrame(points[kind]).groupby(0).mean()[1].items()
            rows = [{"kind": kind, "bytes_seen": at, "bits_per_byte": mean} for at, mean in means]
            ends = [runs[key].mean() if key in runs else np.nan for key in ("bytes_seen", "valid_bits_per_byte")]
            at, bits = (None if np.isnan(end) else end for end in ends)
            drawn[arm] = runs["variant"].iloc[0], LINES[runs["order"].iloc[0] % len(LINES)], rows, (at or 0.0, bits)
    if not drawn:
        return
    look = looks(variant for variant, *_ in drawn.values())
    size = {"width": 8.5, "height": max(4.6, 1.6 + 0.17 * len(drawn))}
    figure, (ax,) = drawing.panels(1, 1, title="Learning curves", subtitle=data_words(arms["row"]), **size)
    for arm, (variant, line, rows, last) in drawn.items():
        before, style = len(ax.get_lines()), look[variant]
        drawing.draw_bits(ax, rows, last=last, colour=style["color"], marker=style["marker"], line=line)
        lines = ax.get_lines()[before:]
        for artist, label in zip(lines, ["_"] * (len(lines) - 1) + [arm], strict=True):
            artist.set_label(label)
    drawing.bits_axis(ax, [rows for *_, rows, _ in drawn.values()], others=[bits for *_, (_, bits) in drawn.values()])
    ax.set(xlabel="bytes seen", xlim=(0, None))
    drawing.count_axis(ax.xaxis, unit="B")
    legend(ax)
    caption = (
        "Valid bits per byte, means over seeds: joined on the way, where a prefix of the split may be scored, and "
        "marked at the end. The first fifth may leave the frame."
    )
    yield finish(figure, name=name, title="Learning curves", caption=caption)


def _of_costs(costs: pd.DataFrame) -> Iterator[Drawing]:
    """Cost against length of context; one figure for each ground, code, mode, streams and data,
    with six digits in its name that are the same whatever else is drawn."""

    def same(row: dict) -> str:
        return repr((ground(row), tree_of(row), row["mode"], row["streams"], row["data"]["sha256"]))

    for key, rows in costs.groupby([same(row) for row in costs["row"]], sort=False) if len(costs) else ():
        digits = hashlib.sha256(key.encode()).hexdigest()[:6]
        yield _costs(rows, name=f"cost-{rows['row'].iloc[0]['mode']}-{digits}")


def _costs(rows: pd.DataFrame, *, name: str) -> Drawing:
    first, look = rows["row"].iloc[0], looks(rows["variant"])
    spans_from = rows.get("spans_from", pd.Series(None, index=rows.index)).replace("learned", None)
    ran = rows["backend"] + spans_from.map(lambda where: f", {where}" if isinstance(where, str) else "")
    lines = pd.concat([with_arms(some, without=OF_A_LINE) for _, some in rows.groupby(ran)])
    lines = lines.assign(ran=ran, line=lines["arm"] + ", " + ran)
    dashes = {one: LINES[place % len(LINES)] for place, one in enumerate(sorted(set(ran)))}
    title = f"Cost against length of context: {first['mode']}, {count_of(first['streams'], 'stream')}"
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
