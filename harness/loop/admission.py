"""Admission of a mechanism before its first step: it is a shipped one, or it is checked against the contract.

A shipped mechanism has the digests of all its files in ``variants/conformance/shipped.json``, which
``python -m bench.shipped`` writes. A passed check is cached by source, sizes and version of torch."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from harness import source
from harness.cache import cache_folder, sha256_of, write_atomically
from harness.count.ideal import PROMISE, compare_ideal
from harness.device.runtime import device_kind
from harness.failures import StorageFailure
from harness.loop.scoring import WINDOWS
from harness.plan.build import Plan
from harness.plan.small import contract_plan, reduce_width, shrink
from variants.conformance import BEFORE_TRAINING, SIZED, Finding, Size, check, run_check

CONFORMANCE = source.ROOT / "variants" / "conformance"
SHIPPED = CONFORMANCE / "shipped.json"
CHECKED_SECTIONS = ("variant", "model", "position", "batch", "eval")
"""Sections of the configuration on which the outcome of the checks depends."""


def admission(plan: Plan) -> str:
    """Return ``shipped``, ``passed`` or ``unchecked`` (``check=false``). ValueError names the first broken promise."""
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    files = source.mechanism_files(plan.config, trust=plan.trust)
    if all(shipped.get(name) == sha256_of(path) for name, path in files):
        return "shipped"
    if not plan.check:
        print("check=false: the mechanism is not checked, and no table compares this run", flush=True)
        return "unchecked"
    marker = Path("checked", _identity(plan))
    with suppress(StorageFailure):  # without a cache folder, each run checks
        if (cache_folder() / marker).exists():
            return "passed"
    print("check: the mechanism is not a shipped one; it is checked once at the sizes of this run", flush=True)
    if broken := next((finding for finding in findings(plan) if not finding.passed), None):
        raise ValueError(
            f"variant={plan.variant}: {broken.promise}: {broken.detail}; "
            'check=false trains anyway and marks the row "unchecked"'
        )
    with suppress(StorageFailure):
        write_atomically(cache_folder() / marker, b"")
    return "passed"


def findings(plan: Plan) -> Iterator[Finding]:
    """Yield the outcome of each promise that is checked before training, at the run's sizes and at small sizes."""
    yield from findings_at_sizes(plan)
    small = shrink(contract_plan(plan, device_kind(plan.runtime)))
    sizes = {"span": small.model.span, "vocabulary": plan.data["vocabulary"]}
    streams = tuple({17, plan.batch.streams, plan.eval.streams})  # 17: the default of ``check``
    yield from check(small.make_model, **sizes, checks=BEFORE_TRAINING, batch_sizes=streams)
    yield compare_flops(small)


def compare_flops(plan: Plan) -> Finding:
    """Check that declared FLOPs are at most the executed ones with a full past, and at least half of them."""
    return run_check(PROMISE, lambda: compare_ideal(plan.make_model(), span=plan.model.span))


def findings_at_sizes(plan: Plan) -> Iterator[Finding]:
    """Yield the outcome of promises that depend on sizes, in a narrow network at the plan's span and batch sizes."""
    narrow = reduce_width(contract_plan(plan, device_kind(plan.runtime)))
    e, b = plan.eval, plan.batch
    third = e.segment // 3
    last_segment = max(1, e.segment - third)  # as at the end of a split: shorter than the others, and odd if possible
    if e.segment > 3 and third % 2 == e.segment % 2:
        last_segment -= 1
    sizes = [Size("train", b.streams, b.segment, b.carry), Size("eval", b.streams, b.segment, True)]
    sizes += [Size("eval", e.streams, segment, True) for segment in (e.segment, last_segment)]
    sizes = tuple(dict.fromkeys([*sizes, Size("eval", *WINDOWS, False)]))
    span, vocabulary = plan.model.span, plan.data["vocabulary"]
    yield from check(narrow.make_model, span=span, vocabulary=vocabulary, checks=SIZED, sizes=sizes)


def _identity(plan: Plan) -> str:
    """Return a digest of everything that the outcome of the checks depends on."""
    inputs = [source.digest_of(source.mechanism_files(plan.config, trust=plan.trust))]
    inputs += [sha256_of(path) for path in sorted(CONFORMANCE.glob("*.py"))]
    inputs += [torch.__version__, plan.runtime.backend, device_kind(plan.runtime), plan.data["vocabulary"]]
    inputs += [plan.config[name] for name in CHECKED_SECTIONS]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
