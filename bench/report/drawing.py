"""Learning curves, figures and their files: for the report, ``bench.inspect`` and ``bench.evaluate``.

Scores on the way are often of a shorter prefix of the valid split than the last one: they are joined by a line, and the
last stands apart. matplotlib's object interface only: no window system, no global state, nothing left behind in a sweep.
"""

import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from harness.cache import write_whole

GREY, FAINT, INK = "#7F7F7F", "0.9", "0.15"
CONTEXT_COLOUR = "#0072B2"  # of Okabe and Ito's, told apart with any colour vision
BINS = 200
"""Most points of one run's training curve."""
SETTLED = 0.2
"""Fraction of the bytes before which bits may leave the frame above: the fall from 8 bits would flatten the rest."""


def panels(
    rows: int, columns: int, *, width: float, height: float, title: str, subtitle: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` x ``columns`` axes, row by row.

    Args:
        width, height: of the whole, in inches.
        title, subtitle: written above; the second names the data or the machine inside the picture itself.
    """
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    renderer, top = FigureCanvasAgg(figure).get_renderer(), height - 0.08
    for text, style in ((title, {"fontsize": 13, "color": INK}), (subtitle, {"fontsize": 9, "color": "0.35"})):
        note = figure.text(0.5, top / height, text, ha="center", va="top", wrap=True, **style)
        top -= note.get_window_extent(renderer).height / figure.dpi + 0.06 * bool(text)
    figure.get_layout_engine().set(rect=(0, 0, 1, top / height))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(color=FAINT, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def count_axis(axis, *, unit: str = "") -> None:
    """An axis of large counts, not logarithmic, with ticks like ``2.5 M``; at most six of them, so that they never touch."""
    axis.set_major_formatter(EngFormatter(unit=unit, sep=" "))
    axis.set_major_locator(MaxNLocator(6))


def points(rows: Iterable[dict], *, kind: str) -> list[tuple[float, float]]:
    """Bytes seen and bits per byte of rows on the way, ``train`` or ``valid``."""
    return [
        (row["bytes_seen"], bits)
        for row in rows
        if row["kind"] == kind
        and not row.get("final")
        and "bytes_seen" in row
        and (bits := row.get("bits_per_byte")) is not None
        and math.isfinite(bits)
    ]


def draw_bits(
    ax: Axes,
    rows: list[dict],
    *,
    last: tuple[float, float | None],
    colour: str,
    marker: str = "o",
    line: str = "-",
) -> None:
    """One run's learning curve: training thin, scores on the way joined, the last a large mark.

    Args:
        last: bytes seen and bits per byte of the last score, if there is one.
    """
    if train := points(rows, kind="train"):
        at, bits = np.array([part.mean(axis=0) for part in np.array_split(train, min(BINS, len(train)))]).T
        ax.plot(at, bits, color=colour, linewidth=0.6, alpha=0.45, label="train")
    if valid := points(rows, kind="valid"):
        at, bits = np.array(valid).T
        style = {"linewidth": 1.4, "linestyle": line, "marker": ".", "markersize": 4}
        ax.plot(at, bits, color=colour, **style, alpha=0.9, label="valid, on the way")
    at, bits = last
    if bits is not None:
        style = {"marker": marker, "markersize": 6, "linestyle": "none"}
        ax.plot(at, bits, color=colour, **style, alpha=0.8, clip_on=False, label="valid, at the end")


def bits_axis(ax: Axes, curves: Iterable[list[dict]], *, others: Iterable[float | None]) -> None:
    """The vertical axis: from the lowest to the highest of ``others`` and of the runs' rows once they have settled."""
    reached = [bits for bits in others if bits is not None]
    for rows in curves:
        way = points(rows, kind="train") + points(rows, kind="valid")
        end = max((at for at, _ in way), default=0)
        reached += [bits for at, bits in way if at >= SETTLED * end]
    margin = 0.05 * (max(reached) - min(reached)) or 0.1
    ax.set_ylim(min(reached) - margin, max(reached) + margin)
    ax.set_ylabel("bits per byte")


def layer_names(names: Iterable[str]) -> list[str]:
    """``layers.3.attention`` as ``3``, unless a layer has two such sublayers."""
    names = list(names)
    short = [name.split(".")[1] if name.startswith("layers.") else name for name in names]
    return short if len(set(short)) == len(names) else [name.removeprefix("layers.") for name in names]


def draw_context(curve: list[dict], *, path: Path, label: str) -> Path:
    """Bits per byte against bytes of context: rows ``{from_bytes, to_bytes, bits_per_byte}``, drawn as steps.

    Args:
        label: the run, and after a colon its data. A dollar is a dollar: nothing in it is a formula.
    """
    run, _, data = label.replace("$", r"\$").partition(": ")
    figure, (ax,) = panels(1, 1, width=7.0, height=4.2, title=run, subtitle=data)
    for point in curve:
        ax.hlines(point["bits_per_byte"], point["from_bytes"], point["to_bytes"] + 1, color=CONTEXT_COLOUR, linewidth=2)
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
