"""The fused backend of ``window.attend``: no score matrix in memory, at a cost that grows with each
head's span.

Three facts make it exact, with the soft mask of 1905.07799 as an additive bias:

1. m exp(s) = exp(s + log m), so the mask is a bias, and keys with m = 0 are skipped. Neighbouring
   heads with an equal number of visible keys are computed in one call. Each chunk of queries reads
   only its band of keys.
2. Parts of one softmax are merged by their log-sum-exps. The backward pass of a part needs only the
   output and log-sum-exp of the whole softmax. Persistent vectors are a part with the unrotated
   query.
3. With upstream gradient g and output o, the gradient of a span is a sum over its ramp,
   dL/dz = sum over t and z <= x <= z + R of exp(s_tx - lse_t) / R * (g_t . v_x - g_t . o_t).
   It is computed outside the kernel, in which spans are constants.

The kernels are torch's: flash attention on a CPU and memory-efficient attention on CUDA. Their
additive mask must be a constant. Dropout is not supported: the CPU's kernel has none, and CUDA's
kernel does not return the dropout mask that fact 3 needs. If every query sees all keys, or all up
to its own, torch chooses the kernel (``full``)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels import window as plain
from variants.kernels.window import Inputs, Window

_Group = TypeVar("_Group")
ALIGNMENT = 8
"""Rows of masks and heads are padded to a multiple of this width, because CUDA's kernel reads 16
bytes at once."""


class Engine(NamedTuple):
    """A kernel for one part of a softmax.

    Attributes:
        forward: maps scaled q ``[B, n, t, K]``, k and v ``[B, n, j, K]`` and an additive mask ``[1,
            n or 1, t, j]`` or None to the output, and the log-sum-exp ``[B, n, t]`` in float32 or
            float64.
        backward: maps the output's gradient, the four arguments of ``forward``, and the output and
            log-sum-exp of the whole softmax to gradients of q, k and v."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=1.0
    )


def _flash_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operation(g, q, k, v, y, lse.contiguous(), 0.0, False, attn_mask=mask, scale=1.0)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = _aligned(q, k, v)
    mask = mask if mask is None else mask.expand(*q.shape[:3], -1)
    y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *parts, mask, True, scale=1.0
    )
    return y[..., : q.shape[3]], lse[..., : q.shape[2]]


def _efficient_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    g, q_, k_, v_, y = _aligned(g, q, k, v, y)
    # The kernel ignores strides. It reads outputs in the layout of its forward, and log-sum-exps in
    # blocks of 32.
    y = y.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
    generator_state = torch.zeros((), dtype=torch.int64)  # of dropout; not read without dropout
    dropout = 0.0
    needs_gradient = [True, True, True, False]
    operation = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    mask = mask if mask is None else mask.expand(*q.shape[:3], -1)
    states = generator_state, generator_state
    gradients = operation(g, q_, k_, v_, mask, y, lse, *states, dropout, needs_gradient, scale=1.0)
    return tuple(x[..., : q.shape[3]] for x in gradients[:3])


def _aligned(*parts: Tensor) -> tuple[Tensor, ...]:
    """Pad heads with zeros to a width that the kernel can read; zeros change no product."""
    padding = -parts[0].shape[3] % ALIGNMENT
    return tuple(F.pad(x, (0, padding)) if padding else x for x in parts)


ENGINES = {"cpu": Engine(_flash, _flash_backward), "cuda": Engine(_efficient, _efficient_backward)}
"""The engine for each type of device."""


def obstacle(device: torch.device, *_: object) -> str | None:
    """Return the reason why this backend cannot run on ``device``, or None."""
    if device.type not in ENGINES:
        return f"runtime.device={device.type}"
    if device.type == "cuda" and torch.version.hip:
        return "torch for ROCm"  # its kernel pads in another way
    return None


def is_full(window: Window, inputs: Inputs) -> bool:
    """Return whether each query sees all keys up to its own, or all keys of both sides, and no
    other term is added to the scores."""
    rows = inputs.q.shape[2]
    keys = inputs.k.shape[2]
    sees_all = (
        window.z is None and not window.ramp and not window.shift and min(window.max_keys) >= rows
    )
    of_keys = (inputs.key_bias, inputs.valid)
    terms = (inputs.bias, inputs.vectors, inputs.extra_q, inputs.sink, *of_keys)
    return sees_all and inputs.lengths is None and keys == rows and all(x is None for x in terms)


def full(inputs: Inputs, *, causal: bool) -> Tensor:
    """Compute ``window.attend`` if ``is_full``."""
    q, k, v = inputs[:3]
    return F.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), is_causal=causal, scale=1.0
    )


def forward(inputs: Inputs, window: Window) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, T, K]`` and log-sum-exp ``[B, H, T]``, which are 0 and -inf for a
    query that sees no key.

    Keys that no query sees are not read. A bias ``[H, n]`` is allowed; vectors, key biases and
    dropout are not."""
    assert inputs.vectors is None and not inputs.dropout, (
        "the fused backend has no vectors and no dropout"
    )
    assert inputs.key_bias is None, "the fused backend has no key biases"
    q, k, v = _cast_like_queries(inputs)
    engine = ENGINES[q.device.type]
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(
        q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
    )
    for heads, t, j, mask, _ in _calls(inputs, window):
        band = (inputs.of_heads(x, heads)[:, :, j] for x in (k, v))
        y[:, heads, t], lse[:, heads, t] = engine.forward(q[:, heads, t], *band, mask)
    if inputs.extra_q is not None:
        y, lse = plain.merge_parts(
            y, lse, *engine.forward(inputs.extra_q, *_persistent_kv(inputs), None)
        )
    if inputs.sink is None:
        return y, lse
    return plain.merge_sink(y, lse, inputs.sink)


def backward(
    g: Tensor, y: Tensor, lse: Tensor, inputs: Inputs, window: Window, fields: frozenset[str], *,
    segment_only: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return gradients of ``fields`` of ``inputs``; those of keys and values are summed over chunks
    in float32 or wider. ``g`` is the output's gradient; ``y`` and ``lse`` are from ``forward``.
    With ``segment_only``, only the segment's keys and values get gradients, ``[B, H, T, K]``."""
    q, k, v = _cast_like_queries(inputs)
    g = g.contiguous()
    engine = ENGINES[q.device.type]
    gradients = {}
    counts = inputs.key_counts()
    rows = q.shape[2]
    gradients["q"] = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for name in "kv":
        gradients[name] = torch.zeros(
            q.shape if segment_only else k.shape, dtype=lse.dtype, device=q.device
        )
    if "z" in fields:
        gradients["z"] = torch.zeros(inputs.z.shape, dtype=lse.dtype, device=q.device)
    for heads, t, j, mask, span_tables in _calls(inputs, window, needs_slopes="z" in fields):
        band = [inputs.of_heads(x, heads)[:, :, j] for x in (k, v)]
        part = g[:, heads, t], q[:, heads, t], *band
        outputs = y[:, heads, t], lse[:, heads, t]
        gradients["q"][:, heads, t], *of_band = engine.backward(*part, mask, *outputs)
        first = 0
        if segment_only:
            first = counts[heads.start] - rows
        low, high = (max(0, key - first) for key in (j.start, j.stop))
        for name, x in zip("kv", of_band, strict=True):
            if segment_only:
                sums = gradients[name][:, heads]
            else:
                sums = inputs.of_heads(gradients[name], heads)
            sums[:, :, low:high] += x[:, :, x.shape[2] - (high - low) :]
        if "z" in fields:
            gradients["z"][heads] += _span_gradient(*part, *outputs, *span_tables)
    if inputs.extra_q is not None:
        persistent = _persistent_kv(inputs)
        gradients["extra_q"], *of_vectors = engine.backward(
            g, inputs.extra_q, *persistent, None, y, lse
        )
        gradients["extra_k"], gradients["extra_v"] = (x.sum(0, dtype=lse.dtype) for x in of_vectors)
    if "sink" in fields:
        gradients["sink"] = plain.sink_gradient((g * y).sum(-1, dtype=lse.dtype), lse, inputs.sink)
    return {name: gradients[name].to(getattr(inputs, name).dtype) for name in fields}


def group_heads(keys: Iterable[_Group]) -> Iterator[tuple[_Group, slice]]:
    """Group neighbouring heads with an equal entry in ``keys``; yields this entry and a slice of
    heads."""
    first = 0
    for key, heads in groupby(keys):
        last = first + len(list(heads))
        yield key, slice(first, last)
        first = last


def window_groups(inputs: Inputs, window: Window) -> Iterator[tuple[tuple[int, int], slice]]:
    """Return ``group_heads`` by ``max_keys`` and number of keys."""
    return group_heads(zip(window.max_keys, inputs.key_counts(), strict=True))


def query_chunks(
    rows: int, keys: int, max_keys: int, shift: int, *, both: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut the queries that see a key into chunks: yields ``(begin, end, low, high, shift)``, a
    chunk's rows and its band of keys, and the ``shift`` of its ``Window``. The band ends with the
    nearest key of the chunk's last row, or with ``both`` at most ``max_keys - 1`` keys after
    it."""
    size = max(32, min(128, max_keys))
    nearest = keys - rows - shift  # key of row 0, column 0
    after = max_keys - 1 if both else 0
    for begin in range(max(0, -nearest), rows, size):
        end = min(begin + size, rows)
        low = max(0, nearest + begin - max_keys + 1)
        high = min(keys, nearest + end + after)
        yield begin, end, low, high, high - nearest - end


def executed_flops(
    inputs: Inputs, window: Window, fields: frozenset[str], *, segment_only: bool = False
) -> tuple[int, int]:
    """Return FLOPs of the products in a forward and in a backward pass, 2 per multiply-add.

    All pairs of a chunk and its band count, also hidden ones, and scores that the backward pass
    computes again. Padding inside a kernel's tiles, softmax and masks do not count."""
    streams, _, rows, width = inputs.q.shape
    padded_width = width if inputs.q.device.type == "cpu" else width + -width % ALIGNMENT
    pairs = 0
    for (max_keys, keys), heads in window_groups(inputs, window):
        chunks = query_chunks(rows, keys, max_keys, window.shift, both=window.both)
        pairs += (heads.stop - heads.start) * sum(
            (end - begin) * (high - low) for begin, end, low, high, _ in chunks
        )
    persistent_pairs = 0
    if inputs.extra_k is not None:
        persistent_pairs = inputs.extra_k[..., 0].numel() * rows
    backward = 10 * padded_width * (pairs + persistent_pairs) + 4 * width * pairs * ("z" in fields)
    return 4 * padded_width * streams * (pairs + persistent_pairs), streams * backward


def _cast_like_queries(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in the dtype of the queries."""
    return inputs.q, inputs.k.to(inputs.q.dtype), inputs.v.to(inputs.q.dtype)


def _chunk_mask(
    table: Tensor | None, max_keys: int, rows: int, keys: int, like: Tensor, **sides: int
) -> Tensor:
    """Return additive mask ``[1, H or 1, rows, keys]`` with aligned rows; the last key is column 0
    of the last row, unless ``sides``, the fields of a ``Window``, say otherwise."""
    visible = plain.visible_mask(rows, keys, max_keys, device=like.device, **sides)
    if table is None:
        band = visible.new_zeros((1, rows, keys), dtype=like.dtype)
    else:
        band = plain.spread_distances(table, rows, keys, **sides)
    return _align(band.masked_fill(~visible, -torch.inf).to(like.dtype)[None])


def _align(mask: Tensor) -> Tensor:
    """Return a mask of which each row begins at a multiple of ``ALIGNMENT``."""
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % ALIGNMENT))[..., :keys]


def _calls(
    inputs: Inputs, window: Window, *, needs_slopes: bool = False
) -> Iterator[tuple[slice, slice, slice, Tensor, tuple[Tensor | None, ...]]]:
    """Yield heads, queries, keys and mask of each call of a kernel; then its bias and dm/dz, None
    without ``needs_slopes``.

    Calls of equal shape share one mask."""
    bias = table = inputs.bias  # table [H, n] is added to the scores of columns
    slope = None
    if inputs.z is not None:
        z = inputs.z.detach()
        n_distances = max(window.max_keys)
        table = plain.soft_mask(z, window.ramp, n_distances).log()
        table = table if bias is None else table + bias
        if needs_slopes:
            slope = plain.ramp_slope(z, window.ramp, n_distances)
    for (max_keys, keys), heads in window_groups(inputs, window):
        of_heads = [None if x is None else x[heads, :max_keys] for x in (table, bias, slope)]
        masks: dict[tuple[int, int, int], tuple] = {}
        for begin, end, low, high, shift in query_chunks(
            inputs.q.shape[2], keys, max_keys, window.shift, both=window.both
        ):
            shape = (end - begin, high - low)
            sides = {"shift": shift, "both": window.both}
            if (*shape, shift) not in masks:
                tables = tuple(
                    None
                    if x is None or slope is None
                    else plain.spread_distances(x, *shape, **sides)
                    for x in of_heads[1:]
                )
                mask = _chunk_mask(of_heads[0], max_keys, *shape, inputs.q, **sides)
                masks[*shape, shift] = mask, tables
            mask, (bias_of_keys, slope_of_keys) = masks[*shape, shift]
            if inputs.valid is not None:
                hidden = plain.padding_mask(inputs.valid - low, *shape, shift=shift)
                mask = _align(mask.masked_fill(hidden, -torch.inf))
                if needs_slopes:
                    slope_of_keys = slope_of_keys.masked_fill(hidden, 0)
            yield heads, slice(begin, end), slice(low, high), mask, (bias_of_keys, slope_of_keys)


def _persistent_kv(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return keys and values of persistent vectors, expanded to all streams, ``[B, H, N, K]``."""
    shape = (len(inputs.q), -1, -1, -1)
    dtype = inputs.q.dtype
    return tuple(x[None].to(dtype).expand(shape) for x in (inputs.extra_k, inputs.extra_v))


def _span_gradient(g, q, k, v, y, lse, bias: Tensor | None, slope: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of spans from one chunk, by fact 3 of this file's docstring."""
    scores = (q @ k.mT).to(lse.dtype)
    scores = (scores if bias is None else scores + bias) - lse.masked_fill(
        lse == -torch.inf, torch.inf
    )[..., None]
    # A key with m = 0 may have a score above the log-sum-exp.
    weights = (
        scores.clamp(max=plain.max_exponent(lse.dtype)).exp().masked_fill(slope == 0, 0) * slope
    )
    dweights = (g @ v.mT).to(lse.dtype) - (g * y).sum(-1, dtype=lse.dtype)[..., None]
    return (weights * dweights).sum(dim=(0, 2, 3))
