"""Kernels offered to outsiders: a file that uses nothing but what ``variants/backends.py`` says keeps the contract on them."""

import pytest
import torch

from bench.conformance import fast_backend, findings
from harness.plan.small import shrunk
from tests.offered import Offered
from tests.test_check import toy
from variants.kernels import window_cpu


@pytest.mark.numeric
@pytest.mark.parametrize(
    "words",
    [
        ("position=rotary", "runtime.backend=fused"),
        pytest.param(("position=relative", "runtime.backend=kernel"), marks=pytest.mark.cpu_kernel),
    ],
)
def test_it_keeps_the_contract(words):
    plan = shrunk(toy(Offered, *words))
    assert words[-1] == f"runtime.backend={fast_backend(plan)}"
    assert [str(finding) for finding in findings(plan) if not finding.passed] == []


@pytest.mark.cpu_kernel
def test_without_a_compiler_it_takes_the_next(monkeypatch):
    (_, sublayer), *_ = shrunk(toy(Offered, "position=alibi")).make_model().sublayers()
    assert sublayer.backend(torch.device("cpu"), training=True) == "kernel"
    monkeypatch.setattr(window_cpu, "obstacle", lambda: "no C++ compiler")
    assert sublayer.backend(torch.device("cpu"), training=True) == "fused"
