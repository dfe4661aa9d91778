"""Small sublayers that each break one promise or more, and some that look as if they did."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.promises import (
    APART,
    AUXILIARY,
    BFLOAT16,
    DERIVATIVE,
    DETACHED,
    FAR,
    FLOPS,
    FUTURE_EVAL,
    FUTURE_TRAIN,
    GRADIENT,
    INFLUENCE,
    KNOWN,
    LARGE,
    LOGITS,
    MANY,
    MAP,
    MODES,
    NEEDED,
    OLD_STATE,
    PROJECTION,
    REACH,
    SAVED,
    SEGMENTS,
    SINGLE,
    STATISTICS,
    STREAMS,
    USED,
    WRITES,
    Gate,
    Sums,
    memory,
)
from variants.attention import Attention
from variants.contract import WAYS, Honours, Inspection, LayerContext, NeededFlops, Sublayer, SublayerOutput
from variants.position import NoPosition, Rotary
from variants.product_key_memory import ProductKeyMemory


class Forgets(Sums):
    """Carries state and does not read it."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x, None, start)


class Stateless(Sums):
    """The same, declared, and with nothing to carry."""

    limits = frozenset({"segments"})

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(state=None)


class Undeclared(Sums):
    """Sees a past and says nothing of it."""

    honours = None

    def reach(self):
        return Sublayer.reach(self)


class Unsaid(Sums):
    """Says that it sees a past, and not how far."""

    def reach(self):
        return Sublayer.reach(self)


class ShortReach(Sums):
    def reach(self):
        return 9


class ReachesThroughState(Gate):
    """Its reach is right in a segment: what it carries is older."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 0

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = super().forward(x).y
        return SublayerOutput(y if state is None else y + state[:, None], x[:, 0].detach())


class LeaksAtOneOffset(Gate):
    """The third byte of a block of eight sees the next."""

    limits = frozenset({"segments"})

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        leaks = (torch.arange(x.shape[1]) % 8 == 2)[:, None]
        return super().forward(torch.where(leaks, x.roll(-1, dims=1), x))


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


class OneBlock(Delayed):
    """The same, with no word of its blocks."""

    period = 1


class IgnoresPosition(Attention):
    def __init__(self, context: LayerContext):
        super().__init__(replace(context, scheme=NoPosition))


class IgnoresCache(Attention):
    def __init__(self, context: LayerContext):
        super().__init__(replace(context, cache="kv"))


class IgnoresAttendSelf(Attention):
    def __init__(self, context: LayerContext):
        super().__init__(replace(context, attend_self=True))


class IgnoresSpan(Attention):
    def __init__(self, context: LayerContext):
        super().__init__(replace(context, span=8))


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

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1), is_causal=True)
        return super().forward(y)


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


class MapOfMore(Mapped):
    """Beside learned vectors that it does not have, the rows are above 1."""

    def changed(self, shares):
        vectors = shares[..., :3]
        return Inspection(shares, torch.zeros(vectors.shape, dtype=torch.int64), vectors)


class MapOfSigns(Mapped):
    def changed(self, shares):
        return Inspection(2 * shares - shares.roll(1, dims=-1))


class MapOfTheFuture(Mapped):
    def changed(self, shares):
        return Inspection(shares.flip(-1))


class MapOfTheBlind(Mapped):
    """The first byte sees nothing, and divides it."""

    def changed(self, shares):
        seen = shares.tril(-1)
        return Inspection(seen / seen.sum(-1, keepdim=True))


class MapWithoutHeads(Mapped):
    def changed(self, shares):
        return Inspection(shares[:, 0])


class Peeks(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x.roll(-1, dims=1))


class LeaksInEvaluation(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x if self.training else x + 1e-4 * x.roll(-1, dims=1))


class PeeksInTraining(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x + 1e-4 * x.mean(dim=1, keepdim=True) if self.training else x)


class BatchNormUndeclared(ProductKeyMemory):
    def __init__(self, context: LayerContext):
        super().__init__(context, **memory.keywords | {"query_norm": "batch"})
        self.limits = frozenset()


class Mixes(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x + 1e-4 * x.mean(dim=0))


class ForgetsInTraining(Sums):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x, None if self.training else state)


class ForgetsOneKey(Attention):
    """A past of one key too few."""

    def _context(self, *arguments):
        keys, kept = super()._context(*arguments)
        return keys, tuple(part[:, :, 1:] for part in kept)


class IgnoresThePast(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(state=x[:, -1].detach())


class Attached(Sums):
    def carry(self, kept):
        return kept


class StreamsLast(Sums):
    """Dimension 0 of the state is width."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, None if state is None else state.T)
        return out._replace(state=out.state.T)


class OverwritesState(Sums):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out if state is None else out._replace(state=state.copy_(out.state))


class Counts(Gate):
    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        self.count += x.shape[1]
        return super().forward(x)


class Remembers(Gate):
    """Keeps its state on the module, out of sight."""

    last = 0.0

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = SublayerOutput(super().forward(x).y + self.last)
        self.last = x.mean().item()
        return out


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


class Shrinks(Gate):
    def project_(self) -> None:
        self.value.weight.data *= 0.5


class Illegal(Gate):
    """A root of a parameter that nothing keeps positive, although there is a ``project_``."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.root = nn.Parameter(torch.ones(()))

    def project_(self) -> None:
        self.root.data.clamp_(max=2)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y * self.root.sqrt())


class Dead(Gate):
    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.unused = nn.Parameter(torch.ones(3))


class CutOff(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(self.gate(x).sigmoid().detach() * self.value(x))


class Shares(Gate):
    scale = nn.Parameter(torch.ones(()))

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.register_parameter("own", Shares.scale)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y * self.own)


class SharesBuffer(Gate):
    table = torch.ones(16)

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.register_buffer("own", SharesBuffer.table)


class NotSaved(Gate):
    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.scale = torch.randn(context.d_model)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y * self.scale)


class LossAlways(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(loss=self.gate.weight.square().mean())


class NegativeLoss(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(loss=-self.gate.weight.square().mean() if self.training else None)


class Means(Gate):
    """A mean does not add."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(stats={"mean": x.detach().mean()} if collect_stats else None)


class AttachedSeen(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = super().forward(x).y
        return SublayerOutput(y, stats={"sum": y.sum()} if collect_stats else None)


class LooksTwice(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y * (2 if collect_stats else 1))


class NanMetric(Gate):
    def metrics(self, stats):
        return {"share": float("nan")}


class OneType(Gate):
    """Autocast gives bfloat16 to ``lerp`` beside float32."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(self.value(x).lerp(x, 0.5) * self.gate(x))


class NoFlops(Gate):
    def ideal_flops(self):
        return float("nan")


class NeedsNothing(Gate):
    """Less than its ideal forward."""

    def needed_flops(self, segment, *, carried):
        return NeededFlops(0.0, 0.0)


class OneNumber(Gate):
    def needed_flops(self, segment, *, carried):
        return 3 * self.ideal_flops()


class Invents(Gate):
    limits = frozenset({"anything"})


class Overflows(Gate):
    """Finite in float64 only."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(super().forward(x).y * 1e50 * 1e-50)


class Exponentials(Gate):
    """A logistic function whose exponential overflows."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        grown = (9 * self.value(x)).exp()
        return SublayerOutput(self.gate(x).sigmoid() * grown / (1 + grown))


class VanishesBackwards(Gate):
    """A finite value, of which the gradient is not."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        value = 9 * self.value(x)
        return SublayerOutput(self.gate(x).sigmoid() * torch.where(value > 80, value, value.exp()))


class Cautious(Gate):
    limits = frozenset({"causal_in_training", "streams_apart", "segments", "training_as_evaluation"})


class DoubledKeys(Attention):
    """Right values: the gradient of the segment's keys is doubled."""

    def _made_of(self, *arguments):
        q, (k, v), *others = super()._made_of(*arguments)
        return q, [2 * k - k.detach(), v], *others


class DoubledPast(Attention):
    """The same of keys that are projected again."""

    def _again(self, *arguments):
        past = super()._again(*arguments)
        return past._replace(k=2 * past.k - past.k.detach())


class ScaledBackwards(Gate):
    """Right gradients of its parameters, a wrong one of its input."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(0.5 * x + 0.5 * x.detach())


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


class HalfInEvaluation(OfDistances):
    @property
    def halved(self) -> bool:
        return not self.training


class Noisy(Gate):
    """What it draws in training is no dropout."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


class QuarterOfTheWindow(OfDistances):
    def reach(self) -> int:
        return 4 * len(self.weight) - 1


class Fades(Sums):
    """It fades to nothing, and says that it sees all."""

    decay = 1e-3


class Regularised(Gate):
    """A span that costs something and does nothing."""

    def __init__(self, context: LayerContext):
        super().__init__(context)
        self.span = nn.Parameter(torch.full((), 0.5))

    def project_(self) -> None:
        self.span.data.clamp_(0, 1)

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x)._replace(loss=0.1 * self.span if self.training else None)


class MixesBeyondEight(Gate):
    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return super().forward(x + 1e-4 * x.mean(dim=0) if len(x) > 8 else x)


class Faint(Sums):
    """The past moves it, too little to be learned from."""

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        out = super().forward(x, state)
        return out._replace(y=1e-4 * out.y + Gate.forward(self, x).y)


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


BROKEN = [
    (Peeks, {FUTURE_EVAL, FUTURE_TRAIN, REACH, SEGMENTS, SINGLE}),
    (LeaksAtOneOffset, {FUTURE_EVAL, FUTURE_TRAIN}),
    (Undeclared, {REACH}),
    (Unsaid, {REACH, USED}),
    (ShortReach, {REACH}),
    (ReachesThroughState, {REACH, INFLUENCE}),
    (Wrapped, {REACH}),
    (OneBlock, {GRADIENT, INFLUENCE}),
    (PeeksInTraining, {FUTURE_TRAIN, SEGMENTS, SINGLE, MODES}),
    (BatchNormUndeclared, {FUTURE_TRAIN, SEGMENTS, SINGLE, STREAMS, MODES, MANY}),
    (Mixes, {STREAMS, MANY}),
    (Forgets, {SEGMENTS, SINGLE}),
    (ForgetsInTraining, {SEGMENTS, SINGLE, MODES}),
    (ForgetsOneKey, {SEGMENTS, SINGLE}),
    (IgnoresThePast, {INFLUENCE}),
    *((one, {MAP}) for one in (MapOfMore, MapOfSigns, MapOfTheFuture, MapOfTheBlind, MapWithoutHeads)),
    (Attached, {DETACHED}),
    (StreamsLast, {DETACHED, STREAMS}),
    (OverwritesState, {WRITES, STREAMS}),
    (Counts, {WRITES}),
    (SizedState, {OLD_STATE}),
    (Shrinks, {PROJECTION, SAVED}),
    (Illegal, {PROJECTION, OLD_STATE}),
    (Dead, {GRADIENT}),
    (CutOff, {GRADIENT, DERIVATIVE}),
    (Shares, {APART}),
    (SharesBuffer, {APART}),
    (NotSaved, {SAVED}),
    (LossAlways, {AUXILIARY}),
    (NegativeLoss, {AUXILIARY}),
    (Means, {STATISTICS}),
    (AttachedSeen, {STATISTICS}),
    (LooksTwice, {STATISTICS}),
    (NanMetric, {STATISTICS}),
    (OneType, {BFLOAT16}),
    (NoFlops, {FLOPS}),
    (NeedsNothing, {NEEDED}),
    (OneNumber, {NEEDED}),
    (Invents, {KNOWN}),
    (Overflows, {LOGITS, FAR, BFLOAT16, LARGE}),
    (Exponentials, {LARGE}),
    (VanishesBackwards, {LARGE}),
    (Cautious, {FUTURE_TRAIN, SEGMENTS, SINGLE, STREAMS, MODES, MANY}),
    (DoubledKeys, {DERIVATIVE}),
    (ScaledBackwards, {DERIVATIVE}),
    (HalfInEvaluation, {MODES}),
    (Noisy, {MODES}),
    (QuarterOfTheWindow, {USED}),
    (Fades, {USED}),
    (Regularised, {GRADIENT}),
    (MixesBeyondEight, {MANY}),
]
