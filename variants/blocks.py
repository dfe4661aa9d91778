"""Blocks: bookkeeping of the finished blocks that a query sees as summaries, beyond its window (``linformer.py``)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Blocks:
    """Blocks of r bytes beyond a window of w keys, in the S visible keys; a query reads ``read`` (None: all)."""

    ratio: int
    window: int
    span: int
    shift: int
    read: int | None

    def __post_init__(self):
        self.near = min(self.window, self.span)  # keys of the window
        self.behind = self.near - 1 + self.shift  # bytes before a segment that its windows may include
        self.reach = self.span - 1 + self.shift
        self.nearest = max(self.behind + 1, self.ratio)  # distance to the first byte of the nearest summary
        self.lag = max(0, self.window + self.shift - self.ratio) // self.ratio  # finished blocks not yet summarised
        self.unsummarised = (self.lag + 1) * self.ratio - 1  # most bytes before a segment that lack a summary
        self.most = max(0, self.reach // self.ratio - self.lag)  # N, most visible summaries: blocks begin in sight
        self.past = max(self.behind, self.unsummarised)  # P, bytes that the window or the next summary may need

    def chunks(self, length: int) -> tuple[int, int]:
        """Return n, the number of query chunks, and Q, queries per chunk; if n > 1, a chunk is whole blocks."""
        size = -(-max(32, min(128, self.near)) // self.ratio) * self.ratio
        return (1, length) if length <= size else (-(-length // size), size)

    def chunked(self, x: Tensor) -> Tensor:
        """Cut ``[.., T, m]`` into chunks, ``[.., n, Q, m]``."""
        chunks, size = self.chunks(x.shape[-2])
        return F.pad(x, (0, 0, 0, chunks * size - x.shape[-2])).unflatten(-2, (chunks, size))

    def met(self, size: int, device: torch.device) -> Tensor:
        """Return indices of summaries that a chunk of ``size`` queries may see, relative to the blocks before it."""
        number = self.most + self.lag + 1 + (self.ratio - 2 + size - self.nearest) // self.ratio
        return torch.arange(max(0, number), device=device)

    def seen(self, before: int) -> int:
        """Return how many summaries a query sees after ``before`` earlier bytes."""
        first = before - self.span - self.shift  # blocks that begin here or before are out of sight
        return max(0, (before - self.nearest) // self.ratio + 1) - max(0, first // self.ratio + 1)

    def chosen(self, seen: int) -> int:
        return seen if self.read is None else min(seen, self.read)

    def seen_warm(self) -> tuple[float, float]:
        """Return how many summaries a query of a warm stream sees, and how many it reads, as means over phases."""
        seen = [self.seen(self.span + phase) for phase in range(self.ratio, 2 * self.ratio)]
        return sum(seen) / self.ratio, sum(map(self.chosen, seen)) / self.ratio


def highest(scores: Tensor, number: int) -> Tensor:
    """Return a mask of rows' ``number`` highest, ``[.., G]``, and of NaN; ties go to the first (``topk``: any)."""
    last = scores.topk(number, dim=-1).values[..., -1:]
    above, equal = ~(scores <= last), scores == last
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= number - above.sum(-1, keepdim=True)))
