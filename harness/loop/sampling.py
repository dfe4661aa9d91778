"""Sampling: a model generates bytes one by one. With carried state each byte costs the same for
any length of text."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.model import LanguageModel

PROMPT_SEGMENT = 512  # bytes of a prompt that one forward pass reads


def token_ids(text: bytes, symbols: bytes, *, key: str) -> Tensor:
    """Return the token id of each byte of ``text``, int64 ``[T]``: its index in ``symbols``.
    ValueError, beginning with ``key``, if the text is empty or has a byte that is not in
    ``symbols``."""
    if not text:
        raise ValueError(
            f"{key}: is empty; at least one byte is needed, because a model does not predict the "
            "first"
        )
    for byte in text:
        if byte not in symbols:
            raise ValueError(
                f"{key}: has byte {byte} ({chr(byte)!r}), which is not among the {len(symbols)} "
                "bytes of the model"
            )
    return torch.tensor([*map(symbols.index, text)])


@torch.no_grad()
def generate(network: LanguageModel, prompt: Tensor, *, n_symbols: int, **options) -> Iterator[int]:
    """Yield token ids that continue ``prompt`` (int64 ``[P]``, P >= 1), without end, drawn from the
    first ``n_symbols`` ids with ``options`` of ``draw``. Sets ``network`` to evaluation mode.
    ValueError if one of its mechanisms carries no state."""
    for name, sublayer in network.sublayers():
        if "segments" in sublayer.limits:
            raise ValueError(
                f"{name} ({type(sublayer).__name__}) has the limit `segments`: it carries no "
                "state, so it cannot generate; allowed are mechanisms without that limit"
            )
    network.eval()
    device = next(network.parameters()).device
    state = None
    segments = prompt[None].to(device).split(PROMPT_SEGMENT, dim=1)
    while True:
        for segment in segments:
            out = network(segment, state)
            state = out.state
        token_id = draw(out.logits[0, -1, :n_symbols].cpu().double(), **options)
        yield token_id
        segments = (torch.tensor([[token_id]], device=device),)


def draw(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """Draw a token id by its logits, float64 ``[V]``, from the ``top_k`` likeliest; at temperature
    0 return the likeliest. ValueError for logits that are not finite, and for arguments out of
    range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be a finite number of at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or null for all")
    if not logits.isfinite().all():
        raise ValueError(
            "the model's logits are not finite; allowed are the weights of another run"
        )
    if temperature == 0:
        return int(logits.argmax())
    sorted_logits, sorted_ids = (logits / temperature).sort(descending=True, stable=True)
    return int(
        sorted_ids[torch.multinomial(sorted_logits[:top_k].softmax(0), 1, generator=generator)]
    )
