"""The report's figures: learning curves, trade-offs, cost against context, spans, peers, and the front page's.

What may stand in one figure is decided in ``compare``. Lines and points are labelled where they are.
"""

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from bench.report.compare import by, cost_ground, is_tuning, tag, with_arms
from bench.report.frame import Rows, copies
from bench.report.style import (
    FONT_POINTS,
    LINES,
    finish,
    label_right,
    looks,
    memory_unit,
    plain_number,
    spread,
    styled,
    value_axis,
)
from bench.report.tables import REFERENCE, groups, paired_with, summed
from bench.report.words import budget_words, data_words, freed_words, machine_words
from harness.record.cells import count_of
from harness.record.comparison import ground
from harness.record.drawing import (
    GREY,
    INK,
    bits_axis,
    count_axis,
    draw_bits,
    draw_span_cells,
    panels,
    points,
    spans_of,
)
from harness.record.table import Drawing

COSTS = {
    "ideal FLOPs per byte (forward)": "flops_per_byte.ideal",
    "peak memory of training": "memory.peak_bytes",
    "time of training [s]": "seconds",
}
"""Horizontal axes of trade-offs; all but the first depend on the machine."""
MEASURES = {
    "training step [ms]": "time.train_ms.p50",
    "peak memory of training": "memory.train_peak_bytes",
    "executed FLOPs per byte (forward)": "flops.executed_per_byte",
    "generation [ms per byte]": "time.generate_ms.p50",
}
OF_A_LINE = ("model.span", "batch.segment", "batch.carry", "runtime.backend", "runtime.allocator")
"""Keys of the configuration that the cells of one line differ in, or that follow from the drawing."""
RAISED = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
OUT = "out of memory"
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}


def draw_all(rows: Rows, *, spoilt: Sequence[int]) -> list[Drawing]:
    """Every figure that the rows allow; equal rows give equal files.

    Args:
        spoilt: rows of the frame that are no results, having trained with a seed that chose.
    """
    with styled():
        return [*_of_runs(rows, spoilt), *_of_costs(rows.of("cost")), *_of_peers(rows.of("peers"))]


def _of_runs(rows: Rows, spoilt: Sequence[int]) -> Iterator[Drawing]:
    for index, same in groups(rows.of("run")):
        same = same[~same.index.isin(spoilt)]
        if len(same) and not is_tuning(same["row"].iloc[-1]):
            arms = with_arms(same)
            about = {"title": data_words(same["row"]), "budget": budget_words(same["row"].iloc[-1]["budget"])}
            yield from trade_off(arms, name=f"trade-off-{index}", **about)
            yield from curves(arms, name=f"curves-{index}", **about)
            yield from _spans(arms, index=index)
            if any(copies(row) for row in same["row"]):
                yield front_page(None, summed(arms), name=f"recall-{index}")


def trade_off(arms: pd.DataFrame, *, name: str, title: str, budget: str) -> Iterator[Drawing]:
    """Bits per byte against FLOPs and, where all were measured on one ground, memory and time; with the seeds'
    range."""
    split = "test" if arms.get("test_bits_per_byte", pd.Series(dtype=float)).notna().all() else "valid"
    bits = f"{split}_bits_per_byte"
    rows = [row for row in summed(arms) if bits in row]
    alone = len({cost_ground(row) for row in arms["row"]}) == 1
    shown = {
        label: key for label, key in COSTS.items() if all(key in row for row in rows) and (alone or "FLOPs" in label)
    }
    if not rows or not shown:
        return
    look, labels = looks(row["variant"] for row in rows), []
    machine = machine_words(arms["row"].iloc[-1]) if len(shown) > 1 else ""
    grid = (-(-len(shown) // 2), min(2, len(shown)))
    size = {"width": 5.9 * grid[1], "height": 0.9 + max(3.4, 0.6 + 0.19 * len(rows)) * grid[0]}
    figure, axes = panels(*grid, title="Bits per byte against cost", subtitle=f"{title}\n{machine}".strip(), **size)
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    for ax, (label, key) in zip(axes, shown.items(), strict=False):
        divisor, unit = memory_unit(max(row[key] for row in rows)) if "memory" in label else (1, "")
        for row in rows:
            seeds = row["runs"][bits].dropna()
            ax.vlines(row[key] / divisor, seeds.min(), seeds.max(), color=look[row["variant"]]["color"], linewidth=1)
            ax.plot(row[key] / divisor, row[bits], **look[row["variant"]], markersize=7, alpha=0.85)
        value_axis(ax.xaxis, [row[key] / divisor for row in rows])
        ax.set(xlabel=f"{label} [{unit}]" if unit else label, ylabel=f"{split} bits per byte")
        places = [(row[key] / divisor, row[bits]) for row in rows]
        labels.append(label_right(ax, places, [f"{row['arm']} (n={row['n']})" for row in rows]))
    spread(figure, labels)
    caption = f"Lower and further left is better; upright lines are the seeds' range. Budget: {budget}."
    yield finish(figure, name=name, title="Bits per byte against cost", caption=caption)


def curves(arms: pd.DataFrame, *, name: str, title: str, budget: str) -> Iterator[Drawing]:
    """Bits per byte of valid while training, means over seeds, labelled at their ends."""
    drawn = {}
    for arm, own in arms.groupby("arm", sort=False):
        kind = "valid" if any(points(record, kind="valid") for record in own["record"]) else "train"
        way = pd.DataFrame([point for record in own["record"] for point in points(record, kind=kind)]).groupby(0).mean()
        end = (
            own[["bytes_seen", "valid_bits_per_byte"]].mean()
            if "valid_bits_per_byte" in own
            else pd.Series([np.nan] * 2)
        )
        if len(way):
            rows = [{"kind": kind, "bytes_seen": at, "bits_per_byte": bits} for at, bits in way[1].items()]
            last = (end.iloc[0], None if np.isnan(end.iloc[1]) else end.iloc[1])
            drawn[arm] = own["variant"].iloc[0], LINES[own["order"].iloc[0] % len(LINES)], rows, last
    if not drawn:
        return
    look, ends = looks(variant for variant, *_ in drawn.values()), []
    size = {"width": 8.5, "height": max(4.6, 1.6 + 0.17 * len(drawn))}
    figure, (ax,) = panels(1, 1, title="Learning curves", subtitle=title, **size)
    for variant, line, rows, last in drawn.values():
        style = {"colour": look[variant]["color"], "marker": look[variant]["marker"], "line": line}
        draw_bits(ax, rows, last=last, **style)
        ends.append(last if last[1] is not None else (rows[-1]["bytes_seen"], rows[-1]["bits_per_byte"]))
    bits_axis(ax, [rows for *_, rows, _ in drawn.values()], others=[bits for *_, (_, bits) in drawn.values()])
    ax.set(xlabel="bytes seen", xlim=(0, None))
    count_axis(ax.xaxis, unit="B")
    spread(figure, [label_right(ax, ends, list(drawn))])
    caption = (
        "Valid bits per byte, means over seeds: joined on the way, where a prefix of the split may be scored, and "
        f"marked at the end. The first fifth may leave the frame. Budget: {budget}."
    )
    yield finish(figure, name=name, title="Learning curves", caption=caption)


def _spans(arms: pd.DataFrame, *, index: int) -> Iterator[Drawing]:
    """Layers by heads, at the end of the first seed of every arm that has spans: heads of two seeds have no common
    order."""
    for place, (arm, own) in enumerate(arms.groupby("arm", sort=False), start=1):
        run = own.iloc[0]
        scored = [row["metrics"] for row in run["record"] if row["kind"] == "valid" and row.get("metrics")]
        spans = spans_of(run["row"].get("valid_metrics") or (scored[-1] if scored else {}))
        heads = np.array([span for layer in spans.values() for span in layer], dtype=float)
        if not np.isfinite(heads).any():
            continue
        title = f"Learned spans: {arm}, seed {run['seed']:.0f}"
        limit = run.get("protocol.span") or max(1.0, np.nanmax(heads))
        told = f"mean over heads {np.nanmean(heads):.1f} of {limit:,.0f} positions; {data_words([run['row']])}"
        size = {"width": 7.5, "height": max(3.6, 1.5 + 0.32 * len(spans))}
        figure, (ax,) = panels(1, 1, title=title, subtitle=told, **size)
        draw_span_cells(ax, spans, limit=limit)
        first = f" Only the first of {len(own)} seeds is drawn." if len(own) > 1 else ""
        caption = (
            f"Span of every head at the end of training, in positions, on a logarithmic scale; dark is short.{first}"
        )
        yield finish(figure, name=f"spans-{index}-{place}", title=title, caption=caption)


def _of_costs(costs: pd.DataFrame) -> Iterator[Drawing]:
    """Cost against length of context; one figure for each ground, setting of freed memory, mode, streams and data."""

    def same(row: dict) -> tuple:
        return ground(row), freed_words(row), row["mode"], row["streams"], row["data"]["sha256"]

    for key, places in by(costs.index, key=lambda place: same(costs["row"][place])).items():
        yield _costs(costs.loc[places], name=f"cost-{key[2]}-{tag(key)}")


def _costs(rows: pd.DataFrame, *, name: str) -> Drawing:
    first, look = rows["row"].iloc[0], looks(rows["variant"])
    ran = [
        b if pd.isna(s) or s == "learned" else f"{b}, {s}"
        for b, s in zip(rows["backend"], _texts(rows, "spans_from"), strict=True)
    ]
    lines = pd.concat([with_arms(some, without=OF_A_LINE) for _, some in rows.assign(ran=ran).groupby("ran")])
    lines = lines.assign(line=lines["arm"] + ", " + lines["ran"])
    styles = {one: LINES[place % len(LINES)] for place, one in enumerate(sorted(set(ran)))}
    mode = f"{first['mode']}, {count_of(first['streams'], 'stream')}"
    title, labels = f"Cost against length of context: {mode}", []
    size = {"width": 12.5, "height": max(8.2, 2.4 + 0.36 * lines["line"].nunique())}
    figure, axes = panels(2, 2, title=title, subtitle=f"{machine_words(first)}\n{data_words([first])}", **size)
    for ax, (label, key) in zip(axes, MEASURES.items(), strict=True):
        values = rows[key].dropna() if key in rows else pd.Series(dtype=float)
        divisor, unit = memory_unit(values.max()) if "memory" in label and len(values) else (1, "")
        ends, texts = [], []
        for line, own in lines.groupby("line", sort=False):
            style = look[own["variant"].iloc[0]] | {"linestyle": styles[own["ran"].iloc[0]]}
            middle = (own.groupby("length")[key].median().dropna() if key in own else values[:0]) / divisor
            ax.plot(middle.index, middle, **style, linewidth=1.4, markersize=5)
            lost = own[own["status"] == OUT]["length"]
            ax.plot(lost, [0.97] * len(lost), "x", color=style["color"], transform=ax.get_xaxis_transform())
            if len(middle):
                power = exponent(list(middle.items()))
                ends.append((middle.index[-1], middle.iloc[-1]))
                texts.append(line if power is None else f"{line}: L{f'{power:.1f}'.translate(RAISED)}")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(plain_number)
        ax.set(xlabel="length of context L [bytes]", ylabel=f"{label} [{unit}]" if unit else label)
        value_axis(ax.yaxis, list(values / divisor), log=True)
        labels.append(label_right(ax, ends, texts))
    spread(figure, labels)
    caption = (
        "Medians against the length; of each line the power of L with which its longer half grows. x at the upper "
        "edge: out of memory. Both axes are logarithmic."
    )
    return finish(figure, name=name, title=title, caption=caption)


def _texts(rows: pd.DataFrame, key: str) -> pd.Series:
    return rows[key] if key in rows else pd.Series([None] * len(rows))


def exponent(curve: list[tuple[float, float]]) -> float | None:
    """The power of the length by which ``(length, cost)`` grows over its longer half, by least squares; None of one
    length."""
    half = [(length, cost) for length, cost in curve[:-2] if length**2 >= curve[0][0] * curve[-1][0]] + curve[-2:]
    return float(np.polyfit(*np.log(half).T, 1)[0]) if len(half) > 1 and min(min(pair) for pair in half) > 0 else None


def _of_peers(peers: pd.DataFrame) -> Iterator[Drawing]:
    """Bytes per second relative to the reference; one figure for each job on equal ground, void ones apart."""

    def same(row: dict) -> tuple:
        job = (row["job"], row["streams"], row["segment"], row.get("relative_to"), row["data"]["sha256"])
        return ground(row), freed_words(row), *job, str(row.get("invalid"))

    for key, places in by(peers.index, key=lambda place: same(peers["row"][place])).items():
        yield _peers([row.dropna().to_dict() for _, row in peers.loc[places].iterrows()], name=f"peers-{tag(key)}")


def _peers(rows: list[dict], *, name: str) -> Drawing:
    first, share = rows[0]["row"], "relative_to_reference"
    against, void = first.get("relative_to") or "the reference model", first.get("invalid")
    title = f"Training speed of peers: {textwrap.shorten(first['job'], 90)}"
    about = f"{machine_words(first)}; {first['streams']} x {first['segment']} bytes a step\n{data_words([first])}"
    rows = sorted(rows, key=lambda row: (row.get(share, 0.0), row["name"]))
    figure, (ax,) = panels(1, 1, width=9.5, height=1.9 + 0.36 * len(rows), title=title, subtitle=about)
    longest = max([1.0, *(end for row in rows for end in _ends(row))])
    for place, row in enumerate(rows):
        if share not in row:
            words = (
                row["reason"] if "reason" in row else f"{row.get('bytes_per_second', 0):,.0f} B/s, without a reference"
            )
            _beside(ax, 0.0, place, textwrap.shorten(f"{row['status']}: {words}", 90, placeholder=" ..."))
            continue
        low, high = _ends(row)
        ax.barh(place, row[share], height=0.66, color=GREY, alpha=0.45)
        ax.hlines(place, low, high, color=INK, linewidth=1.6)
        speed = f", {row['bytes_per_second']:,.0f} B/s" if "bytes_per_second" in row else ""
        size = f", {row['parameters.total'] / 1e6:.2f} M parameters" if "parameters.total" in row else ""
        _beside(ax, high, place, f"{row[share]:.2f}x{size}{speed}")
    ax.axvline(1, color=INK, linestyle="--", linewidth=1)
    ax.set(
        xlim=(0, 1.7 * longest), ylim=(-0.6, len(rows) - 0.4), xlabel=f"bytes per second relative to {against} (dashed)"
    )
    ax.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(row["name"], 40)) for row in rows])
    ax.grid(axis="y", visible=False)
    if void:
        style = {"fontsize": 60, "rotation": 15, "weight": "bold", "ha": "center", "va": "center", "alpha": 0.35}
        ax.text(0.5, 0.5, "VOID", transform=ax.transAxes, color=INK, zorder=10, **style)
    caption = "Speed of the same training step; lines reach from the least to the greatest of the rounds."
    return finish(figure, name=name, title=title, caption=caption + (f" VOID: {void}." if void else ""))


def _ends(row: dict) -> tuple[float, float]:
    """The least and the greatest of the rounds' speeds; the speed itself where they were not recorded."""
    ends = [row.get("relative_to_reference", 0.0), *(row["row"].get("relative_range") or [])]
    return min(ends), max(ends)


def _beside(ax: Axes, x: float, y: float, words: str) -> None:
    ax.annotate(
        words, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=FONT_POINTS, color=INK, bbox=BOX
    )


def front_page(
    rows: Sequence[dict] | None, recalled: Sequence[dict] | None, *, name: str, split: str = "test"
) -> Drawing:
    """Left, how far each row is from the reference, with 95% intervals; right, bits of copied letters by distance.

    Args:
        rows, recalled: from ``summed``: of runs that compare, and of runs on a corpus that copies; None: without that
            panel.
        split: whose bits.
    """
    reference = next((row for row in rows or () if row["variant"] == REFERENCE), None)
    pairs = [(row, paired_with(row, reference, split)) for row in rows or () if reference and row is not reference]
    pairs = sorted(((row, pair) for row, pair in pairs if pair), key=lambda one: -one[1].mean)
    heat = [row for row in recalled or () if any(copies(one) for one in row["runs"]["row"])]
    title = (
        "Attention mechanisms: bits per byte and recall" if pairs and heat else "Recall" if heat else "Bits per byte"
    )
    size = {"width": 6.2 * (bool(pairs) + bool(heat)), "height": 1.6 + 0.27 * max(len(pairs), len(heat), 6)}
    with styled():
        figure, axes = panels(1, bool(pairs) + bool(heat) or 1, title=title, **size)
        if pairs:
            _draw_pairs(axes[0], pairs, f"{split} bits per byte, less {REFERENCE}'s (95% interval)")
        if heat:
            _draw_recall(axes[-1], heat)
        told = f"Left: difference from {REFERENCE} over equal seeds; below 0 is better. " if pairs else ""
        told += "Mean bits of letters that repeat the one so many bytes before; 4 without memory." if heat else ""
        return finish(figure, name=name, title=title, caption=told)


def _draw_pairs(ax: Axes, pairs: list, label: str) -> None:
    look = looks(row["variant"] for row, _ in pairs)
    for place, (row, pair) in enumerate(pairs):
        width = pair.half_width or 0.0
        ax.errorbar(pair.mean, place, xerr=width, **look[row["variant"]], markersize=6, linewidth=1.2, capsize=2)
        _beside(ax, pair.mean + width, place, f"{row['arm']}  {pair.mean:+.3f}")
    ax.axvline(0, color=INK, linestyle="--", linewidth=1)
    low, high = ax.get_xlim()
    ax.set(xlim=(low, high + 0.55 * (high - low)), ylim=(-0.7, len(pairs) - 0.3), xlabel=label, yticks=[])
    ax.grid(axis="y", visible=False)


def _draw_recall(ax: Axes, rows: list[dict]) -> None:
    distances = sorted({distance for row in rows for one in row["runs"]["row"] for distance in copies(one)})
    cells = np.array([[row.get(f"valid_bits_per_copy.{distance}", np.nan) for distance in distances] for row in rows])
    order = np.argsort(np.nan_to_num(cells, nan=4.0).sum(axis=1))
    ax.imshow(cells[order], cmap="Greys", vmin=0, vmax=5, aspect="auto", interpolation="nearest")
    for (y, x), bits in np.ndenumerate(cells[order]):
        if np.isfinite(bits):
            ax.text(
                x,
                y,
                f"{bits:.1f}",
                ha="center",
                va="center",
                fontsize=FONT_POINTS,
                color="white" if bits > 2.5 else INK,
            )
    ax.set_xticks(range(len(distances)), [f"{distance:,}" for distance in distances])
    ax.set_yticks(range(len(rows)), [rows[place]["arm"] for place in order])
    ax.set_xlabel("distance in bytes; in the cells, bits of a copied letter")
    ax.grid(visible=False)
