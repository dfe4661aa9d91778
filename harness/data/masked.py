"""Masked windows: bytes of a window are selected, and predicted from the others (1810.04805, 3.1).
Every window has as many selected bytes as any other. In training, 8 of 10 selected bytes are
hidden, 1 is replaced by a random byte, and 1 stays; in scoring all are hidden. Selections of a step
depend only on seed, step and row, those of a score only on the number of the window."""

import numpy as np
import torch
from torch import Tensor

from harness.data.streams import (
    UNSHARDED,
    Batches,
    Segment,
    Shard,
    Streams,
    row_batches,
    shard_slice,
)
from harness.hashing import integer_hash

UNSCORED = -100
"""The target of a byte that is not predicted, as ``torch.nn.functional.cross_entropy`` ignores
it."""
# first keys of the hash, other than those of harness/data/streams.py and harness/objective
_SELECTED = 6
_CHANGED = 7
_SCORED = 8


class MaskedWindows(Streams):
    """Training batches: windows of ``Streams`` without carried state, with a share ``rate`` of
    their bytes selected."""

    def __init__(self, split: Tensor, *, rate: float, vocabulary: int, **layout: object):
        super().__init__(split, carry=False, **layout)
        self.rate = rate
        self.vocabulary = vocabulary

    def batch(self, step: int, *, shard: Shard = UNSHARDED) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, counted from 0, for a shard's windows: int32 ``[B,
        T]`` each. Targets of bytes that are not selected are ``UNSCORED``."""
        tokens, _ = super().batch(step, shard=shard)
        rows = np.arange(self.streams)[shard_slice(self.streams, shard), None]
        keys = (self.seed, step, rows)
        selected = select(_SELECTED, *keys, width=self.segment, rate=self.rate)
        draws = integer_hash(_CHANGED, *keys, np.arange(self.segment)) % np.uint64(
            10 * self.vocabulary
        )
        byte, change = map(torch.from_numpy, np.divmod(draws.astype(np.int64), 10))
        inputs = hide(tokens, selected & (change < 8), vocabulary=self.vocabulary)
        inputs = torch.where(selected & (change == 8), byte, inputs)
        return inputs.int(), torch.where(selected, tokens, UNSCORED).int()


def select(*keys: int | np.ndarray, width: int, rate: float) -> Tensor:
    """Return which bytes of each row are selected, bool ``[B, T]``: a share ``rate``, rounded, but
    at least one. The last of ``keys`` has a number for each row, ``[B, 1]``."""
    order = np.argsort(integer_hash(*keys, np.arange(width)), axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    return torch.from_numpy(ranks < max(1, round(rate * width)))


def hide(tokens: Tensor, hidden: Tensor, *, vocabulary: int) -> Tensor:
    """Return ``tokens [B, T]`` with the id after all others where ``hidden [B, T]`` is true."""
    return torch.where(hidden, vocabulary, tokens)


def scored_windows(
    split: Tensor, *, window: int, rate: float, vocabulary: int, **layout
) -> Batches:
    """Return the ``row_batches`` of the whole windows of ``split [n]`` in a ``layout``. Targets are
    all bytes, and the mask is true for the selected ones."""
    windows = split.unfold(0, window, window)

    def read(rows: Tensor) -> Segment:
        tokens = windows[rows].long()
        selected = select(_SCORED, rows.numpy()[:, None], width=window, rate=rate)
        return hide(tokens, selected, vocabulary=vocabulary).int(), tokens, selected

    return row_batches(len(windows), read=read, **layout)
