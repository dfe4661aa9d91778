"""Sublayers that break a promise at the sizes of a run but keep it at the smaller sizes of the
conformance suite."""

import torch
import torch.nn.functional as F

from tests.support.promises import Gate
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


class DropsState(Gate):
    """Ignores the state before segments of more than 64 bytes, without declaring the limit
    ``segments``."""

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
    """In evaluation, if the model is wider than 32 and the segment longer than 8 bytes, a byte
    sees the next byte."""

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

    def spoil(self, y):
        return y.roll(-1, dims=1)

    def transform_output(self, out, x, collect_stats):
        return out._replace(y=self.spoil(out.y)) if out.y.dtype == torch.bfloat16 else out


class NegativeInBfloat16(LeaksInBfloat16):
    def spoil(self, y):
        return -y


class LeaksAt(Gate):
    """A byte sees a trace of the next one where ``leaks [T]`` is true."""

    def leaks(self, x):
        return torch.arange(1, x.shape[1] + 1) % 96 == 0

    def transform_input(self, x):
        return torch.where(self.leaks(x)[..., None], x + 1e-6 * x.roll(-1, dims=1), x)


class LeaksInSegments(LeaksAt):
    def leaks(self, x):
        return super().leaks(x) & (x.shape[1] <= 128 and not self.training)


class LeaksInWindows(LeaksAt):
    def leaks(self, x):
        return super().leaks(x) & (x.shape[1] > 128)


class LeaksInTraining(LeaksAt):
    """While gradients are recorded in training."""

    def leaks(self, x):
        return super().leaks(x) & (self.training and torch.is_grad_enabled())


class LeaksAtRepeats(LeaksAt):
    """The last of thirty equal bytes sees the next one. No source file has so many."""

    def leaks(self, x):
        same = (x == x.roll(1, dims=1)).all(-1)
        return F.pad(same, (28, 0)).unfold(1, 29, 1).all(-1)


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


class CountsWindows(Gate):
    """In evaluation, a buffer that changes in windows, which are longer than segments."""

    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def transform_input(self, x):
        self.count += x.shape[1] > 128 and not self.training
        return x


class LeaksFromLargeValues(Gate):
    """A byte sees by how much the next one's value exceeds a threshold, which few weights reach."""

    def transform_output(self, out, x, collect_stats):
        excess = (self.value(x).roll(-1, dims=1) - 8).relu()
        return SublayerOutput(out.y + excess)


class AttentionWithoutItsFlops(Gate):
    """Causal attention over the segment; it declares only its matrices. At first it sees nothing,
    because its learned share is 0."""

    honours = Honours()
    limits = frozenset({"segments"})

    def __init__(self, context):
        super().__init__(context)
        self.share = torch.nn.Parameter(torch.zeros(1))

    def project_(self):
        self.share.data.clamp_(-1, 1)

    def reach(self):
        return None

    def transform_output(self, out, x, collect_stats):
        y = out.y * (1 + self.share)
        if self.share == 0:
            return SublayerOutput(y)
        seen = F.scaled_dot_product_attention(*(y[:, None],) * 3, is_causal=True)
        return SublayerOutput(y + seen[:, 0])


class ComputesAtRepeats(LeaksAtRepeats):
    """Has 10,000 hidden units for the last of thirty equal bytes, and declares none of them."""

    def transform_input(self, x):
        hidden = x[self.leaks(x)] @ x.new_ones(x.shape[2], 10_000)
        return x + 0 * hidden.sum()


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
