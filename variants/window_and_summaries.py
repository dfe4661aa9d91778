"""Window and summaries: one softmax over the nearest keys and over summaries of blocks beyond them (``linformer.py``).

- ``by_kernel``: windows by the CPU's kernel, summaries by matrix products. No hidden window key is multiplied.
- ``in_bands``: plain PyTorch. A chunk of queries is multiplied with the band of its windows' keys, and summaries.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants.blocks import Blocks
from variants.contract import Position
from variants.kernels import window_cpu
from variants.kernels.beside import Beside
from variants.kernels.window import PastKV, Window


class Near(NamedTuple):
    """Keys, after position encoding, and values: ``[B, H, T, K]`` of the segment, ``[B, H, P, K]`` of the past. Zeros
    precede the ``past_bytes [B or 1]`` that the past really has."""

    k: Tensor
    v: Tensor
    old_k: Tensor
    old_v: Tensor
    past_bytes: Tensor


class Far(NamedTuple):
    """Summaries that n chunks of Q queries see, G per chunk.

    Attributes:
        k, v: ``[B, n, H, G, K]``.
        visible: ``[B or 1, n, Q, G]``.
        distance: visible keys between query and summary, as if none were missing, int64 ``[B or 1, n, Q, G]``.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    distance: Tensor


@torch.compiler.disable
def by_kernel(q: Tensor, near: Near, far: Far, *, blocks: Blocks, position: Position) -> Tensor:
    """Return head outputs ``[B, H, T, K]`` for scaled queries ``q [B, H, T, K]`` after position encoding. A key bias
    hides the zeros before streams that are younger than a window."""
    (streams, heads, length, _), front, number = q.shape, near.old_k.shape[2], blocks.near
    exact, biases, hiding = torch.promote_types(q.dtype, torch.float32), (None, None), {}
    if not isinstance(near.past_bytes, FakeTensor) and (near.past_bytes < front).any():
        padding = torch.arange(front + length) < front - near.past_bytes[:, None, None]
        hidden = torch.zeros(streams, heads, front + length, dtype=exact).masked_fill(padding, -torch.inf)
        biases = hidden.split([front, length], dim=2)
        hiding = {"key_bias": biases[1], "query_bias": torch.zeros_like(biases[1])}
    visible, vectors = far.visible[:, :, None], position.vectors(number)
    bias = position.bias(q, number) if vectors is None else None
    added, of_far = torch.zeros_like(visible, dtype=exact), _bias(q, far.distance, blocks=blocks, position=position)
    added = (added if of_far is None else added + of_far).masked_fill(~visible, -torch.inf)
    summaries = Beside(far.k, far.v, added) if added.shape[-1] else None
    past = [PastKV(tuple(range(heads)), near.old_k, near.old_v, biases[0])] if front else []
    same = {"past": past, "bias": bias, "vectors": vectors, "beside": summaries, **hiding}
    with torch.autocast(q.device.type, enabled=False):
        return window_cpu.attend(q, near.k, near.v, Window((number,) * heads, blocks.shift), **same)


def in_bands(q: Tensor, near: Near, far: Far, *, blocks: Blocks, position: Position, dropout: float) -> Tensor:
    """Do the same as ``by_kernel``, in plain PyTorch."""
    (chunks, size), front = blocks.chunks(q.shape[2]), near.old_k.shape[2]
    k, v = torch.cat([near.old_k, near.k], dim=2), torch.cat([near.old_v, near.v], dim=2)
    before = -(-blocks.behind // size) if chunks > 1 else 0
    if chunks > 1:
        pad = (0, 0, before * size - front, chunks * size - q.shape[2])
        k, v, front = F.pad(k, pad), F.pad(v, pad), before * size

    def joined(x: Tensor, far: Tensor) -> Tensor:  # [B, H, front + n Q, K] -> [B, n, H, L + G, K]
        parts = x.unflatten(2, (chunks + before, -1)).transpose(1, 2)
        return torch.cat([*(parts[:, i : i + chunks] for i in range(before + 1)), far], dim=3)

    place = torch.arange(front + size, device=q.device) - front  # of a band's keys, 0 at the chunk's first query
    first = size * torch.arange(chunks, device=q.device)[:, None, None]
    distance = (torch.arange(size, device=q.device)[:, None] - place - blocks.shift).expand(chunks, -1, -1)
    seen = (distance >= 0) & (distance < blocks.near) & (first + place >= -near.past_bytes[:, None, None, None])
    distance = torch.cat([distance.expand(len(far.distance), -1, -1, -1), far.distance], dim=3)
    visible = torch.cat([seen.expand(len(far.visible), -1, -1, -1), far.visible], dim=3)
    bias = _bias(q, distance, blocks=blocks, position=position)
    inputs = blocks.chunked(q).transpose(1, 2), joined(k, far.k), joined(v, far.v), visible[:, :, None]
    y = _softmax(*inputs, bias, dropout=dropout, blind=blocks.shift > 0)
    return rearrange(y, "B n H Q K -> B H (n Q) K")[:, :, : q.shape[2]]


@torch.no_grad()
def far_weights(q: Tensor, far: Far, *, blocks: Blocks, position: Position) -> Tensor:
    """Return attention weights ``[B, n, H, Q, G]`` among visible summaries alone; 0 for a query that sees none."""
    bias, visible = _bias(q, far.distance, blocks=blocks, position=position), far.visible[:, :, None]
    return _weights(blocks.chunked(q).transpose(1, 2), far.k, visible, bias).masked_fill_(~visible, 0)


def _bias(q: Tensor, distance: Tensor, *, blocks: Blocks, position: Position) -> Tensor | None:
    """Return the term of the position scheme for scores at distances ``[B or 1, n, Q, m]``, ``[B, n, H, Q, m]``."""
    if (bias := position.bias(q, blocks.span)) is None:  # else [H, S] or [B, H, T, S]
        return None
    bias = bias[None, None, :, None] if bias.dim() == 2 else blocks.chunked(bias).transpose(1, 2)
    shape = (len(q), distance.shape[1], q.shape[1], distance.shape[2])
    at = distance.clamp(0, blocks.span - 1)[:, :, None].expand(*shape, -1)
    return bias.expand(*shape, -1).gather(-1, at)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, *, dropout: float, blind: bool
) -> Tensor:
    """Return ``[B, n, H, Q, K]``, by torch's kernel without a bias; a ``blind`` query may see nothing: then 0."""
    nothing = ~visible.any(-1, keepdim=True)
    visible = (visible | nothing).expand(len(q), -1, -1, -1, -1)
    if bias is None and not dropout:
        parts = (x.flatten(0, 1) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*parts, attn_mask=visible.flatten(0, 1), scale=1.0).view(q.shape)
    else:
        y = F.dropout(_weights(q, k, visible, bias), dropout).to(v.dtype) @ v
    return y.masked_fill(nothing, 0) if blind else y


def _weights(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``[B, n, H, Q, m]``, in float32 at least; uniform for a query that sees nothing."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
