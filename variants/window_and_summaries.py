"""Window and summaries: one softmax over the nearest keys and over summaries of earlier blocks
(``linformer.py``).

- ``by_kernel`` computes windows by the CPU's kernel, whose cost is proportional to w, and summaries
  by matrix products.
- ``by_bands`` is plain PyTorch. It multiplies a chunk of queries with all keys of their windows,
  and with summaries."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants.blocks import Blocks
from variants.contract import Position
from variants.kernels import window_cpu
from variants.kernels.chunk_keys import ChunkKeys
from variants.kernels.window import PastKV, Window


class WindowKeys(NamedTuple):
    """Keys, after position encoding, and values of windows."""

    k: Tensor  # of the segment, [B, H, T, K]
    v: Tensor
    old_k: Tensor  # of the past, [B, H, P, K], padded with zeros in front
    old_v: Tensor
    past_bytes: Tensor  # number of rows of the past that are not padding, int64 [B or 1]


class Summaries(NamedTuple):
    """Summaries that n chunks of Q queries may see, G for each chunk."""

    k: Tensor  # [B, n, H, G, K]
    v: Tensor
    visible: Tensor  # whether a query sees a summary, [B or 1, n, Q, G]
    # column x of the block's last byte, as in kernels/window.py, int64 [B or 1, n, Q, G]
    distance: Tensor


@torch.compiler.disable
def by_kernel(
    q: Tensor, keys: WindowKeys, summaries: Summaries, *, blocks: Blocks, position: Position
) -> Tensor:
    """Return head outputs ``[B, H, T, K]`` for scaled queries ``q [B, H, T, K]`` after position
    encoding. Key biases hide the padding of streams that are shorter than a window."""
    (streams, heads, length, _), past_rows, max_keys = (
        q.shape,
        keys.old_k.shape[2],
        blocks.window_keys,
    )
    dtype = torch.promote_types(q.dtype, torch.float32)
    past_bias = None
    biases = {}
    if not isinstance(keys.past_bytes, FakeTensor) and (keys.past_bytes < past_rows).any():
        padding = torch.arange(past_rows + length) < past_rows - keys.past_bytes[:, None, None]
        key_bias = torch.zeros(streams, heads, past_rows + length, dtype=dtype).masked_fill(
            padding, -torch.inf
        )
        past_bias, segment_bias = key_bias.split([past_rows, length], dim=2)
        biases = {"key_bias": segment_bias, "query_bias": torch.zeros_like(segment_bias)}
    visible = summaries.visible[:, :, None]
    vectors, bias = position.term(q, max_keys)
    summary_bias = _position_bias(q, summaries.distance, blocks=blocks, position=position)
    summary_bias = (
        torch.zeros_like(visible, dtype=dtype) if summary_bias is None else summary_bias.to(dtype)
    )
    summary_bias = summary_bias.masked_fill(~visible, -torch.inf)
    past = []
    if past_rows:
        past = [PastKV(keys.old_k, keys.old_v, past_bias)]
    chunk_keys = None
    if summary_bias.shape[-1]:
        chunk_keys = ChunkKeys(summaries.k, summaries.v, summary_bias)
    options = {"past": past, "bias": bias, "vectors": vectors, "chunk_keys": chunk_keys, **biases}
    with torch.autocast(q.device.type, enabled=False):
        return window_cpu.attend(
            q, keys.k, keys.v, Window((max_keys,) * heads, blocks.shift), **options
        )


def by_bands(
    q: Tensor,
    keys: WindowKeys,
    summaries: Summaries,
    *,
    blocks: Blocks,
    position: Position,
    dropout: float,
) -> Tensor:
    """Compute ``by_kernel`` in plain PyTorch."""
    (chunks, size), past_rows = blocks.chunks(q.shape[2]), keys.old_k.shape[2]
    k = torch.cat([keys.old_k, keys.k], dim=2)
    v = torch.cat([keys.old_v, keys.v], dim=2)
    past_chunks = 0
    if chunks > 1:
        past_chunks = -(-blocks.window_past // size)
    if chunks > 1:
        pad = (0, 0, past_chunks * size - past_rows, chunks * size - q.shape[2])
        k = F.pad(k, pad)
        v = F.pad(v, pad)
        past_rows = past_chunks * size

    # [B, H, past_rows + n Q, K] -> [B, n, H, L + G, K]
    def join_summaries(x: Tensor, of_blocks: Tensor) -> Tensor:
        parts = x.unflatten(2, (chunks + past_chunks, -1)).transpose(1, 2)
        return torch.cat(
            [*(parts[:, i : i + chunks] for i in range(past_chunks + 1)), of_blocks], dim=3
        )

    # from the chunk's first query
    key_offset = torch.arange(past_rows + size, device=q.device) - past_rows
    first = size * torch.arange(chunks, device=q.device)[:, None, None]
    distance = (torch.arange(size, device=q.device)[:, None] - key_offset - blocks.shift).expand(
        chunks, -1, -1
    )
    in_window = (distance >= 0) & (distance < blocks.window_keys)
    in_window = in_window & (first + key_offset >= -keys.past_bytes[:, None, None, None])
    distance = torch.cat(
        [distance.expand(len(summaries.distance), -1, -1, -1), summaries.distance], dim=3
    )
    visible = torch.cat(
        [in_window.expand(len(summaries.visible), -1, -1, -1), summaries.visible], dim=3
    )
    bias = _position_bias(q, distance, blocks=blocks, position=position)
    k = join_summaries(k, summaries.k)
    v = join_summaries(v, summaries.v)
    chunked_q = blocks.chunked(q).transpose(1, 2)
    y = _softmax(
        chunked_q, k, v, visible[:, :, None], bias, dropout=dropout, may_be_empty=blocks.shift > 0
    )
    return rearrange(y, "B n H Q K -> B H (n Q) K")[:, :, : q.shape[2]]


@torch.no_grad()
def summary_weights(
    q: Tensor, summaries: Summaries, *, blocks: Blocks, position: Position
) -> Tensor:
    """Return attention weights ``[B, n, H, Q, G]`` among the visible summaries, without the window.
    All weights of a query that sees no summary are 0."""
    bias = _position_bias(q, summaries.distance, blocks=blocks, position=position)
    visible = summaries.visible[:, :, None]
    weights = _weights(blocks.chunked(q).transpose(1, 2), summaries.k, visible, bias)
    return weights.masked_fill_(~visible, 0)


def _position_bias(
    q: Tensor, distance: Tensor, *, blocks: Blocks, position: Position
) -> Tensor | None:
    """Return the term of the position scheme for scores at distances ``[B or 1, n, Q, m]``. It is
    ``[B, n, H, Q, m]``, or None for a scheme without a bias."""
    bias = position.bias(q, blocks.span)
    if bias is None:  # else [H, S] or [B, H, T, S]
        return None
    bias = bias[None, None, :, None] if bias.dim() == 2 else blocks.chunked(bias).transpose(1, 2)
    shape = (len(q), distance.shape[1], q.shape[1], distance.shape[2])
    columns = distance.clamp(0, blocks.span - 1)[:, :, None].expand(*shape, -1)
    return bias.expand(*shape, -1).gather(-1, columns)


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    *,
    dropout: float,
    may_be_empty: bool,
) -> Tensor:
    """Return outputs ``[B, n, H, Q, K]``, by torch's kernel if there is no bias and no dropout. The
    output of a query that sees nothing is 0; such queries occur only if ``may_be_empty``."""
    empty = ~visible.any(-1, keepdim=True)
    visible = (visible | empty).expand(len(q), -1, -1, -1, -1)
    if bias is None and not dropout:
        parts = (x.flatten(0, 1) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*parts, attn_mask=visible.flatten(0, 1), scale=1.0).view(
            q.shape
        )
    else:
        y = F.dropout(_weights(q, k, visible, bias), dropout).to(v.dtype) @ v
    if may_be_empty:
        return y.masked_fill(empty, 0)
    return y


def _weights(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention weights ``[B, n, H, Q, m]``, in float32 or wider; equal weights if a
    query sees nothing."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
