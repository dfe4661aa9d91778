"""Sublayers that break a promise at the sizes of a run but keep it at the smaller sizes of the conformance suite."""

import math

import torch
import torch.nn.functional as F

from tests.promises import Gate
from variants.contract import Honours, NeededFlops, SublayerOutput


class OverSegments(Gate):
    """May see all bytes of its segment, as it declares. It keeps its promises."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return None


class LeaksInTwoHundred(Gate):
    """In segments of exactly 200 bytes, a byte sees the next byte."""

    def transform_input(self, x):
        return x.roll(-1, dims=1) if x.shape[1] == 200 else x


class ShortWindow(Gate):
    """Declares a reach of 7 bytes, but sees the last 100 in segments of more than 64."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 7

    def transform_output(self, out, x, collect_stats):
        width = 100 if x.shape[1] > 64 else 8
        return SublayerOutput(out.y + F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1).mean(-1))


class MisalignedMeans(OverSegments):
    """Cumulative means over a segment padded to a power of two, read at wrong positions if it has over 300 bytes."""

    def transform_output(self, out, x, collect_stats):
        length = x.shape[1]
        padded = 2 ** math.ceil(math.log2(length))
        first = padded - length if length > 300 else 0  # wrong: the padding is at the end, so it must be 0
        means = F.pad(x, (0, 0, 0, padded - length)).cumsum(1) / torch.arange(1, padded + 1)[:, None]
        return SublayerOutput(out.y + means[:, first : first + length].to(x.dtype))


class DropsState(Gate):
    """Ignores the state before segments of more than 64 bytes, without declaring the limit ``segments``."""

    honours = Honours()

    def reach(self):
        return 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        before = 0 * x[:, :1] if state is None or x.shape[1] > 64 else state.to(x.dtype)
        y = super().forward(torch.cat([before, x[:, :-1]], dim=1) + x).y
        return SublayerOutput(y, x[:, -1:].detach())


class LeaksInLongWindows(Gate):
    """In windows of more than 600 bytes, a byte sees the next byte."""

    def transform_input(self, x):
        return x.roll(-1, dims=1) if x.shape[1] > 600 else x


class LeaksWhenWide(Gate):
    """In evaluation, if the model is wider than 32 and the segment longer than 8 bytes, a byte sees the next byte."""

    def transform_input(self, x):
        leaks = x.shape[-1] > 32 and x.shape[1] > 8 and not self.training
        return 10 * x.roll(-1, dims=1) if leaks else x


class DetachedChunks(OverSegments):
    """Running means in chunks of 64, of which each takes the sum of those before as a constant."""

    chunk = 64

    def transform_output(self, out, x, collect_stats):
        before, means = 0, []
        for chunk in self.value(x).split(self.chunk, dim=1):
            means.append((before + chunk.cumsum(1)) / self.chunk)
            before = (before + chunk.sum(1, keepdim=True)).detach()
        return SublayerOutput(out.y + torch.cat(means, dim=1))


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient eight times as large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 8 * g


class WrongGradientInFloat32(Gate):
    def transform_input(self, x):
        return x if x.dtype == torch.float64 else _Scaled.apply(x)


class LeaksInBfloat16(Gate):
    """Linear layers give bfloat16 under autocast only; then a byte sees the next one."""

    def transform_output(self, out, x, collect_stats):
        y = out.y
        return out._replace(y=y.roll(-1, dims=1) if y.dtype == torch.bfloat16 else y)


class LeaksWithGradients(Gate):
    def transform_input(self, x):
        leaks = torch.is_grad_enabled() and x.shape[1] > 64
        return x.roll(-1, dims=1) if leaks else x


class LeaksAt(Gate):
    """A byte sees the next one where ``leaks [T]`` is true."""

    def leaks(self, x):
        return torch.arange(1, x.shape[1] + 1) % 96 == 0

    def transform_input(self, x):
        return torch.where(self.leaks(x)[..., None], x.roll(-1, dims=1), x)


class LeaksAtRepeats(Gate):
    """A byte that is the same as the one before and as the next sees the one after."""

    def transform_input(self, x):
        same = (x == x.roll(-1, dims=1)).all(-1, keepdim=True)
        return torch.where(same & same.roll(1, dims=1), x.roll(-2, dims=1), x)


class LeaksInTheLastLayer(LeaksAt):
    def __init__(self, context):
        super().__init__(context)
        self.is_last = context.layer == 3

    def leaks(self, x):
        return super().leaks(x) & self.is_last


class TrimsLate(Gate):
    """Sees the byte before. Once its state has 272 bytes, it takes the one before that at the start
    of a segment."""

    honours = Honours()

    def reach(self):
        return 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        past = x.new_zeros(len(x), 2, x.shape[2]) if state is None else state.to(x.dtype)
        last = past[:, -2:-1] if past.shape[1] == 272 else past[:, -1:]
        y = super().forward(x + torch.cat([last, x[:, :-1]], dim=1)).y
        return SublayerOutput(y, torch.cat([past, x], dim=1)[:, -272:].detach())


class ChunkedTraining(OverSegments):
    """A decaying sum. In training it decays faster after the first 64 bytes."""

    def transform_output(self, out, x, collect_stats):
        position = torch.arange(x.shape[1])
        rate = 0.1 * (1 + (self.training & (position > 64)))
        distance = (position[:, None] - position).clamp(min=0)
        weight = (-rate[:, None] * distance).exp().tril().to(x.dtype)
        return SublayerOutput(out.y + weight @ self.value(x))


class RandomInLongSegments(Gate):
    """In evaluation, a random mask in windows, which are longer than segments."""

    def transform_input(self, x):
        return F.dropout(x, 0.1) if x.shape[1] > 128 and not self.training else x


class MaximumOfTheSegment(OverSegments):
    """Linear attention with exp(k - maximum of all k), which cancels unless the denominator is
    clamped."""

    limits = frozenset({"segments", "ideal_flops"})

    def transform_output(self, out, x, collect_stats):
        keys = self.gate(x)
        weights = (keys - keys.amax(1, keepdim=True)).exp()
        sums = (weights * self.value(x)).cumsum(1) / weights.cumsum(1).clamp(min=1e-12)
        return SublayerOutput(out.y + sums)


class AttentionWithoutItsFlops(OverSegments):
    """Causal attention over the segment; it declares only its matrices. Seven keys cost less than
    the matrices."""

    def transform_output(self, out, x, collect_stats):
        seen = F.scaled_dot_product_attention(*(out.y[:, None],) * 3, is_causal=True)
        return SublayerOutput(out.y + seen[:, 0])


class CheapBackward(Gate):
    def needed_flops(self, segment, *, carried):
        return NeededFlops(self.ideal_flops(), 0.5 * self.ideal_flops())


class ReadsItsWholeTable(Gate):
    """A byte reads all rows of a table, of which it declares eight."""

    tables = {"table": 8}

    def __init__(self, context):
        super().__init__(context)
        self.table = torch.nn.Parameter(0.02 * torch.randn(1024, context.d_model))

    def transform_output(self, out, x, collect_stats):
        return SublayerOutput(out.y + (x @ self.table.T).softmax(-1) @ self.table)

    def ideal_flops(self):
        return super().ideal_flops() + 4 * self.table.numel()
