"""Figures that commands add to a run folder."""

import io
from pathlib import Path

from harness.cache import write_whole
from harness.record.drawing import panels

COLOUR = "#0072B2"  # of Okabe and Ito's, told apart with any colour vision


def draw_context(curve: list[dict], *, path: Path, label: str) -> Path:
    """Bits per byte against bytes of context: rows ``{from_bytes, to_bytes, bits_per_byte}``, drawn as steps.

    Args:
        label: the run, and after a colon its data. A dollar is a dollar: nothing in it is a formula.
    """
    run, _, data = label.replace("$", r"\$").partition(": ")
    figure, (ax,) = panels(1, 1, width=7.0, height=4.2, title=run, subtitle=data)
    for point in curve:
        ax.hlines(point["bits_per_byte"], point["from_bytes"], point["to_bytes"] + 1, color=COLOUR, linewidth=2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("bytes of context")
    ax.set_ylabel("bits per byte")
    return save(figure, path)


def save(figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_whole(path, png.getbuffer())
    return path
