"""Reformer: its reference, what a query meets, where segments are cut, what is refused, and that no pair of all is in memory."""

import pytest
import torch
from torch import Tensor

from tests.attention_case import DOUBLE, SCHEMES, B, D, Largest, assert_near, assert_same, starts
from tests.reference.reformer import reformer as reference
from variants.contract import LayerContext
from variants.kernels import window
from variants.kernels.window import Window
from variants.reformer import Reformer, lsh_attention

pytestmark = pytest.mark.numeric

H, K = 2, 4


def build(
    *,
    position: str = "none",
    span: int = 8,
    cache: str = "kv",
    attend_self: bool = True,
    dropout: float = 0.0,
    dtype: torch.dtype = DOUBLE,
    **keywords,
) -> Reformer:
    torch.manual_seed(0)
    context = LayerContext(
        d_model=D,
        layer=0,
        n_layers=1,
        heads=H,
        span=span,
        attend_self=attend_self,
        cache=cache,
        dropout=dropout,
        scheme=lambda context, *, d_head: SCHEMES[position](context, d_head=d_head),
    )
    return Reformer(context, **{"buckets": 4, "rounds": 3, "bucket_keys": 2, "d_head": K} | keywords).to(dtype)


def inputs(length: int, *, seed: int = 1, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(B, length, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = {
    "cold": {"length": 13, "position": "rotary"},
    "warm": {"length": 11, "past": 9, "position": "alibi"},
    "one byte": {"length": 1, "past": 12, "position": "rotary", "attend_self": False},
    "nothing before it": {"length": 1},
    "a short past": {"length": 7, "past": 2, "cache": "hidden", "position": "rotary"},
    "a past of its own": {"length": 9, "past": 10, "cache": "hidden", "attend_self": False, "position": "alibi"},
    "a wide span": {"length": 10, "past": 5, "span": 40, "bucket_keys": 3, "attend_self": False},
    "more keys than there are": {"length": 6, "past": 5, "bucket_keys": 50, "rounds": 2, "position": "rotary"},
    "one key": {"length": 12, "bucket_keys": 1, "buckets": 2, "position": "alibi", "attend_self": False},
    "a span of one": {"length": 4, "past": 3, "span": 1},
    "one round": {"length": 12, "past": 4, "rounds": 1, "buckets": 6, "span": 5},
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_every_gradient(name):
    case = {"past": 0, "position": "none"} | CASES[name]
    length, past = case.pop("length"), case.pop("past")
    layer, stream = build(**case), inputs(past + length)
    before, x = stream[:, :past], stream[:, past:].clone().requires_grad_()
    state = layer(before, None, starts(0)).state if past else None
    expected = reference(
        x,
        wq=layer.query.weight,
        wv=layer.value.weight,
        wo=layer.output.weight,
        rotations=layer.rotations,
        bucket_keys=layer.bucket_keys,
        span=layer.span,
        attend_self=layer.attend_self,
        position=case["position"],
        past=before,
        past_is_constant=layer.cache == "kv",
    )
    found = layer(x, state, starts(past)).y
    assert_same(found, expected, named={"x": x} | dict(layer.named_parameters()))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("length", [1, 9])
def test_a_single_bucket_is_attention_and_many_rounds_count_once(length, rounds):
    """All in one bucket and room for all: a window of plain attention without the query itself, with as many rounds."""
    torch.manual_seed(0)
    keys = torch.randn(B, H, 12, 2 * K, dtype=DOUBLE, requires_grad=True)
    sizes = torch.rand(B, H, length, dtype=DOUBLE, requires_grad=True)
    queries = keys[:, :, -length:, :K] * sizes[..., None]
    expected = window.attend(queries, keys[..., :K], keys[..., K:], Window((5,) * H, 1))
    hashes = torch.zeros(B, H, rounds, 12, dtype=torch.int32)
    found, seen = lsh_attention(keys, sizes, hashes, bucket_keys=20, farthest=5, alone=False, count=True)
    assert_same(found, expected, named={"keys": keys, "sizes": sizes})
    assert seen[0, 0].tolist() == [min(5, at) for at in range(12 - length, 12)]


def test_a_query_meets_itself_only_if_it_has_nothing_else():
    layer, x = build(attend_self=True), inputs(3)
    layer.rotations.zero_()
    own, others = layer(x, collect_stats=True), layer.value(x)
    assert_near(own.y[:, :2], layer.output(torch.stack([others[:, 0], others[:, 0]], 1)))  # the second: the first alone
    assert layer.metrics(own.stats)["alone"].tolist() == [pytest.approx(1 / 3)] * H
    assert layer.metrics(own.stats)["keys"].tolist() == [1.0] * H
    assert build(attend_self=False)(x).y[:, 0].abs().max() == 0
    assert layer.metrics({}) == {}


def test_a_wider_span_meets_a_state_that_was_trimmed_and_a_narrower_one_forgets():
    layer, x = build(span=6, bucket_keys=20), inputs(30)
    layer.rotations.zero_()
    state = layer(x[:, :20]).state
    assert [tensor.shape[dim] for tensor, dim in zip(state, (2, 3), strict=True)] == [5, 5]
    layer.set_span(3)
    assert_near(layer(x[:, 20:], state).y, layer(x).y[:, 20:])
    layer.set_span(9)
    assert_near(layer(x[:, 20:], state).y, layer(x[:, 15:]).y[:, 5:])
    with pytest.raises(ValueError, match=r"eval\.span=0: allowed are 1 to"):
        layer.set_span(0)


@pytest.mark.parametrize(("span", "buckets"), [(512, 8), (4096, 64), (64, 2), (16, 2), (447, 6)])
def test_buckets_follow_the_span_and_stay_what_they_were(span, buckets):
    layer = build(span=span, buckets=None, bucket_keys=64)
    assert layer.buckets == 2 * layer.rotations.shape[-1] == buckets
    layer.set_span(span // 4)
    assert layer.buckets == buckets
    assert build(span=span, buckets=6, bucket_keys=64).buckets == 6


def test_pairs_are_made_again_for_the_backward_with_the_same_dropout(monkeypatch):
    layer, x = build(dropout=0.5, span=40, bucket_keys=20, attend_self=True).train(), inputs(60).requires_grad_()

    def found() -> tuple[int, tuple[Tensor, ...]]:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: sizes.append(kept.numel()) or kept, lambda x: x):
            torch.manual_seed(1)
            y = layer(x).y
        return sum(sizes), torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    kept, again = found()
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", lambda function, *given, **how: function(*given))
    without, expected = found()
    assert kept < without / 3
    assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))


def test_flops_by_hand():
    layer = build(span=100)  # 4 buckets, 3 rounds, 2 keys of each
    matrices, hashes, met = 3 * 2 * D * H * K, 2 * H * 3 * K * 2, 3 * 2
    assert layer.ideal_flops() == matrices + hashes + H * met * (2 * K + 2 * K)
    cold = layer.needed_flops(1, carried=0)
    assert cold.forward == matrices + hashes
    assert cold.backward == 2 * matrices
    warm = layer.needed_flops(1, carried=100)
    assert warm.forward == layer.ideal_flops()
    assert warm.backward == 2 * matrices + H * met * 4 * K  # past keys have no gradient
    again = build(span=100, cache="hidden").needed_flops(10, carried=30)
    assert again.forward - layer.needed_flops(10, carried=30).forward == pytest.approx(3 * (4 * D * H * K + hashes))


def test_memory_grows_as_the_segment_and_not_as_its_square():
    layer, largest_of = build(span=1000, dtype=torch.float32), []
    for length in (200, 400):
        with Largest() as largest:
            layer(inputs(length, dtype=torch.float32)).y.sum().backward()
        largest_of.append(largest.numbers)
    assert largest_of[1] <= 2.1 * largest_of[0]
