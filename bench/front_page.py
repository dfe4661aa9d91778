"""Writes README's table and picture and ``docs/results.md`` from ``bench/results``: ``python -m bench.front_page``
replaces the text between two markers of each page. A test compares the text with the rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench import results_page
from bench.report.compare import VARIANTS
from bench.results_page import REFERENCE, best_first, markdown, read_runs
from harness.cache import write_atomically
from harness.compose.cli import run_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS, README, PAGE, PICTURE = "bench/results", "README.md", "docs/results.md", "docs/front_page.png"
BEGIN, END = "<!-- python -m bench.front_page writes from here -->", "<!-- to here -->"
BASELINES = {"order-3": "order-3 byte counts", "xz": "xz -9e", "bzip2": "bzip2 -9"}
LONG = 4096
FARTHEST = 0.4
"""Bits per byte at which the picture's axis ends; a larger difference is an arrow with its number."""
TITLES = ["mechanism", "test, bits per byte", f"Δ vs. {REFERENCE}, paired", "recall reach, bytes", "MFLOP/byte at 512"]
TITLES += [f"at {LONG:,}", "state, KiB", "parameters"]


def main() -> None:
    """Write both pages and the picture; ValueError for a page without markers."""
    folder = ROOT / RESULTS
    for name, block in {README: readme_table(folder), PAGE: results_page.sections(folder)}.items():
        path = ROOT / name
        write_atomically(path, between_markers(path.read_text(encoding="utf-8"), block, name=name).encode())
    if (folder / "front_page.jsonl").exists():
        write_atomically(ROOT / PICTURE, picture(folder))


def between_markers(page: str, block: str, *, name: str) -> str:
    """The page with ``block`` between its markers; ValueError without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{name}: must have the lines {BEGIN} and {END}")
    return "\n\n".join([before + begin, block, end + after])


def readme_table(folder: Path) -> str:
    """A row for each mechanism of ``front``, for byte counts and for compressors, the best on test first."""
    runs, recall = read_runs(folder / "front_page.jsonl"), read_runs(folder / "recall.jsonl")
    if not len(runs):
        return "These runs are under way: so far [the learning rates](docs/results.md#learning-rates) are chosen."
    long_flops, reach = results_page.flops_at(folder / "cost.jsonl", LONG), results_page.reaches(recall)
    rows = []
    for name, same in best_first(runs[runs["variant"].isin(VARIANTS["front"])]):
        quality = [results_page.interval(same["test"]), results_page.difference(runs, name), reach.get(name, "")]
        costs = ["" if n is None else f"{n / 1e6:.2f}" for n in (same["flops"].mean(), long_flops.get(name))]
        costs += [f"{same['state'].mean() / results_page.KIB:,.0f}", f"{same['parameters'].iloc[0]:,.0f}"]
        rows.append((same["test"].mean(), f"`{name}`", *quality, *costs))
    packed = next(iter(runs["compressors"].dropna()), {})
    rows += [(packed[key], label, f"{packed[key]:.4f}", *[""] * 6) for key, label in BASELINES.items() if key in packed]
    return markdown(TITLES, [row[1:] for row in sorted(rows)])


def picture(folder: Path) -> bytes:
    """A PNG of each mechanism's difference from the reference, with 95% intervals, and bits of a copied byte by
    distance."""
    from bench.report import drawing  # late: matplotlib

    runs, recall = read_runs(folder / "front_page.jsonl"), read_runs(folder / "recall.jsonl")
    names = [name for name, _ in best_first(runs) if name != REFERENCE and results_page.paired_with(runs, name)]
    heat = results_page.copies(recall)
    with drawing.styled():
        panels = bool(names) + bool(len(heat)) or 1
        height = 1.4 + 0.27 * max(len(names), len(heat), 8)
        figure, axes = drawing.panels(1, panels, title="", width=5.6 * panels, height=height)
        if names:
            _draw_differences(axes[0], runs, names[::-1])
        if len(heat):
            _draw_recall(axes[-1], heat)
        return drawing.png_of(figure)


def _draw_differences(ax, runs: pd.DataFrame, names: Sequence[str]) -> None:
    from bench.report.drawing import FONT_POINTS, INK

    text = {"textcoords": "offset points", "va": "center", "fontsize": FONT_POINTS}
    text["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line at 0
    for row, name in enumerate(names):
        pair = results_page.paired_with(runs, name)
        if pair.mean > FARTHEST:
            ax.plot(FARTHEST, row, ">", color=INK, markersize=5)
            ax.annotate(f"{name}, {pair.mean:+.2f}", (FARTHEST, row), (-7, 0), ha="right", **text)
            continue
        fill = INK if pair.half_width else "white"
        marker = {"fmt": "o", "color": INK, "markerfacecolor": fill, "markersize": 4.5, "capsize": 2, "linewidth": 1.2}
        ax.errorbar(pair.mean, row, xerr=pair.half_width or None, **marker)
        ax.annotate(name, (pair.mean + (pair.half_width or 0.0), row), (6, 0), **text)
    ax.axvline(0, color=INK, linestyle="--", linewidth=1, zorder=0)
    left, right = ax.get_xlim()
    ax.set_xlim(left, min(right + 0.5 * (right - left), FARTHEST + 0.02))  # room for names
    ax.set(yticks=[], ylim=(-0.7, len(names) - 0.3))
    ax.set_xlabel(f"test bits per byte minus {REFERENCE}'s (left is better; hollow: one seed)")
    ax.grid(axis="y", visible=False)


def _draw_recall(ax, heat: pd.DataFrame) -> None:
    """Draw bits of a copied byte: a row per mechanism, a column per distance in bytes."""
    from bench.report.drawing import FONT_POINTS, INK

    ax.imshow(heat.to_numpy(), cmap="Greys", vmin=0, vmax=5, aspect="auto", interpolation="nearest")
    for (y, x), bits in np.ndenumerate(heat.to_numpy()):
        if np.isfinite(bits):
            colour = "white" if bits > 2.5 else INK
            ax.text(x, y, f"{bits:.1f}", ha="center", va="center", fontsize=FONT_POINTS, color=colour)
    ax.set_xticks(range(heat.shape[1]), [f"{distance:,}" for distance in heat.columns])
    ax.set_yticks(range(len(heat)), list(heat.index))
    ax.set_xlabel("bits of a byte copied from so many bytes back")
    ax.grid(visible=False)


if __name__ == "__main__":
    run_command(main)
