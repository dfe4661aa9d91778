"""Panels of the published figures: bits per byte against state and other costs, and recall
against training bytes."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import pandas as pd

from bench.published import LEARNED_ACCURACY
from bench.published_runs import STATE, TEST, accuracy_curve, pooled_bits, published_means
from bench.tables.compare import VARIANTS
from bench.tables.drawing import (
    FONT_POINTS,
    INK,
    LINE_STYLES,
    SPARE_COLOURS,
    add_legend,
    scale_axis,
    variant_styles,
)
from bench.tables.estimate import (
    BETTER,
    MIN_SEEDS,
    TIE,
    TOO_FEW,
    WORSE,
    estimate_mean,
)
from harness.record.cells import KIB
from harness.record.rows import read_rows

COSTS = {
    "training FLOPs": "training_flops",
    "seconds of training": "seconds",
    "carried state, KiB": STATE,
}
"""The column of the frame for each panel of bits against bytes."""
CURVES = VARIANTS["recall"]
RECALL_SEQUENCE = 64  # bytes of a sequence with 8 keys
COUNTING = 0.33  # share of its answers that are the commonest digit of the sequence
VERBS = {
    BETTER: "beats",
    WORSE: "is worse than",
    TIE: "is not separated from",
    TOO_FEW: "has too few seeds to compare with",
}
TITLE_WIDTH = 56  # characters
LABEL_GAP = 0.034  # smallest vertical distance of labels, as a share of the axis


def draw_state(ax, runs: pd.DataFrame, names: Collection[str]) -> None:
    """Draw a labelled point with an interval for each of the mechanisms ``names``. The interval is
    that of the difference from the baseline, divided by the square root of 2, which is the share
    of one of two means."""
    pooled = pooled_bits(runs)
    means = published_means(runs)
    points = {}
    for row in (row for row in means if row["variant"] in names):
        x = row[STATE] / KIB
        y = row[TEST]
        single = estimate_mean([0.0] * row["n"], pooled).half_width  # of a row without a baseline
        half_width = (row.get("difference.half_width", single) or 0.0) / math.sqrt(2)
        ax.errorbar(
            x,
            y,
            yerr=half_width,
            fmt="o",
            color=INK,
            markerfacecolor=INK if row["n"] >= MIN_SEEDS else "white",
            markersize=4.5,
            capsize=2,
            linewidth=1,
        )
        points[row["variant"]] = x, y
    scale_axis(ax.xaxis, [x for x, _ in points.values()], log=True)
    low, high = ax.get_ylim()
    points = dict(sorted(points.items(), key=lambda item: item[1][1]))
    heights = label_heights([y for _, y in points.values()], gap=LABEL_GAP * (high - low))
    for (name, point), height in zip(points.items(), heights, strict=True):
        ax.annotate(
            name,
            point,
            xytext=(1.04, height),
            textcoords=ax.get_yaxis_transform(),
            va="center",
            fontsize=FONT_POINTS,
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
        )
    label = f"carried state, KiB (hollow: fewer than {MIN_SEEDS} seeds)"
    ax.set(xlabel=label, ylabel="bits per byte on test (lower is better)")
    ax.set_title(textwrap.fill(state_finding(means, names), TITLE_WIDTH), loc="left")


def label_heights(heights: Sequence[float], *, gap: float) -> list[float]:
    """Return heights with distances of at least ``gap``, for ascending ones: the means of those
    that move up only and of those that move down only."""
    up = accumulate(heights, lambda below, height: max(height, below + gap))
    down = accumulate(reversed(heights), lambda above, height: min(height, above - gap))
    return [(high + low) / 2 for high, low in zip(up, reversed([*down]), strict=True)]


def state_finding(means: Sequence[dict], names: Collection[str]) -> str:
    """Return how the one of the mechanisms ``names`` that has the least state compares with its
    baseline."""
    compared = [row for row in means if "difference" in row and row["variant"] in names]
    least = min(compared, key=lambda row: row[STATE])
    name = least["variant"]
    baseline = least["baseline"]
    verb = VERBS[least["verdict"]]
    (state,) = (row[STATE] for row in means if row["variant"] == baseline)
    return f"With {least[STATE] / state:.0%} of its state, {name} {verb} {baseline}"


def recall_curves(path: Path) -> dict[str, pd.DataFrame]:
    """Return accuracy of answers with 8 keys: for each of ``CURVES`` that has finished runs, a row
    per megabytes of training and a column per seed, at the learning rate with the most seeds and,
    of these, the highest mean accuracy."""
    frames: dict[str, list[pd.DataFrame]] = {}
    for row in read_rows(path):
        summary = row["summary"]
        sequence = summary["protocol"].get("sequence")
        if sequence != RECALL_SEQUENCE or summary["status"] != "finished":
            continue
        variant = row["record"][0]["config"]["variant"]
        attention = variant["attention"]
        name = variant["name"].removesuffix("_shift")
        name += ", key_shift" * bool(attention.get("key_shift"))
        name += ", filter_bytes=1" * (attention.get("filter_bytes") == 1)
        curve = accuracy_curve(row).reset_index()
        curve = curve.assign(rate=str(variant["lr_scale"]), seed=summary["seed"])
        frames.setdefault(name, []).append(curve)
    curves = {}
    for name, parts in frames.items():
        runs = pd.concat(parts)
        rates = runs.groupby("rate").agg({"seed": "nunique", "accuracy": "mean"})
        rate = rates.sort_values(["seed", "accuracy"]).index[-1]
        curves[name] = runs[runs["rate"] == rate].pivot(
            index="megabytes", columns="seed", values="accuracy"
        )
    return curves


def draw_recall(ax, curves: Mapping[str, pd.DataFrame]) -> None:
    """Draw a line for each seed and a thick one for the median of each curve, and name curves that
    are missing. A dotted line is the share that ``COUNTING`` reaches."""
    for colour, dashes, name in zip((INK, *SPARE_COLOURS), LINE_STYLES, CURVES, strict=False):
        if name in curves:
            ax.plot(curves[name], color=colour, linewidth=0.6, alpha=0.6)
            label = f"{name} (n={curves[name].shape[1]})"
            median = curves[name].median(axis=1)
            ax.plot(median, dashes, color=colour, linewidth=2, label=label)
        else:
            ax.plot([], dashes, color=colour, label=f"{name}: no row yet")
    ax.axhline(COUNTING, color="0.5", linestyle=":", linewidth=1)
    ax.legend(loc="lower right")
    ax.set(
        xlabel="megabytes of training",
        ylabel="accuracy of recall, 8 keys",
        xlim=(0, None),
        ylim=(0, 1.02),
    )
    ax.set_title(textwrap.fill(recall_finding(curves), TITLE_WIDTH), loc="left")


def recall_finding(curves: Mapping[str, pd.DataFrame]) -> str:
    """Say after how many bytes the median seed of plain attention recalls, with and without
    shifted keys: the first two of ``CURVES``."""
    if not {*CURVES[:2]} <= {*curves}:
        return "Recall by key: rows are missing (sweep=recall_by_key)"
    without, shifted = (_when_learned(curves[name].median(axis=1)) for name in CURVES[:2])
    return f"The median seed of attention recalls {shifted} with shifted keys, {without} without"


def _when_learned(accuracy: pd.Series) -> str:
    learned = accuracy.index[accuracy >= LEARNED_ACCURACY]
    if len(learned):
        return f"after {learned[0]:.1f} MB"
    return f"not within {accuracy.index[-1]:.1f} MB"


def draw_costs(axes, runs: pd.DataFrame) -> None:
    """Draw bits per byte of each mechanism against ``COSTS``, a point for each number of
    training bytes."""
    runs = runs.assign(**{STATE: runs[STATE] / KIB})
    styles = variant_styles(runs["variant"])
    for ax, (label, column) in zip(axes, COSTS.items(), strict=True):
        for name, group in runs.groupby("variant"):
            means = group.groupby("budget.bytes")[[TEST, column]].mean()
            ax.plot(means[column], means[TEST], **styles[name], label=name)
        scale_axis(ax.xaxis, runs[column].dropna().tolist(), log=True)
        ax.set(xlabel=label, ylabel="bits per byte on test")
    megabytes = ", ".join(f"{n / 1e6:g}" for n in sorted({*runs["budget.bytes"]}))
    axes[0].set_title(f"Separate runs of {megabytes} MB", loc="left")
    add_legend(axes[-1])
