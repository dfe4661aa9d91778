"""Sampling: bytes that a model writes one by one with carried state: a byte costs the same however long the text."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.model import LanguageModel

SEGMENT = 512
"""Bytes of a prompt that one forward pass reads."""


def numbers_of(text: bytes, symbols: bytes, *, key: str) -> Tensor:
    """The numbers of bytes in a vocabulary, int64 ``[T]``; ValueError naming ``key`` and a byte that it lacks."""
    if not text:
        raise ValueError(f"{key}: is empty; at least one byte is needed, for there is no prediction of the first")
    for byte in text:
        if byte not in symbols:
            raise ValueError(
                f"{key}: has byte {byte} ({chr(byte)!r}), which is not among the {len(symbols)} of the model"
            )
    return torch.tensor([*map(symbols.index, text)])


@torch.no_grad()
def sampled(network: LanguageModel, prompt: Tensor, *, symbols: int, **choice) -> Iterator[int]:
    """Endless numbers after ``prompt`` (int64 ``[P]``, P >= 1). ``network`` is set to evaluation mode; only its first
    ``symbols`` numbers are drawn; ``choice`` as of ``draw``. ValueError as of ``draw``, or without carried state."""
    for name, sublayer in network.sublayers():
        if "segments" in sublayer.limits:
            raise ValueError(
                f"{name} ({type(sublayer).__name__}) has the limit `segments`: it carries no state, so it cannot "
                "write; allowed are mechanisms without that limit"
            )
    network.eval()
    device, state = next(network.parameters()).device, None
    parts = prompt[None].to(device).split(SEGMENT, dim=1)
    while True:
        for part in parts:
            out = network(part, state)
            state = out.state
        number = draw(out.logits[0, -1, :symbols].cpu().double(), **choice)
        yield number
        parts = (torch.tensor([[number]], device=device),)


def draw(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> int:
    """One number by its logits, float64 ``[V]``, among the ``top_k`` likeliest; temperature 0 takes the likeliest.
    ValueError for logits that are not finite, and for arguments out of range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be a number from 0, which is the likeliest byte")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or null for all")
    if not logits.isfinite().all():
        raise ValueError("the weights give no probabilities, logits are not finite; allowed is another run")
    if temperature == 0:
        return int(logits.argmax())
    ordered, order = (logits / temperature).sort(descending=True, stable=True)
    return int(order[torch.multinomial(ordered[:top_k].softmax(0), 1, generator=generator)])
