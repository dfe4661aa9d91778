"""Persistent vectors: their scale, their place in the softmax, their share of it, their limits."""

import pytest
import torch

from tests.attention_case import B, Case, assert_near, assert_same, by_reference, run, starts
from variants.all_attention import PersistentKV

pytestmark = pytest.mark.numeric

BACKENDS = pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])


@pytest.mark.parametrize(("std", "key_std"), [({}, 1.0), ({"key_std": 0.3}, 0.3)])
def test_vectors_start_with_unit_variance_and_keys_may_start_nearer_to_zero(std, key_std):
    """Parameters that are smaller by sqrt(K) and sqrt(N)."""
    torch.manual_seed(0)
    vectors = PersistentKV(Case(heads=8).context(), d_head=16, number=400, **std)
    key, value = vectors()
    assert key.shape == value.shape == (8, 400, 16)
    assert key.std().item() == pytest.approx(key_std, rel=0.03) and value.std().item() == pytest.approx(1, rel=0.03)
    assert vectors.key.std().item() == pytest.approx(key_std / 4, rel=0.03)
    assert vectors.value.std().item() == pytest.approx(1 / 20, rel=0.03)


@pytest.mark.parametrize(
    ("words", "line"), [({"number": 0}, "=0: at least 1"), ({"key_std": -1}, "=-1: must be at least 0")]
)
def test_wrong_sizes_are_refused(words, line):
    with pytest.raises(ValueError, match=rf"persistent\.{next(iter(words))}{line}"):
        PersistentKV(Case().context(), d_head=2, **words)


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
