"""The proof of a way of attending: what is right passes in every case, and each kind of wrong fails under its name; and sublayers
prove their backends by it, as they call them."""

import pytest
import torch
from torch import Tensor

from tests.attention_case import Case
from variants import backends
from variants.kernels import proof, window
from variants.kernels.proof import FEATURES, Proof, prove
from variants.kernels.window import Window

CPU = torch.device("cpu")
LENGTHS = (70, 33, 1)
SMALL = {"heads": 4, "width": 16, "ramp": 8, "device": CPU, "lengths": LENGTHS}


def plain(q, k, v, visible: Window, *, bias=None, vectors=None, **same) -> Tensor:
    return window.attend(q, k, v, visible, bias=bias if vectors is None else q @ vectors.mT, **same)


def failures(attend, *features: str, **options) -> list[Proof]:
    proofs = list(prove(attend, features=frozenset(features), **SMALL | options))
    assert proofs
    return [proof for proof in proofs if not proof.passed]


SETS = [
    ("bias", "dropout"),
    ("spans", "vectors", "persistent", "dropout"),
    ("dynamic", "dropout"),
]


@pytest.mark.parametrize(("features", "cache"), [*zip(SETS, ("kv", "hidden", "kv"), strict=True)], ids=str)
def test_plain_passes_in_all_cases(features, cache):
    assert not failures(plain, *features, cache=cache, lengths=(33, 1))
    assert {name for one in SETS for name in one} == set(FEATURES)


def test_cases_are_ugly_enough():
    sizes, windows, rates = set(), set(), set()

    def attend(q, k, v, visible, **same):
        sizes.add((q.shape[2], k.shape[2], visible.shift))
        windows.add((max(visible.max_keys) >= k.shape[2], list(visible.max_keys) == sorted(visible.max_keys)))
        rates.add(same.get("dropout"))
        assert 0.0 in visible.z and (visible.z % 1).any()
        return plain(q, k, v, visible, **same)

    assert not failures(attend, "spans", "dropout", deterministic=False)
    assert sizes == {(t, k, s) for t in LENGTHS for k in (t, 2 * t + 37) for s in (0, 1)}
    assert (False, False) in windows and {wide for wide, _ in windows} == {True, False}
    assert rates == {None, 0.2}


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled by 1.01."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 1.01


def wrong(kind: str):
    """``plain`` with one thing wrong."""
    runs = [0]

    def attend(q, k, v, visible: Window, **same):
        runs[0] += 1
        if kind == "query":
            q = Scaled.apply(q)
        if kind == "value":
            v = Scaled.apply(v)
        if kind == "span":
            visible = visible._replace(z=visible.z.detach())
        if kind == "persistent":
            same["persistent"] = same["persistent"]._replace(k=same["persistent"].k.detach())
        if kind == "shift":
            visible = visible._replace(shift=0)
        if kind == "mask" and "seed" in same:
            same["seed"] = same["seed"] + 1
        y = plain(q, k, v, visible, **same)
        if kind == "runs":
            y = y + 1e-7 * runs[0]
        if kind == "nan":
            y = torch.where(torch.arange(y.shape[2])[:, None] == y.shape[2] - 1, torch.nan, y)
        if kind == "one number" and y.shape[2] > 30:
            y = y + 1e-3 * torch.nn.functional.one_hot(torch.tensor(5), y.shape[2])[:, None]
        return y

    return attend


NAMED = {
    "query": "the gradient of q",
    "value": "the gradient of v",
    "span": "the gradient of z",
    "persistent": "the gradient of persistent k",
    "shift": "shift 1",
    "mask": "dropout 0.2: ",
    "runs": "two runs differ in the value",
    "nan": "the value",
    "one number": "the value",
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_wrong_fails_under_its_name(kind):
    proofs = failures(wrong(kind), "spans", "persistent", "dropout", lengths=(33,))
    assert proofs and all(NAMED[kind] in proof.case for proof in proofs), proofs[:3]
    assert (kind == "nan") == any(proof.error == torch.inf for proof in proofs)


def test_a_mistake_of_a_tenth_is_above_bfloat16():
    def too_much(q, k, v, visible, **same):
        return plain(q, k, v, visible, **same) * 1.1

    assert failures(too_much, dtype=torch.bfloat16)
    assert not failures(plain, "spans", dtype=torch.bfloat16)


def test_coarse_products_are_allowed_where_plain_has_them(monkeypatch):
    """A made-up TF32: products round their factors, plain's too if the mode is on."""
    inner, mode = window.attend, {"coarse": False}

    def rounded(x: Tensor) -> Tensor:
        return x.detach().bfloat16().to(x.dtype) + (x - x.detach())

    def coarse(q, k, v, visible, **same):
        return inner(rounded(q), rounded(k), rounded(v), visible, **same)

    def yardstick(q, k, v, visible, **same):
        return (coarse if mode["coarse"] and q.dtype == torch.float32 else inner)(q, k, v, visible, **same)

    monkeypatch.setattr(window, "attend", yardstick)
    assert failures(coarse)
    mode["coarse"] = True
    assert not failures(coarse)


# Of sublayers: pasts by head, constant pasts, dropout

SUBLAYERS = {
    "spans": Case(heads=4, d_head=8, spans="between", persistent=3, backend="fused"),
    "hidden": Case(heads=2, d_head=8, cache="hidden", position="alibi", backend="fused"),
    "dropped": Case(heads=2, d_head=8, spans="between", position="relative", dropout=0.2, backend="chunked"),
    "dynamic": Case(heads=2, d_head=8, spans="dynamic", backend="chunked"),
}


@pytest.fixture
def prove_sublayer(monkeypatch):
    """Proofs of a case of ``SUBLAYERS``, at two lengths."""
    short = proof.prove.__kwdefaults__ | {"lengths": (33, 1)}
    monkeypatch.setattr(proof.prove, "__kwdefaults__", short)

    def proofs(name: str) -> list[Proof]:
        attention = SUBLAYERS[name].build().float()
        return list(attention.prove(SUBLAYERS[name].backend, CPU, precision="float32", deterministic=True))

    return proofs


@pytest.mark.parametrize("name", SUBLAYERS)
def test_an_attention_sublayer_proves_its_backends(name, prove_sublayer):
    proofs = prove_sublayer(name)
    assert len(proofs) >= 8
    assert all(one.passed for one in proofs), max(proofs, key=lambda one: one.error / (one.allowed or 1e-12))


def test_spans_of_one_key_too_many_fail(monkeypatch, prove_sublayer):
    call = backends._attend

    def longer(backend, q, k, v, part, own, **same):
        return call(backend, q, k, v, part if part.z is None else part._replace(z=part.z + 1), own, **same)

    monkeypatch.setattr(backends, "_attend", longer)
    assert not all(one.passed for one in prove_sublayer("spans"))


def test_what_a_proof_depends_on_is_said():
    features = {name: case.build().proof_class()["features"] for name, case in SUBLAYERS.items()}
    assert features.pop("dynamic") == ["dynamic"]
    assert features == {
        "spans": ["spans", "persistent"],
        "hidden": ["bias"],
        "dropped": ["spans", "vectors", "dropout"],
    }
    sizes = {"heads": 2, "width": 8, "ramp": 3, "cache": "kv"}
    assert SUBLAYERS["dynamic"].build().proof_class() == {"features": ["dynamic"]} | sizes
