"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

    for finding in check(make_model, span=13):
        print(finding)

A whole small model is checked: that is what a configuration gives. Differences are looked for in every sublayer's output, in
order of execution, and then in the logits: the first that differs is named.

- Everything runs in float64 on a CPU, so that a break is told from rounding. Work that a mechanism does in float32
  for safety must follow a float64 input (``torch.promote_types(x.dtype, torch.float32)``).
- Parameters are moved off their start before anything is checked: a matrix that starts at zero hides what is behind it.
- A declared limit (``Sublayer.limits``) must be real: then the check has to fail, and the finding says by how much.
- Whatever a model raises is a finding too, with the mode and bytes that it was computing and the line of its code.
"""

import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.conformance import numbers, promises
from variants.conformance.fixture import Subject, Verdict, gradients_of, run, seed_cpu
from variants.conformance.sizes import SIZED, Size

Check = tuple[str, str | None, Callable[[Subject], Verdict]]
BEFORE_TRAINING: tuple[Check, ...] = numbers.CHECKS
"""Those that ``train.py`` runs, at small sizes, before the first step of a mechanism that is not shipped."""
CHECKS = (*SIZED, *promises.CHECKS, *BEFORE_TRAINING)
"""Promise, the limit that excuses it, and its check."""
MOST_BREAKS = 3  # that a finding names
SCORED, SEEDS = 10, 3  # steps between two scores of what is learnt, and seeds of which one must learn it


@dataclass(frozen=True)
class Finding:
    """What became of one promise; ``detail`` names byte, mode and size of a break."""

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
    """Check promises of the contract, one finding each, as they are found, in float64.

    Args:
        make_model: builds the model on the CPU, small, uncompiled, each time anew. The model is called as
            ``model(tokens int64 [B, T], state=None, collect_stats=False)`` and gives ``.logits [B, T, V]``, ``.state`` (stream
            positions int64 ``[B]``, then a tuple of one state a sublayer), ``.loss`` and ``.stats``; it has ``sublayers()``,
            ``project_()``, ``inspect(tokens)``, ``metrics(stats)``, ``ideal_flops()``; its sublayers are the contract's.
        span: positions that a query may see; streams are a little over twice as long.
        vocabulary: V, at least 2.
        checks: which promises; all.
        streams: of the large batches, in which streams may not mix either.
        sizes: of a run, at which ``SIZED`` are checked instead of at small ones, but for what a limit excuses.
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
    """What a check says of a promise, or what it raised; the caller's random numbers stay as they were.

    Args:
        limit: that is declared and excuses the promise.
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
    """The first breaks, or what a check says where there is none."""
    breaks = []
    while len(breaks) < MOST_BREAKS:
        try:
            breaks.append(next(verdict))
        except StopIteration as end:
            return breaks, end.value
    return breaks, None


def _line_of(error: Exception, *during: str) -> str:
    """An exception as a finding's detail: what, then when, then the line of the last code that is not torch's."""
    torchs = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torchs)]
    where = [f"{Path(frames[-1].filename).name} line {frames[-1].lineno}"] if frames else []
    return f"{type(error).__name__}: {error} ({', '.join([*during, *where])})"


def learns(
    make_model: Callable[[], nn.Module], *, vocabulary: int = 256, steps: int = 300, below_bits: float = 0.1
) -> Finding:
    """Train on two repeated strings, in float32 with AdamW, until ``below_bits`` a byte: seven different bytes, which a
    mechanism without a past can pass, and ABAC, where a past is needed.

    One of three seeds must pass: a right mechanism misses by bad luck in its first weights, a wrong one by all of them. Scored in
    evaluation mode over two segments; after an A, at the best of the places where the byte before moves the logits,
    if there are any: what cannot tell the two by their order can by what began with one.
    """
    return finding_of("learns repeated strings", partial(_train, make_model, vocabulary, steps, below_bits))


def _train(make_model: Callable[[], nn.Module], vocabulary: int, steps: int, below_bits: float) -> Verdict:
    seed_cpu(0)
    symbols, line = torch.randperm(vocabulary), torch.arange(33)
    string, abac = symbols[:7], symbols[[-3, -2, -3, -1]][(torch.arange(4)[:, None] + line) % 4]  # abac [4, 33]
    after_a = (abac[:, :-1] == symbols[-3]) & _needs_a_past(
        Subject(make_model, 1, vocabulary), abac[:1, :-1]
    )  # [4, 32]
    at = after_a.any(0)
    for seed, step in itertools.product(range(SEEDS), range(1, steps + 1)):
        if step == 1:
            seed_cpu(seed)
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        places = torch.randint(len(string), (4, 1)) + line
        window = torch.cat([string[places % len(string)], abac])  # [8, 33]
        out = model.train()(window[:, :-1])
        (F.cross_entropy(out.logits.flatten(0, 1), window[:, 1:].flatten()) + out.loss).backward()
        for name, gradient in gradients_of(model).items():
            model.get_parameter(name).grad = gradient  # AdamW takes no sparse one
        optimizer.step()
        optimizer.zero_grad()
        model.project_()
        if step % SCORED and step < steps:
            continue
        logits = run(model.eval(), window[:, :-1], cuts=(16,))[0]["logits"]
        bits = F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none") / math.log(2)  # [8, 32]
        scores = [bits[:4].mean(), *((bits[4:] * after_a).sum(0)[at] / after_a.sum(0)[at]).sort().values[:1]]
        if max(scores) < below_bits:
            break
    past = f"{scores[1]:.3f} where the byte two before tells the next" if at.any() else "none that needs a past so near"
    score = f"{scores[0]:.3f} bits per byte, {past}, after {step} steps of seed {seed}"
    if not max(scores) < below_bits:  # not a number, perhaps
        yield score
    return score


def _needs_a_past(subject: Subject, line: Tensor) -> Tensor:
    """Bool ``[T]``: where another byte before it moves the logits over ``line [1, T]``."""
    copies = torch.cat([line, *(subject.change(line, at) for at in range(line.shape[1] - 1))])
    logits = run(subject.build(), copies)[0]["logits"]
    return (logits - logits[:1]).abs().amax(-1).diagonal() > 1e-6
