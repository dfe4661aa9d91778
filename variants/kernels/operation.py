"""Attention over a window as one torch operation, for backends that compute their own gradients.

A backend is a module with three functions,

    forward(inputs, window) -> y [B, H, T, K], saved [B, H, T]
    backward(g, y, saved, inputs, window, wanted, own_only=) -> a gradient for each wanted name
    executed_flops(inputs, window, wanted, own_only=) -> FLOPs of a forward, of a backward

This module turns them into two operations that torch can trace, ``windtunnel::attention_forward`` and
``attention_backward``. Each head's window is passed as a tensor on the CPU, so that moving spans are no constants of a
compiled graph. A hard window is a constant: a graph for a GPU would need a C++ compiler to create a tensor on the CPU.

Keys and values of the past are constants; ``k`` and ``v`` hold them, then the segment's own. They may be given without
a gradient, and the segment's own again as ``own``: then only gradients of ``own`` are computed. Key biases likewise.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from variants.kernels import fused, triton_window
from variants.kernels.window import Inputs, Window

LEARNED = ("q", "k", "v", "z", "extra_q", "extra_k", "extra_v", "vectors", "sink", "key_bias", "query_bias")
"""Fields of ``Inputs`` that may have a gradient."""
SEGMENT = ("own_k", "own_v", "own_key_bias")
MODULES: dict[str, ModuleType] = {"fused": fused, "kernel": triton_window}
"""The module of each backend."""


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, window: Window, *, own: Sequence[Tensor | None] = (), **added
) -> Tensor:
    """``window.attend`` by ``fused`` or ``kernel``.

    Args:
        own: the segment's keys and values ``[B, H, T, K]``, which get the gradients and equal the last T of ``k`` and
            ``v``; then the segment's key biases, if there are any.
    """
    inputs = Inputs.of(q, k, v, window, **added)
    named = inputs._asdict() | dict(zip(SEGMENT, own, strict=False))
    rate = named.pop("dropout")
    tensors = {n: x for n, x in named.items() if x is not None and (rate or n != "seed")}
    sizes = (list(window.max_keys), window.limits, window.shift, window.ramp, rate)
    return _forward(backend, " ".join(tensors), list(tensors.values()), *sizes)[0]


@torch.library.custom_op("windtunnel::attention_forward", mutates_args=())
def _forward(
    backend: str, names: str, tensors: list[Tensor], max_keys: list[int], limits: Tensor | None, shift: int, ramp: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``[B, H, T, K]``, and numbers ``[B, H, T]`` for the backward pass; ``names`` are those of ``tensors``."""
    y, saved = MODULES[backend].forward(*_call(names, tensors, max_keys, limits, shift, ramp, dropout))
    return y.contiguous(), saved.contiguous()


@_forward.register_fake
def _forward_results(backend, names, tensors, *_):
    q = tensors[0]
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("windtunnel::attention_backward", mutates_args=())
def _backward(
    backend: str, names: str, tensors: list[Tensor], max_keys: list[int], limits: Tensor | None, shift: int, ramp: int,
    dropout: float, g: Tensor, y: Tensor, saved: Tensor, wanted: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors whose names are ``wanted``, in their order."""
    fields, own_only = _fields(wanted)
    inputs, window = _call(names, tensors, max_keys, limits, shift, ramp, dropout)
    gradients = MODULES[backend].backward(g, y, saved, inputs, window, frozenset(fields), own_only=own_only)
    return [gradients[field].to(getattr(inputs, field).dtype).contiguous() for field in fields]


@_backward.register_fake
def _backward_results(backend, names, tensors, max_keys, limits, shift, ramp, dropout, g, y, saved, wanted):
    named = dict(zip(names.split(), tensors, strict=True))
    return [named[name].new_empty(named[name].shape) for name in wanted.split()]


def _save(ctx, inputs, output) -> None:
    ctx.backend, ctx.names, tensors, ctx.max_keys, limits, *ctx.sizes = inputs
    ctx.save_for_backward(limits, *tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, g: Tensor, _: Tensor):
    limits, *tensors, y, saved = ctx.saved_tensors
    names = ctx.names.split()
    needs = dict(zip(names, ctx.needs_input_grad[2], strict=True))
    wanted = [name for name in names if needs[name] and name in (*LEARNED, *SEGMENT)]
    call = (ctx.backend, ctx.names, tensors, ctx.max_keys, limits, *ctx.sizes)
    results = _backward(*call, g.contiguous(), y, saved, " ".join(wanted))
    named = dict(zip(wanted, results, strict=True))
    return None, None, [named.get(name) for name in names], None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _call(
    names: str, tensors: list[Tensor], max_keys: list[int], limits: Tensor | None, shift: int, ramp: int, dropout: float
) -> tuple[Inputs, Window]:
    """Arguments of a backend's functions. Rows are made contiguous here, because a compiled graph chooses layouts, and
    torch's flash attention for CPUs (2.13) silently misreads rows whose elements are apart."""
    named = {name: x for name, x in zip(names.split(), tensors, strict=True) if name not in SEGMENT}
    for name in {"q", "k", "v", "extra_q"} & named.keys():
        named[name] = named[name] if named[name].stride(-1) == 1 else named[name].contiguous()
    seen = max_keys if limits is None else limits.tolist()
    return Inputs(**named, dropout=dropout), Window(tuple(seen), shift, None, ramp)


def _fields(wanted: str) -> tuple[list[str], bool]:
    """Fields of ``Inputs``, and whether key and value gradients are of the segment alone."""
    names = wanted.split()
    return [name.removeprefix("own_") for name in names], not set(SEGMENT).isdisjoint(names)


@register_flop_formula(torch.ops.windtunnel.attention_forward, get_raw=True)
def _forward_flops(backend, *call, **_) -> int:
    return MODULES[backend].executed_flops(*_call(*call), frozenset())[0]


@register_flop_formula(torch.ops.windtunnel.attention_backward, get_raw=True)
def _backward_flops(backend, *call, **_) -> int:
    fields, own_only = _fields(call[-1])
    return MODULES[backend].executed_flops(*_call(*call[:7]), frozenset(fields), own_only=own_only)[1]
