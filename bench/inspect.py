"""Draws what a trained run attends to: ``python -m bench.inspect run=outputs/latest [text=FILE or
'some words']``.

It writes figures into the run folder. ``inspect_attention.png`` has the attention map of every
head for the first ``bytes`` of ``text``, or without ``text`` of the part of valid that is scored.
``inspect_spans.png`` shows how far each head attends, and ``inspect_training.png`` the learned
span of each head during training."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from omegaconf import DictConfig

from bench.tables.drawing import GREY, INK, panels, png_of, styled
from bench.tables.spans import layer_names, span_curves, span_figure
from harness.cache import write_atomically
from harness.compose.cli import run_command, with_config
from harness.loop.sampling import token_ids
from harness.plan.settings import parse_setting
from harness.record.rows import RECORD, read_rows
from harness.trained import open_trained
from variants.contract import Inspection

MAX_CELLS = 12 * 16 * 256**2  # most attention weights in a figure: 12 layers of 16 heads, 256 bytes
SHARES = ((0.5, "o", "#0072B2", "half"), (0.9, "^", "#D55E00", "nine tenths"))
"""Shares of attention, each with its marker, colour and name."""


@with_config("inspect")
def main(cfg: DictConfig) -> None:
    text = parse_setting(cfg.text, str | None, key="text")
    length = parse_setting(cfg.bytes, Annotated[int, Ge(2)], key="bytes")
    run = open_trained(cfg.run, key="run", runtime=cfg.runtime, trust=cfg.trust)
    model, runtime = run.on_device()
    if text is None:
        corpus = run.corpus()
        name = f"valid of {corpus.name}"
        symbols = corpus.symbols
        tokens = corpus.scored_part("valid", selection_bytes=run.plan.eval.selection_bytes)
    else:
        symbols = run.symbols()
        is_file = os.path.isfile(text)
        name = Path(text).name if is_file else "text"
        content = Path(text).read_bytes() if is_file else os.fsencode(text)
        tokens = token_ids(content, symbols, key="text")
    if len(tokens) < 2:
        raise ValueError(f"text={text}: has {len(tokens)} byte; allowed are at least 2")
    tokens = tokens[:length]
    _, inspections = model.eval().inspect(tokens[None].long().to(runtime.device))
    maps = {
        name: i.weights[0].float().cpu().numpy()
        for name, i in inspections.items()
        if i.weights is not None
    }
    if (n_weights := sum(weights.size for weights in maps.values())) > MAX_CELLS:
        max_length = math.isqrt(MAX_CELLS * len(tokens) ** 2 // n_weights)
        raise ValueError(
            f"bytes={length}: allowed is {max_length} or less for this number of heads"
        )
    for sublayer, part in model.sublayers():
        if part.honours is not None and sublayer not in maps:
            print(f"{sublayer} is not drawn: its mechanism has no attention weights to show")
    if not maps:
        return
    title = f"{run.provenance['variant']}, seed {run.provenance['seed']}"
    about = f"{name}, {len(tokens)} bytes"
    excerpt = bytes(symbols[token] for token in tokens[:90].tolist()).decode(
        "utf-8", "backslashreplace"
    )
    excerpt = "".join(letter if letter.isprintable() else " " for letter in excerpt)
    curves = span_curves(read_rows(run.folder / RECORD))
    with styled():
        figures = {
            "inspect_attention.png": draw_attention(
                maps,
                both=model.both,
                title=title,
                subtitle=f"{about}: {excerpt}",
            ),
            "inspect_spans.png": draw_reach(maps, inspections, title=title, subtitle=about),
        }
        if curves:
            figures["inspect_training.png"] = span_figure(curves, title=f"Learned spans: {title}")
        else:
            print("no span was learned, so there is no inspect_training.png")
        for name, figure in figures.items():
            write_atomically(run.folder / name, png_of(figure))
    print(f"{run.folder}: {', '.join(figures)}")


def draw_attention(
    maps: Mapping[str, np.ndarray], *, both: bool, title: str, subtitle: str
) -> Figure:
    """Draw attention maps ``[H, T, T]``: a row of panels for each layer, a panel for each head.
    Later keys are left empty, unless ``both`` sides are seen."""
    heads = max(map(len, maps.values()))
    side = min(max(1.3, 9.0 / heads), 3.2)
    size = {"width": max(6.5, side * heads + 1.3), "height": side * len(maps) + 1.4}
    figure, axes = panels(
        len(maps), heads, title=f"Attention weights: {title}", subtitle=subtitle, **size
    )
    norm = PowerNorm(0.5, vmin=0, vmax=max(np.quantile(layer, 0.999) for layer in maps.values()))
    for row, (name, layer) in enumerate(zip(layer_names(maps), maps.values(), strict=True)):
        for head, ax in enumerate(axes[row * heads : (row + 1) * heads]):
            ax.set_visible(head < len(layer))
            if head < len(layer):
                seen = both | np.tri(layer.shape[1], dtype=bool)
                weights = np.where(seen, layer[head], np.nan)
                image = ax.imshow(weights, cmap="magma_r", norm=norm, interpolation="nearest")
            ax.grid(visible=False)
            ax.tick_params(labelsize=7, length=2)
            ax.set_title(f"head {head}" if row == 0 else "", fontsize=9)
            ax.set_ylabel(f"layer {name}", fontsize=9)
            ax.label_outer()
    shrink = min(1.0, 4 / size["height"])
    figure.colorbar(
        image, ax=axes, shrink=shrink, label="weight, on a square-root scale", extend="max"
    )
    figure.supxlabel(
        "key: index of the byte that is attended to; rows are queries", fontsize=9, color=INK
    )
    return figure


def draw_reach(
    maps: Mapping[str, np.ndarray], inspections: Mapping[str, Inspection], **titles: str
) -> Figure:
    """Draw for each head the distances within which ``SHARES`` of its attention lie, and the end
    of its soft mask."""
    titles |= {"title": f"How far heads attend: {titles['title']}"}
    figure, (ax,) = panels(1, 1, width=max(6.5, 1.2 + 0.9 * len(maps)), height=4.4, **titles)
    for index, (name, layer) in enumerate(maps.items()):
        heads = len(layer)
        mask = inspections[name].mask
        x = index + (np.arange(heads) + 0.5) / heads * 0.8 - 0.4
        for share, marker, colour, share_name in SHARES:
            label = None
            if index == 0:
                label = f"{share_name} of its attention"
            ax.plot(x, reach(layer, share), marker, color=colour, markersize=4.5, label=label)
        if mask is not None:
            ends = (mask > 0).sum(dim=1).cpu().numpy()
            ax.hlines(ends, x - 0.3 / heads, x + 0.3 / heads, color=GREY, linewidth=2)
    if any(inspections[name].mask is not None for name in maps):
        ax.plot([], [], color=GREY, linewidth=2, label="end of its soft mask")
    ax.set_yscale("symlog", base=2, linthresh=1, linscale=0.5)
    ax.set_ylim(0, 1.3 * max(1, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_xticks(range(len(maps)), layer_names(maps))
    ax.set(xlabel="layer; heads side by side", ylabel="distance in bytes")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def reach(maps: np.ndarray, share: float) -> np.ndarray:
    """Return distances in bytes ``[H]`` that cover a ``share`` of the weights ``[H, T, T]``, over
    the later half of the queries."""
    length = maps.shape[-1]
    distance = np.abs(np.arange(length // 2, length)[:, None] - np.arange(length)).ravel()
    mass = np.stack(
        [np.bincount(distance, head[length // 2 :].ravel(), minlength=length) for head in maps]
    )
    cumulative = mass.cumsum(axis=1)
    return (cumulative >= share * cumulative[:, -1:]).argmax(axis=1)


if __name__ == "__main__":
    run_command(main)
