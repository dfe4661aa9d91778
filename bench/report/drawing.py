"""Style of all figures, and how they become files: report, front page, ``bench.inspect`` and ``bench.evaluate``.

Colours are Okabe and Ito's, for any colour vision, and every variant has a marker, for grey prints. In SVG, text is
drawn as paths: it needs no font. Identifiers have a fixed salt, and there is no date: equal rows give equal files.
matplotlib's object interface needs no window system and leaves no global state.
"""

import io
from collections.abc import Iterable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from bench.report.compare import VARIANTS
from harness.cache import write_atomically
from harness.record.table import Drawing

GREY, FAINT, INK, BLUE = "#7F7F7F", "0.9", "0.15", "#0072B2"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "attention-windtunnel",
    "text.parse_math": False,  # a $ in a name is a $
}
OTHERS = [(colour, marker) for marker in "Xp*h>d" for colour in ("#CC79A7", "#56B4E9", "#D55E00", "#0072B2", "#009E73")]
LINES = ("-", "--", ":", "-.")
FONT_POINTS = 8.5
WIDE_RANGE = 8
"""Ratio of largest to smallest value from which on an axis is logarithmic."""


def styled():
    """A context in which figures are made and saved."""
    return rc_context(STYLE)


def looks(variants: Iterable[str]) -> dict[str, dict]:
    """Colour and marker of each; ours always look the same, others take what is left, in order of name."""
    shipped = {name: (c, tuple(m) if isinstance(m, list) else m) for name, (c, m) in VARIANTS["looks"].items()}
    others = enumerate(sorted(set(variants) - set(shipped)))
    shipped |= {name: OTHERS[place % len(OTHERS)] for place, name in others}
    return {name: {"color": colour, "marker": marker} for name, (colour, marker) in shipped.items()}


def panels(
    rows: int, columns: int, *, width: float, height: float, title: str, subtitle: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` x ``columns`` axes, row by row, ``width`` x ``height`` inches, title and subtitle above."""
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


def legend(ax: Axes) -> None:
    """Names of an axes' lines to the right of it, in the order of their last points from the top."""
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_") and len(line.get_ydata())]
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    if lines:
        style = {"frameon": False, "fontsize": FONT_POINTS, "borderaxespad": 0.0}
        ax.legend(handles=lines, loc="center left", bbox_to_anchor=(1.02, 0.5), **style)


def value_axis(axis, values: list[float], *, log: bool | None = None) -> None:
    """An axis with plain numbers, logarithmic where values range far."""
    low, high = min(values, default=1), max(values, default=1)
    if low > 0 and (high > WIDE_RANGE * low if log is None else log):
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high < 50 * low else (1,), numticks=10))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain_number))


def plain_number(value: float, _position: int | None = None) -> str:
    """``0.02``, ``512``, ``3 M``: short, and never a power of ten to be worked out."""
    return f"{value:g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else EngFormatter(sep=" ")(value)


def finish(figure: Figure, *, name: str, title: str, caption: str) -> Drawing:
    """Both files of a figure."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name=name, title=title, caption=caption, svg=svg.getvalue(), png=png_of(figure))


def png_of(figure: Figure) -> bytes:
    """Equal figures give equal bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    write_atomically(path, png_of(figure))
    return path
