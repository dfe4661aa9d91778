"""Blocks: which finished blocks of a stream a query sees as summaries beyond its window (``linformer.py``)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Blocks:
    """Blocks of r bytes beyond a window of w keys, within the S keys in sight; ``read`` of them are read, or all."""

    ratio: int
    window: int
    span: int
    shift: int
    read: int | None

    def __post_init__(self):
        self.near = min(self.window, self.span)  # keys of the window
        self.behind = self.near - 1 + self.shift  # bytes before a segment that its windows may hold
        self.reach = self.span - 1 + self.shift
        self.nearest = max(self.behind + 1, self.ratio)  # bytes back to the first of the nearest summarised block
        self.lag = max(0, self.window + self.shift - self.ratio) // self.ratio  # finished blocks not yet summarised
        self.unsummarised = (self.lag + 1) * self.ratio - 1  # bytes before a segment that are in no summary, at most
        self.most = max(0, self.reach // self.ratio - self.lag)  # N: none that began farther back than a query sees
        self.past = max(self.behind, self.unsummarised)  # P, bytes that the window or the next summary may need

    def chunks(self, length: int) -> tuple[int, int]:
        """Chunks n in which queries are taken, and queries Q of each: whole blocks if there are several."""
        size = -(-max(32, min(128, self.near)) // self.ratio) * self.ratio
        return (1, length) if length <= size else (-(-length // size), size)

    def chunked(self, x: Tensor) -> Tensor:
        """``[.., T, m]`` to ``[.., n, Q, m]``."""
        chunks, size = self.chunks(x.shape[-2])
        return F.pad(x, (0, 0, 0, chunks * size - x.shape[-2])).unflatten(-2, (chunks, size))

    def met(self, size: int, device: torch.device) -> Tensor:
        """Numbers of the summaries that a chunk of ``size`` queries may meet, beside one for each block before it."""
        number = self.most + self.lag + 1 + (self.ratio - 2 + size - self.nearest) // self.ratio
        return torch.arange(max(0, number), device=device)

    def seen(self, before: int) -> int:
        """Summaries in sight of the byte after ``before`` others."""
        first = before - self.span - self.shift  # blocks that begin here or before are out of sight
        return max(0, (before - self.nearest) // self.ratio + 1) - max(0, first // self.ratio + 1)

    def chosen(self, seen: int) -> int:
        return seen if self.read is None else min(seen, self.read)

    def seen_warm(self) -> tuple[float, float]:
        """Summaries in sight of a warm query, and of these read, the means over phases."""
        seen = [self.seen(self.span + phase) for phase in range(self.ratio, 2 * self.ratio)]
        return sum(seen) / self.ratio, sum(map(self.chosen, seen)) / self.ratio


def highest(scores: Tensor, number: int) -> Tensor:
    """Where in each row ``[.., G]`` the ``number`` highest stand, or NaN; of equals the first (``topk``: any)."""
    last = scores.topk(number, dim=-1).values[..., -1:]
    above, equal = ~(scores <= last), scores == last
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= number - above.sum(-1, keepdim=True)))
