"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

    for finding in check(make_model, span=13):
        print(finding)

A whole small model is checked, because a configuration gives a model. Outputs are compared for every sublayer in order
of execution, and then for the logits; the first that differs is named.

- Everything runs in float64 on a CPU, so that a break is told from rounding. Work that a mechanism does in float32
  for safety must follow a float64 input (``torch.promote_types(x.dtype, torch.float32)``).
- Parameters are moved off their initial values before any check: a matrix that starts at zero hides what is behind it.
- A declared limit (``Sublayer.limits``) must be real: its check has to fail, and the finding says by how much.
- An exception of the model is a finding too, with the mode and bytes that it was computing and the line of its code.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from variants.conformance import numbers, promises
from variants.conformance.fixture import Subject, Verdict
from variants.conformance.sizes import SIZED, Size

Check = tuple[str, str | None, Callable[[Subject], Verdict]]
BEFORE_TRAINING: tuple[Check, ...] = numbers.CHECKS
"""Checks that ``train.py`` runs at small sizes before the first step of a mechanism that is not shipped."""
CHECKS = (*SIZED, *promises.CHECKS, *BEFORE_TRAINING)
"""Promise, the limit that excuses it, and its check."""
MOST_BREAKS = 3  # named in one finding


@dataclass(frozen=True)
class Finding:
    """The result for one promise; ``detail`` names byte, mode and size of a break."""

    promise: str
    passed: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {': '.join(filter(None, [self.promise, self.detail]))}"


def check(
    make_model: Callable[[], nn.Module],
    *,
    span: int,
    vocabulary: int = 256,
    checks: tuple[Check, ...] = CHECKS,
    streams: tuple[int, ...] = (17,),
    sizes: tuple[Size, ...] = (),
) -> Iterator[Finding]:
    """Check promises of the contract in float64; yields one finding for each, as soon as it is known.

    Args:
        make_model: builds a new small, uncompiled model on the CPU per call. It is called as
            ``model(tokens int64 [B, T], state=None, collect_stats=False)`` and gives ``.logits [B, T, V]``, ``.state``
            (stream positions int64 ``[B]``, a tuple of sublayers' states), ``.loss`` and ``.stats``; it has
            ``sublayers()`` of the contract, ``project_()``, ``inspect(tokens)``, ``metrics(stats)``, ``ideal_flops()``.
        span: positions that a query may see; streams are a little over twice as long.
        vocabulary: V, at least 2.
        checks: the promises to check; by default all.
        streams: sizes of large batches, in which streams may not mix either.
        sizes: a run's, at which ``SIZED`` are checked instead of small ones; what a limit excuses is left out.
    """
    subject = Subject(make_model, span, vocabulary, streams, sizes)
    try:
        with torch.random.fork_rng(devices=[]):
            limits = subject.limits
    except Exception as error:
        yield Finding("the model can be built", False, _line_of(error))
        return
    for promise, limit, function in checks:
        if not sizes or limit not in limits:
            promise += " at the sizes of the run" * bool(sizes)
            yield finding_of(promise, function, subject, limit=limit if limit in limits else None)


def finding_of(promise: str, function: Callable[..., Verdict], *subjects: Subject, limit: str | None = None) -> Finding:
    """The finding of a check, or of the exception that it raised. The caller's random state does not change.

    Args:
        limit: a declared limit that excuses the promise.
    """
    for subject in subjects:
        subject.during.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            breaks, detail = outcome(function(*subjects))
    except Exception as error:
        return Finding(promise, False, _line_of(error, *(line for subject in subjects for line in subject.during)))
    if limit is None:
        return Finding(promise, not breaks, "; ".join(breaks) or detail or "")
    if breaks:
        return Finding(promise, True, f"limit {limit} is declared and real: {breaks[0]}")
    return Finding(promise, False, f"limit {limit} is declared, but nothing broke")


def outcome(verdict: Verdict) -> tuple[list[str], str | None]:
    """Lines of the first broken promises, and what the check says if there is none."""
    breaks = []
    while len(breaks) < MOST_BREAKS:
        try:
            breaks.append(next(verdict))
        except StopIteration as end:
            return breaks, end.value
    return breaks, None


def _line_of(error: Exception, *during: str) -> str:
    """An exception as a finding's detail: its message, what was computed, and the last line of code outside torch."""
    torchs = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torchs)]
    where = [f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"] if frames else []
    return f"{type(error).__name__}: {error} ({', '.join([*during, *where])})"
