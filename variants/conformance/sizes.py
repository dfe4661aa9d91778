"""What bytes may move: no output before them, none beyond the reach that sublayers declare; and segments that move nothing.

At small sizes every byte is looked at. At those of the run a narrow network reads what the run and its score will, batches,
whole and ragged segments from a warm state, and windows without one: what happens only in whole blocks of 64, or beyond 300
bytes, is seen there. Streams are changed at places of their own, so that a forward pass looks at as many places.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from variants.conformance.fixture import NoDropout, Outputs, Subject, Verdict, differs, leaves, pick, run
from variants.contract import State, Sublayer, map_state

MOST_BYTES = 2**30
"""Of the tensors of one forward pass; fewer streams are looked at where they would be more."""
ALIVE = 6
"""Tensors as large as the largest that are alive at once, about."""
MOST_SEGMENTS = 8
"""Read on after the first change; who reaches farther than they are long is not looked at."""
SECONDS, LEAST = 1.2, 6
"""Of work for the places of one size of the run; then no more are looked at, once so many were."""
EVERY, ROWS = 128, 64
"""Places of a small stream, and about so many of a longer one; and copies that go into one forward."""
LONGEST = 1000
"""Bytes of the longest small stream; who reaches farther is not looked at."""


Where = Callable[[Tensor], Tensor]
"""Places ``[B, 1]`` to bool ``[B, T]``."""


class Size(NamedTuple):
    """A shape in which a model is called: ``train`` or ``eval``, streams, segment, whether state is carried, and whether it is
    small, so that every byte is looked at."""

    mode: str
    streams: int
    segment: int
    carry: bool
    small: bool = False

    def __str__(self) -> str:
        return f"{self.mode}, {self.streams} x {self.segment} bytes{'' if self.carry else ' without a past'}"

    def places(self, period: int) -> list[int]:
        """Bytes of a segment: of a small one all, or some at all offsets of a period; of another about 18, edges of blocks, the
        last, powers of two and a neighbour of each, the most telling first."""
        length = self.segment
        if self.small:
            step = max(1, length // EVERY)
            while math.gcd(step, period) > 1:
                step += 1
            return list(range(0, length, step))
        powers = [2**i for i in range(20) if 2**i < length][:-8:-1]
        block = max(1, length // 2 // period) * period if period > 1 else length // 3
        places = [length - 1, block, *powers[:3], block - 1, 1, length - block, 2 * length // 3 + 1]
        places += [power + 1 - 2 * (i % 2) for i, power in enumerate(powers)] + powers
        return [place for place in dict.fromkeys(places) if 0 < place < length] or [0]


def _small(subject: Subject) -> list[Size]:
    """Streams of more than two windows, and halves of one, with a past."""
    streams, half = ROWS if subject.apart else 3, subject.length // 2
    sizes = [Size(mode, min(streams, subject.length), subject.length, False, small=True) for mode in ("eval", "train")]
    return [*sizes, Size("eval", min(streams, half), half, True, small=True)]


def causality(subject: Subject, *, mode: str) -> Verdict:
    """All bytes from p on are changed; nothing before p may move."""
    told = []
    for size in (size for size in subject.sizes or _small(subject) if size.mode == mode):
        fed, byte = _Fed(subject, size), torch.arange(size.segment)
        silent = {name: lambda at, byte=byte: byte < at for name in [*subject.declared, "logits"]}
        case = f"{size}, all from byte {{at}} on changed"
        if found := fed.moved(case, changed=lambda at, byte=byte: byte >= at, silent=silent):
            return [found[1]], ""
        told.append(f"{size} at {fed.looked_at} places{fed.fewer}")
    return [], "; ".join(told)


def reach(subject: Subject) -> Verdict:
    """All bytes up to p are changed, those of the state too; nothing after p + reach may move."""
    known, told, seen = reaches(subject.declared), [], set()
    for size in (size for size in subject.sizes or _small(subject) if size.mode == "eval"):
        length = LONGEST if size.small and size.carry else size.segment * (MOST_SEGMENTS if size.carry else 1)
        near = {name: int(most) for name, most in known.items() if most + 1 < length}
        if not near:
            continue
        number = -(-(max(near.values()) + 2) // size.segment) if size.carry else 1
        fed, byte = _Fed(subject, size, number=number), torch.arange(number * size.segment)
        silent = {name: lambda at, most=most, byte=byte: byte > at + most for name, most in near.items()}
        case = f"{size}, all up to byte {{at}} changed"
        if found := fed.moved(case, changed=lambda at, byte=byte: byte <= at, silent=silent, other_past=True):
            name, line = found
            honest = near[name] or name not in subject.declared or subject.declared[name].honours is not None
            end = "" if honest else ": what sees a past declares honours and reach()"
            return [f"{line}, beyond its reach of {near[name]}{end}"], ""
        seen |= near.keys()
        ends = ", ".join(f"{name} {most}" for name, most in near.items())
        told.append(f"{size} at {fed.looked_at} places{fed.fewer}: {ends}")
    far = [name for name, most in known.items() if name not in seen and most < math.inf]
    told += [f"too far to look at: {', '.join(far)}"] if far else []
    return [], "; ".join(told) or "no sublayer declares an end of its reach"


def segments(subject: Subject) -> Verdict:
    """The same bytes in whole segments and cut at ugly places; small ones also byte for byte, at the ends."""
    told = []
    small = [size._replace(streams=3) for size in _small(subject) if not size.carry]
    for mode, model, still in subject.modes():
        for size in subject.sizes or small:
            if size.mode != mode or size.segment < 3 or not (size.small or size.carry):
                continue
            with still():
                fed = _Fed(subject, size, model=model)
                whole, schemes = fed.run(fed.tokens), _cuts(subject, size)
                for cuts in schemes:
                    case = f"{size} cut at {', '.join(map(str, cuts[:4]))}{', ...' * (len(cuts) > 4)}"
                    if breaks := differs(case, whole, fed.run(fed.tokens, cuts=cuts)):
                        return breaks, ""
            told.append(f"{size}{fed.fewer} in {len(schemes)} ways")
    return [], "; ".join(told) or "nothing is carried"


def _cuts(subject: Subject, size: Size) -> list[tuple[int, ...]]:
    length, span, period = size.segment, subject.span, subject.period
    if not size.small:
        return [(length // 3 + 1,), (1, 2 * (length // 3))]
    schemes = [(1,), (span + 2,), (length - 1,), (2, 3, span + 3), tuple(range(3, length, max(2, span // 3)))]
    if period > 1:  # three periods are finished before, and three after, one of them across the cut
        schemes += [(3 * period,), (3 * period + period // 2,)]
    some = min(max(6, period + 2), length // 2)  # one at a time, from nothing and with a full window
    return [*schemes, (*range(1, some + 1), *range(length - some, length))]


def reaches(sublayers: Mapping[str, Sublayer]) -> dict[str, float]:
    """Bytes back that each output may depend on: what reaches so far may be made of what reached before it."""
    own = [math.inf if (n := sublayer.reach()) is None else n for sublayer in sublayers.values()]
    total = list(accumulate(own))
    return dict(zip([*sublayers, "logits"], [*total, *total[-1:]], strict=True))


class _Fed:
    """A model in a mode, and streams of random bytes for it: ``tokens [B, T]`` of some segments, and what they continue;
    ``fewer`` says where memory allows fewer streams than were asked for, ``looked_at`` how many places were."""

    def __init__(self, subject: Subject, size: Size, *, number: int = 1, model: nn.Module | None = None):
        self.model = (model or subject.build()).train(size.mode == "train")
        self.size, self.apart, self.looked_at = size, subject.apart, 0
        self.places = size.places(subject.period)
        self.still = NoDropout if size.mode == "train" and model is None else nullcontext
        past = -(-subject.span // size.segment) * size.segment if size.carry else 0
        with _Largest() as largest:  # that one stream makes
            _, state = self._read(torch.zeros(1, past + size.segment, dtype=torch.int64), None)
        past = (
            past if any(tensor.numel() for tensor in leaves(state[1])) else 0
        )  # where nothing is carried, it takes time only
        streams = min(size.streams, max(1, MOST_BYTES // (ALIVE * largest.bytes)))
        self.fewer = f" of {streams} streams, for memory's sake" if streams < size.streams else ""
        tokens = subject.bytes(length=past + number * size.segment, streams=streams, seed=2)
        self.tokens, self.other = tokens[:, past:], subject.other(tokens[:, past:])
        self.past = [self._read(some, None)[1] for some in (tokens[:, :past], subject.other(tokens[:, :past]))]

    def _read(self, tokens: Tensor, state: State, cuts: tuple[int, ...] | None = None) -> tuple[Outputs, State]:
        if not tokens.numel():
            return {}, state
        cuts = tuple(range(self.size.segment, tokens.shape[1], self.size.segment)) if cuts is None else cuts
        with self.still():
            return run(self.model, tokens, cuts=cuts, state=map_state(torch.clone, state))

    def run(self, tokens: Tensor, *, cuts: tuple[int, ...] | None = None, other_past: bool = False) -> Outputs:
        """Outputs over ``tokens``, in segments of the size or cut otherwise."""
        return self._read(tokens, self.past[other_past], cuts)[0]

    def moved(
        self, case: str, *, changed: Where, silent: Mapping[str, Where], other_past: bool = False
    ) -> tuple[str, str] | None:
        """The first output that moves where it is ``silent``, with a line for it, when bytes that are ``changed`` are others, or
        the past alone; ``case`` is what is done, with ``{at}`` for the place, ``other_past`` whether the past is another, too."""
        before = self.run(self.tokens)
        for at in self._turns([-1, *self.places] if other_past else self.places):
            after = self.run(torch.where(changed(at), self.other, self.tokens), other_past=other_past)
            for name, still in silent.items():
                found = torch.where(still(at)[..., None], after[name], before[name])
                for stream in range(len(at)) if differs("", {name: before[name]}, {name: found}) else ():
                    one, told = slice(stream, stream + 1), case.format(at=at[stream].item())
                    lines = differs(told, pick({name: before[name]}, one), pick({name: found}, one))
                    if lines and self.apart and len(at.unique()) > 1:  # another stream's change may have moved it
                        self.apart = False
                        return self.moved(case, changed=changed, silent=silent, other_past=other_past)
                    if lines:
                        return name, lines[0]
        return None

    def _turns(self, places: list[int]) -> Iterator[Tensor]:
        """``[B, 1]``, the place of each stream, until all had their turn or time is up; of all one where they are not apart."""
        streams, begun = len(self.tokens) if self.apart else 1, time.thread_time()
        for first in range(0, len(places), streams):
            if first >= LEAST and not self.size.small and time.thread_time() - begun > SECONDS:
                return
            some = places[first : first + streams]
            self.looked_at = first + len(some)
            yield torch.tensor([some[i % len(some)] for i in range(len(self.tokens))])[:, None]


class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that is made."""

    bytes = 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        self.bytes = max(self.bytes, *(tensor.numel() * tensor.element_size() for tensor in tensors), 1)
        return made


SIZED = (
    ("evaluation does not see the future", None, partial(causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(causality, mode="train")),
    ("no byte beyond the declared reach matters", None, reach),
    ("segments do not matter", "segments", segments),
)
"""Promise, the limit that excuses it, with which it is not looked at in the run's sizes, and its check."""
