"""Streams: the order in which training and scoring read bytes, and windows for scoring.

A pair is an input byte and its target, the byte after it: a split of n bytes has n - 1 pairs; pair i is bytes i and
i + 1. Order depends on split, position and seed alone: runs resume from one integer, and all variants read alike.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from harness.hashing import integer_hash

WHOLE = (0, 1)
"""A part of divided work: which, of how many; here all of it."""
_RING, _WINDOW = 1, 2  # first key of the hash, so that the two kinds of draws are unrelated

Segment = tuple[Tensor, Tensor, Tensor]
"""Inputs int64 ``[L, T]``, targets int64 ``[L, T]``, and mask bool ``[L, T]``: which of the pairs are to be scored."""


class Batches:
    """Segments in their order, each made when it is read; their number is known before."""

    def __init__(self, make: Callable[[int], Segment], firsts: range):
        self._make, self._firsts = make, firsts

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[Segment]:
        return map(self._make, self._firsts)


class Streams:
    """Batches: B ``streams`` of ``split``, uint8 ``[n]``, side by side, T bytes (``segment``) a step, B x T in all.

    With ``carry`` the split is a ring, cut into B streams of n // B bytes, read segment after segment with carried
    state. After ``steps_per_turn`` segments a new turn begins: the ring shifts by an offset drawn by seed and turn, and
    state is dropped. Without it a step reads B random windows. ValueError for a stream (or split) below T + 1 bytes.
    """

    def __init__(self, split: Tensor, *, streams: int, segment: int, seed: int, carry: bool = True):
        self.split, self.streams, self.segment, self.seed, self.carry = split, streams, segment, seed, carry
        self.stream_bytes = len(split) // streams if carry else len(split)
        self.steps_per_turn, self.bytes_per_step = self.stream_bytes // segment, streams * segment
        if self.stream_bytes <= segment:
            needed = (segment + 1) * (streams if carry else 1)
            raise ValueError(
                f"batch.streams={streams} and batch.segment={segment} need {needed:,} bytes to train on, the train "
                f"split of data has {len(split):,}: allowed is a longer corpus, fewer streams or a shorter segment"
            )

    def carried(self, position: int) -> int:
        """Bytes of each stream before step ``position``, since the stream began."""
        return position % self.steps_per_turn * self.segment if self.carry else 0

    def begins(self, position: int) -> bool:
        """Whether the streams of step ``position`` start without state."""
        return self.carried(position) == 0

    def batch(self, position: int, *, part: tuple[int, int] = WHOLE) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step ``position``, from 0, for a part of the streams: int64 ``[B, T]`` each."""
        numbers = range(self.streams)[share(self.streams, part)]
        if self.carry:
            turn, step = divmod(position, self.steps_per_turn)
            offset = int(integer_hash(_RING, self.seed, turn)[0]) % len(self.split)
            begin = [offset + number * self.stream_bytes + step * self.segment for number in numbers]
        else:
            places = len(self.split) - self.segment
            begin = [int(draw) % places for draw in integer_hash(_WINDOW, self.seed, position, numbers)]
        index = torch.tensor(begin, dtype=torch.int64)[:, None] + torch.arange(self.segment + 1)  # [B, T + 1]
        values = self.split[index % len(self.split)].long()
        return values[:, :-1], values[:, 1:]


def share(number: int, part: tuple[int, int]) -> slice:
    """Which of ``number`` streams a part (which, of how many) has: in order, in sizes that differ by at most one."""
    which, parts = part
    return slice(which * number // parts, (which + 1) * number // parts)


def score_streams(n_pairs: int, streams: int, *, context: int = 0) -> list[tuple[int, int]]:
    """Cut pairs 0..n_pairs - 1 into contiguous ranges (first, end) to score, such that all streams read as many pairs,
    or one more, with the unscored ``context`` that all but the first read before. ValueError names ``eval.streams``."""
    if not 1 <= streams <= n_pairs:
        raise ValueError(f"eval.streams={streams}: allowed is 1 to {n_pairs}, the (input, target) pairs to be scored")
    read = n_pairs + (streams - 1) * context
    return list(pairwise([0, *(stream * read // streams - (stream - 1) * context for stream in range(1, streams + 1))]))


def whole_context(context: int, *, n_pairs: int, streams: int, segment: int) -> int:
    """Pairs of unscored context before a stream's range: ``context`` in whole segments, and at most as many as a stream
    scores, so that reading takes at most twice the time."""
    return min(-(-context // segment), n_pairs // streams // segment) * segment


def segments(split: Tensor, *, streams: int, segment: int, context: int = 0, part: tuple[int, int] = WHOLE) -> Batches:
    """All pairs of ``split [n]`` once: L streams side by side, ``[L, T]`` pairs at a time, with carried state. The mask
    is false for the ``context`` (``whole_context``) of all streams but the first, and beyond a stream's end."""
    ranges = torch.tensor(score_streams(len(split) - 1, streams, context=context))
    first, end = ranges[:, :1], ranges[:, 1:]
    begin = (first - context).clamp(min=0)
    longest, mine = int((end - begin).max()), share(streams, part)
    return _read(split, begin[mine], longest=longest, segment=segment, scored=(first[mine], end[mine]))


def sample_cut(pairs: int, *, streams: int, segment: int, context: int) -> tuple[int, int]:
    """Streams, at most so many, of a sample of ``pairs``, and pairs of unscored context in each: ``context`` in whole
    segments, half of a short stream, none where no stream has two segments."""
    whole = -(-context // segment) * segment
    few = max(1, min(streams, pairs // (2 * whole)))
    before = min(whole, pairs // few // 2 // segment * segment)
    return (few, before) if before else (min(streams, pairs), 0)


def samples(
    split: Tensor, *, pairs: int, streams: int, segment: int, context: int = 0, part: tuple[int, int] = WHOLE
) -> Batches:
    """``pairs`` or a few less, in L equal streams spread evenly over ``split [n]``, T pairs at a time; the first
    ``context`` of each have a false mask."""
    n_pairs = len(split) - 1
    longest = min(pairs, n_pairs) // streams
    begin = (torch.arange(streams) * (n_pairs - longest) // max(streams - 1, 1))[share(streams, part), None]
    return _read(split, begin, longest=longest, segment=segment, scored=(begin + context, torch.tensor(n_pairs)))


def _read(split: Tensor, begin: Tensor, *, longest: int, segment: int, scored: tuple[Tensor, Tensor]) -> Batches:
    """Streams of ``longest`` pairs from ``begin [L, 1]`` on; the mask is true for ``scored`` (first, end)."""
    first, end = scored

    def read(done: int) -> Segment:
        index = begin + done + torch.arange(min(segment, longest - done))
        return *_pairs(split, index), (index >= first) & (index < end)

    return Batches(read, range(0, longest, segment))


def windows(
    split: Tensor, *, window: int = 1024, stride: int = 512, batch: int = 32, part: tuple[int, int] = WHOLE
) -> Batches:
    """All pairs of ``split [n]`` once without carried state: windows of ``window`` pairs, one every ``stride``, at most
    ``batch`` at a time, and a ``part`` of these batches. A window scores its last ``stride`` pairs, the first all."""
    n_pairs = len(split) - 1
    n_windows = 1 + -(-max(0, n_pairs - window) // stride)
    batch = min(batch, n_windows)
    firsts, place = range(0, n_windows, batch), torch.arange(window)

    def read(first: int) -> Segment:
        number = torch.arange(first, first + batch)[:, None]  # [b, 1]; the last batch is filled up from beyond the end
        index = number * stride + place
        return *_pairs(split, index), (index < n_pairs) & ((place >= window - stride) | (number == 0))

    return Batches(read, firsts[share(len(firsts), part)])


def _pairs(split: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of pairs; beyond the end the last pair again."""
    safe = index.clamp(max=len(split) - 2)
    return split[safe].long(), split[safe + 1].long()
