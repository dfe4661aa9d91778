"""Writes README's table and figure, ``docs/results.md`` and the table of ``docs/gpu.md`` from the rows in
``bench/results``: ``python -m bench.front_page``.

It replaces the text between two markers in each page. ``tests/test_front_page.py`` compares the text with the rows."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench import gpu_page, results_page
from bench.report import drawing
from bench.report.compare import VARIANTS
from bench.report.drawing import FONT_POINTS, INK
from bench.results_page import REFERENCE, by_variant, markdown_table, read_runs
from harness.cache import write_atomically
from harness.compose.cli import run_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS, README, PAGE, GPU_PAGE = "bench/results", "README.md", "docs/results.md", "docs/gpu.md"
FIGURE, SKILLS_FIGURE = "docs/front_page.png", "docs/skills.png"
BEGIN, END = "<!-- python -m bench.front_page writes from here -->", "<!-- to here -->"
LONG_SPAN = 4096
NO_MEMORY = "(no memory)"  # the predictor of skill_baselines.yaml up to whose bits the figure is shaded
HEADINGS = ["mechanism", "test, bits per byte", f"Δ vs. {REFERENCE} (sorted)", "copy reach, bytes"]
HEADINGS += ["MFLOP/byte, span 512", f"span {LONG_SPAN:,}", "state at 512, KiB", "parameters"]


def main() -> None:
    """Write the pages and figures; ValueError for a page without markers."""
    folder = ROOT / RESULTS
    for name, block in blocks(folder).items():
        path = ROOT / name
        write_atomically(path, between_markers(path.read_text(encoding="utf-8"), block, name=name).encode())
    write_atomically(ROOT / FIGURE, figure_png(folder))
    if (folder / "skills.jsonl").exists():
        write_atomically(ROOT / SKILLS_FIGURE, skills_png(folder))


def blocks(folder: Path) -> dict[str, str]:
    """The generated text of each page."""
    pages = {README: readme_table(folder), PAGE: results_page.sections(folder)}
    return pages | {GPU_PAGE: gpu_page.gpu_sections(folder / "gpu.jsonl")}


def between_markers(page: str, block: str, *, name: str) -> str:
    """``page`` with ``block`` as the text between its markers; ValueError naming the page if it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{name}: must have the lines {BEGIN} and {END}")
    return "\n\n".join([before + begin, block, end + after])


def readme_table(folder: Path) -> str:
    """The Markdown of README's table: a row for each mechanism in ``readme`` of ``variants.yaml`` and each compressor,
    the best on test first."""
    runs, copies = read_runs(folder / "front_page.jsonl"), read_runs(folder / "recall.jsonl")
    long_flops, reach = results_page.flops_at(folder / "cost.jsonl", LONG_SPAN), results_page.copy_reach(copies)
    rows = []
    for name, group in by_variant(runs[runs["variant"].isin(VARIANTS["readme"])]):
        difference = results_page.estimate_text(results_page.reference_difference(runs, name))
        row = [f"`{name}`", results_page.mean_text(group["test"]), difference, reach.get(name, "")]
        flops = (group["flops"].mean(), long_flops.get(name))
        row += ["" if n is None else f"{n / 1e6:.2f}" for n in flops]
        row += [f"{group['state'].mean() / results_page.KIB:,.0f}", f"{group['parameters'].iloc[0]:,.0f}"]
        rows.append(row)
    results_page.insert_compressors(rows, runs, names=("bzip2", "xz", "order-5"), column=1)
    return markdown_table(HEADINGS, rows)


def figure_png(folder: Path) -> bytes:
    """README's figure as PNG: differences from the reference, and bits of a copied byte by distance."""
    runs, copies = read_runs(folder / "front_page.jsonl"), read_runs(folder / "recall.jsonl")
    runs, copies = (frame[frame["variant"].isin(VARIANTS["readme"])] for frame in (runs, copies))
    names = [name for name, _ in by_variant(runs) if results_page.reference_difference(runs, name)]
    copy_bits = results_page.copy_bits(copies)
    with drawing.styled():
        height = 1.4 + 0.27 * max(len(names), len(copy_bits), 8)
        figure, axes = drawing.panels(1, 2, title="", width=11.2, height=height)
        _draw_differences(axes[0], runs, names[::-1])
        label = "bits of a copied byte, by the distance it is copied from in bytes"
        _draw_heat_map(axes[1], copy_bits.rename(columns="{:,}".format), darkest=4, label=label)
        return drawing.png_of(figure)


def skills_png(folder: Path) -> bytes:
    """The figure of ``docs/results.md`` as PNG: bits of an answer by skill."""
    bits = results_page.skill_bits(read_runs(folder / "skills.jsonl"))
    with drawing.styled():
        figure, (ax,) = drawing.panels(1, 1, title="", width=9.6, height=1.4 + 0.27 * len(bits))
        label = f"bits of an answer; a column is shaded from 0 to its number of {NO_MEMORY}"
        _draw_heat_map(ax, bits, darkest=bits.loc[NO_MEMORY], label=label)
        return drawing.png_of(figure)


def _draw_differences(ax, runs: pd.DataFrame, names: Sequence[str]) -> None:
    """Draw a point with an error bar for each mechanism, from the bottom to the top."""
    text_style = {"textcoords": "offset points", "va": "center", "fontsize": FONT_POINTS}
    text_style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # so that no line at 0 crosses a name
    style = {"fmt": "o", "color": INK, "markersize": 4.5, "capsize": 2, "linewidth": 1.2}
    for y, name in enumerate(names):
        difference = results_page.reference_difference(runs, name)
        half_width = difference.half_width or 0.0
        fill = INK if half_width else "white"
        ax.errorbar(difference.mean, y, xerr=half_width or None, markerfacecolor=fill, **style)
        ax.annotate(name, (difference.mean + half_width, y), (6, 0), **text_style)
    ax.axvline(0, color=INK, linestyle="--", linewidth=1, zorder=0)
    x_min, x_max = ax.get_xlim()
    ax.set_xlim(x_min, x_max + 0.5 * (x_max - x_min))  # room for names
    ax.set(yticks=[], ylim=(-0.7, len(names) - 0.3))
    ax.set_xlabel(f"test bits per byte minus {REFERENCE}'s (left is better; hollow: one seed)")
    ax.grid(axis="y", visible=False)


def _draw_heat_map(ax, bits: pd.DataFrame, *, darkest: float | pd.Series, label: str) -> None:
    """Draw bits as a heat map, a row per mechanism or predictor. ``darkest``: bits of the darkest shade, or by column."""
    shades = (bits / darkest).to_numpy()
    ax.imshow(shades, cmap="Greys", vmin=0, vmax=1.25, aspect="auto", interpolation="nearest")
    for (y, x), shade in np.ndenumerate(shades):
        if np.isfinite(shade):
            style = {"fontsize": FONT_POINTS, "color": "white" if shade > 0.6 else INK}
            ax.text(x, y, f"{bits.iat[y, x]:.1f}", ha="center", va="center", **style)
    ax.set_xticks(range(bits.shape[1]), [re.sub(r"_|(?<=,) ", "\n", column) for column in bits.columns])
    ax.set_yticks(range(len(bits)), list(bits.index))
    ax.set_xlabel(label)
    ax.grid(visible=False)


if __name__ == "__main__":
    run_command(main)
