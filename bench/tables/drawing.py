"""The style of all figures of ``bench``, and how they become files.

Colours are Okabe and Ito's, which readers with any colour vision can tell apart. Each variant also
has a marker, for prints in grey. Equal rows give equal files: SVGs have text as paths, which need
no font, identifiers with a fixed salt, and no date. Figures use matplotlib's object interface,
which needs no window system and leaves no global state."""

import io
from collections.abc import Iterable
from functools import partial
from itertools import cycle

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bench.tables.compare import VARIANTS
from harness.record.table import Drawing

GREY = "#7F7F7F"

INK = "0.15"
BLUE = "#0072B2"
FONT_POINTS = 8.5
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "attention-windtunnel",
    "text.parse_math": False,  # a $ in a name starts no formula
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": FONT_POINTS,
    "legend.title_fontsize": FONT_POINTS,
}
styled = partial(rc_context, STYLE)
"""Context in which figures are made and saved in this style."""
LINE_STYLES = ("-", "--", ":", "-.")
SPARE_COLOURS = ("#CC79A7", "#56B4E9", "#D55E00", "#0072B2", "#009E73")
SPARE_STYLES = [(colour, marker) for marker in "Xp*h>d" for colour in SPARE_COLOURS]
"""Colour and marker of variants that ``variants.yaml`` does not name."""
FEW_TICKS_RATIO = 4  # up to which 1, 2, 5, 10, .. are too few ticks
LOG_RATIO = 8  # an axis is logarithmic if its largest number is more than 8 times its smallest


def variant_styles(variants: Iterable[str]) -> dict[str, dict]:
    """Return the colour and the marker of each variant: from ``variants.yaml``, or spare ones in
    alphabetical order of the names."""
    unnamed = sorted({*variants} - {*VARIANTS["styles"]})
    styles = VARIANTS["styles"] | dict(zip(unnamed, cycle(SPARE_STYLES)))
    return {
        name: {"color": colour, "marker": tuple(marker) if isinstance(marker, list) else marker}
        for name, (colour, marker) in styles.items()
    }


def panels(
    rows: int, columns: int, *, width: float, height: float, title: str, subtitle: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` x ``height`` inches with title and subtitle, and its axes, row
    by row."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    renderer = FigureCanvasAgg(figure).get_renderer()
    top = height - 0.08
    for words, style in (
        (title, {"fontsize": 13, "color": INK}),
        (subtitle, {"fontsize": 9, "color": "0.35"}),
    ):
        # matplotlib reads a line that it wraps as a formula, whatever text.parse_math says
        wrap = "$" not in words
        text = figure.text(0.5, top / height, words, ha="center", va="top", wrap=wrap, **style)
        top -= text.get_window_extent(renderer).height / figure.dpi + 0.06 * bool(words)
    figure.get_layout_engine().set(rect=(0, 0, 1, top / height))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def add_legend(ax: Axes, *, title: str | None = None) -> None:
    """Add a legend to the right of the axes. Its lines are ordered by the height of their last
    points."""
    labelled, _ = ax.get_legend_handles_labels()
    lines = [line for line in labelled if len(line.get_ydata())]
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    if lines:
        ax.legend(
            handles=lines,
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
            borderaxespad=0.0,
            frameon=False,
            title=title,
            alignment="left",
        )


def scale_axis(axis, numbers: list[float], *, log: bool = False) -> None:
    """Label an axis with plain numbers. It is logarithmic if ``log``, or if ``LOG_RATIO`` is
    exceeded."""
    low = min(numbers, default=1)
    high = max(numbers, default=1)
    locator = MaxNLocator(6)
    if low > 0 and (log or high > LOG_RATIO * low):
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_minor_locator(NullLocator())
        if high > FEW_TICKS_RATIO * low:
            subs = (1, 2, 5) if high < 50 * low else (1,)
            locator = LogLocator(base=10, subs=subs, numticks=10)
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(plain_number))


def plain_number(number: float, _position: int | None = None) -> str:
    """Return ``0.02``, ``512`` or ``3 M``: a short text without a power of ten."""
    if 1e-3 <= abs(number) < 1e4 or number == 0:
        return f"{number:g}"
    return EngFormatter(sep=" ")(number)


def drawing_of(figure: Figure, *, name: str, title: str, caption: str) -> Drawing:
    """Return the figure as SVG and PNG."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name=name, title=title, caption=caption, svg=svg.getvalue(), png=png_of(figure))


def png_of(figure: Figure) -> bytes:
    """Return the figure as PNG; equal figures give equal bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()
