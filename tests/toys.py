"""Small sublayers that are wrong in more than a line: see ``tests/broken.py`` for the promises that they break."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.promises import Gate, Sums, memory, toy
from variants.attention import Attention
from variants.contract import WAYS, Honours, Inspection, LayerContext, SublayerOutput
from variants.position import NoPosition, Rotary
from variants.product_key_memory import ProductKeyMemory


class ReachesThroughState(Gate):
    """Its reach is right in a segment: what it carries is older."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 0

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = super().forward(x).y
        return SublayerOutput(y if state is None else y + state[:, None], x[:, 0].detach())


class Delayed(Gate):
    """A byte sees what was made of the block before the one before its own: a step learns from whole blocks."""

    honours = Honours()
    period = 8

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.block = nn.Linear(context.d_model, context.d_model)

    def reach(self) -> int:
        return 2 * 8 + 7

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        begun, waiting, seen = (x[:, :0], 0 * x[:, 0], 0 * x[:, 0]) if state is None else (t.to(x.dtype) for t in state)
        added = []
        for now in x.unbind(1):
            added.append(seen)
            begun = torch.cat([begun, now[:, None]], dim=1)
            if begun.shape[1] == 8:
                begun, waiting, seen = begun[:, :0], self.block(begun.mean(1)), waiting
        state = (begun.detach(), waiting.detach(), seen.detach())
        return SublayerOutput(super().forward(x).y + torch.stack(added, dim=1), state)


def _ignoring(name: str, **choices: object) -> type[Attention]:
    """Attention that takes these choices, whatever the run's are."""

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
    """A causal attention of one's own around which nothing was done: no state, no choice of the run."""

    limits = frozenset({"segments"})

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.qkv = nn.Linear(context.d_model, 3 * context.d_model)

    def hears(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1), is_causal=True)


class WrappedBoasting(Wrapped):
    honours = Honours(position=WAYS.keys(), cache={"kv", "hidden"}, attend_self={True, False}, span=True)

    def reach(self) -> None:
        return None


class Mapped(Sums):
    """Says what it looks at, right or changed."""

    def inspect(self, x: Tensor) -> Inspection:
        places = torch.arange(x.shape[1])
        raw = (self.decay ** (places[:, None] - places).to(x.dtype)).tril()
        shares = (raw / raw.sum(-1, keepdim=True)).expand(len(x), 1, -1, -1)
        return self.changed(shares)

    def changed(self, shares: Tensor) -> Inspection:
        return Inspection(shares)


class BatchNormUndeclared(ProductKeyMemory):
    def __init__(self, context: LayerContext):
        super().__init__(context, **memory.keywords | {"query_norm": "batch"})
        self.limits = frozenset()


class ForgetsOneKey(Attention):
    """A past of one key too few."""

    def _next_state(self, *arguments):
        return tuple(part[:, :, 1:] for part in super()._next_state(*arguments))


class StreamsLast(Sums):
    """Dimension 0 of the state is width."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, None if state is None else state.T)
        return out._replace(state=out.state.T)


class OverwritesState(Sums):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out if state is None else out._replace(state=state.copy_(out.state))


class Remembers(Gate):
    """Keeps its state on the module, out of sight."""

    last = 0.0

    def gives(self, out, x, collect_stats):
        last, self.last = self.last, x.mean().item()
        return SublayerOutput(out.y + last)


class SizedState(Sums):
    """Its state is as wide as a parameter says, and an older one is not understood."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.fraction = nn.Parameter(torch.full((), 0.5))
        self.project_()

    def project_(self) -> None:
        self.fraction.data.clamp_(0.1, 1)
        self.size = round(10 * self.fraction.item())

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, None if state is None else state.view(len(x), self.size, -1)[:, 0])
        return SublayerOutput(out.y * self.fraction, out.state.repeat(1, self.size))


class DoubledKeys(Attention):
    """Right values: the gradient of the segment's keys is doubled."""

    def project_qkv(self, *arguments):
        segment = super().project_qkv(*arguments)
        return segment._replace(k=2 * segment.k - segment.k.detach())


class DoubledPast(Attention):
    """The same of keys that are projected again."""

    def reproject_past(self, *arguments):
        past = super().reproject_past(*arguments)
        return past._replace(k=2 * past.k - past.k.detach())


class OfDistances(Gate):
    """A weight for each of the last bytes, half of them where ``halved``, nearest and farthest among these."""

    honours = Honours()
    halved = False

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.weight = nn.Parameter(torch.ones(context.span))

    def reach(self) -> int:
        return len(self.weight) - 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        most = len(self.weight)
        past = x.new_zeros(len(x), most - 1, x.shape[2]) if state is None else state.to(x.dtype)
        past = torch.cat([past, x], dim=1)
        windows = past.unfold(1, most, 1).flip(-1)  # [B, T, D, S], the nearest first
        weight = self.weight * (torch.arange(most) % 3 == 1) if self.halved else self.weight
        return SublayerOutput(super().forward(windows @ weight).y, past[:, past.shape[1] - most + 1 :].detach())


class FloatAngles(Rotary):
    """Angles of absolute positions, in float32 always or in the type of the input."""

    def __init__(self, context: LayerContext, *, d_head: int, follow: bool = False):
        super().__init__(context, d_head=d_head)
        self.d_head, self.follow = d_head, follow

    def rotate(self, x, start):
        dtype = x.dtype if self.follow else torch.float32
        at = (start[:, None] + torch.arange(x.shape[2])).to(dtype)  # [B, T]
        frequencies = 10000.0 ** (-torch.arange(0, self.d_head, 2, dtype=dtype) / self.d_head)
        angle = (at[..., None] * frequencies)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


Stateless = toy(
    Sums,
    limits=frozenset({"segments"}),
    reads=lambda self, state: None,
    gives=lambda self, out, x, collect_stats: out._replace(state=None),
)
"""Carries nothing, and has said so."""
