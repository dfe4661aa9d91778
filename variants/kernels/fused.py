"""The fused backend of ``window.attend``: no score matrix in memory, cost by each head's own span.

Three facts make it exact (1905.07799's soft mask, written as an additive bias):

1. m exp(s), renormalised, is exp(s + log m), so the mask is a bias and where m = 0 nothing need be computed. Heads are
   grouped by the keys they may see, queries are cut into chunks, and each chunk meets only its band of keys.
2. Parts of one softmax merge by their log-sum-exp, and the backward of a part needs only the joint output and the joint
   log-sum-exp: persistent vectors are one more part, with the unrotated query.
3. The gradient of a span needs the ramp alone: with upstream g and output o,
   dL/dz = sum over z <= x <= z + R of exp(s_tx - lse_t) / R * (g_t . v_x - g_t . o_t),
   so the kernel treats spans as constants and the ramp is a band of R + 1 keys a query.

The kernels are torch's: flash attention on a CPU, memory-efficient attention on CUDA, and both take only constants beside
the scores. Neither has dropout here: the one has none, and the other's mask could not be had for fact 3.
``window_cpu.cpp`` does the same by the row, where a compiler is at hand.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels.given import Given
from variants.kernels.window import Persistent, Window, highest, skew, soft_mask, visible

ALIGNED = 8
"""Numbers that rows of a mask and heads are rounded up to: 16 bytes, which CUDA's kernel reads at once."""


class Engine(NamedTuple):
    """A kernel for one part of a softmax.

    Attributes:
        forward: of scaled q ``[B, n, t, K]``, k and v ``[B, n, j, K]`` and an additive mask ``[1, n or 1, t, j]`` or None:
            output, and log-sum-exp ``[B, n, t]`` in float32 or float64.
        backward: of the output's gradient, these four, the joint output and the joint log-sum-exp: gradients of q, k, v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=1.0)


def _flash_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operation(g, q, k, v, y, lse.contiguous(), 0.0, False, attn_mask=mask, scale=1.0)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = _aligned(q, k, v)
    y, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*parts, _beside(mask, q), True, scale=1.0)
    return y[..., : q.shape[3]], lse[..., : q.shape[2]]


def _efficient_backward(g, q, k, v, mask, y, lse) -> tuple[Tensor, Tensor, Tensor]:
    g, q_, k_, v_, y = _aligned(g, q, k, v, y)
    # Outputs are read as the forward lays them out, whatever strides say, and log-sum-exps to whole blocks of 32 queries.
    y = y.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
    drawn = torch.zeros((), dtype=torch.int64)  # the state of dropout's generator, which is not read without dropout
    dropout, wanted = 0.0, [True, True, True, False]
    operation = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    found = operation(g, q_, k_, v_, _beside(mask, q), y, lse, drawn, drawn, dropout, wanted, scale=1.0)
    return tuple(x[..., : q.shape[3]] for x in found[:3])


def _aligned(*parts: Tensor) -> tuple[Tensor, ...]:
    """Heads as wide as the kernel can read them: zeros at the end change no product."""
    spare = -parts[0].shape[3] % ALIGNED
    return tuple(F.pad(x, (0, spare)) if spare else x for x in parts)


def _beside(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:3], -1)


ENGINES = {"cpu": Engine(_flash, _flash_backward), "cuda": Engine(_efficient, _efficient_backward)}
"""By the type of the tensors' device."""


def obstacle(device: torch.device, dtype: torch.dtype, *, dropout: float = 0.0) -> str | None:
    """Why this backend cannot run there, or None."""
    if device.type not in ENGINES:
        return f"runtime.device={device.type}"
    if device.type == "cuda" and torch.version.hip:
        return "torch for ROCm"  # its kernel pads otherwise
    if device.type == "cuda" and dtype == torch.float64:
        return "float64 on a GPU"
    return f"model.dropout={dropout}" if dropout else None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same function as ``window.attend``; ``z`` is ``[H]``.

    Args:
        bias: a constant ``[H, n]``.
        vectors, dropout, seed: none; the arguments are there because every backend has them.
    """
    assert vectors is None and not dropout, "the fused backend has no vectors and no dropout"
    extra = (None, None, None) if persistent is None else persistent
    given = Given(q, k.to(q.dtype), v.to(q.dtype), window.z, *extra, bias=bias)
    return Differentiable.apply(forward, backward, window._replace(z=None), *given)


class Differentiable(torch.autograd.Function):
    """``forward`` and ``backward`` of a backend as one operation of autograd."""

    @staticmethod
    def forward(ctx, forward, backward, window: Window, *given):
        given = Given(*given)
        y, saved = forward(given, window)
        ctx.save_for_backward(*given._replace(dropout=None), y, saved)
        ctx.of_backend, ctx.window, ctx.dropout = backward, window, given.dropout
        return y

    @staticmethod
    def backward(ctx, g):
        *given, y, saved = ctx.saved_tensors
        wanted = frozenset(n for n, needed in zip(Given._fields, ctx.needs_input_grad[3:], strict=True) if needed)
        given = Given(*given)._replace(dropout=ctx.dropout)
        found = ctx.of_backend(g, y, saved, given, ctx.window, wanted)
        return None, None, None, *(found.get(name) for name in Given._fields)


def forward(given: Given, window: Window) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]``, and log-sum-exp ``[B, H, T]``: 0 and -inf where a query sees nothing.

    Keys that no query sees are not read. Keys and values have the type of the queries.
    """
    order = by_max_keys(window)
    given, window = arranged(given, order), window._replace(max_keys=tuple(sorted(window.max_keys)))
    q, k, v, engine = given.q, given.k, given.v, ENGINES[given.q.device.type]
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_island(q), device=q.device)
    for heads, t, j, mask in _plan(given, window):
        y[:, heads, t], lse[:, heads, t] = engine.forward(q[:, heads, t], k[:, heads, j], v[:, heads, j], mask)
    if given.extra_q is not None:
        out, part = engine.forward(given.extra_q, *_persistent(given), None)
        joint = torch.logaddexp(lse, part)
        shares = ((x - joint).exp()[..., None] for x in (lse, part))
        y = sum(x * share for x, share in zip((y, out), shares, strict=True)).to(q.dtype)
        lse = joint
    return tuple(arranged(x, inverse(order)) for x in (y, lse))


def backward(
    g: Tensor, y: Tensor, saved: Tensor, given: Given, window: Window, wanted: frozenset[str], *, own_only: bool = False
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` fields of ``given``.

    Args:
        g, y, saved: the output's gradient, and what ``forward`` gave.
        own_only: those of keys and values are of the segment's own, ``[B, H, T, K]``.
    """
    order = by_max_keys(window)
    dtypes = {name: getattr(given, name).dtype for name in wanted}
    g, y, lse, given = (arranged(x, order) for x in (g, y, saved, given))
    window, g = window._replace(max_keys=tuple(sorted(window.max_keys))), g.contiguous()
    found: dict[str, Tensor] = {}
    if wanted & {"q", "k", "v"}:
        first = given.k.shape[2] - given.q.shape[2] if own_only else 0
        found |= zip("qkv", _context_gradients(g, y, lse, given, window, first=first), strict=True)
    if "z" in wanted:
        parts = (_span_gradient(g, y, lse, given, window, heads, n) for n, heads in groups(window.max_keys))
        found["z"] = torch.cat(list(parts))
    if wanted & {"extra_q", "extra_k", "extra_v"}:
        a, b, c = ENGINES[g.device.type].backward(g, given.extra_q, *_persistent(given), None, y, lse)
        b, c = (x.sum(0, dtype=lse.dtype) for x in (b, c))
        found |= {"extra_q": a, "extra_k": b, "extra_v": c}
    back = inverse(order)
    return {name: arranged(found[name], back, name).to(dtype) for name, dtype in dtypes.items()}


def by_max_keys(window: Window) -> list[int]:
    """Heads, those that see fewest keys first."""
    return sorted(range(len(window.max_keys)), key=window.max_keys.__getitem__)


def inverse(order: list[int]) -> list[int]:
    """The order that undoes ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def arranged(x, order: list[int], name: str = ""):
    """The heads of a tensor, a field of ``Given``, or of all of its fields, in that order, so that equal heads are a slice.

    An index would do it too, and a GPU would wait for it.
    """
    if isinstance(x, Given):
        heads = {n: arranged(t, order, n) for n, t in x._asdict().items() if isinstance(t, Tensor)}
        return x._replace(**heads)
    if order == sorted(order) or name in ("vectors", "seed"):
        return x
    dim = 0 if x.dim() < 3 or name in ("extra_k", "extra_v") else 1
    return torch.stack([x.select(dim, h) for h in order], dim)


def groups(max_keys: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Heads that see equally many keys: ``[(max_keys, heads), ...]``."""
    return [(n, [h for h, c in enumerate(max_keys) if c == n]) for n in sorted(set(max_keys))]


def chunks(rows: int, keys: int, max_keys: int, shift: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut queries that see a key: yields ``(first row, last row, first key, last key)`` of each chunk and the band it meets.

    The band ends with the nearest key of the last row.
    """
    size = max(32, min(128, max_keys))
    nearest = keys - rows - shift  # key of row 0, column 0
    for begin in range(max(0, -nearest), rows, size):
        end = min(begin + size, rows)
        yield begin, end, max(0, nearest + begin - max_keys + 1), nearest + end


def executed_flops(
    window: Window, *, streams: int, rows: int, keys: int, width: int, persistent: int, device: torch.device
) -> tuple[int, int]:
    """FLOPs of a forward and of a backward of all that can have a gradient: products, 2 a multiply-add.

    Chunks and bands are counted whole, masked or not, and the scores that the backward computes again; not what a kernel adds
    inside to fill its tiles, nor softmax and masks.

    Args:
        window: spans are soft where its ramp is not 0.
        persistent: N, vectors beside the context.
    """
    wide = width if device.type == "cpu" else width + -width % ALIGNED
    pairs, ramp, blocks = 0, window.ramp, _blocks(rows)
    for max_keys, heads in groups(window.max_keys):
        cut = chunks(rows, keys, max_keys, window.shift)
        pairs += len(heads) * sum((end - begin) * (high - low) for begin, end, low, high in cut)
    pairs = streams * (pairs + len(window.max_keys) * rows * persistent)
    band = streams * len(window.max_keys) * blocks[0] * blocks[1] * (blocks[1] + ramp) if ramp else 0
    return 4 * wide * pairs, 10 * wide * pairs + 4 * width * band


def _island(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunk_mask(table: Tensor | None, max_keys: int, rows: int, keys: int, like: Tensor) -> Tensor:
    """Additive ``[1, H or 1, rows, keys]`` whose last key is column 0 of the last row; rows begin at aligned places."""
    seen = visible(rows, keys, max_keys, shift=0, device=like.device)
    band = seen.new_zeros((1, rows, keys), dtype=like.dtype)
    if table is not None:
        band = skew(table[:, None, :max_keys].expand(-1, rows, -1), keys, shift=0)
    return F.pad(band.masked_fill(~seen, -torch.inf).to(like.dtype), (0, -keys % ALIGNED))[None, ..., :keys]


def _plan(given: Given, window: Window) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Heads, queries, keys and mask of every call of the kernel; masks of equal shape are made once."""
    table = given.bias  # what is added to scores at each column, [H, n]: the constant bias and log m
    if given.z is not None:
        soft = soft_mask(given.z.detach(), window.ramp, max(window.max_keys)).log()
        table = soft if table is None else soft + table
    for max_keys, of_group in groups(window.max_keys):
        heads = slice(of_group[0], of_group[-1] + 1)
        masks: dict[tuple[int, int], Tensor] = {}
        for begin, end, low, high in chunks(given.q.shape[2], given.k.shape[2], max_keys, window.shift):
            shape = (end - begin, high - low)
            if shape not in masks:
                masks[shape] = _chunk_mask(None if table is None else table[heads], max_keys, *shape, given.q)
            yield heads, slice(begin, end), slice(low, high), masks[shape]


def _persistent(given: Given) -> tuple[Tensor, Tensor]:
    """Keys and values of persistent vectors, the same for every stream, ``[B, H, N, K]``."""
    return tuple(x[None].to(given.q.dtype).expand(given.q.shape[0], -1, -1, -1) for x in (given.extra_k, given.extra_v))


def _context_gradients(g, y, lse, given: Given, window: Window, *, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, and of k and v from key number ``first`` on: they are sums over chunks, in float32."""
    q, k, v, *_ = given
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (
        torch.zeros((*x.shape[:2], x.shape[2] - first, x.shape[3]), dtype=lse.dtype, device=x.device) for x in (k, v)
    )
    for heads, t, j, mask in _plan(given, window):
        one, two = (g[:, heads, t], q[:, heads, t]), (k[:, heads, j], v[:, heads, j])
        dq[:, heads, t], b, c = ENGINES[q.device.type].backward(*one, *two, mask, y[:, heads, t], lse[:, heads, t])
        low, high = (max(0, place - first) for place in (j.start, j.stop))
        for total, part in ((dk, b), (dv, c)):
            total[:, heads, low:high] += part[:, :, part.shape[2] - (high - low) :]
    return dq, dk, dv


def _blocks(rows: int) -> tuple[int, int]:
    """Into how many blocks of how many queries the ramp's band is cut."""
    size = min(rows, 64)
    return -(-rows // size), size


def _span_gradient(g, y, lse, given: Given, window: Window, heads: list[int], max_keys: int) -> Tensor:
    """Fact 3, of heads that see equally many keys, from a block of scores of which only the band on the ramp is read."""
    own = slice(heads[0], heads[-1] + 1)
    g, y, lse, q, k, v = (x[:, own] for x in (g, y, lse, given.q, given.k, given.v))
    z, bias = given.z[own], None if given.bias is None else given.bias[own]
    rows, keys, ramp, device = q.shape[2], k.shape[2], window.ramp, q.device
    blocks, size = _blocks(rows)
    far = z + ramp  # rounded as in soft_mask, so that both agree on which side of a kink z is
    near = far.ceil().long() - ramp  # nearest column of each head's ramp
    # Keys from the far end of row 0's ramp on, so that row t reads places t .. t + R of its head.
    place = torch.arange(blocks * size + ramp, device=device) + keys - rows - window.shift - near[:, None] - ramp
    exists = (place >= 0) & (place < keys)
    head = torch.arange(len(heads), device=device)[:, None]

    def blocked(x: Tensor, fill: float = 0.0) -> Tensor:  # [B, H, T, ..] -> [B, H, blocks, size, ..]
        pad = (0, 0) * (x.dim() - 3) + (0, blocks * size - rows)
        return F.pad(x, pad, value=fill).unflatten(2, (blocks, size))

    def ramp_of(left: Tensor, right: Tensor) -> Tensor:  # products with the R + 1 keys on each row's ramp
        wide = right[:, head, place.clamp(0, keys - 1)].unfold(2, size + ramp, size)  # [B, H, blocks, K, size + R]
        return _band(blocked(left) @ wide, ramp + 1).to(lse.dtype)

    x = (
        near[:, None] + ramp - torch.arange(ramp + 1, device=device)
    )  # [H, R + 1], the column read at each place of the band
    inside = (x <= far[:, None]) & (x < max_keys)
    inside = inside[:, None, None] & _band(
        exists.unfold(1, size + ramp, size)[:, :, None].expand(-1, -1, size, -1).contiguous(), ramp + 1
    )
    scores = ramp_of(q, k)
    if bias is not None:
        scores = scores + bias.gather(1, x.clamp(max=bias.shape[1] - 1))[:, None, None]
    # A key of weight 0 may be above the sum of all that have one.
    score = (scores - blocked(lse, torch.inf)[..., None]).clamp(max=highest(lse.dtype))
    weight = torch.exp(score).masked_fill(~inside, 0)
    reward = ramp_of(g, v) - blocked((g * y).sum(-1, dtype=lse.dtype))[..., None]
    return (weight * reward).sum(dim=(0, 2, 3, 4)) / ramp


def _band(block: Tensor, n: int) -> Tensor:
    """Places t .. t + n - 1 of row t, ``[..., rows, n]``: a strided view of the contiguous block, no copy."""
    *outer, rows, one = block.stride()
    return block.as_strided((*block.shape[:-1], n), (*outer, rows + one, one))
