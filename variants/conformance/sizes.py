"""The contract at the sizes of a run: causality, segment cuts and reach over its own segments, streams and span.

The checks of ``suite`` feed few bytes, so that what happens only in whole blocks of 64, or beyond 300 bytes, is not seen.
Here a small network reads what the run and its score will: batches, whole and ragged segments from a warm state, and
windows without one. Streams are changed at places of their own, so that a forward pass looks at as many places.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from variants.conformance.changed import reaches
from variants.conformance.fixture import NoDropout, Outputs, Subject, Verdict, differs, pick, run
from variants.conformance.suite import Finding, finding_of
from variants.contract import State

MOST_BYTES = 2**30
"""Of the tensors of one forward pass; fewer streams are looked at where they would be more."""
ALIVE = 6
"""Tensors as large as the largest that are alive at once, about."""
MOST_SEGMENTS = 8
"""Read on after the first change; who reaches farther than they are long is not looked at."""


class Size(NamedTuple):
    """A shape in which the run calls its model: ``train`` or ``eval``, streams, segment, whether state is carried, and whether
    it is what is left at the end of a split."""

    mode: str
    streams: int
    segment: int
    carry: bool
    ragged: bool = False

    def __str__(self) -> str:
        return f"{self.mode}, {self.streams} x {self.segment} bytes{'' if self.carry else ' without a past'}"


def sizes_of(*, batch: tuple[int, int], carry: bool, score: tuple[int, int], windows: tuple[int, int]) -> list[Size]:
    """Shapes of a run, each once: its batch in both modes, its score with a ragged last segment, its windows.

    Args:
        batch, score, windows: streams and bytes of a segment.
        carry: whether training carries state.
    """
    streams, segment = score
    ragged = max(1, segment - segment // 3) - (segment > 3 and segment // 3 % 2 == segment % 2)  # odd
    found = [Size("train", *batch, carry), Size("eval", *batch, True), Size("eval", streams, segment, True)]
    found += [Size("eval", streams, ragged, True, ragged=True), Size("eval", *windows, False)]
    return list(dict.fromkeys(found))


def at_sizes(
    make_model: Callable[[], nn.Module], sizes: Sequence[Size], *, span: int, vocabulary: int = 256
) -> Iterator[Finding]:
    """Check causality, reach and segment cuts at some sizes, one finding a promise, in float64.

    Args:
        make_model, span, vocabulary: as ``suite.check`` has them; the model is narrow, its span is the run's.
    """
    subject = Subject(make_model, span, vocabulary)
    for promise, limit, function in CHECKS:
        if limit is None or limit not in subject.limits():
            yield finding_of(f"{promise} at the sizes of the run", partial(function, sizes=sizes), subject)


def _causality(subject: Subject, *, mode: str, sizes: Sequence[Size]) -> Verdict:
    """All bytes from p on are changed; nothing before p may move."""
    told = []
    for size in (size for size in sizes if size.mode == mode):
        fed, places = _Fed(subject, size), _places(size.segment, subject.period)
        before, byte = fed.run(fed.tokens), torch.arange(size.segment)
        for at in fed.at(places):
            after = fed.run(torch.where(byte >= at, subject.other(fed.tokens), fed.tokens))
            if breaks := _moved(f"{size}, all from byte {{at}} on changed", before, after, byte < at, at):
                return breaks, ""
        told.append(f"{size} at {len(places)} places{fed.fewer}")
    return [], "; ".join(told)


def _reach(subject: Subject, *, sizes: Sequence[Size]) -> Verdict:
    """All bytes up to p are changed, those of the state too; nothing after p + reach may move."""
    known, told = reaches(subject.declared), []
    for size in (size for size in sizes if size.mode == "eval" and not size.ragged):
        length = size.segment * (MOST_SEGMENTS if size.carry else 1)
        near = {name: int(most) for name, most in known.items() if most + 1 < length}
        if not near:
            continue
        number = -(-(max(near.values()) + 2) // size.segment) if size.carry else 1
        fed, places = _Fed(subject, size, number=number), [-1, *_places(size.segment, subject.period)]
        before, byte = fed.run(fed.tokens), torch.arange(fed.tokens.shape[1])
        for at in fed.at(places):
            after = fed.run(torch.where(byte <= at, subject.other(fed.tokens), fed.tokens), other_past=True)
            for name, most in near.items():
                one, other = {name: before[name]}, {name: after[name]}
                case = f"{size}, all up to byte {{at}} changed, beyond the reach of {most}"
                if breaks := _moved(case, one, other, byte > at + most, at):
                    return breaks, ""
        told.append(f"{size}: {', '.join(f'{name} {most}' for name, most in near.items())}{fed.fewer}")
    return [], "; ".join(told) or "no sublayer declares an end of its reach that these sizes show"


def _segments(subject: Subject, *, sizes: Sequence[Size]) -> Verdict:
    """The same bytes in whole segments and cut at ugly places."""
    told = []
    whole_ones = [size for size in sizes if size.carry and size.segment > 2 and not size.ragged]
    for mode, model, still in subject.modes():
        for size in (size for size in whole_ones if size.mode == mode):
            third = size.segment // 3
            with still():
                fed = _Fed(subject, size, model=model)
                whole = fed.run(fed.tokens)
                for cuts in ((third + 1,), (1, 2 * third)):
                    case = f"{mode}, {size.streams} x {size.segment} bytes cut at {', '.join(map(str, cuts))}"
                    if breaks := differs(case, whole, fed.run(fed.tokens, cuts=cuts)):
                        return breaks, ""
            told.append(f"{mode}, {size.streams} x {size.segment} bytes{fed.fewer}")
    return [], "; ".join(told) or "nothing is carried"


class _Fed:
    """A model in a mode, and streams of random bytes for it: ``tokens [B, T]`` of some segments, and what they continue.

    ``fewer`` says where memory allows fewer streams than were asked for.
    """

    def __init__(self, subject: Subject, size: Size, *, number: int = 1, model: nn.Module | None = None):
        self.model = (model or subject.build()).train(size.mode == "train")
        self.size, self.apart = size, "streams_apart" not in subject.limits()
        self.still = NoDropout if size.mode == "train" and model is None else nullcontext
        past = -(-subject.span // size.segment) * size.segment if size.carry else 0
        streams = min(size.streams, _streams_that_fit(self.model, size, past=past))
        self.fewer = f" of {streams} streams, for memory's sake" if streams < size.streams else ""
        tokens = torch.randint(
            subject.vocabulary, (streams, past + number * size.segment), generator=torch.Generator().manual_seed(2)
        )
        before, self.tokens = tokens[:, :past], tokens[:, past:]
        self.past = [self._warm(bytes_) for bytes_ in (before, subject.other(before))]

    def _warm(self, tokens: Tensor) -> State:
        state = None
        with self.still():
            for segment in tokens.split(self.size.segment, dim=1) if tokens.numel() else ():
                _, state = run(self.model, segment, state=state)
        return state

    def run(self, tokens: Tensor, *, cuts: tuple[int, ...] | None = None, other_past: bool = False) -> Outputs:
        """Outputs over ``tokens``, in segments of the size or cut otherwise."""
        cuts = tuple(range(self.size.segment, tokens.shape[1], self.size.segment)) if cuts is None else cuts
        with self.still():
            return run(self.model, tokens, cuts=cuts, state=self.past[other_past])[0]

    def at(self, places: list[int]) -> Iterator[Tensor]:
        """``[B, 1]``, the place of each stream, until all had their turn; of all streams one where they are not apart."""
        streams = len(self.tokens) if self.apart else 1
        for first in range(0, len(places), streams):
            some = places[first : first + streams]
            yield torch.tensor([some[i % len(some)] for i in range(len(self.tokens))])[:, None]


def _moved(case: str, before: Outputs, after: Outputs, silent: Tensor, at: Tensor) -> list[str]:
    """A line for the first output that moved where ``silent [B, T]`` says that it may not."""
    for name, y in before.items():
        found = torch.where(silent[..., None], after[name], y)
        if differs(case, {name: y}, {name: found}):
            for stream in range(len(at)):
                one = slice(stream, stream + 1)
                told = case.format(at=at[stream].item())
                if lines := differs(told, pick({name: y}, one), pick({name: found}, one)):
                    return lines
    return []


def _places(length: int, period: int) -> list[int]:
    """About 18 bytes of a segment: powers of two and a neighbour of each, edges of blocks, and the last."""
    powers = [2**i for i in range(1, 20) if 2**i < length][-7:]
    block = max(1, length // 2 // period) * period if period > 1 else length // 3
    found = {1, *powers, *(power + 1 - 2 * (i % 2) for i, power in enumerate(powers))}
    found |= {block - 1, block, length - block, 2 * length // 3 + 1, length - 1}
    return sorted(place for place in found if 0 < place < length) or [0]


class _Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that is made."""

    bytes = 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return made


def _streams_that_fit(model: nn.Module, size: Size, *, past: int) -> int:
    """Streams that one forward pass may have, warm, by the largest tensor that one of them makes."""
    state = None
    for tokens in torch.zeros(1, past + size.segment, dtype=torch.int64).split(size.segment, dim=1):
        with _Largest() as largest:
            _, state = run(model, tokens, state=state)
    return max(1, MOST_BYTES // (ALIVE * largest.bytes))


CHECKS = (
    ("evaluation does not see the future", None, partial(_causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(_causality, mode="train")),
    ("no byte beyond the declared reach matters", None, _reach),
    ("segments do not matter", "segments", _segments),
)
"""Promise, the limit with which it is not looked at, and its check."""
