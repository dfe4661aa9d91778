"""Learning curves and spans of heads on axes that are given: for one run's own figures and for the report's.

Scores on the way are often of a shorter prefix of the valid split than the last one: they are joined by a line, and the
last stands apart. matplotlib's object interface only: no window system, no global state, nothing left behind in a sweep.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

GREY, FAINT, INK = "#7F7F7F", "0.9", "0.15"
LAYERS = "viridis"
"""A map whose lightness rises evenly, also in grey prints."""
BINS = 200
"""Most points of one run's training curve."""
SETTLED = 0.2
"""Fraction of the bytes before which bits may leave the frame above: the fall from 8 bits would flatten the rest."""
MOST_NUMBERS = 12 * 24
"""Cells up to which spans are written into them."""


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
    """A linear axis of large counts with ticks like ``2.5 M``; at most six of them, so that they never touch."""
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


def spans_of(metrics: dict | None) -> dict[str, list[float]]:
    """Spans by sublayer, ``layers.3.attention``, one entry a head; one that is not finite is NaN and leaves a gap."""
    spans = {name: value for name, value in (metrics or {}).items() if name.endswith(".span")}
    heads = {name: value if isinstance(value, list) else [value] for name, value in spans.items()}
    return {
        name.removesuffix(".span"): [math.nan if z is None else z for z in lengths] for name, lengths in heads.items()
    }


def layer_names(names: Iterable[str]) -> list[str]:
    """``layers.3.attention`` as ``3``, unless a layer has two such sublayers."""
    names = list(names)
    short = [name.split(".")[1] if name.startswith("layers.") else name for name in names]
    return short if len(set(short)) == len(names) else [name.removeprefix("layers.") for name in names]


def draw_span_cells(ax: Axes, spans: Mapping[str, list[float]], *, limit: float | None) -> None:
    """A heat map of layers by heads with the spans in it; the first layer, nearest to the bytes, is lowest.

    Args:
        spans: by sublayer, from :func:`spans_of`.
        limit: the longest possible span; None: the longest there is.
    """
    grid = np.full((len(spans), max(map(len, spans.values()))), np.nan)
    for row, heads in zip(grid, spans.values(), strict=True):
        row[: len(heads)] = -np.sort(-np.array(heads))  # NaN last
    limit = limit or max([1.0, *grid[np.isfinite(grid)]])
    norm = SymLogNorm(1, vmin=0, vmax=limit, base=2)
    image = ax.imshow(grid, norm=norm, cmap=LAYERS, aspect="auto", origin="lower", interpolation="nearest")
    ax.grid(visible=False)
    step = -(-grid.shape[1] // 16)
    ax.set_xticks(range(0, grid.shape[1], step), [str(head + 1) for head in range(0, grid.shape[1], step)])
    ax.set_yticks(range(len(spans)), layer_names(spans))
    ax.set(xlabel="head, longest span first", ylabel="layer")
    if grid.size <= MOST_NUMBERS:
        size = 9 if grid.shape[1] <= 8 else 6.5
        for (layer, head), span in np.ndenumerate(grid):
            if np.isfinite(span):
                bright = sum(colormaps[LAYERS](norm(span))[:3]) > 1.5
                style = {"ha": "center", "va": "center", "fontsize": size, "color": INK if bright else "white"}
                ax.text(head, layer, f"{span:.0f}", **style)
    ax.figure.colorbar(image, ax=ax, format="{x:,.0f}", label="span [positions]").minorticks_off()
