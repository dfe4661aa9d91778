"""Sublayers that break a promise at the sizes of a run but keep it at the smaller sizes of the conformance suite."""

import math

import torch
import torch.nn.functional as F

from tests.promises import Gate
from variants.contract import Honours, SublayerOutput


class NextInWholeBlocks(Gate):
    """A byte in a complete block of 64 sees the next byte of its block."""

    def transform_input(self, x):
        complete = x.shape[1] // 64 * 64
        shifted = x[:, :complete].unflatten(1, (-1, 64)).roll(-1, dims=2).flatten(1, 2)
        return torch.cat([shifted, x[:, complete:]], dim=1)


class MisalignedMeans(Gate):
    """Cumulative means over a segment padded to a power of two, read at wrong positions if it has over 300 bytes."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return None

    def transform_output(self, out, x, collect_stats):
        length = x.shape[1]
        padded = 2 ** math.ceil(math.log2(length))
        first = padded - length if length > 300 else 0  # wrong: the padding is at the end, so it must be 0
        means = F.pad(x, (0, 0, 0, padded - length)).cumsum(1) / torch.arange(1, padded + 1)[:, None]
        return SublayerOutput(out.y + means[:, first : first + length].to(x.dtype))


class MixesBeyondEight(Gate):
    """In a batch of more than eight streams, each stream sees the mean of all streams."""

    def transform_input(self, x):
        return x + x.mean(0) if len(x) > 8 else x


class LeaksInTwoHundred(Gate):
    """In segments of exactly 200 bytes, a byte sees the next byte."""

    def transform_input(self, x):
        return x.roll(-1, dims=1) if x.shape[1] == 200 else x


class ShortWindow(Gate):
    """Declares a reach of 8 bytes, but sees the last 100 in segments of more than 64."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 8

    def transform_output(self, out, x, collect_stats):
        width = 100 if x.shape[1] > 64 else 8
        return SublayerOutput(out.y + F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1).mean(-1))


class DropsState(Gate):
    """Ignores the state before segments of more than 64 bytes, without declaring the limit ``segments``."""

    honours = Honours()

    def reach(self):
        return 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        before = 0 * x[:, :1] if state is None or x.shape[1] > 64 else state.to(x.dtype)
        y = super().forward(torch.cat([before, x[:, :-1]], dim=1) + x).y
        return SublayerOutput(y, x[:, -1:].detach())


class LeaksWhenWide(Gate):
    """In evaluation, if the model is wider than 32 and the segment longer than 8 bytes, a byte sees the next byte."""

    def transform_input(self, x):
        leaks = x.shape[-1] > 32 and x.shape[1] > 8 and not self.training
        return 10 * x.roll(-1, dims=1) if leaks else x
