"""Style of all figures of the report: how a variant looks, labels beside points and lines, and how a figure becomes
files.

Colours are Okabe and Ito's, told apart with any colour vision, and every variant has a marker of its own and a label,
so that grey prints can be read too. In SVG, text is drawn as paths: a browser without our font shows the same picture.
Identifiers come from a fixed salt and no date is written, so that equal rows give equal files. matplotlib's object
interface only.
"""

import io
from collections.abc import Iterable

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bench.report.compare import VARIANTS
from harness.record.drawing import INK
from harness.record.table import Drawing

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "attention-windtunnel",
    "text.parse_math": False,  # a $ in a name is a $
}
OTHER_COLOURS, OTHER_MARKERS = ("#CC79A7", "#56B4E9", "#D55E00", "#0072B2", "#009E73"), "Xp*h>d"
LINES = ("-", "--", ":", "-.")
FONT_POINTS = 8.5
LINE_POINTS = 1.3 * FONT_POINTS
"""Height of a line of text, in typographic points."""
WIDE_RANGE = 8
"""Ratio of largest to smallest value from which on an axis is logarithmic."""


def looks(variants: Iterable[str]) -> dict[str, dict]:
    """Colour and marker of each; ours always look the same, others take what is left, in order of name."""
    shipped = {name: (c, tuple(m) if isinstance(m, list) else m) for name, (c, m) in VARIANTS["looks"].items()}
    for place, name in enumerate(sorted(set(variants) - set(shipped))):
        marker = OTHER_MARKERS[place // len(OTHER_COLOURS) % len(OTHER_MARKERS)]
        shipped[name] = (OTHER_COLOURS[place % len(OTHER_COLOURS)], marker)
    return {name: {"color": colour, "marker": marker} for name, (colour, marker) in shipped.items()}


def styled():
    """A context in which figures are made and saved."""
    return rc_context(STYLE)


def finish(figure: Figure, *, name: str, title: str, caption: str) -> Drawing:
    """Both files of a figure."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", metadata={"Software": None})
    return Drawing(name=name, title=title, caption=caption, svg=svg.getvalue(), png=png.getvalue())


def label_right(ax: Axes, points: list[tuple[float, float]], texts: list[str]) -> list:
    """Write each text right of the axes, joined to its point by a thin line; ``spread`` then moves them apart."""
    style = {
        "textcoords": "axes fraction",
        "va": "center",
        "fontsize": FONT_POINTS,
        "color": INK,
        "annotation_clip": False,
    }
    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
    return [
        ax.annotate(text, point, xytext=(1.03, 0.5), arrowprops=line, **style)
        for point, text in zip(points, texts, strict=True)
    ]


def spread(figure: Figure, labels: Iterable[list]) -> None:
    """Move labels of ``label_right``, a list for each axes, to the heights of their points, none over another."""
    figure.draw_without_rendering()  # the layout is made with all labels in it
    figure.set_layout_engine("none")
    for notes in filter(None, labels):
        ax = notes[0].axes
        frame, line = ax.get_window_extent(), LINE_POINTS * figure.dpi / 72
        wanted = sorted(
            ((ax.transData.transform(note.xy)[1] - frame.y0) / line, place) for place, note in enumerate(notes)
        )
        clusters: list[list[float]] = []  # sum of (height - rank), count: labels that touch stand around their mean
        for rank, (height, _) in enumerate(wanted):
            clusters.append([height - rank, 1])
            while len(clusters) > 1 and clusters[-2][0] / clusters[-2][1] >= clusters[-1][0] / clusters[-1][1]:
                total, count = clusters.pop()
                clusters[-1][0] += total
                clusters[-1][1] += count
        heights = [total / count for total, count in clusters for _ in range(count)]
        heights = np.add(heights, range(len(wanted)))
        heights -= min(0, heights[0])
        for rank in reversed(range(len(wanted))):  # inside the frame, as far as there is room
            above = heights[rank + 1] - 1 if rank + 1 < len(wanted) else max(frame.height / line, len(wanted))
            heights[rank] = min(heights[rank], above)
        for (_, place), height in zip(wanted, heights, strict=True):
            notes[place].xyann = (1.03, height * line / frame.height)


def value_axis(axis, values: list[float], *, log: bool | None = None) -> None:
    """An axis with plain numbers, logarithmic where values range far, with more ticks between powers where it is
    short."""
    low, high = min(values, default=1), max(values, default=1)
    if low > 0 and (high > WIDE_RANGE * low if log is None else log):
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        ratio = high / low
        between = (
            (1, 1.5, 2, 3, 4, 5, 7) if ratio < 5 else (1, 2, 5) if ratio < 50 else (1, 3) if ratio < 3000 else (1,)
        )
        axis.set_major_locator(LogLocator(base=10, subs=between, numticks=10))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(plain_number))


def plain_number(value: float, _position: int | None = None) -> str:
    """``0.02``, ``512``, ``3 M``: short, and never a power of ten to be worked out."""
    return f"{value:g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else EngFormatter(sep=" ")(value)


def memory_unit(largest_bytes: float) -> tuple[float, str]:
    """Bytes in the unit that suits the largest value: GiB = 2^30, MiB = 2^20 where all is below one GiB."""
    return (2.0**30, "GiB") if largest_bytes >= 2**30 else (2.0**20, "MiB")
