"""Checks that a byte moves no output before it or beyond the declared reach, and that segments
change no output.

At small sizes every byte is changed, or every n-th of a long stream. At the sizes of a run, a
narrow network reads what the run and its final score read: batches, whole and shorter segments with
a carried state that has stopped growing, and windows without state; in training it records
gradients. That shows errors that occur only in whole blocks of 64, or beyond 300 bytes. Each stream
is changed at a position of its own, so that one forward pass checks one position per stream. For
causality these are all positions in the upper half of a segment, because each size of a block has a
boundary there. On a CPU, no bit of an earlier output may change in float32 and, at some positions
and with larger weights, in bfloat16."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from variants.conformance.fixture import (
    EXACT,
    MATRIX_FACTOR,
    MODES,
    CountElements,
    NoDropout,
    Outputs,
    Subject,
    Verdict,
    differences,
    enlarge_matrices,
    run,
    state_tensors,
)
from variants.contract import State, map_state

MAX_PAIRS = 2**23
"""Largest number of query-key pairs of a head in a forward pass in float64; twice as many in
float32, which needs half the memory. A batch gets fewer streams if it would have more."""
MAX_SEGMENTS = 8  # segments of a run that are read; a longer reach is not checked
MAX_WARM_UP = 4  # spans, and at least ``MAX_SEGMENTS``, that are read until a state stops growing
MAX_SMALL_POSITIONS = 128  # positions that are changed in a small stream
SMALL_STREAMS = 64  # streams of a small batch
MAX_POSITIONS = 18  # positions that are changed in a segment of the run, unless ``Size.every``
MAX_PASSES = 6  # forward passes for these positions; the positions that reveal most come first
MAX_ELEMENTS = 2**34
"""With ``Size.every``, largest number of elements in the outputs of all operations; a slow
mechanism gets fewer positions."""
LARGE_WEIGHTS_POSITIONS = 64
ROUNDING = 1e-5
ROUNDING_HINT = "; if later bytes only change how it is rounded, declare the limit rounding"
MOVED_BY = "moved the output at byte {byte} by {size:.2g} ({name}, stream {stream}; {case})"
LONGEST_STREAM = 1000  # bytes of the longest small stream; a longer reach is not checked


class Size(NamedTuple):
    """Sizes of a check."""

    mode: str  # ``train`` or ``eval``
    streams: int
    segment: int  # bytes
    carry: bool  # whether segments continue a carried state
    small: bool = False  # whether it is a size of small checks, not of a run
    # whether causality is checked at each position of the upper half of a segment
    every: bool = False

    def __str__(self) -> str:
        return (
            f"{self.mode}, {self.streams} x {self.segment} "
            f"bytes{'' if self.carry else ' without a past'}"
        )

    def positions(self, period: int) -> list[int]:
        """Return positions of a segment to change. In a small segment: all, or every n-th with n
        coprime to the period. In a segment of a run: the last byte, edges of blocks, and powers of
        two with one neighbour each."""
        length = self.segment
        if self.small:
            step = max(1, length // MAX_SMALL_POSITIONS)
            while math.gcd(step, period) > 1:
                step += 1
            return list(range(0, length, step))
        block = max(1, length // 2 // period) * period if period > 1 else length // 3
        powers = [2**i for i in range(20) if 2**i < length][::-1]
        positions = [length - 1, block, block - 1, 1, length - block, 2 * length // 3 + 1]
        for i, power in enumerate(powers):
            positions += [power, power + 1 - 2 * (i % 2)]
        return [position for position in dict.fromkeys(positions) if 0 < position < length][
            :MAX_POSITIONS
        ] or [0]

    def all_positions(self, period: int) -> list[int]:
        """Return ``positions``, then the others of the upper half, those that are boundaries of
        most sizes of blocks first."""
        upper = range(self.segment // 2, self.segment)
        divisors = torch.zeros(self.segment, dtype=torch.int64)
        for block in range(1, self.segment):
            divisors[::block] += 1
        by_blocks = sorted(upper, key=lambda position: -divisors[position].item())
        return list(dict.fromkeys([*self.positions(period), *by_blocks]))

    def cuts(self, span: int, period: int) -> list[tuple[int, ...]]:
        """Return uneven ways to cut a segment. In evaluation, a small segment is also cut byte by
        byte at both ends."""
        length = self.segment
        if not self.small:
            return [(length // 3 + 1,), (1, 2 * (length // 3))]
        schemes = [(1,), (span + 2,), tuple(range(3, length, max(2, span // 3)))]
        if self.mode == "train":
            return schemes
        # three periods end before the cut, and three after it, of which one may contain the cut
        if period > 1:
            schemes += [(3 * period,), (3 * period + period // 2,)]
        # bytes read singly, without a past and with a full window
        single = min(max(6, period + 2), length // 2)
        return [*schemes, (*range(1, single + 1), *range(length - single, length))]


def _sizes(subject: Subject, *modes: str) -> list[Size]:
    """Return the run's sizes; or small ones: streams of more than two windows, and streams of half
    that length with a past."""
    length = subject.length
    half = subject.length // 2
    small = [Size(mode, min(SMALL_STREAMS, length), length, False, small=True) for mode in MODES]
    small.append(Size("eval", min(SMALL_STREAMS, half), half, True, small=True))
    return [size for mode in modes for size in subject.sizes or small if size.mode == mode]


def _precision(subject: Subject, size: Size) -> torch.dtype:
    """Return the precision of a check of bytes that must move no output: at the sizes of a run
    float32, because it is faster. Where later bytes may change the rounding, float32 would show
    that and nothing else."""
    if size.small or "rounding" in subject.limits:
        return torch.float64
    return torch.float32


def check_causality(subject: Subject, *, mode: str) -> Verdict:
    """Change all bytes from a position on. No output before that position may move."""
    for size in _sizes(subject, mode):
        case = str(size)
        dtype = _precision(subject, size)
        streams = _Streams(subject, size, dtype=dtype)
        difference = streams.first_difference(case)
        if not difference and size.every and mode == "eval" and size.carry:
            streams.enlarge_weights()
            case += f", matrices {MATRIX_FACTOR} times as large"
            difference = streams.first_difference(case)
            if not difference:
                streams.context = partial(torch.autocast, "cpu", torch.bfloat16)
                streams.positions = streams.positions[:MAX_POSITIONS]
                difference = streams.first_difference(f"{case}, in bfloat16")
        if difference:
            may_be_rounding = dtype == torch.float32 and difference[2] < ROUNDING
            yield difference[1] + (ROUNDING_HINT if may_be_rounding else "")
            return


def check_reach(subject: Subject) -> Verdict:
    """Change all bytes up to a position, also those before the segment. No output beyond the
    reach may move."""
    # A byte moves an output at most at the sum of the reaches of its sublayer and of those before.
    distances = (sublayer.reach() for sublayer in subject.sublayers.values())
    totals = [*accumulate(math.inf if distance is None else distance for distance in distances)]
    reaches = dict(zip([*subject.sublayers, "logits"], [*totals, *totals[-1:]], strict=True))
    for size in _sizes(subject, "eval"):
        length = size.segment
        if size.carry:
            length = LONGEST_STREAM if size.small else size.segment * MAX_SEGMENTS
        checked = {name: int(reach) for name, reach in reaches.items() if reach + 1 < length}
        if not checked:
            continue
        segments = 1
        if size.carry:
            segments = -(-(max(checked.values()) + 2) // size.segment)
        difference = None
        # A difference in float32 may be rounding, as of a sum over the whole past.
        for dtype in dict.fromkeys([_precision(subject, size), torch.float64]):
            streams = _Streams(subject, size, segments=segments, both_pasts=True, dtype=dtype)
            difference = streams.first_difference(str(size), reaches=checked)
            if not difference:
                break
        if difference:
            name, line, _ = difference
            hint = ""
            if (
                name in subject.sublayers
                and not checked[name]
                and subject.sublayers[name].honours is None
            ):
                hint = ": a sublayer that sees a past must declare honours and reach()"
            yield f"{line}, beyond its reach of {checked[name]}{hint}"
            return


def check_segments(subject: Subject) -> Verdict:
    """Compare outputs in whole segments with those in uneven cuts of the same bytes."""
    for size in _sizes(subject, *subject.deterministic_contexts):
        if size.segment < 3 or size.small == size.carry:
            continue
        # Repeated text has equal blocks, between which rounding decides what a mechanism selects.
        streams = _Streams(subject, size._replace(streams=3) if size.small else size, text=False)
        expected = streams.run(streams.tokens)
        for cuts in size.cuts(subject.span, subject.period):
            case = (
                f"{streams.size} cut at {', '.join(map(str, cuts[:4]))}{', ...' * (len(cuts) > 4)}"
            )
            if lines := differences(case, expected, streams.run(streams.tokens, cuts=cuts)):
                yield from lines
                return


class _Streams:
    """A model in a mode, and two versions of bytes that differ everywhere: ``tokens`` and
    ``changed_tokens [B, T]`` of whole segments, with the states ``past`` and ``changed_past``
    before them, or None; ``changed_past`` only with ``both_pasts``. With ``text`` half of the
    streams of a run's sizes have bytes of the corpus. At these sizes, the past
    is read until it changes no shape of the state any more."""

    def __init__(
        self,
        subject: Subject,
        size: Size,
        *,
        segments: int = 1,
        both_pasts: bool = False,
        text: bool = True,
        dtype: torch.dtype = torch.float64,
    ):
        self.subject = subject
        self.size = size
        self.model = subject.build(mode=size.mode, dtype=dtype)
        self.context = subject.deterministic_contexts.get(size.mode, NoDropout)
        self.exact = dtype == torch.float32
        # segments
        n_past = 0
        if size.carry:
            n_past = -(-subject.span // size.segment)
        longest = n_past if size.small else max(MAX_SEGMENTS, MAX_WARM_UP * n_past) * size.carry
        max_pairs = MAX_PAIRS * (8 // dtype.itemsize)
        pairs = size.segment * (size.segment + subject.span)
        streams = min(size.streams, max(1, max_pairs // pairs))
        self.positions = size.positions(subject.period)
        if not size.small:
            self.positions = self.positions[: MAX_PASSES * streams]
        keywords = {"length": (longest + segments) * size.segment, "streams": streams, "seed": 2}
        mixed = text and not size.small
        tokens = subject.mixed_bytes(**keywords) if mixed else subject.random_bytes(**keywords)
        self.past = self.changed_past = None
        n_read = unchanged = 0
        changed = subject.change_all(tokens)
        while n_read < longest and (n_read < n_past or unchanged < 2):
            segment = slice(n_read * size.segment, (n_read + 1) * size.segment)
            shapes = [tensor.shape for tensor in state_tensors(self.past)]
            self.past = self._run(tokens[:, segment], self.past)[1]
            if both_pasts:
                self.changed_past = self._run(changed[:, segment], self.changed_past)[1]
            equal = shapes == [tensor.shape for tensor in state_tensors(self.past)]
            unchanged = unchanged + 1 if equal else 0
            n_read += 1
        after_past = slice(n_read * size.segment, (n_read + segments) * size.segment)
        self.tokens = tokens[:, after_past]
        self.changed_tokens = changed[:, after_past]

    def _run(
        self, tokens: Tensor, past: State, cuts: tuple[int, ...] | None = None
    ) -> tuple[Outputs, State]:
        cuts = (
            tuple(range(self.size.segment, tokens.shape[1], self.size.segment))
            if cuts is None
            else cuts
        )
        with self.context():
            past = map_state(torch.clone, past)
            return run(
                self.model, tokens, cuts=cuts, state=past, gradients=self.size.mode == "train"
            )

    def run(self, tokens: Tensor, *, cuts: tuple[int, ...] | None = None) -> Outputs:
        """Return outputs over ``tokens`` after the past, in segments of the size or cut at
        ``cuts``."""
        return self._run(tokens, self.past, cuts)[0]

    def enlarge_weights(self) -> None:
        """Enlarge the matrices of sublayers, without the past, and check fewer positions."""
        enlarge_matrices(self.model)
        self.past = None
        self.positions = self.size.all_positions(self.subject.period)[:LARGE_WEIGHTS_POSITIONS]
        self.size = self.size._replace(every=False)

    def _run_and_choose_positions(self) -> Outputs:
        """Return outputs over ``tokens``. With ``Size.every``, set as many positions as
        ``MAX_ELEMENTS`` allow."""
        if not self.size.every:
            return self.run(self.tokens)
        with CountElements() as counter:
            outputs = self.run(self.tokens)
        passes = MAX_ELEMENTS // counter.elements
        positions = self.size.all_positions(self.subject.period)
        self.positions = positions[: max(len(self.positions), passes * len(self.tokens))]
        return outputs

    def first_difference(
        self, case: str, *, reaches: Mapping[str, int] | None = None
    ) -> tuple[str, str, float] | None:
        """Return the name of the first output that moves where it must not, a line about the
        difference, and its size; or None.

        Args:
            case: size and precision, for the line.
            reaches: None to change all bytes from a position on; no output before it may move.
                Otherwise the past and all bytes up to a position, or to none for -1, are changed;
                outputs may move only within their reach."""
        causality = reaches is None
        before = self._run_and_choose_positions() if causality else self.run(self.tokens)
        byte = torch.arange(self.tokens.shape[1])
        tolerance = None
        if self.exact and causality:
            tolerance = EXACT

        def compare(at: Tensor) -> tuple[str, str, float] | None:
            """Compare with streams of which each is changed at its own position ``at [B, 1]``."""
            changed_bytes = byte >= at if causality else byte <= at
            tokens = torch.where(changed_bytes, self.changed_tokens, self.tokens)
            after, _ = self._run(tokens, self.past if causality else self.changed_past)
            for name in before if causality else reaches:
                fixed = byte < at if causality else byte > at + reaches[name]
                if not ((after[name] != before[name]).any(-1) & fixed).any():
                    continue
                actual = torch.where(fixed[..., None], after[name], before[name])
                outputs = ({name: before[name]}, {name: actual})
                changed = f"bytes {at[0].item()} to {len(byte) - 1}"
                if not causality:
                    changed = f"all bytes up to {at[0].item()}"
                line = f"changing {changed} {MOVED_BY}"
                for text in differences(case, *outputs, tolerance=tolerance, line=line):
                    return name, text, (actual - before[name]).abs().max().item()
            return None

        positions = self.positions if causality else [-1, *self.positions]
        streams = len(self.tokens)
        for begin in range(0, len(positions), streams):
            batch = positions[begin : begin + streams]
            at = torch.tensor([batch[i % len(batch)] for i in range(streams)])[:, None]
            if compare(at):
                # Another stream's change may have caused the difference, which is not what this
                # check is about.
                for position in at.unique().tolist():
                    if difference := compare(torch.full_like(at, position)):
                        return difference
        return None


SIZED = (
    ("evaluation does not see the future", None, partial(check_causality, mode="eval")),
    (
        "training does not see the future",
        "causal_in_training",
        partial(check_causality, mode="train"),
    ),
    ("no byte beyond the declared reach matters", None, check_reach),
    ("segments do not matter", "segments", check_segments),
)
"""Triples of a promise, the limit that excuses a model from it or None, and the check. A model with
that limit is not checked at the sizes of a run."""
