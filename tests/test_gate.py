"""Gate: every variant of ours keeps the contract at small sizes."""

import pytest

from tests.composing import CONF, plan
from tests.test_check import gate

VARIANTS = sorted(path.stem for path in (CONF / "variant").glob("*.yaml"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_may_be_measured(variant):
    own = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    assert [str(finding) for finding in gate(plan(f"variant={variant}", *own))] == []
