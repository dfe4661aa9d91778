"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

    for finding in check(make_model, span=13):
        print(finding)

A whole small model is checked, because that is what a configuration gives and what a user trusts. Differences are
looked for in every sublayer's output, in order of execution, and then in the logits: the first that differs is named.

- Everything runs in float64 on a CPU, so that a break is told from rounding. Work that a mechanism does in float32
  for safety must follow a float64 input (``torch.promote_types(x.dtype, torch.float32)``).
- Parameters are moved off their start before anything is checked: a matrix that starts at zero hides what is behind it.
- A declared limit (``Sublayer.limits``) must be real: then the check has to fail, and the finding says by how much.
- Whatever a model raises is a finding too, with the mode and bytes that it was computing and the line of its code.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from variants.conformance.promises import (
    causality,
    detached_state,
    equal_paths,
    far_start,
    influence,
    known_limits,
    logits_shape,
    old_state,
    segments,
    single_bytes,
    streams,
)
from variants.conformance.subject import Subject, Verdict, limits_of, run
from variants.conformance.upkeep import (
    apart,
    autocast,
    auxiliary_loss,
    gradients,
    ideal_flops,
    projection,
    saved,
    statistics,
    writes,
)


@dataclass(frozen=True)
class Finding:
    """What became of one promise; ``detail`` names byte, mode and size of a break."""

    promise: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.promise}: {self.detail}"


CHECKS: list[tuple[str, str | None, Callable[[Subject], Verdict]]] = [
    ("logits are float32 [B, T, V] and finite", None, logits_shape),
    ("declared limits are known", None, known_limits),
    ("evaluation does not see the future", None, partial(causality, mode="eval")),
    ("training does not see the future", "causal_in_training", partial(causality, mode="train")),
    ("bytes have influence", None, influence),
    ("segments do not matter", "segments", segments),
    ("one byte at a time equals the whole", "segments", single_bytes),
    ("a stream may start at 10**7", None, far_start),
    ("streams do not mix", "streams_apart", streams),
    ("state is detached, and its dimension 0 is streams", None, detached_state),
    ("any earlier state is accepted", None, old_state),
    ("two models share nothing", None, apart),
    ("every parameter gets a gradient", None, gradients),
    ("project_ is legal and idempotent", None, projection),
    ("a saved model continues alike", None, saved),
    ("a forward pass writes nothing", None, writes),
    ("the auxiliary loss is for training only", None, auxiliary_loss),
    ("statistics add up", None, statistics),
    ("bfloat16 autocast is finite", None, autocast),
    ("ideal FLOPs are a positive int", None, ideal_flops),
]
"""Promise, the limit that excuses it, and its check."""


def check(make_model: Callable[[], nn.Module], *, span: int, vocabulary: int = 256, seed: int = 0) -> Iterator[Finding]:
    """Check all promises of the contract, one finding each, as they are found.

    Args:
        make_model: builds the model on the CPU, small, uncompiled, each time anew. The model is called as
            ``model(tokens int64 [B, T], state=None, look=False)`` and gives ``.logits [B, T, V]``, ``.state`` (stream
            positions int64 ``[B]``, then a tuple of one state a sublayer), ``.loss`` and ``.seen``; it has
            ``sublayers()``, ``project_()``, ``metrics(seen)`` and ``ideal_flops()``.
        span: positions that a query may see; streams are a little over twice as long.
        vocabulary: V, at least 2.
        seed: of parameters and bytes.
    """
    subject = Subject(make_model, span, vocabulary, seed)
    try:
        limits = limits_of(_apart_from_outside(subject.build))
    except Exception as error:
        yield Finding("the model can be built", False, said(error))
        return
    for promise, limit, function in CHECKS:
        subject.during.clear()
        try:
            breaks, kept = _apart_from_outside(function, subject)
        except Exception as error:
            yield Finding(promise, False, said(error, *subject.during))
            continue
        if limit not in limits:
            yield Finding(promise, not breaks, "; ".join(breaks[:3]) or kept)
        elif breaks:
            yield Finding(promise, True, f"limit {limit} is declared and real: {breaks[0]}")
        else:
            yield Finding(promise, False, f"limit {limit} is declared, but nothing broke: {kept}")


def learns(
    make_model: Callable[[], nn.Module],
    *,
    vocabulary: int = 256,
    steps: int = 150,
    seed: int = 0,
    below_bits: float = 0.1,
) -> Finding:
    """Train on a repeated string of seven different bytes, in float32 with AdamW, until ``below_bits`` a byte.

    Different bytes, so that a mechanism without a past can pass; scored in evaluation mode over two segments.
    """
    promise = "learns a repeated string"
    try:
        bits, taken = _apart_from_outside(_train, make_model, vocabulary, steps, seed, below_bits)
    except Exception as error:
        return Finding(promise, False, said(error))
    return Finding(promise, bits < below_bits, f"{bits:.3f} bits per byte after {taken} steps")


def agree(
    make_fast: Callable[[], nn.Module],
    make_plain: Callable[[], nn.Module],
    *,
    span: int,
    vocabulary: int = 256,
    seed: int = 0,
    path: str = "fused",
) -> Finding:
    """Whether two makes of one model, which differ in the code that computes it, give the same values and gradients."""
    fast, plain = (Subject(make, span, vocabulary, seed) for make in (make_fast, make_plain))
    promise = f"the {path} path equals the plain one"
    try:
        breaks, kept = _apart_from_outside(equal_paths, fast, plain)
    except Exception as error:
        return Finding(promise, False, said(error, *fast.during, *plain.during))
    return Finding(promise, not breaks, "; ".join(breaks[:3]) or kept)


def _train(make_model, vocabulary: int, steps: int, seed: int, below_bits: float) -> tuple[float, int]:
    torch.manual_seed(seed)
    string = torch.randperm(vocabulary)[:7]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bits = math.inf
    for step in range(1, steps + 1):
        places = torch.randint(len(string), (4, 1)) + torch.arange(33)
        window = string[places % len(string)]  # [4, 33]
        out = model.train()(window[:, :-1])
        (F.cross_entropy(out.logits.flatten(0, 1), window[:, 1:].flatten()) + out.loss).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # AdamW takes no other
        optimizer.step()
        optimizer.zero_grad()
        model.project_()
        if step % 25 == 0 or step == steps:
            logits = run(model.eval(), window[:, :-1], cuts=(16,))[0]["logits"]
            bits = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).item() / math.log(2)
            if bits < below_bits:
                break
    return bits, step


def _apart_from_outside(function: Callable, *arguments):
    """Leave the caller's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        return function(*arguments)


def said(error: Exception, *during: str) -> str:
    """An exception as a finding's detail: what, then when, then the line of the last code that is not torch's."""
    torchs = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torchs)]
    where = [f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"] if frames else []
    return f"{type(error).__name__}: {error} ({', '.join([*during, *where])})"
