"""Promises about what a byte may move: no output before it, and none beyond the reach that sublayers declare; and a map gives
no weight to a byte that moves nothing.

Every byte of a stream is changed in turn, so every offset of a block. The changed copies are the streams of one batch: one
forward, unless streams influence each other or random numbers are drawn, which shows in a copy that was left as it is.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from variants.conformance.fixture import Outputs, Subject, Verdict, differs, pick, run
from variants.contract import Inspection, Sublayer

PLACES, ROWS = 128, 64
"""Bytes changed, of a longer stream about so many; and how many copies go into one forward, for memory's sake."""
BEYOND = 5
"""Bytes that are left to look at beyond the largest reach."""
LONGEST = 1000
"""Bytes of the longest stream; who reaches farther is not looked at."""
SMALL = 1e-4
"""Of a map: how far a row's sum may be from 1, float32 being allowed there, and a weight that may move nothing."""


class Changed(NamedTuple):
    """What a model gives for a stream ``[1, T]`` and for copies of it: row i ``[n, T]`` has another byte at ``places[i]``."""

    places: list[int]
    before: Outputs
    after: Outputs

    def at(self) -> Tensor:
        """``[n, 1]``, where each copy was changed."""
        return torch.tensor(self.places)[:, None]

    def moved(self, case: str, name: str, wrong: Tensor) -> list[str]:
        """A line for the first byte that moved an output where ``wrong [n, T]`` says that it may not; none where none did."""
        before = self.before[name]
        found = torch.where(wrong[..., None], self.after[name], before)
        if not differs(case, {name: before.expand_as(found)}, {name: found}):
            return []
        copies = zip(self.places, found.split(1), strict=True)
        lines = [line for at, y in copies for line in differs(f"{case}, byte {at} changed", {name: before}, {name: y})]
        return [lines[0] + f", and by {len(lines) - 1} other bytes" * (len(lines) > 1)] if lines else []


def causality(subject: Subject, *, mode: str) -> Verdict:
    found, breaks = _changed(subject, mode=mode, length=subject.length), []
    earlier = torch.arange(subject.length) < found.at()
    for name in found.before:
        breaks = breaks or found.moved(mode, name, earlier)
    return breaks, f"{_told(found, subject.length)} changed in turn, nothing before it moved"


def reach(subject: Subject) -> Verdict:
    """Whole, and cut in the middle, where a state might carry more than a segment shows."""
    bytes_back = reaches(subject.declared)
    known = {name: n for name, n in bytes_back.items() if n + BEYOND <= LONGEST}
    if not known:
        return [], "no sublayer declares an end of its reach" + _too_far(bytes_back)
    length = max(subject.length, max(known.values()) + BEYOND)
    for cuts in ((), (length // 2,)):
        found, case = (
            _changed(subject, mode="eval", length=length, cuts=cuts),
            "eval" + f", cut at {length // 2}" * len(cuts),
        )
        distance = torch.arange(length) - found.at()
        for name, most in known.items():
            silent = not most and name in subject.declared and subject.declared[name].honours is None
            end = f", beyond its reach of {most}" + ": what sees a past declares honours and reach()" * silent
            if breaks := [line + end for line in found.moved(case, name, distance > most)]:
                return breaks, ""
    told = ", ".join(f"{name} {most}" for name, most in known.items())
    return [], f"{_told(found, length)} changed in turn; bytes back: {told}{_too_far(bytes_back)}"


def maps(subject: Subject) -> Verdict:
    """A row is shares of what its byte sees, with those of learned vectors: 1 in all, or 0 of a byte that sees nothing."""
    tokens = subject.bytes()[:1]
    with torch.no_grad():
        found = subject.build().inspect(tokens)[1]
    given = {name: own for name, own in found.items() if own.weights is not None}
    changed = _changed(subject, mode="eval", length=subject.length) if given else None
    breaks = [line for name, own in given.items() for line in _of_a_map(name, own, changed, subject.length)][:1]
    return breaks, ", ".join(given) or "no sublayer gives one"


def _of_a_map(name: str, own: Inspection, changed: Changed, length: int) -> Iterator[str]:
    weights, shares = own.weights, own.weights[..., :0] if own.shares is None else own.shares
    heads = weights.shape[1] if weights.dim() == 4 else None
    if weights.shape != (1, heads, length, length) or shares.shape[:-1] != weights.shape[:-1]:
        yield f"{name}: a map of {tuple(weights.shape)} and shares of {tuple(shares.shape)} are not [B, H, T, T] and [B, H, T, n]"
        return
    taken = torch.cat([weights, shares], dim=-1)[0]  # [H, T, T + n]
    rows = taken.sum(-1)
    wrong = ~((rows - 1).abs() < SMALL) & (rows != 0) | (taken < -SMALL).any(-1)
    for head, at in wrong.nonzero()[:1].tolist():
        yield f"{name}: what byte {at} takes in head {head} is no shares of 1: in all {rows[head, at]:.3g}"
    still = (changed.after[name] == changed.before[name]).all(-1).T  # [T, n]
    for at, copy in (still & (weights[0].amax(0)[:, changed.places] > SMALL)).nonzero()[:1].tolist():
        key = changed.places[copy]
        size = weights[0, :, at, key].max()
        yield f"{name}: byte {at} takes {size:.2g} of byte {key}, which moves nothing that it gives"


def reaches(sublayers: Mapping[str, Sublayer]) -> dict[str, float]:
    """Bytes back that each output may depend on: what reaches so far may be made of what reached before it."""
    own = [math.inf if (n := sublayer.reach()) is None else n for sublayer in sublayers.values()]
    total = list(accumulate(own))
    return dict(zip([*sublayers, "logits"], [*total, *total[-1:]], strict=True))


def _too_far(bytes_back: Mapping[str, float]) -> str:
    far = [f"{name} {most}" for name, most in bytes_back.items() if LONGEST < most + BEYOND < math.inf]
    return f"; too far to look at: {', '.join(far)}" if far else ""


def _told(found: Changed, length: int) -> str:
    return f"every byte of {length}" if len(found.places) == length else f"{len(found.places)} of {length} bytes"


def _changed(subject: Subject, *, mode: str, length: int, cuts: tuple[int, ...] = ()) -> Changed:
    """In ``mode``, by streams of so many bytes, fed in segments that end at ``cuts``; found once."""
    key = mode, length, cuts
    if key not in subject.kept:
        model, tokens = subject.build().train(mode == "train"), subject.bytes(length=length)[:1]
        places = _places(length, subject.period)
        copies = torch.cat([subject.change(tokens, at) for at in places])
        before, _ = run(model, tokens, cuts=cuts)
        parts = [run(model, torch.cat([part, tokens]), cuts=cuts)[0] for part in copies.split(ROWS)]
        same = all(not differs(mode, before, pick(part, slice(-1, None))) for part in parts)
        # alone, a copy draws the random numbers of the stream before, and dropout drops the same
        parts = (
            [pick(part, slice(-1)) for part in parts]
            if same
            else [run(model, row, cuts=cuts)[0] for row in copies.split(1)]
        )
        after = {name: torch.cat([part[name] for part in parts]) for name in before}
        subject.kept[key] = Changed(places, before, after)
    return subject.kept[key]


def _places(length: int, period: int) -> list[int]:
    """All bytes; of a long stream some, at distances that meet every offset of a period."""
    step = max(1, length // PLACES)
    while math.gcd(step, period) > 1:
        step += 1
    return list(range(0, length, step))
