"""Mechanisms that break promises of the contract.

``BROKEN`` maps a name to a class, the promises that it breaks (None if the test does not compare
them), and a regular expression for the detail of at least one broken promise."""

import torch
import torch.nn.functional as F

from tests.support import broken_sublayers as broken
from tests.support import promises as p
from tests.support.promises import Gate, Sums, parameter, toy
from variants.contract import LIMITS, Inspection, NeededFlops, Sublayer

LOCATION = r"layers\.0\.part0 moved by [\d.e+-]+ at byte \d+ of stream \d"
SCALE, TABLE = torch.nn.Parameter(torch.ones(())), torch.ones(16)


def with_input(change, base: type = Gate, **members) -> type:
    """Return a sublayer whose input is replaced by ``change(self, x)``."""
    return toy(base, transform_input=change, **members)


def with_output(change, base: type = Gate, **members) -> type:
    """Return a sublayer whose output is replaced by ``change(self, y, x)``."""
    return toy(
        base,
        transform_output=lambda self, out, x, collect: out._replace(y=change(self, out.y, x)),
        **members,
    )


def with_map(change) -> type:
    """Return a sublayer whose attention map is replaced by ``change(shares)``."""
    return toy(broken.Mapped, changed=lambda self, shares: Inspection(change(shares)))


def add_vectors(self, shares):
    """Return a map with shares of learned vectors that do not exist, so that its rows sum to more
    than 1."""
    vectors = shares[..., :3]
    return Inspection(shares, torch.zeros(vectors.shape, dtype=torch.int64), vectors)


def with_stats(statistics) -> type:
    """Return a sublayer that returns ``statistics(y)`` where statistics are collected."""
    return toy(
        transform_output=lambda self, out, x, collect: out._replace(
            stats=statistics(out.y) if collect else None
        )
    )


def with_loss(loss, **members) -> type:
    """Return a sublayer with the auxiliary loss ``loss(self)``."""
    return toy(
        transform_output=lambda self, out, x, collect: out._replace(loss=loss(self)), **members
    )


def clamped(low: float | None, high: float) -> dict:
    """Return members that add a parameter, clamped between two bounds."""
    return {"init": parameter(0.5), "project_": lambda self: self.extra.data.clamp_(low, high)}


def share_scale(self):
    self.register_parameter("extra", SCALE)


def set_scale(self):
    """Return a tensor that is not in the module's state_dict."""
    self.scale = torch.randn(16)


def begin_count(self):
    self.register_buffer("count", torch.zeros(()), persistent=False)


def count_bytes(self, x):
    self.count += x.shape[1]
    return x


def mean_in_training(self, x):
    return x + 1e-4 * x.mean(dim=0) if self.training else x


def at_one_offset(self, x):
    """Return the third byte of each block of eight sees the next byte."""
    return torch.where((torch.arange(x.shape[1]) % 8 == 2)[:, None], x.roll(-1, dims=1), x)


def bfloat16_nan(self, y, x):
    return (
        torch.cat([y[:, :2], y[:, 2:] / 0], dim=1)
        if y.dtype == torch.bfloat16 and self.training
        else y
    )


def one_type(self, y, x):
    """Convert for autocast, under which ``lerp`` receives both bfloat16 and float32."""
    return self.value(x).lerp(x, 0.5) * self.gate(x)


def exponentials(self, y, x):
    """Return a logistic function whose exponential overflows."""
    exponential = (9 * self.value(x)).exp()
    return self.gate(x).sigmoid() * exponential / (1 + exponential)


def overflows_backwards(self, y, x):
    """Return a finite output with a gradient that is not finite."""
    value = 9 * self.value(x)
    return self.gate(x).sigmoid() * torch.where(value > 80, value, value.exp())


FUTURES = {p.FUTURE_EVAL, p.FUTURE_TRAIN}
CHANGED_FROM_ONE = (
    r"changing bytes 1 to 14 moved the output at byte 0 by [\d.e+-]+ "
    r"\(layers\.0\.part0, stream \d+; {}, 15 x 15 bytes without a past\)"
)
CUT = rf"eval, 3 x 15 bytes without a past cut at 1: {LOCATION}"
NO_INFLUENCE = r"eval: byte {} of layers\.0\.part0 in 12 draws of parameters: declared is {}"
quarter = toy(broken.DistanceWeights, reach=lambda self: 4 * len(self.weight) - 1)
thinned_in_evaluation = toy(
    broken.DistanceWeights, thinned=property(lambda self: not self.training)
)
half_detached = with_input(lambda self, x: 0.5 * x + 0.5 * x.detach())
doubling = toy(
    transform_output=lambda self, out, x, collect: out._replace(y=out.y * (2 if collect else 1))
)
forgetting = toy(
    transform_output=lambda self, out, x, collect: out._replace(state=x[:, -1].detach())
)
peeking = with_input(lambda self, x: x + 1e-4 * x.mean(dim=1, keepdim=True) if self.training else x)
leaking = with_input(lambda self, x: x if self.training else x + 1e-4 * x.roll(-1, dims=1))
mixing = with_input(lambda self, x: x + 1e-4 * x.mean(dim=0) if len(x) > 8 else x)
noisy = with_input(lambda self, x: x + 0.1 * torch.randn_like(x) if self.training else x)
needs_none = {"needed_flops": lambda self, segment, *, carried: NeededFlops(0.0, 0.0)}
one_number = {"needed_flops": lambda self, segment, *, carried: 3 * self.ideal_flops()}
negative = with_loss(lambda self: -self.gate.weight.square().mean() if self.training else None)
unlikely = {"limits": frozenset({"likelihood"}), **clamped(0, 1)}
half_of_its_loss = with_loss(
    lambda self: self.extra * self.extra.detach() if self.training else None, **unlikely
)
add_table = parameter([[1.0] * 16] * 3)
two_rows = with_output(
    lambda self, y, x: y * self.extra[:2].mean(0) + self.extra[2:].square().mean() * 0,
    init=add_table,
    tables={"extra": 1},
)
BROKEN = {
    "Peeks": (with_input(lambda self, x: x.roll(-1, dims=1)), {*FUTURES, p.REACH, p.SEGMENTS}, ""),
    "LeaksAtOneOffset": (with_input(at_one_offset, limits=frozenset({"segments"})), FUTURES, ""),
    "LeaksInEvaluation": (
        leaking,
        {p.FUTURE_EVAL, p.REACH, p.SEGMENTS, p.MODES},
        CHANGED_FROM_ONE.format("eval"),
    ),
    "PeeksInTraining": (
        peeking,
        {p.FUTURE_TRAIN, p.SEGMENTS, p.MODES},
        CHANGED_FROM_ONE.format("train"),
    ),
    "Undeclared": (
        toy(Sums, honours=None, reach=Sublayer.reach),
        {p.REACH},
        ".*: a sublayer that sees a past must declare",
    ),
    "NoReach": (
        toy(Sums, reach=Sublayer.reach),
        {p.REACH, p.REACH_USED},
        "NotImplementedError: Toy: a sublayer with",
    ),
    "ShortReach": (toy(Sums, reach=lambda self: 9), {p.REACH}, ".*, beyond its reach of 9$"),
    "ReachesThroughState": (broken.ReachesThroughState, {p.REACH, p.INFLUENCE}, ""),
    "Wrapped": (broken.Wrapped, {p.REACH}, ""),
    "OneBlock": (toy(broken.Delayed, period=1), {p.GRADIENT, p.INFLUENCE}, ""),
    "BatchNormUndeclared": (broken.BatchNormUndeclared, {p.STREAMS}, ""),
    "Mixes": (
        with_input(lambda self, x: x + 1e-4 * x.mean(dim=0)),
        {p.STREAMS},
        f"eval, stream 0 changed: {LOCATION}",
    ),
    "MixesInTraining": (
        with_input(mean_in_training),
        {p.STREAMS},
        f"train, stream 0 changed: {LOCATION}",
    ),
    "MixesBeyondEight": (mixing, {p.STREAMS}, f"eval, 17 streams at once: {LOCATION}; train, .*"),
    "Forgets": (toy(Sums, read_state=lambda self, state: None), {p.SEGMENTS}, CUT),
    "ForgetsInTraining": (
        toy(Sums, read_state=lambda self, state: None if self.training else state),
        {p.SEGMENTS, p.MODES},
        "",
    ),
    "ForgetsOneKey": (broken.ForgetsOneKey, {p.SEGMENTS}, ""),
    "IgnoresThePast": (forgetting, {p.INFLUENCE}, r"eval, byte 2 changed: .* byte 3 did not"),
    # The past influences the output too little.
    "FaintPast": (
        with_output(lambda self, y, x: 1e-4 * y + self.gate(x).sigmoid() * self.value(x), Sums),
        {p.INFLUENCE},
        "",
    ),
    "MapWithVectors": (
        toy(broken.Mapped, changed=add_vectors),
        {p.MAP},
        "layers.0.part0: the weights of byte 0.*: 2$",
    ),
    "NegativeMap": (
        with_map(lambda shares: 2 * shares - shares.roll(1, dims=-1)),
        {p.MAP},
        "[^;]*$",
    ),
    "MapOfTheFuture": (
        with_map(lambda a: a.flip(-1)),
        {p.MAP},
        ".* byte 0 has weight 1 on byte 14, which it cannot see",
    ),
    "MapWithoutSelf": (
        with_map(lambda a: a.tril(-1) / a.tril(-1).sum(-1, keepdim=True)),
        {p.MAP},
        ".*nan",
    ),
    "MapWithoutHeads": (with_map(lambda shares: shares[:, 0]), {p.MAP}, r".*\[B, H, T, T\]"),
    "Attached": (
        toy(Sums, carry=lambda self, sums: sums),
        {p.DETACHED},
        r"eval: a tensor \(3, "
        r"16\) of the state is "
        r"not det",
    ),
    "StreamsLast": (broken.StreamsLast, {p.DETACHED, p.STREAMS}, ""),
    "OverwritesState": (broken.OverwritesState, {p.WRITES}, ""),
    "Counts": (
        with_input(count_bytes, init=begin_count),
        {p.WRITES},
        r"eval: a forward changed "
        r"layers\.0\.part0.*count$",
    ),
    "Random": (
        with_input(lambda self, x: F.dropout(x, 0.1)),
        {p.RANDOM},
        f"eval, with another seed: {LOCATION}",
    ),
    "Draws": (
        with_input(lambda self, x: x + 0 * torch.rand(())),
        {p.RANDOM},
        "eval: a forward draws numbers",
    ),
    "ReadsTwoRows": (
        two_rows,
        {p.TABLES},
        r"layers\.0\.part0: one byte reads 2 rows of extra, "
        r"but tables declares 1",
    ),
    "Remembers": (
        broken.Remembers,
        None,
        r"eval, a forward repeated after one of other bytes: "
        rf"{LOCATION}",
    ),
    "SizedState": (
        broken.SizedState,
        {p.PROJECTION},
        r"RuntimeError: .* \(eval, byte 1 to 5, "
        r"broken_sublayers.py line \d+\)",
    ),
    "Shrinks": (toy(project_=lambda self: self.value.weight.data.mul_(0.5)), {p.SAVED}, ""),
    # The root of a parameter that ``project_`` does not keep positive.
    "Illegal": (
        with_output(lambda self, y, x: y * self.extra.sqrt(), **clamped(None, 2)),
        {p.PROJECTION},
        "",
    ),
    "Dead": (
        toy(init=parameter([1.0, 1.0, 1.0])),
        {p.GRADIENT},
        r".* likelihood gives "
        r"layers\.0\.part0\.sublayer\.extra no",
    ),
    # Only the auxiliary loss depends on the parameter.
    "Regularised": (
        with_loss(lambda self: 0.1 * self.extra if self.training else None, **clamped(0, 1)),
        {p.GRADIENT},
        "",
    ),
    # Half of the derivative of its loss is detached, which the limit ``likelihood`` does not
    # excuse.
    "HalfOfItsLoss": (
        half_of_its_loss,
        {p.DERIVATIVE},
        r"train: along a direction of "
        r"layers\.0\.part0\.sublayer\.extra the",
    ),
    "CutOff": (
        with_output(lambda self, y, x: self.gate(x).sigmoid().detach() * self.value(x)),
        {p.GRADIENT, p.DERIVATIVE},
        "",
    ),
    "Shares": (
        with_output(lambda self, y, x: y * self.extra, init=share_scale),
        {p.NO_SHARING},
        "",
    ),
    "SharesBuffer": (
        toy(init=lambda self: self.register_buffer("extra", TABLE)),
        {p.NO_SHARING},
        "",
    ),
    "Unsaved": (
        with_output(lambda self, y, x: y * self.scale, init=set_scale),
        {p.SAVED},
        "eval, a fresh model with loaded par",
    ),
    "LossAlways": (
        with_loss(lambda self: self.gate.weight.square().mean()),
        {p.AUXILIARY},
        r"eval: [\d.]+ nats",
    ),
    "NegativeLoss": (negative, {p.AUXILIARY}, ""),
    "Means": (
        with_stats(lambda y: {"mean": y.detach().mean()}),
        {p.STATISTICS},
        r"eval, bytes "
        r"before and from 7: layers\.0\.pa",
    ),
    "AttachedStatistics": (with_stats(lambda y: {"sum": y.sum()}), {p.STATISTICS}, ""),
    "CollectingDoubles": (doubling, {p.STATISTICS}, ""),
    "NanMetric": (
        toy(metrics=lambda self, stats: {"share": float("nan")}),
        {p.STATISTICS},
        "eval: metric .* is nan",
    ),
    "OneType": (with_output(one_type), {p.BFLOAT16}, ""),
    "NanInBfloat16": (
        with_output(bfloat16_nan),
        {p.BFLOAT16},
        r"train: logits is not finite at "
        r"byte 2 of stream 0 \(39 of 45",
    ),
    "NoFlops": (toy(ideal_flops=lambda self: float("nan")), {p.FLOPS}, ""),
    "NeedsNothing": (toy(**needs_none), {p.FLOPS}, ""),
    "OneNumber": (toy(**one_number), {p.FLOPS}, ""),
    "UnknownLimit": (
        toy(limits=frozenset({"anything"})),
        {p.LIMITS_KNOWN},
        "anything is not one of causal_in_training,",
    ),
    "Overflows": (
        with_output(lambda self, y, x: y * 1e50 * 1e-50),
        {p.LOGITS, p.FAR_START, p.BFLOAT16, p.LARGE},
        "",
    ),
    # Divides by zero in a segment of one byte.
    "DividesByZero": (
        with_output(lambda self, y, x: y / min(1, x.shape[1] - 1)),
        None,
        r"eval, a segment of 1: .* \(3 of 3 b",
    ),
    "Exponentials": (with_output(exponentials), {p.LARGE}, ""),
    "OverflowsBackwards": (with_output(overflows_backwards), {p.LARGE}, ""),
    "AllLimits": (
        toy(limits=LIMITS),
        {p.FUTURE_TRAIN, p.SEGMENTS, p.STREAMS, p.MODES, p.GRADIENT},
        "limit segments is declared",
    ),
    "DoubledKeys": (
        broken.DoubledKeys,
        {p.DERIVATIVE},
        r"train: along a direction of "
        r"embedding\.weight the loss changes by",
    ),
    "HalfDetached": (half_detached, {p.DERIVATIVE}, ""),
    "ThinnedInEvaluation": (
        thinned_in_evaluation,
        {p.MODES},
        r"train without dropout, against "
        rf"eval: {LOCATION}",
    ),
    "Noisy": (noisy, {p.MODES}, r"train: draws random numbers that are not dropout's.*"),
    "QuarterOfTheWindow": (
        quarter,
        {p.REACH_USED},
        NO_INFLUENCE.format("t - 19 never moved byte t", "a reach of 19"),
    ),
    "Fades": (
        toy(Sums, decay=1e-3),
        {p.REACH_USED, p.INFLUENCE},
        NO_INFLUENCE.format("0 never moved the end", "all of"),
    ),
}
