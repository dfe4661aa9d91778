"""Backends as sublayers call them, proven as on a device where they run first: pasts by head, constant pasts, dropout."""

import pytest
import torch

from tests.attention_case import Case
from variants import backends
from variants.kernels import proof

CPU = torch.device("cpu")
CASES = {
    "spans": Case(heads=4, d_head=8, spans="between", persistent=3, backend="fused"),
    "hidden": Case(heads=2, d_head=8, cache="hidden", position="alibi", backend="fused"),
    "dropped": Case(heads=2, d_head=8, spans="between", position="relative", dropout=0.2, backend="chunked"),
    "dynamic": Case(heads=2, d_head=8, spans="dynamic", backend="chunked"),
}
MODE = {"precision": "float32", "deterministic": True}


@pytest.mark.parametrize("name", CASES)
def test_an_attention_sublayer_proves_its_backends(name, monkeypatch):
    monkeypatch.setattr(proof.prove, "__kwdefaults__", proof.prove.__kwdefaults__ | {"lengths": (33, 1)})
    case = CASES[name]
    proofs = list(case.build().float().prove(case.backend, CPU, **MODE))
    assert len(proofs) >= 8
    assert all(found.passed for found in proofs), max(proofs, key=lambda found: found.error / (found.allowed or 1e-12))


def test_what_it_depends_on_is_said():
    assert CASES["spans"].build().proof_class()["features"] == ["spans", "persistent"]
    assert CASES["hidden"].build().proof_class()["features"] == ["bias"]
    assert CASES["dropped"].build().proof_class()["features"] == ["spans", "vectors", "dropout"]
    assert CASES["dynamic"].build().proof_class() == {
        "features": ["dynamic"],
        "heads": 2,
        "width": 8,
        "ramp": 3,
        "cache": "kv",
    }


def test_a_past_of_the_wrong_head_is_found(monkeypatch):
    monkeypatch.setattr(proof.prove, "__kwdefaults__", proof.prove.__kwdefaults__ | {"lengths": (33, 1)})
    of = backends._Heads.of
    monkeypatch.setattr(
        backends._Heads, "of", lambda self, x, dim: of(self, x.flip(dim) if x.dim() == 1 and not self.every else x, dim)
    )
    proofs = list(CASES["spans"].build().float().prove("fused", CPU, **MODE))
    assert not all(found.passed for found in proofs)
