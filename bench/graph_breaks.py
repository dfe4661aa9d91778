"""Graph breaks: what a compiled model leaves to eager code, as nodes of a graph that is otherwise compiled code's.

A call of a module's method that is disabled for the compiler (``torch.compiler.disable``) is one operation where the model is
traced, and its gradient another. When the graph is run they do what eager code does, operation by operation, and what its
autograd keeps for the backward pass lives as long as the first result of the call, its ticket, which the gradient reads.
"""

from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from bench.stand_ins import like, listed


@torch.library.custom_op("windtunnel_fit::eager", mutates_args=())
def eager(read: list[Tensor], made: str, number: int, forward: bool) -> list[Tensor]:
    """What break ``number`` makes of tensors, after its ticket; or of its ticket and gradients."""
    raise NotImplementedError("there is nothing to run")


@eager.register_fake
def _(read, made, number, forward):
    return like(made)


def leaves(tree: object) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], object]]:
    """The tensors of a tree, and what makes such a tree of such tensors."""
    flat, layout = tree_flatten(tree)
    tensors, others = (
        [x for x in flat if isinstance(x, Tensor)],
        [None if isinstance(x, Tensor) else (x,) for x in flat],
    )

    def rebuild(given: Sequence[Tensor]) -> object:
        left = iter(given)
        return tree_unflatten([next(left) if other is None else other[0] for other in others], layout)

    return tensors, rebuild


def compiling(now: bool):
    """What code that asks whether it is compiled is told."""
    return patch.object(torch.compiler, "_is_compiling_flag", now)


def leave_out(model: nn.Module, mode: FakeTensorMode) -> list["Break"]:
    """The breaks of a model, to be filled as it is traced: from now on its disabled methods are calls of ``eager`` there."""
    breaks: list[Break] = []

    def left_out(module: nn.Module, function: Callable) -> Callable:
        def call(*args, **kwargs):
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            weights = dict(module.named_parameters()) | dict(module.named_buffers())
            tensors, rebuild = leaves((weights, args, kwargs))
            own = Break(_Owner(module, function), rebuild, len(breaks), mode)
            breaks.append(own)
            made = _Call.apply(own, *tensors)
            return own.rebuild(made)

        return call

    for module in model.modules():
        for name in dir(type(module)):
            if getattr(getattr(type(module), name, None), "_torchdynamo_disable", False):
                setattr(module, name, left_out(module, getattr(module, name)))
    return breaks


class _Owner(nn.Module):
    """The module of a method, which is its forward."""

    def __init__(self, module: nn.Module, function: Callable):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Break:
    """A call that is left out of the graph, and its gradient.

    Args:
        owner: of the function, with the weights that it may read.
        given: makes weights, arguments and keyword arguments of tensors.
        number: among the breaks of a model.
        mode: under which tensors are fake.
    """

    def __init__(self, owner: _Owner, given: Callable, number: int, mode: FakeTensorMode):
        self.owner, self.given, self.number, self.mode = owner, given, number, mode
        cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.autocast = lambda: torch.autocast("cpu", cast[1], enabled=cast[0])
        self._kept = WeakTensorKeyDictionary()

    def forward(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The ticket and the results."""
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), self.autocast():
            entered = [_Enter.apply(x, anchor) if learns else x for x, learns in zip(given, self.learns, strict=True)]
            weights, args, kwargs = self.given(entered)
            weights = {f"module.{name}": x for name, x in weights.items()}
            made, self.rebuild = leaves(torch.func.functional_call(self.owner, weights, args, kwargs))
        self.learned = [x.requires_grad for x in made]
        ticket = torch.empty(1, dtype=torch.uint8)
        edges = [get_gradient_edge(x) if x.requires_grad else None for x in made]
        self._kept[ticket] = edges, [get_gradient_edge(x) for x in entered if x.requires_grad]
        return [ticket, *(x.detach() for x in made)]

    def backward(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of those that have one, of the ticket and the gradients of those results that have one."""
        ticket, *upstream = given
        made, entered = self._kept.pop(ticket)
        found = torch.autograd.grad([made[i] for i in self.asked], entered, upstream, allow_unused=True)
        self.found = [x is not None for x in found]
        return [x for x in found if x is not None]

    def node(self, ticket: Tensor | None, given: Sequence[Tensor]) -> list[Tensor]:
        """A call of the forward, or with a ticket of the backward, in the graph; run once beside it to see what it makes."""
        with _disable_current_modes(), self.mode, compiling(False):
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in given]
            made = self.forward(fakes) if ticket is None else self.backward([self.sample, *fakes])
            self.sample = made[0]  # with the ticket the backward is tried, when that is traced
            shapes = listed(made)
        return eager([*([] if ticket is None else [ticket]), *given], shapes, self.number, ticket is None)


class _Enter(torch.autograd.Function):
    """Where gradients leave a break: unlike a leaf it keeps no tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, g: Tensor):
        raise AssertionError("gradients are taken before it")


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Break, *given):
        own.learns = ctx.needs_input_grad[1:]
        ticket, *made = own.node(None, given)
        ctx.own = own
        ctx.save_for_backward(ticket)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, learned in zip(made, own.learned, strict=True) if not learned))
        return tuple(made)

    @staticmethod
    def backward(ctx, *upstream):
        own, (ticket,) = ctx.own, ctx.saved_tensors
        own.asked = [i for i, g in enumerate(upstream) if g is not None]
        made = iter(own.node(ticket, [upstream[i] for i in own.asked]))
        found = iter(own.found)
        return None, *(next(made) if learns and next(found) else None for learns in own.learns)
