"""A language model: embedding, residual sublayers with a norm before or after each, and logits.

pre     x <- x + f(LayerNorm(x)), and a LayerNorm after the last sublayer
post    x <- LayerNorm(x + f(x)), 1706.03762, section 5.4, without dropout"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.norms import layer_norm
from tests.reference.positions import sinusoid

Affine = tuple[Tensor, Tensor | None]
"""Weight ``[D]`` and bias ``[D]`` (or None) of one LayerNorm."""


def norm_all(x: Tensor, *, affine: Affine) -> Tensor:
    """LayerNorm of every position of ``x [B, T, D]``."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            y[b, t] = layer_norm(x[b, t], weight=affine[0], bias=affine[1])
    return y


def language_model(
    inputs: Tensor,
    *,
    embedding: Tensor,
    sublayers: list[Callable[[Tensor], Tensor]],
    norms: list[Affine],
    placement: str,
    final_norm: Affine | None = None,
    output: Tensor | None = None,
    output_bias: Tensor | None = None,
    sinusoidal: bool = False,
    start: int = 0,
) -> Tensor:
    """Logits ``[B, T, V]`` for the byte after each of ``inputs [B, T]``.

    Args:
        embedding: ``[V, D]``, one row for each byte value.
        sublayers: functions from ``[B, T, D]`` to ``[B, T, D]``, from the first to the last.
        norms: one for each sublayer.
        placement: "pre" or "post".
        final_norm: norm after the last sublayer, or None.
        output: ``[V, D]``, or None for the embedding.
        output_bias: ``[V]``.
        sinusoidal: add sinusoids to the embedded bytes.
        start: stream position of ``inputs[:, 0]``."""
    if placement not in ("pre", "post"):
        raise ValueError(f"placement must be pre or post, not {placement!r}")
    x = torch.stack([torch.stack([embedding[byte] for byte in stream]) for stream in inputs.tolist()])
    if sinusoidal:
        x = x + torch.stack([sinusoid(start + t, d_model=x.shape[2]) for t in range(x.shape[1])])
    for sublayer, norm in zip(sublayers, norms, strict=True):
        if placement == "pre":
            x = x + sublayer(norm_all(x, affine=norm))
        else:
            x = norm_all(x + sublayer(x), affine=norm)
    if final_norm is not None:
        x = norm_all(x, affine=final_norm)
    matrix = embedding if output is None else output
    logits = torch.stack([torch.stack([matrix @ x[b, t] for t in range(x.shape[1])]) for b in range(x.shape[0])])
    return logits if output_bias is None else logits + output_bias
