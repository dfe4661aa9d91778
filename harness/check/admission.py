"""Admission of a mechanism before its first step: it is a shipped one, or it is checked against the
contract.

A shipped mechanism has the digests of all its files in ``variants/conformance/shipped.json``, which
``python -m bench.shipped`` writes. A passed check is cached by source, sizes and version of
torch."""

import json
from collections.abc import Iterator

import torch

from harness import source
from harness.cache import sha256_of
from harness.check.passed import marker, recall, remember
from harness.check.small import contract_plan, reduce_width, shrink
from harness.count.ideal import PROMISE, compare_ideal
from harness.count.memory import tensors_of
from harness.device.selection import device_kind
from harness.plan.build import Plan
from harness.plan.settings import WINDOWS
from variants.conformance import (
    AT_RUN_SIZES,
    AT_SIZES,
    BEFORE_TRAINING,
    Finding,
    Size,
    both,
    check,
    run_check,
)
from variants.conformance.fixture import spread_projected

CONFORMANCE = source.ROOT / "variants" / "conformance"
SHIPPED = CONFORMANCE / "shipped.json"
LEAST_SEGMENT = 64  # bytes, if ``model.span`` is not smaller
CHECKED_SECTIONS = ("variant", "model", "position", "objective", "batch", "eval")
"""Sections of the configuration on which the outcome of the checks depends."""


def admission(plan: Plan, *, text: torch.Tensor | None = None) -> str:
    """Return ``shipped``, ``passed`` or ``unchecked`` (``check=false``). ValueError names the first
    broken promise. ``text`` has bytes of the run's corpus, on which the mechanism is checked as
    well."""
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    files = source.mechanism_files(plan.config, trust=plan.trust)
    if all(shipped.get(name) == sha256_of(path) for name, path in files):
        return "shipped"
    if not plan.check:
        print(
            "check=false: the mechanism is not checked, and no table compares this run", flush=True
        )
        return "unchecked"
    file = marker(
        "checked",
        source.digest_of(files),
        [sha256_of(path) for path in sorted(CONFORMANCE.glob("*.py"))],
        [torch.__version__, plan.runtime.backend, device_kind(plan.runtime), vars(plan.data)],
        [plan.config[name] for name in CHECKED_SECTIONS],
    )
    if recall(file) is not None:
        return "passed"
    print(
        "check: the mechanism is not a shipped one; it is checked once at the sizes of this run",
        flush=True,
    )
    torch.use_deterministic_algorithms(plan.runtime.deterministic)  # as in the run
    if broken := next(
        (finding for finding in findings(plan, text=text) if not finding.passed), None
    ):
        raise ValueError(
            f"variant={plan.variant}: {broken.promise}: {broken.detail}; "
            'check=false trains anyway and marks the row "unchecked"'
        )
    remember(file)
    return "passed"


def findings(plan: Plan, *, text: torch.Tensor | None = None) -> Iterator[Finding]:
    """Yield the outcome of each promise that is checked before training, at small sizes and at the
    run's sizes."""
    small = shrink(contract_plan(plan, device_kind(plan.runtime)))
    streams = tuple({17, plan.batch.streams, plan.eval.streams})  # 17: the default of ``check``
    yield from check_plan(small, checks=BEFORE_TRAINING, batch_sizes=streams)
    if plan.objective.direction == "causal":
        yield compare_flops(small)
    yield from findings_at_sizes(plan, text=text)


def check_plan(plan: Plan, **options) -> Iterator[Finding]:
    """Yield the outcome of ``check`` for the plan's model. If it sees both sides, ``checks`` are
    those of both sides."""
    if plan.objective.direction == "both":
        options["checks"] = both.CHECKS
    return check(plan.make_model, span=plan.model.span, vocabulary=plan.data.vocabulary, **options)


def compare_flops(plan: Plan) -> Finding:
    """Check that declared FLOPs are at most the executed ones with a full past, and at least
    half of them."""
    return run_check(PROMISE, lambda: compare_ideal(plan.make_model(), span=plan.model.span))


def compare_flops_at_sizes(plan: Plan, *, text: torch.Tensor | None) -> Finding:
    """Compare FLOPs in the run's model, with learned spans at their longest. A plain backend
    computes all pairs of a segment and the past, visible or not, so segments are short if a state
    is carried, but no shorter than blocks of kernels. Without a state they are the run's."""
    with torch.random.fork_rng(devices=[]):
        model = spread_projected(plan.make_model(), 1, 1)
        carries = any(
            len(tensors_of(state)) for state in model(torch.zeros(1, 1, dtype=torch.int64)).state[1]
        )
    span = plan.model.span
    segment = max(span // 4, min(2 * span, LEAST_SEGMENT)) if carries else plan.eval.segment
    return run_check(
        PROMISE + AT_SIZES, lambda: compare_ideal(model, span=span, segment=segment, text=text)
    )


def findings_at_sizes(plan: Plan, *, text: torch.Tensor | None = None) -> Iterator[Finding]:
    """Yield the outcome of promises that depend on sizes, in a narrow network at the plan's span
    and batch sizes."""
    checked = contract_plan(plan, device_kind(plan.runtime))
    narrow = reduce_width(checked)
    if plan.objective.direction == "both":
        yield from check_plan(narrow)
        return
    e = plan.eval
    b = plan.batch
    third = e.segment // 3
    # as at the end of a split: shorter than the others, and odd if possible
    last_segment = max(1, e.segment - third)
    if e.segment > 3 and third % 2 == e.segment % 2:
        last_segment -= 1
    sizes = [
        Size("train", b.streams, b.segment, b.carry, every=True),
        Size("eval", e.streams, e.segment, True, every=True),
        Size("eval", *WINDOWS, False, every=True),
        Size("eval", e.streams, last_segment, True),
    ]
    if (b.streams, b.segment) != (e.streams, e.segment):
        sizes.append(Size("eval", b.streams, b.segment, True))
    yield from check_plan(narrow, text=text, checks=AT_RUN_SIZES, sizes=tuple(sizes))
    yield compare_flops_at_sizes(checked, text=text)
