"""Writes README's table and figure, ``docs/results.md`` and the table of ``docs/gpu.md`` from the
rows in ``bench/results``: ``python -m bench.front_page``.

It replaces the text between two markers in each page. ``tests/bench/test_front_page.py``
compares the text with the rows."""

import argparse
from pathlib import Path

from bench.published import gpu_sections, readme_table, results_sections
from bench.published_runs import PublishedRuns, text_file
from bench.tables import drawing
from bench.tables.compare import VARIANTS
from bench.text_figures import draw_costs, draw_recall, draw_state, recall_curves
from harness.cache import write_atomically
from harness.compose.cli import run_command
from harness.source import ROOT

RESULTS = "bench/results"
README = "README.md"
PAGE = "docs/results.md"
GPU_PAGE = "docs/gpu.md"
FIGURE = "docs/front_page.png"
BYTES_FIGURE = "docs/text_bytes.png"
BEGIN = "<!-- python -m bench.front_page writes from here -->"
END = "<!-- to here -->"


def main() -> None:
    """Write the pages and figures; ValueError for a page without markers."""
    folder = ROOT / RESULTS
    for name, block in blocks(folder).items():
        path = ROOT / name
        write_atomically(
            path, between_markers(path.read_text(encoding="utf-8"), block, name=name).encode()
        )
    write_atomically(ROOT / FIGURE, figure_png(folder))
    if (folder / "text_bytes.jsonl").exists():
        write_atomically(ROOT / BYTES_FIGURE, bytes_png(folder))


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated text of each page."""
    return {
        README: readme_table(folder),
        PAGE: results_sections(folder),
        GPU_PAGE: gpu_sections(folder / "gpu.jsonl"),
    }


def between_markers(page: str, block: str, *, name: str) -> str:
    """Return ``page`` with ``block`` as the text between its markers; ValueError naming the page if
    it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{name}: must have the lines {BEGIN} and {END}")
    return "\n\n".join([before + begin, block, end + after])


def figure_png(folder: Path) -> bytes:
    """Return README's figure as PNG: bits per byte against carried state, and accuracy of recall
    against bytes of training."""
    with drawing.styled():
        figure, axes = drawing.panels(1, 2, title="", width=11.2, height=5.2)
        draw_state(axes[0], PublishedRuns(text_file(folder)).finished, VARIANTS["readme"])
        draw_recall(axes[1], recall_curves(folder / "recall_by_key.jsonl"))
        return drawing.png_of(figure)


def bytes_png(folder: Path) -> bytes:
    """Return the figure of ``docs/results.md`` as PNG: bits per byte against training FLOPs,
    seconds and state."""
    with drawing.styled():
        figure, axes = drawing.panels(1, 3, title="", width=11.2, height=4.2)
        draw_costs(axes, PublishedRuns(folder / "text_bytes.jsonl").finished)
        return drawing.png_of(figure)


if __name__ == "__main__":
    about = __doc__.partition("\n\n")[0]
    argparse.ArgumentParser(prog="python -m bench.front_page", description=about).parse_args()
    run_command(main)
