"""Panels of the published figures: bits per byte against state and other costs, and recall against training bytes."""

import math
import textwrap
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from bench.published_runs import baseline_of, by_variant, differences, scores_by_seed
from bench.report.compare import VARIANTS
from bench.report.drawing import FONT_POINTS, INK, SPARE_COLOURS, add_legend, scale_axis, variant_styles
from bench.report.uncertainty import BETTER, MIN_SEEDS, TIE, WORSE, estimate_mean, residual_mean_square
from bench.results_page import KIB
from harness.record.rows import read_rows

COSTS = {"training FLOPs": "training_flops", "seconds of training": "seconds", "carried state, KiB": "state"}
"""The column of ``read_runs`` for each panel of bits against bytes."""
CURVES = VARIANTS["recall"]
RECALL_SEQUENCE, LEARNED = 64, 0.9  # bytes of a sequence with 8 keys; accuracy from which recall counts as learned
VERBS = {BETTER: "beats", WORSE: "is worse than", TIE: "ties with"}
TITLE_WIDTH = 48  # characters
LABEL_GAP = 0.034  # smallest vertical distance of labels, as a share of the axis


def draw_state(ax, runs: pd.DataFrame, names: Collection[str]) -> None:
    """Draw a labelled point with an interval for each of the mechanisms ``names``. The interval is that of the
    difference from the baseline, divided by the square root of 2, which is the share of one of two means."""
    estimates, pooled = differences(runs), residual_mean_square(scores_by_seed(runs))
    points = {}
    for name, group in by_variant(runs[runs["variant"].isin(names)]):
        half_width = estimate_mean([0.0] * len(group), pooled).half_width  # by the pooled variance
        if name in estimates and estimates[name].half_width:
            half_width = estimates[name].half_width / math.sqrt(2)
        x, y = group["state"].mean() / KIB, group["test"].mean()
        style = {"markersize": 4.5, "capsize": 2, "linewidth": 1, "color": INK}
        fill = INK if len(group) >= MIN_SEEDS else "white"
        ax.errorbar(x, y, yerr=half_width, fmt="o", markerfacecolor=fill, **style)
        points[name] = x, y
    scale_axis(ax.xaxis, [x for x, _ in points.values()], log=True)
    low, high = ax.get_ylim()
    at = -math.inf
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1][1]):
        at = max(y, at + LABEL_GAP * (high - low))
        arrow = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6}
        place = {"xytext": (1.04, at), "textcoords": ax.get_yaxis_transform(), "va": "center"}
        ax.annotate(name, (x, y), fontsize=FONT_POINTS, arrowprops=arrow, annotation_clip=False, **place)
    ax.set(xlabel=f"carried state, KiB (hollow: fewer than {MIN_SEEDS} seeds)")
    ax.set(ylabel="bits per byte on test (lower is better)")
    ax.set_title(textwrap.fill(state_finding(runs, names), TITLE_WIDTH), loc="left")


def state_finding(runs: pd.DataFrame, names: Collection[str]) -> str:
    """How the one of the mechanisms ``names`` that has the least state compares with its baseline."""
    state, estimates = runs.groupby("variant")["state"].mean(), differences(runs)
    name = state[[name for name in estimates if name in names]].idxmin()
    baseline, verdict = baseline_of(name), estimates[name].verdict
    share = f"With {state[name] / state[baseline]:.0%} of its state, {name}"
    return f"{share} {VERBS[verdict]} {baseline}" if verdict else f"{share} against {baseline}: too few seeds"


def recall_curves(path: Path) -> dict[str, dict[int, pd.Series]]:
    """Accuracy of answers with 8 keys by megabytes of training: of each curve and seed, at the learning rate with the
    best mean of final accuracies."""
    curves: dict[str, dict[str, dict[int, pd.Series]]] = {}
    for row in read_rows(path):
        summary, record = row["summary"], row["record"]
        if summary["status"] != "finished" or summary["protocol"].get("sequence") != RECALL_SEQUENCE:
            continue
        attention = record[0]["config"]["variant"]["attention"]
        name = summary["variant"].removesuffix("_shift") + ", key_shift" * bool(attention.get("key_shift"))
        name += ", filter_bytes=1" * (attention.get("filter_bytes") == 1)
        rate = str(record[0]["config"]["variant"].get("lr_scale"))
        scored = [entry for entry in record if "answer_accuracy" in entry and not entry.get("final")]
        accuracy = {entry["bytes_seen"] / 1e6: entry["answer_accuracy"]["all"] for entry in scored}
        curves.setdefault(name, {}).setdefault(rate, {})[summary["seed"]] = pd.Series(accuracy)
    best = {}
    for name in CURVES:
        rates = curves.get(name, {}).values()
        if rates:
            best[name] = max(rates, key=lambda seeds: pd.Series([run.iloc[-1] for run in seeds.values()]).mean())
    return best


def draw_recall(ax, curves: dict[str, dict[int, pd.Series]]) -> None:
    """Draw a line for each seed and a thick one for the mean of each curve, and name curves that are missing."""
    for colour, name in zip((INK, *SPARE_COLOURS), CURVES, strict=False):
        runs = pd.DataFrame(curves.get(name, {}))
        for seed in runs:
            ax.plot(runs.index, runs[seed], color=colour, linewidth=0.6, alpha=0.6)
        if len(runs):
            ax.plot(runs.index, runs.mean(axis=1), color=colour, linewidth=2, label=f"{name} (n={runs.shape[1]})")
    if missing := [name for name in CURVES if name not in curves]:
        text = "\n".join(["no rows yet of", *missing, "(bench.evidence, sweep=recall_by_key)"])
        ax.text(0.5, 0.5, text, ha="center", va="center", color="0.35", transform=ax.transAxes)
    if curves:
        ax.legend(loc="center right", edgecolor="none", fontsize=FONT_POINTS)
    ax.set(xlabel="megabytes of training", ylabel="accuracy of recall, 8 keys", ylim=(0, 1.02))
    ax.set_title(textwrap.fill(recall_finding(curves), TITLE_WIDTH), loc="left")


def recall_finding(curves: dict[str, dict[int, pd.Series]]) -> str:
    """After how many bytes plain attention recalls, with and without shifted keys: the first two of ``CURVES``."""
    texts = []
    for name in CURVES[1::-1]:
        if name not in curves:
            return "Recall by key: rows are missing"
        mean = pd.DataFrame(curves[name]).mean(axis=1)
        learned = mean.index[mean >= LEARNED]
        texts.append(f"after {learned[0]:.1f} MB" if len(learned) else f"not within {mean.index[-1]:.1f} MB")
    return f"Attention recalls {texts[0]} with shifted keys, {texts[1]} without"


def draw_costs(axes, runs: pd.DataFrame) -> None:
    """Draw bits per byte of each mechanism against ``COSTS``, a point for each number of training bytes."""
    styles = variant_styles(set(runs["variant"]))
    for ax, (label, column) in zip(axes, COSTS.items(), strict=True):
        divisor = KIB if "KiB" in label else 1
        for name, group in runs[runs["status"] == "finished"].groupby("variant"):
            means = group.groupby(group["budget"].astype(int))[["test", column]].mean()
            ax.plot(means[column] / divisor, means["test"], **styles[name], linewidth=1.2, markersize=5, label=name)
        scale_axis(ax.xaxis, (runs[column].dropna() / divisor).tolist(), log=True)
        ax.set(xlabel=label, ylabel="bits per byte on test")
    megabytes = ", ".join(f"{budget / 1e6:g}" for budget in sorted(set(runs["budget"].astype(int))))
    axes[0].set_title(f"Separate runs of {megabytes} MB", loc="left")
    add_legend(axes[-1])
