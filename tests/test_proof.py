"""The proof of a way of attending: what is right passes in every case, and each kind of wrong fails under its name."""

import pytest
import torch
from torch import Tensor

from variants.kernels import fused, window, window_cpu
from variants.kernels.proof import FEATURES, Proof, prove
from variants.kernels.window import PastKV, Window

CPU = torch.device("cpu")
LENGTHS = (70, 33, 1)
SMALL = {"heads": 4, "width": 16, "ramp": 8, "device": CPU, "lengths": LENGTHS}


def plain(q, k, v, visible: Window, *, bias=None, vectors=None, **same) -> Tensor:
    return window.attend(q, k, v, visible, bias=bias if vectors is None else q @ vectors.mT, **same)


def compiled(q, k, v, visible: Window, **same) -> Tensor:
    """The CPU's kernel, which takes the past apart."""
    before, everyone = k.shape[2] - q.shape[2], tuple(range(q.shape[1]))
    past = [PastKV(everyone, k[:, :, :before], v[:, :, :before])] if before else []
    return window_cpu.attend(q, k[:, :, before:], v[:, :, before:], visible, past=past, **same)


def failures(attend, *features: str, **options) -> list[Proof]:
    found = list(prove(attend, features=frozenset(features), **SMALL | options))
    assert found
    return [proof for proof in found if not proof.passed]


SETS = [
    ("spans", "persistent"),
    ("bias", "dropout"),
    ("spans", "vectors", "persistent", "dropout"),
    ("dynamic", "dropout"),
]


@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("features", SETS, ids="+".join)
def test_plain_passes_in_all_cases(features, cache):
    assert not failures(plain, *features, cache=cache)
    assert {name for one in SETS for name in one} == set(FEATURES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [(), ("spans", "bias", "persistent")], ids="+".join)
def test_backends_of_the_cpu_pass(features, dtype):
    assert not failures(fused.attend, *features, dtype=dtype)
    if not window_cpu.available() and dtype == torch.float32:
        vectors = () if "bias" in features else ("vectors",)
        assert not failures(compiled, *features, *vectors)


def test_cases_are_ugly_enough():
    seen = []

    def attend(q, k, v, visible, **same):
        sizes = (q.shape[2], k.shape[2], visible.shift)
        seen.append((*sizes, visible.max_keys, tuple(visible.z.tolist()), same.get("dropout")))
        return plain(q, k, v, visible, **same)

    assert not failures(attend, "spans", "dropout", deterministic=False)
    assert {case[:3] for case in seen} == {(t, k, s) for t in LENGTHS for k in (t, 2 * t + 37) for s in (0, 1)}
    assert {case[5] for case in seen} == {None, 0.2}
    assert all(list(case[3]) != sorted(case[3]) for case in seen if case[1] > 70 and max(case[3]) > 64)
    assert all(0.0 in case[4] and any(z % 1 for z in case[4]) for case in seen)
    assert {max(case[3]) >= case[1] for case in seen} == {True, False}, "windows shorter and longer than what is there"


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def wrong(kind: str):
    """``plain`` with one thing wrong."""
    state = {"runs": 0}

    def attend(q, k, v, visible: Window, **same):
        state["runs"] += 1
        if kind == "query":
            q = Scaled.apply(q, 1.01)
        if kind == "value":
            v = Scaled.apply(v, 1.01)
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
            y = y + 1e-7 * state["runs"]
        if kind == "nan":
            y = torch.where(torch.arange(y.shape[2])[:, None] == y.shape[2] - 1, torch.nan, y)
        if kind == "one number" and y.shape[2] > 40:
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
    found = failures(wrong(kind), "spans", "persistent", "dropout")
    assert found and all(NAMED[kind] in proof.case for proof in found), found[:3]
    assert (kind == "nan") == any(proof.error == torch.inf for proof in found)


def test_a_mistake_of_a_hundredth_is_below_bfloat16_and_one_of_a_tenth_is_not():
    def half(q, k, v, visible, **same):
        return plain(q, k, v, visible, **same) * 1.1

    assert failures(half, dtype=torch.bfloat16)
    assert not failures(plain, "spans", dtype=torch.bfloat16)


def test_coarse_products_are_allowed_where_plain_has_them(monkeypatch):
    """A made-up TF32: products round their factors, plain's too if the mode is on."""
    inner, on = window.attend, {"plain": False}

    def rounded(x: Tensor) -> Tensor:
        return x.detach().bfloat16().to(x.dtype) + (x - x.detach())

    def coarse(q, k, v, visible, **same):
        return inner(rounded(q), rounded(k), rounded(v), visible, **same)

    def yardstick(q, k, v, visible, **same):
        return (coarse if on["plain"] and q.dtype == torch.float32 else inner)(q, k, v, visible, **same)

    monkeypatch.setattr(window, "attend", yardstick)
    assert failures(coarse)
    on["plain"] = True
    assert not failures(coarse)


def own_draws(kind: str):
    """Attention that drops by a generator of its own."""

    def attend(q, k, v, visible, *, dropout=0.0, seed=None, **same):
        if not dropout or kind == "nothing dropped":
            return plain(q, k, v, visible, **same)
        rate = 0.5 if kind == "too much" else dropout
        y = plain(q, k, v, visible, dropout=rate, **same)
        if kind == "not scaled":
            return y * (1 - dropout)
        if kind == "drawn again":
            other = plain(q, k, v, visible, dropout=rate, **same)
            return y.detach() + other - other.detach()
        return y

    return attend


@pytest.mark.parametrize("kind", ["right", "nothing dropped", "too much", "not scaled", "drawn again"])
def test_other_draws_are_held_to_their_statistics(kind):
    torch.manual_seed(0)
    found = failures(own_draws(kind), "dropout", own_draws=True, whole=True, lengths=(70,))
    assert bool(found) == (kind != "right"), found
    named = {"nothing dropped": "moves the value", "drawn again": "drop alike"}
    assert all(named.get(kind, "dropout 0.2") in proof.case for proof in found)


def test_a_whole_triangle_is_all_that_is_asked_where_that_is_all_it_can():
    def causal(q, k, v, visible, **same):
        assert q.shape == k.shape and visible.shift == 0 and min(visible.max_keys) >= k.shape[2] and not same
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)

    assert not failures(causal, whole=True)
