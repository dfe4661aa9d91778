"""The learned spans of a run's heads during training, as numbers and as a figure."""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from bench.tables.drawing import LINE_STYLES, SPARE_COLOURS, panels


def span_curves(rows: Iterable[Mapping]) -> dict[str, np.ndarray]:
    """Return by sublayer the learned spans z of its heads in keys, without the ramp, after each
    train row: ``[rows, 1 + H]``, with the bytes read in the first column."""
    curves: dict[str, list] = {}
    for row in rows:
        if row["kind"] == "train":
            for name, spans in row["metrics"].items():
                if name.endswith(".span") and isinstance(spans, list):
                    curves.setdefault(name, []).append([row["bytes_seen"], *spans])
    return {
        name.removesuffix(".span"): pd.DataFrame(points).to_numpy(dtype=float)
        for name, points in curves.items()
    }


def span_figure(curves: Mapping[str, np.ndarray], *, title: str) -> Figure:
    """Return a figure of the span of each head during training: a panel for each layer."""
    about = "z of each head, without the ramp of its mask"
    size = {"width": max(6.5, 2.6 * len(curves)), "height": 3.6}
    figure, axes = panels(1, len(curves), title=title, subtitle=about, **size)
    longest = max(np.nanmax(curve[:, 1:], initial=1.0) for curve in curves.values())
    for name, points, ax in zip(layer_names(curves), curves.values(), axes, strict=True):
        for head, spans in enumerate(points[:, 1:].T):
            ax.plot(
                points[:, 0] / 1e6,
                spans,
                color=SPARE_COLOURS[head % len(SPARE_COLOURS)],
                linestyle=LINE_STYLES[head % len(LINE_STYLES)],
                marker=".",
                markersize=3,
                clip_on=False,
                label=f"head {head}",
            )
        ax.set_title(f"layer {name}", fontsize=9)
        ax.set(xlim=(0, None), xlabel="MB of training")
        ax.set(ylim=(0, 1.05 * longest), ylabel="bytes back")
        ax.label_outer()
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def layer_names(names: Iterable[str]) -> list[str]:
    """Return ``layers.3.attention`` shortened to ``3``, or to ``3.attention`` if two of the names
    are of one layer."""
    names = [name.removeprefix("layers.") for name in names]
    numbers = [name.partition(".")[0] for name in names]
    if len(set(numbers)) == len(names):
        return numbers
    return names
