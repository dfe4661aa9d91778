"""The fused backend of ``window.attend``: no score matrix in memory, cost by each head's own span.

Three facts make it exact (1905.07799's soft mask, written as an additive bias):

1. m exp(s), renormalised, is exp(s + log m), so the mask is a bias and where m = 0 nothing need be computed. Heads are
   grouped by the keys they may see, queries are cut into chunks, and each chunk meets only its band of keys.
2. Parts of one softmax merge by their log-sum-exp, and the backward of a part needs only the joint output and the joint
   log-sum-exp: persistent vectors are one more part, with the unrotated query.
3. The gradient of a span needs the ramp alone: with upstream g and output o,
   dL/dz = sum over z <= x <= z + R of exp(s_tx - lse_t) / R * (g_t . v_x - g_t . o_t),
   so the kernel treats spans as constants and the ramp is a band of R + 1 keys a query.

The kernel is torch's flash attention for CPUs, which takes only constants beside the scores. ``window_cpu.cpp`` does the
same by the row, where a compiler is at hand.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.window import Persistent, Window, skew, soft_mask, visible

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    bias: Tensor | None = None,
    persistent: Persistent | None = None,
) -> Tensor:
    """The same function as ``window.attend`` without dropout; ``z`` is ``[H]``.

    Args:
        bias: a constant ``[H, n]``.
    """
    keep = min(k.shape[2], q.shape[2] + window.past())
    k, v = k[:, :, k.shape[2] - keep :], v[:, :, v.shape[2] - keep :]
    extra = (None, None, None) if persistent is None else persistent
    return _Attend.apply(q, k.to(q.dtype), v.to(q.dtype), window.z, *extra, bias, window)


def groups(max_keys: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Heads that see equally many keys: ``[(max_keys, heads), ...]``."""
    return [(n, [h for h, c in enumerate(max_keys) if c == n]) for n in sorted(set(max_keys))]


def chunks(rows: int, keys: int, max_keys: int, shift: int):
    """Cut queries: yields ``(first row, last row, first key, last key)`` of each chunk and the band it meets."""
    size = max(32, min(128, max_keys))
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        nearest = keys - rows - shift  # key of row 0, column 0
        low, high = max(0, nearest + begin - max_keys + 1), nearest + end
        if high > low:
            yield begin, end, low, high


def _chunk_mask(table: Tensor | None, max_keys: int, rows: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Additive ``[1, H or 1, rows, keys]`` whose last key is column 0 of the last row."""
    seen = visible(rows, keys, max_keys, shift=0, device=torch.device("cpu"))
    if table is None:
        mask = torch.zeros(rows, keys, dtype=dtype).masked_fill(~seen, -torch.inf)
        return mask[None, None]
    band = skew(table[:, None, :max_keys].expand(-1, rows, -1), keys, shift=0)
    return band.masked_fill(~seen, -torch.inf).to(dtype)[None]


def _table(bias: Tensor | None, window: Window) -> Tensor | None:
    """What is added to scores at each column, ``[H, n]``: the constant bias and log m."""
    if window.z is None:
        return bias
    soft = soft_mask(window.z.detach(), window.ramp, max(window.max_keys)).log()
    return soft if bias is None else soft + bias


def _plan(table: Tensor | None, window: Window, q: Tensor, k: Tensor):
    """Yields heads, slices and mask of every call of the kernel; masks of equal shape are made once."""
    for max_keys, heads in groups(window.max_keys):
        part = slice(None) if len(heads) == len(window.max_keys) else heads
        mine = None if table is None else table[part]
        masks: dict[tuple[int, int], Tensor] = {}
        for begin, end, low, high in chunks(q.shape[2], k.shape[2], max_keys, window.shift):
            shape = (end - begin, high - low)
            if shape not in masks:
                masks[shape] = _chunk_mask(mine, max_keys, *shape, q.dtype)
            yield part, slice(begin, end), slice(low, high), masks[shape]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, z, extra_q, extra_k, extra_v, bias, window):
        y = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        _forward_(y, lse, q, k, v, bias, window)
        if extra_q is not None:
            out, part = _flash(_fold(extra_q), extra_k[None].to(q.dtype), extra_v[None].to(q.dtype), scale=1.0)
            out, part = _unfold(out, q.shape[0]), _unfold(part, q.shape[0])
            joint = torch.logaddexp(lse, part)
            y = y * (lse - joint).exp()[..., None].to(q.dtype) + out * (part - joint).exp()[..., None].to(q.dtype)
            lse = joint
        lse.masked_fill_(lse == -torch.inf, torch.inf)  # a blind row has weights 0, also in the backward
        ctx.save_for_backward(q, k, v, z, extra_q, extra_k, extra_v, bias, y, lse)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx, g):
        q, k, v, z, extra_q, extra_k, extra_v, bias, y, lse = ctx.saved_tensors
        g = g.contiguous()
        d = _backward(g, q, k, v, z if ctx.needs_input_grad[3] else None, y, lse, bias, ctx.window)
        extras = (None, None, None)
        if extra_q is not None:
            two, joint = (extra_k[None].to(q.dtype), extra_v[None].to(q.dtype)), (_fold(y), _fold(lse).contiguous())
            a, b, c = _flash_backward(_fold(g), _fold(extra_q), *two, *joint, 0.0, False, scale=1.0)
            extras = (_unfold(a, q.shape[0]), b[0].to(extra_k.dtype), c[0].to(extra_v.dtype))
        return *d, *extras, None, None


def _forward_(y, lse, q, k, v, bias, window: Window) -> None:
    """Output and log-sum-exp of the context alone, which are 0 and -inf where nothing is seen."""
    for heads, t, j, mask in _plan(_table(bias, window), window, q, k):
        y[:, heads, t], lse[:, heads, t] = _flash(
            q[:, heads, t], k[:, heads, j], v[:, heads, j], attn_mask=mask, scale=1.0
        )
    blind = max(0, window.shift - (k.shape[2] - q.shape[2]))  # first rows that see no key; the kernel says 0
    lse[:, :, :blind] = -torch.inf


def _backward(g, q, k, v, z, y, lse, bias, window: Window) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v by the context, from the joint output and log-sum-exp; that of z only where it is given."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dz = None if z is None else _span_gradient(q, k, v, y, lse, g, z, bias, window)
    for heads, t, j, mask in _plan(_table(bias, window), window, q, k):
        one, two = (g[:, heads, t], q[:, heads, t]), (k[:, heads, j], v[:, heads, j])
        joint = (y[:, heads, t], lse[:, heads, t].contiguous())
        a, b, c = _flash_backward(*one, *two, *joint, 0.0, False, attn_mask=mask, scale=1.0)
        dq[:, heads, t] = a
        dk[:, heads, j] += b
        dv[:, heads, j] += c
    return dq, dk, dv, dz


def _fold(x: Tensor) -> Tensor:
    """``[B, H, T, ...]`` to ``[1, H, B * T, ...]``: persistent vectors are the same for every stream."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _unfold(x: Tensor, streams: int) -> Tensor:
    return x[0].unflatten(1, (streams, -1)).transpose(0, 1)


def _span_gradient(q, k, v, y, lse, g, z, bias, window: Window) -> Tensor:
    """Fact 3: ``[H]``, from a block of scores of which only the band on the ramp is read."""
    rows, keys, ramp = q.shape[2], k.shape[2], window.ramp
    size = min(rows, 64)
    blocks = -(-rows // size)
    far = z + ramp  # rounded as in soft_mask, so that both agree on which side of a kink z is
    near = far.ceil().long() - ramp  # nearest column of each head's ramp
    # Keys from the far end of row 0's ramp on, so that row t reads places t .. t + R of its head.
    place = keys - rows - window.shift - near[:, None] - ramp + torch.arange(blocks * size + ramp)
    exists = (place >= 0) & (place < keys)
    own = torch.arange(len(near))[:, None]

    def blocked(x: Tensor, fill: float = 0.0) -> Tensor:  # [B, H, T, ..] -> [B, H, blocks, size, ..]
        pad = (0, 0) * (x.dim() - 3) + (0, blocks * size - rows)
        return F.pad(x, pad, value=fill).unflatten(2, (blocks, size))

    def ramp_of(left: Tensor, right: Tensor) -> Tensor:  # products with the R + 1 keys on each row's ramp
        wide = right[:, own, place.clamp(0, keys - 1)].unfold(2, size + ramp, size)  # [B, H, blocks, K, size + R]
        return _band(blocked(left) @ wide, ramp + 1).to(lse.dtype)

    x = near[:, None] + ramp - torch.arange(ramp + 1)  # [H, R + 1], the column read at each place of the band
    inside = (x <= far[:, None]) & (x < torch.tensor(window.max_keys)[:, None])
    inside = inside[:, None, None] & _band(
        exists.unfold(1, size + ramp, size)[:, :, None].expand(-1, -1, size, -1).contiguous(), ramp + 1
    )
    scores = ramp_of(q, k)
    if bias is not None:
        scores = scores + bias.gather(1, x.clamp(max=bias.shape[1] - 1))[:, None, None]
    weight = torch.exp(scores - blocked(lse, torch.inf)[..., None]).masked_fill(~inside, 0)
    reward = ramp_of(g, v) - blocked((g * y).sum(-1, dtype=lse.dtype))[..., None]
    return (weight * reward).sum(dim=(0, 2, 3, 4)).to(z.dtype) / ramp


def _band(block: Tensor, n: int) -> Tensor:
    """Places t .. t + n - 1 of row t, ``[..., rows, n]``: a strided view of the contiguous block, no copy."""
    *outer, rows, one = block.stride()
    return block.as_strided((*block.shape[:-1], n), (*outer, rows + one, one))
