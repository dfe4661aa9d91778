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


def test_its_kernels_are_proven_as_ours(monkeypatch):
    (_, sublayer), *_ = shrunk(toy(Offered, "position=alibi")).make_model().sublayers()
    monkeypatch.setattr("variants.kernels.proof.LENGTHS", (40, 1))
    mode = {"precision": "float32", "deterministic": False}
    proofs = list(sublayer.prove("fused", torch.device("cpu"), **mode))
    assert proofs and all(proof.passed for proof in proofs)
    monkeypatch.setattr(window_cpu, "available", lambda: "no C++ compiler")
    assert sublayer.backend(torch.device("cpu"), training=True) == "fused"
