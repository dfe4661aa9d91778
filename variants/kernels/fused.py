"""The fused backend of ``window.attend``: no score matrix in memory, cost by each head's own span.

Three facts make it exact (1905.07799's soft mask, written as an additive bias):

1. m exp(s) = exp(s + log m), so the mask is a bias, and keys with m = 0 are skipped. Neighbouring heads that may see
   equally many keys are computed together. Queries are cut into chunks, and each chunk reads only its band of keys.
2. Parts of one softmax merge by their log-sum-exp, and the backward pass of a part needs only the joint output and the
   joint log-sum-exp. Persistent vectors are one more part, with the unrotated query.
3. With upstream g and output o, the gradient of a span is a sum over its ramp,
   dL/dz = sum over z <= x <= z + R of exp(s_tx - lse_t) / R * (g_t . v_x - g_t . o_t),
   which is computed beside the kernel: there spans are constants.

The kernels are torch's: flash attention on a CPU and memory-efficient attention on CUDA. Their additive mask must be a
constant. There is no dropout: the first has none, and the second does not return its dropout mask, which fact 3 needs.
If the window is the whole triangle, torch chooses the kernel. ``window_cpu.cpp`` does the same row by row.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels import window as plain
from variants.kernels.window import Inputs, Window

_Number = TypeVar("_Number")
ALIGNED = 8
"""Rows of masks and heads are padded to a multiple of this: CUDA's kernel reads 16 bytes at once."""


class Engine(NamedTuple):
    """A kernel for one part of a softmax.

    Attributes:
        forward: takes scaled q ``[B, n, t, K]``, k and v ``[B, n, j, K]`` and an additive mask ``[1, n or 1, t, j]`` or
            None; returns the output, and the log-sum-exp ``[B, n, t]`` in float32 or float64.
        backward: takes the output's gradient, these four, joint output and log-sum-exp; returns gradients of q, k, v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=1.0)


def _flash_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operation(g, q, k, v, y, lse.contiguous(), 0.0, False, attn_mask=mask, scale=1.0)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    parts, mask = _aligned(q, k, v), mask if mask is None else mask.expand(*q.shape[:3], -1)
    y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*parts, mask, True, scale=1.0)
    return y[..., : q.shape[3]], lse[..., : q.shape[2]]


def _efficient_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    g, q_, k_, v_, y = _aligned(g, q, k, v, y)
    # The kernel ignores strides and reads outputs in the forward's layout, log-sum-exps in whole blocks of 32.
    y = y.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
    drawn = torch.zeros((), dtype=torch.int64)  # the state of dropout's generator, which is not read without dropout
    dropout, wanted = 0.0, [True, True, True, False]
    operation = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    mask = mask if mask is None else mask.expand(*q.shape[:3], -1)
    gradients = operation(g, q_, k_, v_, mask, y, lse, drawn, drawn, dropout, wanted, scale=1.0)
    return tuple(x[..., : q.shape[3]] for x in gradients[:3])


def _aligned(*parts: Tensor) -> tuple[Tensor, ...]:
    """Heads padded to a width that the kernel can read: zeros at the end change no product."""
    spare = -parts[0].shape[3] % ALIGNED
    return tuple(F.pad(x, (0, spare)) if spare else x for x in parts)


ENGINES = {"cpu": Engine(_flash, _flash_backward), "cuda": Engine(_efficient, _efficient_backward)}
"""The engine for each type of device."""


def obstacle(device: torch.device, *, dropout: float = 0.0) -> str | None:
    """Why this backend cannot run on ``device``, or None."""
    if device.type not in ENGINES:
        return f"runtime.device={device.type}"
    if device.type == "cuda" and torch.version.hip:
        return "torch for ROCm"  # its kernel pads in another way
    return f"model.dropout={dropout}" if dropout else None


def is_triangle(window: Window, inputs: Inputs) -> bool:
    """Whether each query sees all keys up to its own, unmasked: at the start of a stream, or without carried state."""
    rows, keys = inputs.q.shape[2], inputs.k.shape[2]
    hard = window.z is None and not window.ramp and not window.shift and min(window.max_keys) >= rows
    added = (inputs.bias, inputs.vectors, inputs.extra_q, inputs.sink)
    return hard and inputs.lengths is None and keys == rows and all(x is None for x in added)


def triangle(inputs: Inputs) -> Tensor:
    """``window.attend`` for a window that is the whole triangle."""
    q, k, v = inputs[:3]
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, scale=1.0)


def forward(inputs: Inputs, window: Window) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]``, and log-sum-exp ``[B, H, T]``; a query that sees nothing has 0 and -inf.

    Keys no query sees are not read. A constant bias ``[H, n]`` is allowed; vectors, key biases and dropout are not.
    """
    assert inputs.vectors is None and not inputs.dropout, "the fused backend has no vectors and no dropout"
    assert inputs.key_bias is None, "the fused backend has no key biases"
    q, k, v = _alike(inputs)
    engine = ENGINES[q.device.type]
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for heads, t, j, mask, _ in _plan(inputs, window):
        near = (inputs.of_heads(x, heads)[:, :, j] for x in (k, v))
        y[:, heads, t], lse[:, heads, t] = engine.forward(q[:, heads, t], *near, mask)
    if inputs.extra_q is not None:
        y, lse = plain.merged(y, lse, *engine.forward(inputs.extra_q, *_persistent(inputs), None))
    return plain.with_sink(y, lse, inputs.sink)


def backward(
    g: Tensor,
    y: Tensor,
    saved: Tensor,
    inputs: Inputs,
    window: Window,
    wanted: frozenset[str],
    *,
    own_only: bool = False,
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` fields of ``inputs``; key and value gradients are summed over chunks in float32.

    Args:
        g, y, saved: the output's gradient, and the two results of ``forward``.
        own_only: key and value gradients are those of the segment alone, ``[B, H, T, K]``.
    """
    (q, k, v), lse, g = _alike(inputs), saved, g.contiguous()
    engine, results = ENGINES[q.device.type], {}
    counts, rows = inputs.key_counts(), q.shape[2]
    results["q"] = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for name in "kv":
        results[name] = torch.zeros(q.shape if own_only else k.shape, dtype=lse.dtype, device=q.device)
    if "z" in wanted:
        results["z"] = torch.zeros(inputs.z.shape, dtype=lse.dtype, device=q.device)
    for heads, t, j, mask, slope in _plan(inputs, window, ramps="z" in wanted):
        near = [inputs.of_heads(x, heads)[:, :, j] for x in (k, v)]
        part = g[:, heads, t], q[:, heads, t], *near
        results["q"][:, heads, t], *others = engine.backward(*part, mask, y[:, heads, t], lse[:, heads, t])
        first = counts[heads.start] - rows if own_only else 0
        low, high = (max(0, place - first) for place in (j.start, j.stop))
        for name, x in zip("kv", others, strict=True):
            sums = results[name][:, heads] if own_only else inputs.of_heads(results[name], heads)
            sums[:, :, low:high] += x[:, :, x.shape[2] - (high - low) :]
        if "z" in wanted:
            results["z"][heads] += _span_gradient(*part, y[:, heads, t], lse[:, heads, t], *slope)
    if inputs.extra_q is not None:
        results["extra_q"], *others = engine.backward(g, inputs.extra_q, *_persistent(inputs), None, y, lse)
        results["extra_k"], results["extra_v"] = (x.sum(0, dtype=lse.dtype) for x in others)
    if "sink" in wanted:
        results["sink"] = plain.sink_gradient((g * y).sum(-1, dtype=lse.dtype), lse, inputs.sink)
    return {name: results[name].to(getattr(inputs, name).dtype) for name in wanted}


def runs(numbers: Iterable[_Number]) -> Iterator[tuple[_Number, slice]]:
    """Groups of neighbouring heads with equal numbers, as (number, heads)."""
    first = 0
    for number, heads in groupby(numbers):
        last = first + len(list(heads))
        yield number, slice(first, last)
        first = last


def chunks(rows: int, keys: int, max_keys: int, shift: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the queries that see a key: yields ``(begin, end, low, high)``, a chunk's rows and the keys of its band.

    The band ends with the nearest key of the chunk's last row.
    """
    size = max(32, min(128, max_keys))
    nearest = keys - rows - shift  # key of row 0, column 0
    for begin in range(max(0, -nearest), rows, size):
        end = min(begin + size, rows)
        yield begin, end, max(0, nearest + begin - max_keys + 1), nearest + end


def executed_flops(
    inputs: Inputs, window: Window, wanted: frozenset[str], *, own_only: bool = False
) -> tuple[int, int]:
    """FLOPs of the products in a forward and in a backward pass, 2 per multiply-add.

    Chunks and bands count whole, masked or not, and so do the scores that the backward pass recomputes. Padding inside
    a kernel's tiles, softmax and masks do not count.
    """
    streams, _, rows, width = inputs.q.shape
    padded_width = width if inputs.q.device.type == "cpu" else width + -width % ALIGNED
    pairs = 0
    for (max_keys, keys), heads in runs(zip(window.max_keys, inputs.key_counts(), strict=True)):
        cut = chunks(rows, keys, max_keys, window.shift)
        pairs += (heads.stop - heads.start) * sum((end - begin) * (high - low) for begin, end, low, high in cut)
    persistent_pairs = 0 if inputs.extra_k is None else inputs.extra_k[..., 0].numel() * rows
    backward = 10 * padded_width * (pairs + persistent_pairs) + 4 * width * pairs * ("z" in wanted)
    return 4 * padded_width * streams * (pairs + persistent_pairs), streams * backward


def _alike(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the type of the queries."""
    return inputs.q, inputs.k.to(inputs.q.dtype), inputs.v.to(inputs.q.dtype)


def _chunk_mask(table: Tensor | None, max_keys: int, rows: int, keys: int, like: Tensor) -> Tensor:
    """Additive mask ``[1, H or 1, rows, keys]``, rows aligned in memory; its last key is column 0 of the last row."""
    seen = plain.visible(rows, keys, max_keys, shift=0, device=like.device)
    band = seen.new_zeros((1, rows, keys), dtype=like.dtype) if table is None else plain.spread(table, rows, keys)
    return F.pad(band.masked_fill(~seen, -torch.inf).to(like.dtype), (0, -keys % ALIGNED))[None, ..., :keys]


def _plan(
    inputs: Inputs, window: Window, *, ramps: bool = False
) -> Iterator[tuple[slice, slice, slice, Tensor, tuple[Tensor | None, ...]]]:
    """Heads, queries, keys and mask of each call; with ``ramps`` also bias and dm/dz. Equal shapes share one mask."""
    bias, table, slope = inputs.bias, inputs.bias, None  # table [H, n]: added to the scores of each column
    if inputs.z is not None:
        z, most = inputs.z.detach(), max(window.max_keys)
        table = plain.soft_mask(z, window.ramp, most).log()
        table = table if bias is None else table + bias
        slope = plain.ramp_slope(z, window.ramp, most) if ramps else None
    for (max_keys, keys), heads in runs(zip(window.max_keys, inputs.key_counts(), strict=True)):
        of_heads = [None if x is None else x[heads, :max_keys] for x in (table, bias, slope)]
        made: dict[tuple[int, int], tuple] = {}
        for begin, end, low, high in chunks(inputs.q.shape[2], keys, max_keys, window.shift):
            shape = (end - begin, high - low)
            if shape not in made:
                added = [None if x is None or slope is None else plain.spread(x, *shape) for x in of_heads[1:]]
                made[shape] = _chunk_mask(of_heads[0], max_keys, *shape, inputs.q), added
            yield heads, slice(begin, end), slice(low, high), *made[shape]


def _persistent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values of persistent vectors, the same for every stream, ``[B, H, N, K]``."""
    shape, dtype = (len(inputs.q), -1, -1, -1), inputs.q.dtype
    return tuple(x[None].to(dtype).expand(shape) for x in (inputs.extra_k, inputs.extra_v))


def _span_gradient(g, q, k, v, y, lse, bias: Tensor | None, slope: Tensor) -> Tensor:
    """The gradient of spans ``[H]`` from one chunk, by fact 3."""
    scores = (q @ k.mT).to(lse.dtype)
    scores = (scores if bias is None else scores + bias) - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    # A key of weight 0 may score above the log-sum-exp.
    weights = scores.clamp(max=plain.highest(lse.dtype)).exp().masked_fill(slope == 0, 0) * slope
    reward = (g @ v.mT).to(lse.dtype) - (g * y).sum(-1, dtype=lse.dtype)[..., None]
    return (weights * reward).sum(dim=(0, 2, 3))
