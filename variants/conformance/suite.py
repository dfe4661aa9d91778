"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

    for finding in check(make_model, span=13):
        print(finding)

A whole small model is checked, because a configuration describes a model. The outputs of every
sublayer are compared in order of execution, and then the logits. The finding names the first output
that differs.

- Checks run on a CPU, in float64 unless they are about another dtype, so that a broken promise
  differs from rounding. Where a mechanism computes in float32 for precision, it must use
  ``torch.promote_types(x.dtype, torch.float32)``.
- Noise is added to all parameters before any check: a matrix that starts at zero would hide the
  computation before it.
- A declared limit (``Sublayer.limits``) must be real: its check must fail, and the finding reports
  the difference.
- An exception of the model is a finding too. It names the mode and bytes of the forward pass,
  and the line of code."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from variants.conformance import numerics, promises
from variants.conformance.fixture import Subject, Verdict
from variants.conformance.sizes import SIZED, Size

Check = tuple[str, str | None, Callable[[Subject], Verdict]]
FIRST: tuple[Check, ...] = (*promises.FIRST, numerics.STREAMS)
"""Checks that all others rely on: if such a promise is broken, no other is checked, because its
message would mislead."""
BEFORE_TRAINING: tuple[Check, ...] = (*FIRST, *SIZED, *promises.TRUTH, *numerics.CHECKS)
"""Checks that ``train.py`` runs at small sizes before the first step of a mechanism that is not
shipped."""
AT_RUN_SIZES: tuple[Check, ...] = (
    *promises.FIRST[:2],
    *SIZED,
    numerics.MODES_AGREE,
    numerics.GRADIENTS,
    numerics.PRECISION,
)
"""Checks in a narrow model at the sizes of a run."""
CHECKS: tuple[Check, ...] = (*FIRST, *SIZED, *promises.CHECKS, *numerics.CHECKS)
"""Triples of a promise, the limit that excuses a model from it or None, and the check."""
AT_SIZES = " at the sizes of the run"  # end of a promise
MAX_BREAKS = 3  # lines in one finding


@dataclass(frozen=True)
class Finding:
    """The result of one promise's check; ``detail`` has the mode, byte and size of a difference."""

    promise: str
    passed: bool
    detail: str = ""
    error: str = ""  # an exception of the model

    def __str__(self) -> str:
        return (
            f"{'pass' if self.passed else 'FAIL'}  "
            f"{': '.join(filter(None, [self.promise, self.detail]))}"
        )


def check(
    make_model: Callable[[], nn.Module],
    *,
    span: int,
    vocabulary: int = 256,
    checks: tuple[Check, ...] = CHECKS,
    batch_sizes: tuple[int, ...] = (17,),
    sizes: tuple[Size, ...] = (),
    text: torch.Tensor | None = None,
) -> Iterator[Finding]:
    """Check promises of the contract, and yield a finding after each check.

    Args:
        make_model: builds a new small, uncompiled model on the CPU at each call. A model is called
            as ``model(tokens int64 [B, T], state=None, collect_stats=False)`` and returns ``.logits
            [B, T, V]``, ``.state`` (stream positions int64 ``[B]``, a tuple of sublayers' states),
            ``.loss`` and ``.stats``. It has the methods ``sublayers()``, ``project_()``,
            ``inspect(tokens)``, ``metrics(stats)`` and ``ideal_flops()``.
        span: positions that a query may see; streams are a little over twice as long.
        vocabulary: V, at least 2.
        checks: the promises to check; by default all.
        batch_sizes: numbers of streams in the large batches of the check that streams do not mix.
        sizes: the sizes of a run, for ``AT_RUN_SIZES``; a model is not checked for promises that
            its limits excuse.
        text: bytes of the run's corpus, for checks at its sizes."""
    subject = Subject(make_model, span, vocabulary, batch_sizes, sizes, text)
    try:
        with torch.random.fork_rng(devices=[]):
            limits = subject.limits
    except (Exception, SystemExit) as error:
        yield Finding("the model can be built", False, _describe_error(error))
        return
    first = {function for _, _, function in FIRST}
    seen = set()
    for promise, limit, function in checks:
        if sizes and limit in limits:
            continue
        promise += AT_SIZES if sizes else ""
        finding = run_check(promise, function, subject, limit=limit if limit in limits else None)
        yield replace(finding, detail="the same error") if finding.error in seen else finding
        seen |= {finding.error} - {""}
        if function in first and not (finding.passed or finding.error or limit in limits):
            return


def run_check(
    promise: str, function: Callable[..., Verdict], *subjects: Subject, limit: str | None = None
) -> Finding:
    """Run a check and return its finding, also if it raises an exception. The caller's random state
    does not change.

    Args:
        limit: a declared limit that excuses the model from the promise; then the check must
            fail."""
    for subject in subjects:
        subject.forward_pass.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            breaks, detail = collect_breaks(function(*subjects))
    except (Exception, SystemExit) as error:
        forward_passes = [line for subject in subjects for line in subject.forward_pass]
        return Finding(
            promise,
            False,
            _describe_error(error, *forward_passes),
            f"{type(error).__name__}: {error}",
        )
    if limit is None:
        return Finding(promise, not breaks, "; ".join(breaks) or detail or "")
    if breaks:
        return Finding(promise, True, f"limit {limit} is declared and real: {breaks[0]}")
    return Finding(promise, False, f"limit {limit} is declared, but nothing broke")


def collect_breaks(verdict: Verdict) -> tuple[list[str], str | None]:
    """Run a check; return its first lines about broken promises, and its detail if there are
    none."""
    breaks = []
    while len(breaks) < MAX_BREAKS:
        try:
            breaks.append(next(verdict))
        except StopIteration as end:
            return breaks, end.value
    return breaks, None


def _describe_error(error: Exception, *forward_passes: str) -> str:
    """Return the exception's message, the forward passes that raised it, and the last line of code
    outside torch."""
    torch_folder = str(Path(torch.__file__).parent)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(torch_folder)
    ]
    code_line = []
    if frames:
        code_line = [f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"]
    return f"{type(error).__name__}: {error} ({', '.join([*forward_passes, *code_line])})"
