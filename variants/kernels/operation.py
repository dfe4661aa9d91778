"""Operation: attention over a window as one call, for backends that write their own gradients.

A backend is a module with two functions,

    forward(given, window) -> y [B, H, T, K], saved [B, H, T]
    backward(g, y, saved, given, window, wanted, own_only=) -> a gradient for each wanted name,

and here they become a pair of operations that torch can trace, ``windtunnel::attention_forward`` and
``attention_backward``. How far each head looks goes in as a tensor on the CPU, so that moving spans are no constants of a
compiled graph, and the FLOPs of a call are what the backend says (``executed_flops``).

Keys and values of the past are constants. So ``k`` and ``v``, which have the past before the segment's own, may be given
without a gradient beside ``own``, the segment's own keys and values: only their gradients are then computed.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from variants.kernels import fused, triton_window
from variants.kernels.given import Given
from variants.kernels.window import Persistent, Window

LEARNED = ("q", "k", "v", "z", "extra_q", "extra_k", "extra_v", "vectors")
"""Of a ``Given``, what may have a gradient."""
WANTED = frozenset(LEARNED)


def attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    own: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same function as ``window.attend``, by ``fused`` or ``kernel``, as one operation.

    Args:
        own: keys and values of the segment ``[B, H, T, K]``, which are the last of ``k`` and ``v``, to have their gradients.
    """
    limits = torch.tensor(window.max_keys) if window.limits is None else window.limits
    extra = (None, None, None) if persistent is None else persistent
    beside = (*extra, vectors, bias, seed if dropout else None, *(own or (None, None)))
    return _forward(backend, limits, window.shift, window.ramp, dropout, q, k, v, window.z, *beside)[0]


MODULES: dict[str, ModuleType] = {"fused": fused, "kernel": triton_window}
"""The code behind a name."""


@torch.library.custom_op("windtunnel::attention_forward", mutates_args=())
def _forward(
    backend: str,
    limits: Tensor,
    shift: int,
    ramp: int,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None,
    extra_q: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    vectors: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    own_k: Tensor | None,
    own_v: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]``, and what the backward pass needs beside it ``[B, H, T]``."""
    given = _given(q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, dropout, seed)
    y, saved = MODULES[backend].forward(given, _window(limits, shift, ramp))
    return y.contiguous(), saved.contiguous()


@_forward.register_fake
def _forward_results(backend, limits, shift, ramp, dropout, q, *_):
    kind = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=kind)


@torch.library.custom_op("windtunnel::attention_backward", mutates_args=())
def _backward(
    backend: str,
    limits: Tensor,
    shift: int,
    ramp: int,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None,
    extra_q: Tensor | None,
    extra_k: Tensor | None,
    extra_v: Tensor | None,
    vectors: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    y: Tensor,
    saved: Tensor,
    wanted: str,
    own_only: bool,
) -> list[Tensor]:
    """Gradients of the tensors whose names are ``wanted``, in their order; with ``own_only`` of the segment's own keys."""
    given = _given(q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, dropout, seed)
    names = wanted.split()
    found = MODULES[backend].backward(
        g, y, saved, given, _window(limits, shift, ramp), frozenset(names), own_only=own_only
    )
    return [found[name].to(getattr(given, name).dtype).contiguous() for name in names]


@_backward.register_fake
def _backward_results(
    backend, limits, shift, ramp, dropout, q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, seed, g, y, saved, wanted,
    own_only,
):  # fmt: skip
    given = Given(q, k, v, z, extra_q, extra_k, extra_v, vectors)._asdict()
    if own_only:  # as many as queries
        given |= {"k": k.new_empty(q.shape), "v": v.new_empty(q.shape)}
    return [given[name].new_empty(given[name].shape) for name in wanted.split()]


def _save(ctx, inputs, output) -> None:
    ctx.backend, limits, *ctx.sizes = inputs[:5]
    ctx.own_only = inputs[15] is not None
    ctx.save_for_backward(limits, *inputs[5:15], *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, g: Tensor, _: Tensor):
    limits, *tensors, y, saved = ctx.saved_tensors
    needs = dict(zip(LEARNED, ctx.needs_input_grad[5:], strict=False))
    own_k, own_v = ctx.needs_input_grad[15:]
    if ctx.own_only:
        needs |= {"k": own_k, "v": own_v}
    wanted = [name for name, need in needs.items() if need]
    found = _backward(
        ctx.backend, limits, *ctx.sizes, *tensors, g.contiguous(), y, saved, " ".join(wanted), ctx.own_only
    )
    named = dict(zip(wanted, found, strict=True))
    own = (named.pop("k", None), named.pop("v", None)) if ctx.own_only else (None, None)
    return None, None, None, None, None, *(named.get(name) for name in LEARNED), None, None, *own


_forward.register_autograd(_gradients, setup_context=_save)


def _given(q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, extra_q: Tensor | None, *others) -> Given:
    """A compiled graph chooses layouts; torch's flash attention for CPUs reads rows whose elements are apart as if they were
    not, and says nothing (2.13)."""
    q, k, v, extra_q = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, extra_q))
    return Given(q, k, v, z, extra_q, *others)


def _window(limits: Tensor, shift: int, ramp: int) -> Window:
    return Window(tuple(limits.tolist()), shift, None, ramp)


@register_flop_formula(torch.ops.windtunnel.attention_forward, get_raw=True)
def _forward_flops(backend, limits, shift, ramp, dropout, *tensors, **_) -> int:
    return _flops(backend, Given(*tensors[:8]), _window(limits, shift, ramp), WANTED)[0]


@register_flop_formula(torch.ops.windtunnel.attention_backward, get_raw=True)
def _backward_flops(backend, limits, shift, ramp, dropout, *tensors, **_) -> int:
    wanted, own_only = tensors[-2:]
    window = _window(limits, shift, ramp)
    return _flops(backend, Given(*tensors[:8]), window, frozenset(wanted.split()), own_only=own_only)[1]


def _flops(
    backend: str, given: Given, window: Window, wanted: frozenset[str], *, own_only: bool = False
) -> tuple[int, int]:
    """FLOPs that a forward and a backward execute."""
    (streams, _, rows, width), keys = given.q.shape, given.k.shape[2]
    persistent = 0 if given.extra_k is None else given.extra_k.shape[1]
    sizes = {"streams": streams, "rows": rows, "keys": keys, "width": width, "persistent": persistent}
    if backend == "fused":
        return fused.executed_flops(window, device=given.q.device, **sizes)
    z, vectors = given.z, given.vectors is not None
    known = z is not None and not isinstance(z, FakeTensor)
    far = (z.detach() + window.ramp).tolist() if known else None  # waits for the device: whoever counts is not timed
    block = triton_window.block(given)
    return triton_window.executed_flops(
        window, far, vectors=vectors, block=block, wanted=wanted, own_only=own_only, **sizes
    )
