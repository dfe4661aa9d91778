"""Streams: the order in which training and evaluation read the bytes of a split. A pair is an input
byte and its target, the next byte. A split of n bytes has n - 1 pairs; pair i is bytes i and i + 1.
The order depends only on the split, the sizes, the seed and the step. A run therefore resumes from
one integer, the step, and all variants read the same bytes."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from harness.hashing import integer_hash

# the part of the streams that one process reads: (its rank, the number of processes)
Shard = tuple[int, int]
UNSHARDED: Shard = (0, 1)
# first key of the hash, so that offsets of rings and of windows are independent
_RING = 1
_WINDOW = 2
_ORDER = 5  # harness/objective/scoring.py has 3 and 4

Segment = tuple[Tensor, ...]
"""Inputs int64 ``[L, T]``, targets int64 ``[L, T]``, and mask bool ``[L, T]``: true for pairs to
be scored. Of padded texts also their lengths ``[L]``, and targets and mask are ``[L, 1]``."""


@dataclass(eq=False)
class Batches:
    """An iterable of segments, with a length. Each segment is made when it is read, by
    ``make(position)``."""

    make: Callable[[int], Segment]
    positions: range

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Segment]:
        return map(self.make, self.positions)


@dataclass(eq=False)
class Rows:
    """Training batches of ``n`` independent rows of T bytes (``segment``), of which a step reads B
    (``streams``). In an epoch each row is read once, in an order drawn from seed and epoch."""

    n: int
    _: KW_ONLY
    streams: int
    segment: int
    seed: int

    def carried_bytes(self, step: int) -> int:
        """Return 0, because every row starts without state."""
        return 0

    def size(self, step: int) -> tuple[int, int]:
        """Return the bytes of each row in a step, and of all."""
        return self.segment, self.streams * self.segment

    def rows(self, step: int, shard: Shard = UNSHARDED) -> Tensor:
        """Return the ``row`` of each stream of a shard in a step, counted from 0: int64 ``[B]``."""
        indices = range(self.streams)[shard_slice(self.streams, shard)]
        rows = [self.row(step * self.streams + index) for index in indices]
        return torch.tensor(rows, dtype=torch.int64)

    def row(self, read: int) -> int:
        """Return the row that follows ``read`` rows."""
        epoch, position = divmod(read, self.n)
        return int(permutation(self.seed, epoch, self.n)[position])


class Streams(Rows):
    """Training batches: each step reads T bytes (``segment``) of B ``streams`` of ``split``, uint8
    ``[n]``. With ``carry`` the split is a ring, cut into B streams of n // B bytes. A step reads
    the next segment of each stream, and state is carried over. After ``steps_per_epoch`` steps a
    new epoch begins: the ring is shifted by an offset drawn from seed and epoch, and state is
    dropped. Without ``carry`` a step reads B windows: with ``order="random"`` each is drawn for
    itself; with ``"permutation"`` the ring, shifted as above, is cut into n // T windows, which are
    read as rows. ValueError if a stream (or without ``carry`` the split) has fewer than T + 1
    bytes."""

    def __init__(
        self,
        split: Tensor,
        *,
        streams: int,
        segment: int,
        seed: int,
        carry: bool = True,
        order: str = "random",
    ):
        super().__init__(len(split) // segment, streams=streams, segment=segment, seed=seed)
        self.split = split
        self.carry = carry
        self.order = order
        self.stream_bytes = len(split) // streams if carry else len(split)
        self.steps_per_epoch = self.stream_bytes // segment
        if self.stream_bytes <= segment:
            needed = (segment + 1) * (streams if carry else 1)
            raise ValueError(
                f"batch.streams={streams} and batch.segment={segment} need at least {needed:,} "
                f"training bytes, but the train split of data has {len(split):,}: use a longer "
                "corpus, fewer streams or a shorter segment"
            )

    def carried_bytes(self, step: int) -> int:
        """Return the bytes of each stream that its carried state has read before this step; 0 if it
        starts without state."""
        if self.carry:
            return step % self.steps_per_epoch * self.segment
        return 0

    def batch(self, step: int, *, shard: Shard = UNSHARDED) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, counted from 0, for the streams of ``shard``: int64
        ``[B, T]`` each."""
        indices = np.arange(self.streams)[shard_slice(self.streams, shard)]
        if self.carry:
            epoch, epoch_step = divmod(step, self.steps_per_epoch)
            first = self._ring_offset(epoch) + epoch_step * self.segment
            starts = first + indices * self.stream_bytes
        elif self.order == "permutation":
            starts = self.rows(step, shard)
        else:
            draws = integer_hash(_WINDOW, self.seed, step, indices)
            n_starts = np.uint64(len(self.split) - self.segment)
            starts = (draws % n_starts).astype(np.int64)
        positions = torch.as_tensor(starts)[:, None] + torch.arange(self.segment + 1)  # [B, T + 1]
        tokens = self.split[positions % len(self.split)].long()
        return tokens[:, :-1], tokens[:, 1:]

    def _ring_offset(self, epoch: int) -> int:
        return int(integer_hash(_RING, self.seed, epoch)[0]) % len(self.split)

    def row(self, read: int) -> int:
        """Return where the window begins that follows ``read`` windows of a permutation."""
        return self._ring_offset(read // self.n) + super().row(read) * self.segment


@lru_cache(maxsize=2)  # a step may read the end of one epoch and the beginning of the next
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return 0 to n - 1 in an order that depends on seed and epoch, int64 ``[n]``."""
    return np.argsort(integer_hash(_ORDER, seed, epoch, np.arange(n)), kind="stable")


def row_batches(
    n_rows: int, *, batch: int, shard: Shard = UNSHARDED, read: Callable[[Tensor], Segment]
) -> Batches:
    """Return all rows once, in order, as ``read(rows)`` returns them. At most ``batch`` of them
    form a batch, and a shard reads a contiguous part of the batches. The mask is false for rows
    after the last one."""
    batch = min(batch, n_rows)
    firsts = range(0, n_rows, batch)

    def read_batch(first: int) -> Segment:
        rows = torch.arange(first, first + batch)
        inputs, targets, mask, *lengths = read(rows.clamp(max=n_rows - 1))
        return inputs, targets, mask & (rows < n_rows)[:, None], *lengths

    return Batches(read_batch, firsts[shard_slice(len(firsts), shard)])


def shard_slice(n_streams: int, shard: Shard) -> slice:
    """Return the streams of a shard: contiguous, and of sizes that differ between shards by at most
    one."""
    rank, n_shards = shard
    return slice(rank * n_streams // n_shards, (rank + 1) * n_streams // n_shards)


def score_ranges(n_pairs: int, streams: int, *, context: int = 0) -> list[tuple[int, int]]:
    """Cut pairs 0..n_pairs - 1 into contiguous ranges (first, end), one to be scored by each
    stream. All streams but the first read ``context`` unscored pairs before their range. The ranges
    are such that the numbers of pairs that streams read differ by at most one. ValueError names
    ``eval.streams``."""
    if not 1 <= streams <= n_pairs:
        raise ValueError(
            f"eval.streams={streams}: allowed is 1 to {n_pairs}, the number of pairs to be scored"
        )
    n_read = n_pairs + (streams - 1) * context
    ends = [stream * n_read // streams - (stream - 1) * context for stream in range(1, streams + 1)]
    return list(pairwise([0, *ends]))


def round_context(context: int, *, n_pairs: int, streams: int, segment: int) -> int:
    """Return the unscored context of a stream: ``context`` rounded up to whole segments, but not
    more than the pairs that a stream scores, so that evaluation takes at most twice the time."""
    return min(-(-context // segment), n_pairs // streams // segment) * segment


def segments(
    split: Tensor, *, streams: int, segment: int, context: int = 0, shard: Shard = UNSHARDED
) -> Batches:
    """Return all pairs of ``split [n]``, each scored once: segments ``[L, T]`` of L streams, to be
    read with carried state. The mask is false for the ``context`` (``round_context``) of all
    streams but the first, and after a stream's end."""
    ranges = torch.tensor(score_ranges(len(split) - 1, streams, context=context))
    first = ranges[:, :1]
    end = ranges[:, 1:]
    start = (first - context).clamp(min=0)
    length = int((end - start).max())
    rows = shard_slice(streams, shard)
    return _read_segments(
        split, start[rows], length=length, segment=segment, scored=(first[rows], end[rows])
    )


def sample_layout(pairs: int, *, streams: int, segment: int, context: int) -> tuple[int, int]:
    """Return how a sample of ``pairs`` pairs is laid out: its number of streams, at most
    ``streams``, and the number of unscored pairs that each stream reads first. This is ``context``
    (at least 1) rounded up to whole segments, but at most half of the stream, rounded down to whole
    segments; 0 if a stream is shorter than two segments."""
    rounded = -(-context // segment) * segment
    n_streams = max(1, min(streams, pairs // (2 * rounded)))
    unscored = min(rounded, pairs // n_streams // 2 // segment * segment)
    if unscored:
        return (n_streams, unscored)
    return (min(streams, pairs), 0)


def samples(
    split: Tensor,
    *,
    pairs: int,
    streams: int,
    segment: int,
    context: int = 0,
    shard: Shard = UNSHARDED,
) -> Batches:
    """Return a sample of at most ``pairs`` pairs of ``split [n]``, in L streams of equal length,
    spread evenly over the split. The mask is false for the first ``context`` pairs of each
    stream."""
    n_pairs = len(split) - 1
    length = min(pairs, n_pairs) // streams
    start = (torch.arange(streams) * (n_pairs - length) // max(streams - 1, 1))[
        shard_slice(streams, shard), None
    ]
    return _read_segments(
        split,
        start,
        length=length,
        segment=segment,
        scored=(start + context, torch.tensor(n_pairs)),
    )


def _read_segments(
    split: Tensor, start: Tensor, *, length: int, segment: int, scored: tuple[Tensor, Tensor]
) -> Batches:
    """Return segments of L streams of ``length`` pairs each, from ``start [L, 1]`` on. The mask is
    true for pairs in the range ``scored``, (first, end)."""
    first, end = scored

    def read(offset: int) -> Segment:
        positions = start + offset + torch.arange(min(segment, length - offset))
        return *_pairs(split, positions), (positions >= first) & (positions < end)

    return Batches(read, range(0, length, segment))


def windows(
    split: Tensor,
    *,
    window: int = 1024,
    stride: int = 512,
    batch: int = 32,
    shard: Shard = UNSHARDED,
) -> Batches:
    """Return all pairs of ``split [n]``, each scored once, in windows that are read without carried
    state, as ``row_batches``. A window of ``window`` pairs starts at every ``stride``-th pair. Its
    last ``stride`` pairs are scored; of the first window, all."""
    n_pairs = len(split) - 1
    n_windows = 1 + -(-max(0, n_pairs - window) // stride)
    columns = torch.arange(window)

    def read(rows: Tensor) -> Segment:
        positions = rows[:, None] * stride + columns
        is_new = (columns >= window - stride) | (rows == 0)[:, None]
        return *_pairs(split, positions), (positions < n_pairs) & is_new

    return row_batches(n_windows, batch=batch, shard=shard, read=read)


def _pairs(split: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the pairs at ``positions``; a position after the end reads the
    last pair."""
    clamped = positions.clamp(max=len(split) - 2)
    return split[clamped].long(), split[clamped + 1].long()
