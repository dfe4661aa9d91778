"""Weights of a network that is measured: moved off their start, and spans put where a run has learned them.

Hardware is quicker on zeros, and a network starts with many: matrices that start at zero leave all behind them without a
gradient, too.
"""

from pathlib import Path

import torch
import yaml
from torch import nn

from harness.model import LanguageModel
from variants.contract import Spans

NOISE = 0.02
"""Standard deviation of what is added: that of many a network's first weights."""
ONCE = 2**20
"""Elements that are drawn at a time: the noise of a large table must not show in a peak of memory."""
LEARNED = yaml.safe_load((Path(__file__).parent / "learned_spans.yaml").read_text(encoding="utf-8"))["spans"]
LEARNED = [sorted(layer, reverse=True) for layer in LEARNED]  # a layer's longest first, so that few heads have it, too
"""Keys that a run has left, a list for each layer with a number for each head."""


@torch.no_grad()
def shake_(model: nn.Module) -> None:
    """Add normal noise to every parameter but ``Spans``, the same at every call; back into the legal range where the model
    knows it."""
    spans = {p for part in model.modules() if isinstance(part, Spans) for p in part.parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for parameter in model.parameters() if parameter not in spans):
        for piece in parameter.view(-1).split(ONCE):
            piece.add_(NOISE * torch.randn(piece.shape, generator=generator).to(piece))
    if hasattr(model, "project_"):
        model.project_()


def learned_spans(model: LanguageModel) -> list[Spans]:
    """Spans that are learned, a part for each sublayer that has some."""
    parts = [part for _, sublayer in model.sublayers() for part in sublayer.modules() if isinstance(part, Spans)]
    return [part for part in parts if part.placeable]


def place_spans(model: LanguageModel, *, heads: int) -> None:
    """Put learned spans of H = ``heads`` heads at ``LEARNED`` keys, or at S where that is less; layers and heads are read in
    a circle where the model has more."""
    for number, part in enumerate(learned_spans(model)):
        keys = LEARNED[number % len(LEARNED)]
        part.place_([keys[head % len(keys)] for head in range(heads)])
