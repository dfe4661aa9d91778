"""Admission of a mechanism before its first step: shipped, or checked against the contract at the run's sizes.

Shipped means that ``variants/conformance/shipped.json``, which ``python -m bench.shipped`` writes, has the digest of
each file. A pass of any other mechanism is remembered for its source, these sizes and torch.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress

import torch

from harness import source
from harness.cache import cache_folder, sha256_of, write_whole
from harness.count.ideal import IDEAL, compare_ideal
from harness.device.runtime import device_kind
from harness.failures import StorageFailure
from harness.loop.scoring import WINDOWS
from harness.plan.build import Plan
from harness.plan.small import narrow, of_mechanism, shrunk
from variants.conformance import BEFORE_TRAINING, SIZED, Finding, Size, check, run_check

CONFORMANCE = source.ROOT / "variants" / "conformance"
SHIPPED = CONFORMANCE / "shipped.json"
SECTIONS = ("variant", "model", "position", "batch", "eval")
"""Of the configuration, what a pass depends on."""


def admission(plan: Plan) -> str:
    """``shipped``, ``passed``, or ``unchecked`` with ``check=false``; ValueError with the first broken promise."""
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    if all(
        shipped.get(name) == sha256_of(path) for name, path in source.mechanism_files(plan.config, trust=plan.trust)
    ):
        return "shipped"
    if not plan.check:
        print("check=false: the mechanism is not checked, so that no table compares this run", flush=True)
        return "unchecked"
    passed = cache_folder() / "checked" / _identity(plan)
    if not passed.exists():
        print("check: the mechanism is not one of the shipped; checking it at the sizes of this run, once", flush=True)
        if broken := next((finding for finding in findings(plan) if not finding.passed), None):
            raise ValueError(
                f"variant={plan.variant}: {broken.promise}: {broken.detail}; "
                'check=false trains anyway and marks the row "unchecked"'
            )
        with suppress(StorageFailure):  # then it is checked again
            write_whole(passed, b"")
    return "passed"


def findings(plan: Plan) -> Iterator[Finding]:
    """The promises that are checked before training, at the run's sizes and at small ones."""
    yield from findings_at_sizes(plan)
    small = shrunk(of_mechanism(plan, device_kind(plan.runtime)))
    sizes = {"span": small.model.span, "vocabulary": plan.data["vocabulary"]}
    streams = tuple({17, plan.batch.streams, plan.eval.streams})
    yield from check(small.make_model, **sizes, checks=BEFORE_TRAINING, batch_sizes=streams)
    yield ideal_beside_executed(small)


def ideal_beside_executed(plan: Plan) -> Finding:
    """Declared FLOPs are at most the executed ones, in warm state, and not much less."""
    return run_check(IDEAL, lambda: compare_ideal(plan.make_model(), span=plan.model.span))


def findings_at_sizes(plan: Plan) -> Iterator[Finding]:
    """Promises at the plan's own segments, streams and span, in a narrow network."""
    small, e, b = narrow(of_mechanism(plan, device_kind(plan.runtime))), plan.eval, plan.batch
    third = e.segment // 3
    ragged = max(1, e.segment - third) - (e.segment > 3 and third % 2 == e.segment % 2)  # an odd end of a split
    sizes = [Size("train", b.streams, b.segment, b.carry), Size("eval", b.streams, b.segment, True)]
    sizes += [Size("eval", e.streams, segment, True) for segment in (e.segment, ragged)]
    sizes = tuple(dict.fromkeys([*sizes, Size("eval", *WINDOWS, False)]))
    span, vocabulary = plan.model.span, plan.data["vocabulary"]
    yield from check(small.make_model, span=span, vocabulary=vocabulary, checks=SIZED, sizes=sizes)


def _identity(plan: Plan) -> str:
    """Digest of all that a pass depends on."""
    facts = [source.digest_of(source.mechanism_files(plan.config, trust=plan.trust))]
    facts += [sha256_of(path) for path in sorted(CONFORMANCE.glob("*.py"))]
    facts += [torch.__version__, plan.runtime.backend, device_kind(plan.runtime), plan.data["vocabulary"]]
    facts += [plan.config[name] for name in SECTIONS]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
