"""Checks that a byte moves no output before it or beyond the declared reach, and cuts into segments move nothing.

At small sizes every byte is checked. At those of the run, a narrow network reads what the run and its score will read:
batches, whole and ragged segments from a warm state, and windows without one. This shows what happens only in whole
blocks of 64 or beyond 300 bytes. Each stream is changed at its own place, so one pass checks a place per stream.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from variants.conformance.fixture import MODES, NoDropout, Outputs, Subject, Verdict, differs, run
from variants.contract import State, Sublayer, map_state

MOST_PAIRS = 2**23
"""Most pairs of a query and a key of one head in a forward pass; the number of streams is reduced to keep to it."""
MOST_SEGMENTS = 8  # read at most; a reach beyond them is not checked
EVERY, ROWS = 128, 64  # places checked in a small stream; streams of a small batch
SOME, TURNS = 18, 6  # most places in a segment of the run, and most forward passes for them, the most telling first
LONGEST = 1000  # bytes of the longest small stream; a reach beyond it is not checked


class Size(NamedTuple):
    """Mode, streams, segment, whether state is carried, and whether it is small, so that every byte is checked."""

    mode: str
    streams: int
    segment: int
    carry: bool
    small: bool = False

    def __str__(self) -> str:
        return f"{self.mode}, {self.streams} x {self.segment} bytes{'' if self.carry else ' without a past'}"

    def places(self, period: int) -> list[int]:
        """Bytes of a segment to change. Of a small one: all, or some at all offsets of a period. Of another: the last,
        edges of blocks, and powers of two with one neighbour each."""
        length = self.segment
        if self.small:
            step = max(1, length // EVERY)
            while math.gcd(step, period) > 1:
                step += 1
            return list(range(0, length, step))
        block = max(1, length // 2 // period) * period if period > 1 else length // 3
        powers = [2**i for i in range(20) if 2**i < length][::-1]
        places = [length - 1, block, block - 1, 1, length - block, 2 * length // 3 + 1]
        places += [place for i, power in enumerate(powers) for place in (power, power + 1 - 2 * (i % 2))]
        return [place for place in dict.fromkeys(places) if 0 < place < length][:SOME] or [0]

    def cuts(self, span: int, period: int) -> list[tuple[int, ...]]:
        """Uneven ways to cut a segment. In evaluation, a small one is also cut byte by byte at both ends."""
        length = self.segment
        if not self.small:
            return [(length // 3 + 1,), (1, 2 * (length // 3))]
        schemes = [(1,), (span + 2,), tuple(range(3, length, max(2, span // 3)))]
        if self.mode == "train":
            return schemes
        if period > 1:  # three periods end before the cut and three after it, one of them across it
            schemes += [(3 * period,), (3 * period + period // 2,)]
        some = min(max(6, period + 2), length // 2)  # bytes read singly, without a past and with a full window
        return [*schemes, (*range(1, some + 1), *range(length - some, length))]


def _sizes(subject: Subject, *modes: str) -> list[Size]:
    """The run's sizes, or small ones: streams of more than two windows, and streams half as long with a past."""
    length, half = subject.length, subject.length // 2
    small = [Size(mode, min(ROWS, length), length, False, small=True) for mode in MODES]
    small.append(Size("eval", min(ROWS, half), half, True, small=True))
    return [size for mode in modes for size in subject.sizes or small if size.mode == mode]


def causality(subject: Subject, *, mode: str) -> Verdict:
    """All bytes from p on are changed; nothing before p may move."""
    for size in _sizes(subject, mode):
        if moved := _Streams(subject, size).moved(f"{size}, all from byte {{at}} on changed"):
            yield moved[1]
            return


def reach(subject: Subject) -> Verdict:
    """All bytes up to p are changed, also those of the state; nothing after p + reach may move."""
    reaches = total_reaches(subject.declared)
    for size in _sizes(subject, "eval"):
        length = LONGEST if size.small and size.carry else size.segment * (MOST_SEGMENTS if size.carry else 1)
        near = {name: int(most) for name, most in reaches.items() if most + 1 < length}
        if not near:
            continue
        streams = _Streams(subject, size, segments=-(-(max(near.values()) + 2) // size.segment) if size.carry else 1)
        if moved := streams.moved(f"{size}, all up to byte {{at}} changed", reaches=near):
            name, line = moved
            honest = near[name] or name not in subject.declared or subject.declared[name].honours is not None
            end = "" if honest else ": what sees a past declares honours and reach()"
            yield f"{line}, beyond its reach of {near[name]}{end}"
            return


def segments(subject: Subject) -> Verdict:
    """The same bytes must give the same outputs in whole segments and in uneven cuts."""
    for size in _sizes(subject, *subject.still):
        if size.segment < 3 or size.small == size.carry:
            continue
        streams = _Streams(subject, size._replace(streams=3) if size.small else size)
        whole = streams.run(streams.tokens)
        for cuts in size.cuts(subject.span, subject.period):
            case = f"{streams.size} cut at {', '.join(map(str, cuts[:4]))}{', ...' * (len(cuts) > 4)}"
            if lines := differs(case, whole, streams.run(streams.tokens, cuts=cuts)):
                yield from lines
                return


def total_reaches(sublayers: Mapping[str, Sublayer]) -> dict[str, float]:
    """How many bytes back each output may depend on: its reach, plus those of all sublayers before it."""
    total = list(accumulate(math.inf if (n := sublayer.reach()) is None else n for sublayer in sublayers.values()))
    return dict(zip([*sublayers, "logits"], [*total, *total[-1:]], strict=True))


class _Streams:
    """A model in a mode, and streams of random bytes for it: ``tokens [B, T]`` of some segments, and their past."""

    def __init__(self, subject: Subject, size: Size, *, segments: int = 1):
        self.model, self.still = subject.build(mode=size.mode), subject.still.get(size.mode, NoDropout)
        self.size = size
        before = -(-subject.span // size.segment) * size.segment if size.carry else 0
        number = min(size.streams, max(1, MOST_PAIRS // (size.segment * (size.segment + subject.span))))
        places = size.places(subject.period)
        self.places = places if size.small else places[: TURNS * number]
        tokens = subject.bytes(length=before + segments * size.segment, streams=number, seed=2)
        past, self.tokens = tokens.tensor_split([before], dim=1)
        other_past, self.other = subject.other(tokens).tensor_split([before], dim=1)
        self.past, self.other_past = (self._read(part, None)[1] if before else None for part in (past, other_past))

    def _read(self, tokens: Tensor, past: State, cuts: tuple[int, ...] | None = None) -> tuple[Outputs, State]:
        cuts = tuple(range(self.size.segment, tokens.shape[1], self.size.segment)) if cuts is None else cuts
        with self.still():
            return run(self.model, tokens, cuts=cuts, state=map_state(torch.clone, past))

    def run(self, tokens: Tensor, *, cuts: tuple[int, ...] | None = None) -> Outputs:
        """Outputs over ``tokens``, in segments of the size, or cut at ``cuts``."""
        return self._read(tokens, self.past, cuts)[0]

    def moved(self, case: str, *, reaches: Mapping[str, int] | None = None) -> tuple[str, str] | None:
        """The first output that moves where it must not, with a line about it.

        Args:
            case: what is done, with ``{at}`` for the place.
            reaches: None: all bytes from the place on are changed; no output before it may move. Otherwise all bytes up
                to the place and the past are changed, or only the past; outputs then move only within reach.
        """
        before, byte, late = self.run(self.tokens), torch.arange(self.tokens.shape[1]), reaches is not None

        def first(at: Tensor) -> tuple[str, str] | None:
            """The same for streams that are each changed at their own place ``at [B, 1]``."""
            changed = torch.where(byte <= at if late else byte >= at, self.other, self.tokens)
            after, _ = self._read(changed, self.other_past if late else self.past)
            for name in reaches or before:
                silent = byte > at + reaches[name] if late else byte < at
                then = torch.where(silent[..., None], after[name], before[name])
                for line in differs(case.format(at=at[0].item()), {name: before[name]}, {name: then}):
                    return name, line
            return None

        for some in self._turns([-1, *self.places] if late else self.places):
            if first(some):  # or another stream's change moved it, which is another promise
                alike = (torch.full_like(some, at) for at in some.unique().tolist())
                if moved := next(filter(None, map(first, alike)), None):
                    return moved
        return None

    def _turns(self, places: list[int]) -> Iterator[Tensor]:
        """Places ``[B, 1]``, one per stream, until every place had its turn."""
        streams = len(self.tokens)
        for begin in range(0, len(places), streams):
            some = places[begin : begin + streams]
            yield torch.tensor([some[i % len(some)] for i in range(streams)])[:, None]


SIZED = (
    ("evaluation does not see the future", None, partial(causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(causality, mode="train")),
    ("no byte beyond the declared reach matters", None, reach),
    ("segments do not matter", "segments", segments),
)
"""Promise, the limit that excuses it, and its check. With this limit, the run's sizes are not checked."""
