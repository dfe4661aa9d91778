"""Sublayers that break a promise only at the sizes of a run: those of the checks are too small to show it."""

import math

import torch
import torch.nn.functional as F

from tests.promises import Gate
from variants.contract import Honours, SublayerOutput


class NextInWholeBlocks(Gate):
    """A byte in a whole block of 64 is given the next of its block."""

    def hears(self, x):
        whole = x.shape[1] // 64 * 64
        next_ones = x[:, :whole].unflatten(1, (-1, 64)).roll(-1, dims=2).flatten(1, 2)
        return torch.cat([next_ones, x[:, whole:]], dim=1)


class ForgetsAShift(Gate):
    """Means of all bytes so far, over a segment that is padded to a power of two: right to 300 bytes, then read too late."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return None

    def gives(self, out, x, collect_stats):
        length = x.shape[1]
        padded = 2 ** math.ceil(math.log2(length))
        first = padded - length if length > 300 else 0
        means = F.pad(x, (0, 0, 0, padded - length)).cumsum(1) / torch.arange(1, padded + 1)[:, None]
        return SublayerOutput(out.y + means[:, first : first + length].to(x.dtype))


class MixesBeyondEight(Gate):
    """Streams know of each other where they are more than eight."""

    def hears(self, x):
        return x + x.mean(0) if len(x) > 8 else x


class LeaksInTwoHundred(Gate):
    """Segments of exactly 200 bytes."""

    def hears(self, x):
        return x.roll(-1, dims=1) if x.shape[1] == 200 else x


class ShortWindow(Gate):
    """Says that it sees 8 bytes, and sees 100 in longer segments."""

    honours = Honours()
    limits = frozenset({"segments"})

    def reach(self):
        return 8

    def gives(self, out, x, collect_stats):
        width = 100 if x.shape[1] > 64 else 8
        return SublayerOutput(out.y + F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1).mean(-1))


class CutInBlocks(Gate):
    """Remembers nothing across segments of more than 64 bytes, and has not said so."""

    honours = Honours()

    def reach(self):
        return 1

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        before = 0 * x[:, :1] if state is None or x.shape[1] > 64 else state.to(x.dtype)
        y = super().forward(torch.cat([before, x[:, :-1]], dim=1) + x).y
        return SublayerOutput(y, x[:, -1:].detach())


class LeaksWhenWide(Gate):
    """Only a trained model of full width is wrong, where it is scored."""

    def hears(self, x):
        leaks = x.shape[-1] > 32 and x.shape[1] > 8 and not self.training
        return 10 * x.roll(-1, dims=1) if leaks else x
