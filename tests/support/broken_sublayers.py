"""Small sublayers with faults. ``tests/support/broken_promises.py`` lists the promises that they
break."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.support.promises import Gate, Sums, memory, toy
from variants.attention import Attention
from variants.contract import WAYS, Honours, Inspection, LayerContext, SublayerOutput
from variants.position import NoPosition, Rotary
from variants.product_key_memory import ProductKeyMemory


class ReachesThroughState(Gate):
    """Its declared reach of 0 holds inside a segment, but its state has the first byte of the
    previous segment."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 0

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = super().forward(x).y
        return SublayerOutput(y if state is None else y + state[:, None], x[:, 0].detach())


class Delayed(Gate):
    """A byte sees the mean of the block two before its own. A gradient needs a step that
    contains both blocks."""

    honours = Honours()
    period = 8

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.block = nn.Linear(context.d_model, context.d_model)

    def reach(self) -> int:
        return 2 * 8 + 7

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        state = (x[:, :0], 0 * x[:, 0], 0 * x[:, 0]) if state is None else state
        open_block, last_mean, visible_mean = (part.to(x.dtype) for part in state)
        visible_means = []
        for x_t in x.unbind(1):
            visible_means.append(visible_mean)
            open_block = torch.cat([open_block, x_t[:, None]], dim=1)
            if open_block.shape[1] == 8:
                visible_mean, last_mean = last_mean, self.block(open_block.mean(1))
                open_block = open_block[:, :0]
        state = (open_block.detach(), last_mean.detach(), visible_mean.detach())
        return SublayerOutput(super().forward(x).y + torch.stack(visible_means, dim=1), state)


def _ignoring(name: str, **choices: object) -> type[Attention]:
    """Return a class of attention that replaces the choices of the run by ``choices``."""

    def __init__(self, context: LayerContext):
        Attention.__init__(self, replace(context, **choices))

    return type(name, (Attention,), {"__init__": __init__, "__module__": __name__})


IgnoresPosition = _ignoring("IgnoresPosition", scheme=NoPosition)
IgnoresCache = _ignoring("IgnoresCache", cache="kv")
IgnoresSpan = _ignoring("IgnoresSpan", span=8)


class DeniesSpan(Attention):
    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.honours = replace(self.honours, span=False)


class Wrapped(Gate):
    """torch's causal attention without a state. It follows no choice of the run and declares no
    reach."""

    limits = frozenset({"segments"})

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.qkv = nn.Linear(context.d_model, 3 * context.d_model)

    def transform_input(self, x):
        return nn.functional.scaled_dot_product_attention(
            *self.qkv(x).chunk(3, dim=-1), is_causal=True
        )


class OverclaimsChoices(Wrapped):
    honours = Honours(
        position=WAYS.keys(), cache={"kv", "hidden"}, attend_self={True, False}, span=True
    )

    def reach(self):
        return None


class Mapped(Sums):
    """Reports its attention map, which a subclass may change."""

    def inspect(self, x: Tensor) -> Inspection:
        positions = torch.arange(x.shape[1])
        raw = (self.decay ** (positions[:, None] - positions).to(x.dtype)).tril()
        shares = (raw / raw.sum(-1, keepdim=True)).expand(len(x), 1, -1, -1)
        return self.changed(shares)

    def changed(self, shares: Tensor) -> Inspection:
        return Inspection(shares)


class BatchNormUndeclared(ProductKeyMemory):
    def __init__(self, context: LayerContext):
        super().__init__(context, **memory.keywords | {"query_norm": "batch"})
        self.limits = frozenset()


class ForgetsOneKey(Attention):
    """Carries one key too few."""

    def _next_state(self, *arguments):
        return tuple(part[:, :, 1:] for part in super()._next_state(*arguments))


class StreamsLast(Sums):
    """Dimension 0 of the state is the width; it should be the streams."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, None if state is None else state.T)
        return out._replace(state=out.state.T)


class OverwritesState(Sums):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out if state is None else out._replace(state=state.copy_(out.state))


class Remembers(Gate):
    """Keeps its state in an attribute of the module."""

    last = 0.0

    def transform_output(self, out, x, collect_stats):
        last, self.last = self.last, x.mean().item()
        return SublayerOutput(out.y + last)


class SizedState(Sums):
    """The width of its state follows a parameter, and a state of another width raises an error."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.fraction = nn.Parameter(torch.full((), 0.5))
        self.project_()

    def project_(self):
        self.fraction.data.clamp_(0.1, 1)
        self.size = round(10 * self.fraction.item())

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, None if state is None else state.view(len(x), self.size, -1)[:, 0])
        return SublayerOutput(out.y * self.fraction, out.state.repeat(1, self.size))


class DoubledKeys(Attention):
    """Attention with a doubled gradient of the segment's keys."""

    def project_qkv(self, *arguments):
        segment = super().project_qkv(*arguments)
        return segment._replace(k=2 * segment.k - segment.k.detach())


class DoubledPast(Attention):
    """Attention with a doubled gradient of past keys that are projected again."""

    def reproject_past(self, *arguments):
        past = super().reproject_past(*arguments)
        return past._replace(k=2 * past.k - past.k.detach())


class DistanceWeights(Gate):
    """A learned weight for each of the last S bytes. With ``thinned`` only every third byte has
    a weight."""

    honours = Honours()
    thinned = False

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.weight = nn.Parameter(torch.ones(context.span))

    def reach(self) -> int:
        return len(self.weight) - 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        span = len(self.weight)
        past = x.new_zeros(len(x), span - 1, x.shape[2]) if state is None else state.to(x.dtype)
        past = torch.cat([past, x], dim=1)
        windows = past.unfold(1, span, 1).flip(-1)  # [B, T, D, S], the nearest first
        weight = self.weight * (torch.arange(span) % 3 == 1) if self.thinned else self.weight
        return SublayerOutput(
            super().forward(windows @ weight).y, past[:, past.shape[1] - span + 1 :].detach()
        )


class FloatAngles(Rotary):
    """Rotary angles of absolute positions, in float32 or, with ``follow_input``, in the dtype of
    the input."""

    def __init__(self, context: LayerContext, *, d_head: int, follow_input: bool = False):
        super().__init__(context, d_head=d_head)
        self.d_head, self.follow_input = d_head, follow_input

    def rotate(self, x, start):
        dtype = x.dtype if self.follow_input else torch.float32
        positions = (start[:, None] + torch.arange(x.shape[2])).to(dtype)  # [B, T]
        frequencies = 10000.0 ** (-torch.arange(0, self.d_head, 2, dtype=dtype) / self.d_head)
        angle = (positions[..., None] * frequencies)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


Stateless = toy(
    Sums,
    limits=frozenset({"segments"}),
    read_state=lambda self, state: None,
    transform_output=lambda self, out, x, collect_stats: out._replace(state=None),
)
"""A class that carries no state, as its limits declare."""
