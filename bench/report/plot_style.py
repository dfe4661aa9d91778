"""Style of all figures of the report, and how they become files; what they show is in ``plots_*.py``.

Colours are Okabe and Ito's, told apart with any colour vision, and every variant has a marker of its own, so that grey
prints can be read too. In SVG, text is drawn as paths: a browser without our font shows the same picture. Identifiers
come from a fixed salt and no date is written, so that equal rows give equal files. matplotlib's object interface only:
no window system and no global state.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from bench.report.comparison import VARIANTS, Arm
from harness.record.drawing import INK
from harness.record.table import Drawing

ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "attention-windtunnel",
    "text.parse_math": False,  # a $ in a name is a $
    "path.simplify": True,
}
KNOWN_LOOKS = {
    name: (colour, tuple(marker) if isinstance(marker, list) else marker)
    for name, (colour, marker) in VARIANTS["looks"].items()
}
OTHER_MARKERS, OTHER_COLOURS = "Xp*h>d", (PURPLE, SKY, VERMILLION)
OTHER_LOOKS = tuple((OTHER_COLOURS[(i + i // 6) % 3], OTHER_MARKERS[i % 6]) for i in range(18))
LINES = ("-", "--", ":", "-.")
FILLS = ("full", "none", "left", "right", "top", "bottom")


@dataclass(frozen=True, kw_only=True)
class Look:
    """A variant's colour and marker."""

    colour: str
    marker: str | tuple[int, int, int]


def looks(variants: Iterable[str]) -> dict[str, Look]:
    """Ours always look the same; others take what is left, in order of name."""
    others = sorted({name for name in variants if name not in KNOWN_LOOKS})
    chosen = KNOWN_LOOKS | {name: OTHER_LOOKS[index % len(OTHER_LOOKS)] for index, name in enumerate(others)}
    return {name: Look(colour=colour, marker=marker) for name, (colour, marker) in chosen.items()}


def styled():
    """A context in which figures are made and saved."""
    return rc_context(STYLE)


def finish(figure: Figure, *, name: str, title: str, caption: str) -> Drawing:
    """Both files of a figure."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", metadata={"Software": None})
    return Drawing(name=name, title=title, caption=caption, svg=svg.getvalue(), png=png.getvalue())


def entry(label: str, **style) -> Line2D:
    """An entry of a legend; a mark without a line unless ``linestyle`` says otherwise."""
    return Line2D([], [], label=label, **{"linestyle": "none"} | style)


def entry_of(arm: Arm, *, look: Look, **style) -> Line2D:
    """An arm's entry, with its number of seeds."""
    return entry(f"{arm.label} (n={len(arm.members)})", color=look.colour, marker=look.marker, **style)


def legend_below(figure: Figure, handles: list) -> Legend:
    """A legend under all panels, where it covers no data, in as many columns as the figure is wide enough for."""
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / (0.75 + 0.078 * longest)))
    return figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))


def ticks_at(axis, values: Sequence[float], *, most: int, text: Callable[[float], str]) -> None:
    """Ticks at ``values``, thinned where there are more than ``most``."""
    axis.set_major_locator(FixedLocator(values[:: -(-len(values) // most)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def plain_axis(axis) -> None:
    """A plain axis of seconds or GiB, whose ticks are plain numbers."""
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_major_locator(MaxNLocator(6))


def log_axis(axis, *, values: list[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers, with more ticks between powers where it is short."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    ratio = max(values) / min(values) if values else 10
    between = (1, 1.5, 2, 3, 4, 5, 7) if ratio < 5 else (1, 2, 5) if ratio < 50 else (1, 3) if ratio < 3000 else (1,)
    axis.set_major_locator(LogLocator(base=10, subs=between, numticks=10))
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_locator(NullLocator())


def plain_number(value: float, _position: int | None = None) -> str:
    """``0.02``, ``512``, ``3 M``: short, and never a power of ten to be worked out."""
    return f"{value:g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else EngFormatter(sep=" ")(value)


def memory_unit(largest_bytes: float) -> tuple[float, str]:
    """Bytes in the unit that suits the largest value: GiB = 2^30, MiB = 2^20 where all is below one GiB."""
    return (2.0**30, "GiB") if largest_bytes >= 2**30 else (2.0**20, "MiB")


_LABEL = {"fontsize": 8.5, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}}
_AROUND = tuple(
    (dx * far, dy * far, across, up)
    for far in (1, 2.2, 3.4)  # near places first
    for dx, dy, across, up in (
        (9, 0, "left", "center"),
        (-9, 0, "right", "center"),
        (0, 9, "center", "bottom"),
        (0, -9, "center", "top"),
        (8, 8, "left", "bottom"),
        (8, -8, "left", "top"),
        (-8, 8, "right", "bottom"),
        (-8, -8, "right", "top"),
    )
)
"""Where a label may stand: offset from its point in typographic points, and how the text is aligned there."""


def label_points(ax: Axes, *, points: list[tuple[float, float]], texts: list[str], avoid: list) -> bool:
    """Write each text beside its point, where it covers nothing and belongs to no other; False if one has no place.

    The figure must have its layout (``draw_without_rendering``), which these texts do not change.

    Args:
        points, avoid: in data coordinates: those to be labelled, and those that only must not be covered.
        texts: one a point.
    """
    renderer, frame = ax.figure.canvas.get_renderer(), ax.get_window_extent()
    named = [ax.transData.transform(place) for place in points]
    dots = [*named, *(ax.transData.transform(place) for place in avoid)]
    taken = []
    for index, (point, text) in enumerate(zip(points, texts, strict=True)):
        for dx, dy, across, up in _AROUND:
            note = ax.annotate(text, point, xytext=(dx, dy), textcoords="offset points", ha=across, va=up, **_LABEL)
            note.set_in_layout(False)
            box = note.get_window_extent(renderer)
            inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            free = not any(box.overlaps(other) for other in taken) and box.padded(3).count_contains(dots) == 0
            distances = [_distance(box, place) for place in named]
            if inside and free and distances[index] == min(distances):
                taken.append(box)
                break
            note.remove()
        else:
            return False
    return True


def _distance(box: Bbox, point: tuple[float, float]) -> float:
    """From a point to the nearest place of a box."""
    across = max(box.x0 - point[0], 0, point[0] - box.x1)
    up = max(box.y0 - point[1], 0, point[1] - box.y1)
    return float(across**2 + up**2) ** 0.5
