"""Gate: every variant of ours keeps the contract at the small sizes on which cost, fit and peers insist."""

import pytest

from bench.conformance import gate
from tests.composing import CONF, plan

VARIANTS = sorted(path.stem for path in (CONF / "variant").glob("*.yaml"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_may_be_measured(variant):
    own = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    assert [str(finding) for finding in gate(plan(f"variant={variant}", *own))] == []
