"""The kernel path of ``window.attend`` on a CPU: ``window_cpu.cpp``, compiled at its first use (``native.py``).

Two operations, ``windtunnel::window_forward`` and ``window_backward``, are what dispatch modes see; they count the FLOPs of
the products that they execute, and torch's counter is told.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from variants.kernels.window import Past, Persistent, Window
from variants.kernels.window_call import NAMES, PAST, available, geometry, make_call, pasts

__all__ = ["attend", "available", "geometry"]

EXTRA = ("extra_k", "extra_v")
TOGETHER = {"k": ("v", "past"), "v": ("k", "past"), "extra_k": EXTRA, "extra_v": EXTRA}
"""Gradients that come with others: keys with values, and those of the segment with those of the past."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    past: Sequence[Past] = (),
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
) -> Tensor:
    """The same function as ``window.attend`` without dropout; ``z`` is ``[H]``.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values of the segment ``[B, H, T, K]``.
        window: what a query may see.
        past: what comes before, in parts that have all heads together, or nothing: heads that look far may have more
            than others. No work is done for gradients that nobody asks for.
        bias: a constant ``[H, n]``, added to scores.
        vectors: p ``[n, K]``, shared by heads: adds ``q @ vectors.T``.
        persistent: key-value vectors in the same softmax, never masked.

    Returns: ``[B, H, T, K]``.
    """
    most = max(window.columns)
    for name, given in (("vectors", vectors), ("bias", None if bias is None else bias.mT)):
        if given is not None and len(given) < most:
            raise ValueError(f"{name} of {len(given)} distances: window.columns needs {most}")
    kind = torch.promote_types(q.dtype, torch.float32)
    old = [x.to(kind) for part in past for x in (part.k, part.v)]
    owners = [next(i for i, part in enumerate(past) if h in part.heads) for h in range(q.shape[1])] if past else []
    extra = (None, None, None) if persistent is None else (x.to(kind) for x in persistent)
    vectors = None if vectors is None else vectors[:most].to(kind)
    z = None if window.z is None else window.z.to(kind)
    own = (q.to(kind), k.to(kind), v.to(kind))
    return _Attend.apply(window._replace(z=None), owners, *own, z, *extra, vectors, bias, *old).to(q.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, window, owners, *tensors):
        sizes = (owners, window.columns, window.shift, window.ramp)
        y, lse, _ = _forward(list(tensors), *sizes)
        ctx.save_for_backward(*tensors, y, lse)
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        *tensors, y, lse = ctx.saved_tensors
        _, _, *needs = ctx.needs_input_grad
        needed = {name for name, need in zip(NAMES, needs, strict=False) if need}
        needed |= {"past"} if any(needs[PAST:]) else set()
        wanted = [name for name in (*NAMES, "past") if needed & {name, *TOGETHER.get(name, ())}]
        *found, _ = _backward(g, y, lse, tensors, *ctx.sizes, " ".join(wanted))
        found = iter(found)
        own = [next(found) if name in wanted else None for name in NAMES]
        return None, None, *own, None, *(next(found, None) for _ in tensors[PAST:])


@torch.library.custom_op("windtunnel::window_forward", mutates_args=(), device_types="cpu")
def _forward(
    tensors: list[Tensor | None], owners: list[int], columns: list[int], shift: int, ramp: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, K]``, log-sum-exp ``[B, H, T]``, inf where nothing is seen, and FLOPs executed.

    Args:
        tensors: those of ``NAMES``, the bias, then keys and values of each part of the past.
        owners: the part that each head's past is in.
    """
    call = make_call(tensors, owners, columns, shift, ramp, backward=False)
    y, lse, _ = _forward_results(tensors)
    call.put(y=y, lse=lse)
    return y, lse, call.run("forward")


@torch.library.custom_op("windtunnel::window_backward", mutates_args=(), device_types="cpu")
def _backward(
    g: Tensor,
    y: Tensor,
    lse: Tensor,
    tensors: list[Tensor | None],
    owners: list[int],
    columns: list[int],
    shift: int,
    ramp: int,
    wanted: str,
) -> list[Tensor]:
    """Gradients of the tensors whose names are wanted, in the order of ``NAMES``, of the past, and FLOPs executed."""
    call = make_call(tensors, owners, columns, shift, ramp, backward=True)
    *found, _ = _backward_results(g, y, lse, tensors, owners, columns, shift, ramp, wanted)
    own = dict(zip(wanted.split(), found, strict=False))
    for name in ("q", "extra_q"):  # the kernel writes them in any case
        if (x := tensors[NAMES.index(name)]) is not None:
            own.setdefault(name, _like(x))
    call.put(g=g, y=y, lse=lse, **{f"d{name}": x for name, x in own.items() if name != "past"})
    if "past" in own:
        call.put_past(owners, found[-2 * (max(owners) + 1) :], names=("dk_old", "dv_old"))
    return [*found, call.run("backward")]


@_forward.register_fake
def _forward_results(tensors, *_):
    q = tensors[0]
    return _like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _backward_results(g, y, lse, tensors, owners, columns, shift, ramp, wanted):
    found = [_like(x) for name, x in zip(NAMES, tensors, strict=False) if name in wanted.split()]
    found += [_like(x) for x in tensors[PAST:] if "past" in wanted.split()]
    return [*found, g.new_empty((), dtype=torch.int64)]


@register_flop_formula(torch.ops.windtunnel.window_forward, get_raw=True)
def _forward_flops(tensors, owners, columns, *_, out_val) -> int:
    return _expected_flops(tensors, owners, columns) if isinstance(out_val[-1], FakeTensor) else int(out_val[-1])


@register_flop_formula(torch.ops.windtunnel.window_backward, get_raw=True)
def _backward_flops(_g, _y, _lse, tensors, owners, columns, _shift, _ramp, wanted, *, out_val) -> int:
    if isinstance(out_val[-1], FakeTensor):
        return _expected_flops(tensors, owners, columns, wanted.split())
    return int(out_val[-1])


def _expected_flops(
    tensors: list[Tensor | None], owners: list[int], columns: list[int], wanted: list[str] | None = None
) -> int:
    """Without data: at the heads' buckets, because spans have no values, and with nothing rounded up to whole vectors."""
    own = dict(zip(NAMES, tensors, strict=False))
    streams, _, rows, width = own["q"].shape
    products = 0.0  # with a key, for each row
    for n, past in zip(columns, pasts(tensors, owners, len(columns)), strict=True):
        met = min(n + geometry(own["q"].dtype)[0] - 1, past + rows)
        segment = min(n, rows)
        learned = met if wanted and "past" in wanted else segment - segment**2 / (2 * rows)
        products += 2 * met if wanted is None else 3 * met + 2 * learned * ("k" in wanted)
        if own["vectors"] is not None:
            products += met if wanted is None else met * (2 + ("vectors" in wanted))
    if own["extra_k"] is not None:
        products += own["extra_k"][..., 0].numel() * (2 if wanted is None else 3 + 2 * ("extra_k" in wanted))
    return round(2 * streams * rows * width * products)


def _like(x: Tensor) -> Tensor:
    """Empty; of four dimensions in memory as ``[B, T, H, K]``, from where heads are joined without a copy."""
    if x.dim() < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
