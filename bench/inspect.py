"""What a trained run looks at: ``python -m bench.inspect run=outputs/latest [text=FILE or 'some words']``.

Writes two figures into the run folder. ``inspect_attention.png`` has maps of every layer and head over the first bytes
of ``text``, or of the run's reported valid. ``inspect_spans.png`` shows how far back each head looks.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import hydra
import numpy as np
from annotated_types import Ge
from matplotlib.colors import PowerNorm
from omegaconf import DictConfig

from bench import CONF
from bench.report.drawing import GREY, INK, panels, save, styled
from harness.compose.cli import run_command
from variants.contract import Inspection

MAX_CELLS = 12 * 16 * 256**2  # weights in one figure
REACHES = ((0.5, "o", "#0072B2", "half"), (0.9, "^", "#D55E00", "nine tenths"))  # colours of Okabe and Ito


@hydra.main(version_base="1.3", config_path=CONF, config_name="inspect")
def main(cfg: DictConfig) -> None:
    import torch  # late, as everything slow

    from bench.planning import open_trained
    from harness.loop.sampling import token_ids
    from harness.plan.settings import parse_setting

    folder, text = Path(cfg.run), parse_setting(cfg.text, str | None, key="text")
    length = parse_setting(cfg.bytes, Annotated[int, Ge(2)], key="bytes")
    trained = open_trained(folder, key="run", runtime=cfg.runtime, trust=cfg.trust)
    model, device = trained.on_device()
    if text is None:
        corpus = trained.corpus()
        name, symbols = f"valid of {corpus.name}", corpus.symbols
        tokens = corpus.scored_part("valid", selection_bytes=trained.plan.eval.selection_bytes)
    else:
        is_file, symbols = os.path.isfile(text), trained.symbols()
        name, content = (Path(text).name, Path(text).read_bytes()) if is_file else ("text", os.fsencode(text))
        tokens = token_ids(content, symbols, key="text").to(torch.uint8)
    if len(tokens) < 2:
        raise ValueError(f"text={text}: has {len(tokens)} byte; allowed are at least 2")
    passage = tokens[:length]
    _, seen = model.eval().inspect(passage[None].long().to(device.device))
    maps = {layer: s.weights[0].float().cpu().numpy() for layer, s in seen.items() if s.weights is not None}
    if (cells := sum(layer.size for layer in maps.values())) > MAX_CELLS:
        most = math.isqrt(MAX_CELLS * len(passage) ** 2 // cells)
        raise ValueError(f"bytes={length}: allowed is {most} or less for so many heads")
    run, about = f"{trained.saved['variant']}, seed {trained.saved['seed']}", f"{name}, {len(passage)} bytes"
    for layer in [layer for layer, part in model.sublayers() if part.honours is not None and layer not in maps]:
        print(f"{layer} gives no map: its mechanism does not say what each byte takes of each")
    if maps:
        words = bytes(symbols[token] for token in passage[:90].tolist()).decode("utf-8", "backslashreplace")
        words = "".join(letter if letter.isprintable() else " " for letter in words)
        with styled():
            draw_attention(maps, folder / "inspect_attention.png", title=run, subtitle=f"{about}: {words}")
            draw_reach(maps, seen, folder / "inspect_spans.png", title=run, subtitle=about)
        print(f"{folder}: inspect_attention.png, inspect_spans.png")


def draw_attention(maps: Mapping[str, np.ndarray], path: Path, *, title: str, subtitle: str) -> None:
    """Draw maps ``[H, T, T]`` of every layer: a row of panels per layer, a panel per head."""
    heads = max(map(len, maps.values()))
    side = min(max(1.3, 9.0 / heads), 3.2)
    size = {"width": max(6.5, side * heads + 1.3), "height": side * len(maps) + 1.4}
    figure, axes = panels(len(maps), heads, title=f"What each byte looks at: {title}", subtitle=subtitle, **size)
    shade = PowerNorm(0.5, vmin=0, vmax=max(np.quantile(layer, 0.999) for layer in maps.values()))
    for row, (name, layer) in enumerate(zip(layer_names(maps), maps.values(), strict=True)):
        for head, ax in enumerate(axes[row * heads : (row + 1) * heads]):
            ax.set_visible(head < len(layer))
            if head < len(layer):
                weights = np.where(np.tri(layer.shape[1], dtype=bool), layer[head], np.nan)
                image = ax.imshow(weights, cmap="magma_r", norm=shade, interpolation="nearest")
            ax.grid(visible=False)
            ax.tick_params(labelsize=7, length=2)
            ax.set_title(f"head {head}" if row == 0 else "", fontsize=9)
            ax.set_ylabel(f"layer {name}", fontsize=9)
            ax.label_outer()
    shrink = min(1.0, 4 / size["height"])
    figure.colorbar(image, ax=axes, shrink=shrink, label="weight, shaded by its root", extend="max")
    figure.supxlabel("byte that is looked at; rows are the bytes that look", fontsize=9, color=INK)
    save(figure, path)


def draw_reach(maps: Mapping[str, np.ndarray], seen: Mapping[str, Inspection], path: Path, **titles: str) -> None:
    """Draw how far back half and nine tenths of each head's attention lie, and the end of its soft mask, if any."""
    titles |= {"title": f"How far heads look back: {titles['title']}"}
    figure, (ax,) = panels(1, 1, width=max(6.5, 1.2 + 0.9 * len(maps)), height=4.4, **titles)
    for place, (name, layer) in enumerate(maps.items()):
        heads, mask = len(layer), seen[name].mask
        across = place + (np.arange(heads) + 0.5) / heads * 0.8 - 0.4
        for share, marker, colour, words in REACHES:
            label = f"{words} of its attention" if place == 0 else None
            ax.plot(across, reach(layer, share), marker, color=colour, markersize=4.5, label=label)
        if mask is not None:
            ends = (mask > 0).sum(dim=1).cpu().numpy()
            ax.hlines(ends, across - 0.3 / heads, across + 0.3 / heads, color=GREY, linewidth=2)
    if any(seen[name].mask is not None for name in maps):
        ax.plot([], [], color=GREY, linewidth=2, label="end of its soft mask")
    ax.set_yscale("symlog", base=2, linthresh=1, linscale=0.5)
    ax.set_ylim(0, 1.3 * max(1, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_xticks(range(len(maps)), layer_names(maps))
    ax.set(xlabel="layer; heads side by side", ylabel="bytes back")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def layer_names(names: Iterable[str]) -> list[str]:
    """Shorten ``layers.3.attention`` to ``3``, unless a layer has two such sublayers."""
    names = [name.removeprefix("layers.") for name in names]
    short = [name.partition(".")[0] for name in names]
    return short if len(set(short)) == len(names) else names


def reach(maps: np.ndarray, share: float) -> np.ndarray:
    """The distance ``[H]`` holding a ``share`` of the mass of maps ``[H, T, T]``, over queries of the second half."""
    length = maps.shape[-1]
    distance = np.clip(np.arange(length // 2, length)[:, None] - np.arange(length), 0, None).ravel()
    mass = np.stack([np.bincount(distance, head[length // 2 :].ravel(), minlength=length) for head in maps])
    total = mass.cumsum(axis=1)
    return (total >= share * total[:, -1:]).argmax(axis=1)


if __name__ == "__main__":
    run_command(main)
