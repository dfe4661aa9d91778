"""Persistent vectors: their scale, their place in the softmax, their share of it, their limits."""

import pytest
import torch

from tests.attention_case import B, Case, assert_near, assert_same, by_reference, gradients, run, starts
from tests.reference.all_attention import all_attention
from variants.all_attention import PersistentKV

pytestmark = pytest.mark.numeric

BACKENDS = pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])


@BACKENDS
@pytest.mark.parametrize("position", ["none", "rotary", "alibi"])
def test_value_and_gradient_from_parameters(backend, position):
    """The scaling by sqrt(K) and sqrt(N) is the reference's own here, from the bare parameters."""
    case = Case(length=7, span=4, d_head=4, persistent=5, position=position, backend=backend)
    attention = case.build()
    past, x = case.stream()
    weights = {f"w{name[0]}": getattr(attention, name).weight for name in ("query", "key", "value", "output")}
    key, value = attention.persistent.key, attention.persistent.value
    expected = all_attention(
        x, key_parameters=key, value_parameters=value, span=4, attend_self=True, position=position, **weights
    )
    named = {"x": x, "persistent.key": key, "persistent.value": value, **weights}
    assert_same(run(attention, x, past), expected, named=named)


def test_vectors_start_with_unit_variance():
    torch.manual_seed(0)
    vectors = PersistentKV(Case(heads=8).context(), d_head=16, number=400)
    key, value = vectors()
    assert key.shape == value.shape == (8, 400, 16)
    assert key.var().item() == pytest.approx(1, abs=0.03)
    assert value.var().item() == pytest.approx(1, abs=0.03)
    assert vectors.key.var().item() == pytest.approx(1 / 16, rel=0.03)
    assert vectors.value.var().item() == pytest.approx(1 / 400, rel=0.03)
    assert sum(p.numel() for p in vectors.parameters()) == 2 * 8 * 16 * 400


def test_keys_may_start_nearer_to_zero():
    torch.manual_seed(0)
    context = Case(heads=8).context()
    vectors = PersistentKV(context, d_head=16, number=400, key_std=0.3)
    key, value = vectors()
    assert key.std().item() == pytest.approx(0.3, rel=0.03)
    assert value.std().item() == pytest.approx(1, rel=0.03)
    with pytest.raises(ValueError, match=r"persistent\.key_std=-1: must be at least 0"):
        PersistentKV(context, d_head=16, key_std=-1)


@BACKENDS
def test_vectors_that_score_lowest_leave_attention_as_it_was(backend):
    """No persistent vectors and ones with weight exp(-1000) are the same."""
    case = Case(length=7, span=4, d_head=4, persistent=2, backend=backend)
    attention = case.build()
    past, x = case.stream()
    with torch.no_grad():  # dimension 0 of every query is 1, and only persistent keys have one to meet it
        x[..., 0] = 1
        for first in range(0, attention.query.out_features, case.d_head):
            attention.query.weight[first] = torch.eye(x.shape[-1])[0]
            attention.key.weight[first] = 0
        attention.persistent.key[..., 0] = -1000
    with_vectors = run(attention, x, past)
    attention.persistent = None
    assert_same(with_vectors, run(attention, x, past), named={"x": x} | dict(attention.named_parameters()))
    assert_near(with_vectors, by_reference(attention, x=x, past=past, position="none"))


@BACKENDS
@pytest.mark.parametrize("spans", ["fixed", "between"])
def test_persistent_mass_by_direct_computation(backend, spans):
    """The share of the softmax that persistent vectors take, in one segment or in two."""
    case = Case(length=9, span=8, spans=spans, attend_self=False, persistent=3, backend=backend)
    attention = case.build().eval()
    _, x = case.stream()
    q, k = (part(x).unflatten(-1, (case.heads, -1)).transpose(1, 2) for part in (attention.query, attention.key))
    q = q / case.d_head**0.5
    keys, _ = attention.persistent()
    extra = (q @ keys.mT).exp().sum(-1)
    context = torch.zeros_like(extra)
    z = attention.span(x) if spans != "fixed" else torch.full((case.heads,), 100.0)
    for t in range(9):
        for number in range(min(t, 8)):
            mask = ((z + 3 - number) / 3).clamp(0, 1)
            context[:, :, t] += mask * (q[:, :, t] * k[:, :, t - 1 - number]).sum(-1).exp()
    expected = (extra / (extra + context)).mean(dim=(0, 2)).detach()
    whole = attention(x, collect_stats=True)
    assert_near(attention.metrics(whole.stats)["persistent_mass"], expected)
    first = attention(x[:, :4], None, starts(0), collect_stats=True)
    second = attention(x[:, 4:], first.state, starts(4), collect_stats=True)
    summed = {name: first.stats[name] + second.stats[name] for name in whole.stats}
    assert summed["bytes"] == 9 * B
    assert_near(attention.metrics(summed)["persistent_mass"], expected)


def test_looking_changes_nothing_and_asks_no_gradient():
    case = Case(length=6, persistent=3, spans="between")
    attention = case.build()
    _, x = case.stream()
    plain, looked = attention(x), attention(x, collect_stats=True)
    assert plain.stats is None
    assert torch.equal(plain.y, looked.y)
    assert not any(tensor.requires_grad for tensor in looked.stats.values())
    assert "persistent_mass" not in attention.metrics({})
    assert all(g.abs().max() > 0 for g in gradients(looked.y, list(attention.persistent.parameters())))


def test_at_least_one_vector():
    with pytest.raises(ValueError, match=r"persistent\.number=0: at least 1"):
        PersistentKV(Case().context(), d_head=2, number=0)
