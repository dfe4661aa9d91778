"""A user's class of attention that calls our kernels through ``variants/backends.py`` keeps the
contract."""

import pytest

from harness.check.conformance import fast_backend, findings
from harness.check.small import shrink
from tests.bench.test_check import toy
from tests.support.outside_attention import OutsideAttention


@pytest.mark.numeric
@pytest.mark.parametrize(
    "words",
    [
        ("position=rotary", "runtime.backend=fused"),
        pytest.param(("position=relative", "runtime.backend=kernel"), marks=pytest.mark.cpu_kernel),
    ],
)
def test_an_outside_attention_keeps_the_contract(words):
    plan = shrink(toy(OutsideAttention, *words))
    assert words[-1] == f"runtime.backend={fast_backend(plan)}"
    assert [str(finding) for finding in findings(plan) if not finding.passed] == []
