"""Attention over a window as one torch operation, for backends that compute their own gradients.

A backend is a module with three functions, where ``fields`` names the fields of ``Inputs`` that
need a gradient:

    forward(inputs, window) -> y [B, H, T, K], log-sum-exp [B, H, T]
    backward(g, y, lse, inputs, window, fields, segment_only=) -> a gradient for each of the fields
    executed_flops(inputs, window, fields, segment_only=) -> FLOPs of a forward and a backward pass

This module turns them into two operations that torch can trace, ``windtunnel::attention_forward``
and ``attention_backward``. Learned windows are passed as a tensor on the CPU, so that new spans do
not recompile a graph. A hard window is a constant, because a graph for a GPU would need a C++
compiler to create a tensor on the CPU.

``k`` and ``v`` hold keys and values of the past, then those of the segment. If the past needs no
gradient, ``k`` and ``v`` are detached and the segment's part is also passed as ``segment``: then
only that part gets gradients. Key biases are passed in the same way."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from variants.kernels import fused, triton_window
from variants.kernels.dropout import draw_seed
from variants.kernels.window import Inputs, Window

DIFFERENTIABLE = (
    "q",
    "k",
    "v",
    "z",
    "extra_q",
    "extra_k",
    "extra_v",
    "vectors",
    "sink",
    "key_bias",
    "query_bias",
)
"""Fields of ``Inputs`` that may have a gradient."""
SEGMENT_NAMES = ("segment_k", "segment_v", "segment_key_bias")
MODULES: dict[str, ModuleType] = {"fused": fused, "kernel": triton_window}
"""The module of each backend."""


def attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    segment: Sequence[Tensor | None] = (),
    **options,
) -> Tensor:
    """Compute ``window.attend`` by ``fused`` or ``kernel``.

    Args:
        segment: the segment's keys and values ``[B, H, T, K]``, equal to the last T of ``k`` and
            ``v``, and its key biases, if any. Then these get gradients, and ``k`` and ``v`` get
            none."""
    inputs = Inputs.from_call(q, k, v, window, **options)
    named = inputs._asdict() | dict(zip(SEGMENT_NAMES, segment, strict=False))
    rate = named.pop("dropout")
    if rate and inputs.seed is None:
        named["seed"] = draw_seed(q.device)
    tensors = {n: x for n, x in named.items() if x is not None and (rate or n != "seed")}
    sizes = (window.shift, window.ramp, rate, window.both)
    windows = (list(window.max_keys), window.max_keys_tensor, *sizes)
    return _forward(backend, " ".join(tensors), list(tensors.values()), *windows)[0]


@torch.library.custom_op("windtunnel::attention_forward", mutates_args=())
def _forward(
    backend: str, names: str, tensors: list[Tensor], max_keys: list[int],
    max_keys_tensor: Tensor | None, shift: int, ramp: int, dropout: float, both: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output ``[B, H, T, K]`` and log-sum-exp ``[B, H, T]``; ``names`` has the names of
    ``tensors``."""
    y, lse = MODULES[backend].forward(
        *_arguments(names, tensors, max_keys, max_keys_tensor, shift, ramp, dropout, both)
    )
    return y.contiguous(), lse.contiguous()


@_forward.register_fake
def _forward_results(backend, names, tensors, *_):
    q = tensors[0]
    return q.new_empty(q.shape), q.new_empty(
        q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.custom_op("windtunnel::attention_backward", mutates_args=())
def _backward(
    backend: str, names: str, tensors: list[Tensor], max_keys: list[int],
    max_keys_tensor: Tensor | None, shift: int, ramp: int, dropout: float, both: bool, g: Tensor,
    y: Tensor, lse: Tensor, gradient_names: str,
) -> list[Tensor]:  # fmt: skip
    """Return gradients of the tensors in ``gradient_names``, in this order."""
    fields, segment_only = _fields(gradient_names)
    inputs, window = _arguments(
        names, tensors, max_keys, max_keys_tensor, shift, ramp, dropout, both
    )
    gradients = MODULES[backend].backward(
        g, y, lse, inputs, window, frozenset(fields), segment_only=segment_only
    )
    return [gradients[field].to(getattr(inputs, field).dtype).contiguous() for field in fields]


@_backward.register_fake
def _backward_results(backend, names, tensors, *rest):
    named = dict(zip(names.split(), tensors, strict=True))
    gradient_names = rest[-1]
    return [named[name].new_empty(named[name].shape) for name in gradient_names.split()]


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.backend, ctx.names, tensors, ctx.max_keys, max_keys_tensor, *ctx.sizes = inputs
    ctx.save_for_backward(max_keys_tensor, *tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, g: Tensor, _: Tensor):
    max_keys_tensor, *tensors, y, lse = ctx.saved_tensors
    names = ctx.names.split()
    needs = dict(zip(names, ctx.needs_input_grad[2], strict=True))
    gradient_names = [
        name for name in names if needs[name] and name in (*DIFFERENTIABLE, *SEGMENT_NAMES)
    ]
    arguments = (ctx.backend, ctx.names, tensors, ctx.max_keys, max_keys_tensor, *ctx.sizes)
    gradients = _backward(*arguments, g.contiguous(), y, lse, " ".join(gradient_names))
    by_name = dict(zip(gradient_names, gradients, strict=True))
    return None, None, [by_name.get(name) for name in names], *[None] * 6


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


def _arguments(
    names: str, tensors: list[Tensor], max_keys: list[int], max_keys_tensor: Tensor | None,
    shift: int, ramp: int, dropout: float, both: bool,
) -> tuple[Inputs, Window]:  # fmt: skip
    """Return arguments of a backend's functions. Rows are made contiguous here, because a compiled
    graph chooses layouts, and torch's flash attention for CPUs (2.13) silently misreads rows whose
    elements are not adjacent in memory."""
    named = {
        name: x for name, x in zip(names.split(), tensors, strict=True) if name not in SEGMENT_NAMES
    }
    for name in {"q", "k", "v", "extra_q"} & named.keys():
        named[name] = named[name] if named[name].stride(-1) == 1 else named[name].contiguous()
    max_keys = max_keys if max_keys_tensor is None else max_keys_tensor.tolist()
    return Inputs(**named, dropout=dropout), Window(tuple(max_keys), shift, None, ramp, both=both)


def _fields(gradient_names: str) -> tuple[list[str], bool]:
    """Return fields of ``Inputs``, and whether only the segment's keys and values get gradients."""
    names = gradient_names.split()
    return [name.removeprefix("segment_") for name in names], not set(SEGMENT_NAMES).isdisjoint(
        names
    )


@register_flop_formula(torch.ops.windtunnel.attention_forward, get_raw=True)
def _forward_flops(backend, *call, **_) -> int:
    return MODULES[backend].executed_flops(*_arguments(*call), frozenset())[0]


@register_flop_formula(torch.ops.windtunnel.attention_backward, get_raw=True)
def _backward_flops(backend, *call, **_) -> int:
    fields, segment_only = _fields(call[-1])
    return MODULES[backend].executed_flops(
        *_arguments(*call[:8]), frozenset(fields), segment_only=segment_only
    )[1]
