"""What a device makes of a variant, as ``bench.check`` shows it there: each candidate's proof and time, and whether the fast
mode learns what plain float32 does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device import runtime
from harness.device.first_use import Choice
from harness.loop.settle import chosen, settled
from harness.loop.train_state import TrainState
from harness.plan.build import Plan, varied
from harness.record.table import Cell, Column, Table, words

PLAIN = {"backend": "plain", "precision": "float32", "compile": False}
SPREADS = 2.0
"""Times the spread of plain's seeds that the means may be apart: a mean of three is that far off by chance now and then."""
COLUMNS = (
    words("", "pass, or FAIL where a case did, or where it did not run at the plan's shapes"),
    words("candidate", "a way of attending, as runtime.backend names it"),
    words("sublayer"),
    words("nearest to its limit", "the case, and the value or gradient, that is nearest to what it may err, or beyond"),
    Column("error", "relative to the norm, or for a largest error to the largest number, of what float64 says"),
    Column("allowed", "1e-4, or twice what plain PyTorch errs in that mode on the same inputs"),
    Column("cases"),
    Column("proof, s"),
    Column("all layers, ms", "forward and backward at the plan's shapes"),
)


def proofs(plan: Plan, *, choosing: Callable[..., Choice | None] = chosen) -> tuple[Table, int] | None:
    """Every candidate's verdict and time on the plan's device, and how many failed; None where there is no choice."""
    asked = varied(plan, runtime={"backend": "auto"})
    choice = choosing(asked, runtime.start(asked.runtime))
    if choice is None:
        return None
    rows, failed = [], 0
    for backend, found in choice.verdicts.items():
        for sublayer, verdict in found.items():
            good = verdict.passed and backend in choice.step_ms
            failed += not good
            cells = ["pass" if good else "FAIL", backend, sublayer, verdict.case or verdict.said]
            numbers = [("" if x is None else f"{x:.1e}", x) for x in (verdict.error, verdict.allowed)]
            numbers += [(f"{verdict.cases}", verdict.cases), (f"{verdict.seconds:.0f}", verdict.seconds)]
            step_ms = choice.step_ms.get(backend)
            numbers += [("" if step_ms is None else f"{step_ms:.3g}", step_ms)]
            rows.append((*(Cell(text=text) for text in cells), *(Cell(text=t, value=x) for t, x in numbers)))
    table = Table(
        name="candidates",
        title=f"{plan.variant}: ways of attending on {plan.runtime.device}",
        caption="Values and every gradient beside plain PyTorch in float64; each in a process of its own.",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=choice.why,
    )
    return table, failed


def learns_alike(plan: Plan, *, seeds: Sequence[int], settle: Callable[..., Plan] = settled) -> tuple[bool, str]:
    """Whether the plan's mode ends where plain float32 does: mean bits per byte over seeds, by the spread of plain's."""
    if len(seeds) < 2 or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"agree.seeds={seeds}: must be a list of two integers or more, for their spread")
    corpus = corpora.load(**plan.data)
    fast = settle(plan, runtime.start(plan.runtime))
    plain = varied(plan, runtime=PLAIN)
    ours, theirs = ([_bits(replace(one, seed=seed), corpus) for seed in seeds] for one in (fast, plain))
    apart, spread = abs(mean(ours) - mean(theirs)), max(theirs) - min(theirs)
    mode = f"{fast.runtime.backend}, {fast.runtime.precision}{', compiled' if fast.runtime.compile else ''}"
    bits = f"{mean(ours):.4f} bits per byte ({mode}), {mean(theirs):.4f} in plain float32"
    said = f"{bits}: {apart:.4f} apart, seeds {spread:.4f}, at most {SPREADS:g} times that"
    return apart <= SPREADS * spread, said  # False where one is not a number


def _bits(plan: Plan, corpus: Corpus) -> float:
    """Of valid, after the plan's budget of steps."""
    training = TrainState(plan, corpus, runtime.start(plan.runtime))
    while not training.finished:
        training.step()
    return training.validate().bits_per_byte
