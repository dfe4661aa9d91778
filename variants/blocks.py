"""Sizes and indices of the finished blocks that a query sees as summaries, beyond its window
(``linformer.py``)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Blocks:
    """A window of exact keys, and summaries of earlier blocks."""

    ratio: int  # r, bytes of a block
    window: int  # w, keys of the window
    span: int  # S, visible keys
    shift: int  # 0 if a query sees itself, else 1
    read: int | None  # largest number of summaries that a query reads; None for all

    def __post_init__(self):
        self.window_keys = min(self.window, self.span)
        # bytes before a segment that its windows may include
        self.window_past = self.window_keys - 1 + self.shift
        self.reach = self.span - 1 + self.shift
        # distance to the first byte of the nearest visible block
        self.nearest = max(self.window_past + 1, self.ratio)
        # finished blocks not yet summarised
        self.lag = max(0, self.window + self.shift - self.ratio) // self.ratio
        # largest number of past bytes without a summary
        self.unsummarised = (self.lag + 1) * self.ratio - 1
        # N, largest number of visible summaries
        self.max_visible = max(0, self.reach // self.ratio - self.lag)
        # P, bytes that the window or the next summary may need
        self.past = max(self.window_past, self.unsummarised)

    def chunks(self, length: int) -> tuple[int, int]:
        """Return n, the number of query chunks, and Q, queries per chunk; if n > 1, a chunk has
        whole blocks."""
        size = -(-max(32, min(128, self.window_keys)) // self.ratio) * self.ratio
        if length <= size:
            return (1, length)
        return (-(-length // size), size)

    def chunked(self, x: Tensor) -> Tensor:
        """Cut ``[.., T, m]`` into chunks, ``[.., n, Q, m]``."""
        chunks, size = self.chunks(x.shape[-2])
        return F.pad(x, (0, 0, 0, chunks * size - x.shape[-2])).unflatten(-2, (chunks, size))

    def visible_indices(self, size: int, device: torch.device) -> Tensor:
        """Return 0, 1, ..: an index for each summary that a chunk of ``size`` queries may see."""
        n = self.max_visible + self.lag + 1 + (self.ratio - 2 + size - self.nearest) // self.ratio
        return torch.arange(max(0, n), device=device)

    def visible_at(self, position: int) -> int:
        """Return how many summaries the query at a stream position sees."""
        # blocks that begin at this byte or earlier are beyond the span
        last_hidden = position - self.span - self.shift
        return max(0, (position - self.nearest) // self.ratio + 1) - max(
            0, last_hidden // self.ratio + 1
        )

    def n_read(self, visible: int) -> int:
        """Return how many of ``visible`` summaries a query reads."""
        if self.read is None:
            return visible
        return min(visible, self.read)

    def mean_visible(self) -> tuple[float, float]:
        """Return how many summaries a query sees and how many it reads after a full past, as
        means over a block."""
        visible = [
            self.visible_at(self.span + phase) for phase in range(self.ratio, 2 * self.ratio)
        ]
        return sum(visible) / self.ratio, sum(map(self.n_read, visible)) / self.ratio


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Return a mask ``[.., G]`` of the k largest entries of each row, and of every NaN. Of equal
    entries the first are selected; ``topk`` does not define which it selects."""
    kth = scores.topk(k, dim=-1).values[..., -1:]
    above = ~(scores <= kth)
    equal = scores == kth
    return above | (
        equal & (equal.cumsum(-1, dtype=torch.int32) <= k - above.sum(-1, keepdim=True))
    )
