"""Reformer: its reference, what a query meets, where segments are cut, what is refused, and that no pair of all is in memory."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention_case import DOUBLE, SCHEMES, B, D, assert_near, assert_same, gradients, starts
from tests.composing import TINY, plan
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


def in_segments(layer: Reformer, x: Tensor, lengths: list[int]) -> tuple[Tensor, tuple]:
    pieces, state, at = [], None, 0
    for piece in x.split(lengths, dim=1):
        out = layer(piece, state, starts(at))
        pieces.append(out.y)
        state, at = out.state, at + piece.shape[1]
    return torch.cat(pieces, dim=1), state


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


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_segments_do_not_matter(cache):
    layer, x = build(cache=cache, position="rotary", span=11, rounds=2), inputs(40)
    whole = layer(x, None, starts(0)).y
    for lengths in ([1] * 40, [7, 1, 20, 12], [39, 1], [3] * 13 + [1]):
        assert_near(in_segments(layer, x, lengths)[0], whole)


def test_no_output_moves_when_a_later_byte_changes():
    layer, x = build(bucket_keys=3, span=30).train(), inputs(29)
    before = layer(x).y
    for at in (1, 7, 16, 28):
        changed = torch.cat([x[:, :at], inputs(1, seed=at + 5), x[:, at + 1 :]], dim=1)
        after = layer(changed).y
        assert_near(after[:, :at], before[:, :at])
        assert (after[:, at] - before[:, at]).abs().max() > 1e-3


@pytest.mark.parametrize("attend_self", [True, False])
def test_reach_is_how_far_it_sees(attend_self):
    layer, x = build(attend_self=attend_self, span=6, bucket_keys=20), inputs(20)
    layer.rotations.zero_()  # one bucket
    x.requires_grad_()
    (gradient,) = gradients(layer(x).y[:, -1], [x])
    far = (gradient.abs().amax((0, 2)) > 1e-9).nonzero().min().item()
    assert 19 - far == layer.reach() == (5 if attend_self else 6)


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


@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_a_long_stream_carries_no_more_and_stays_as_exact(cache):
    """The state of 2000 bytes is as large as that of 1000. In float32 a hash may fall otherwise: single bytes, no drift."""
    sizes, found = [], {}
    for dtype in (torch.float32, DOUBLE):
        layer = build(cache=cache, position="rotary", dtype=dtype)
        x = inputs(2000, dtype=torch.float32).to(dtype)
        _, state = in_segments(layer, x[:, :1000], [100] * 10)
        found[dtype], twice = in_segments(layer, x, [100] * 20)
        sizes.append([[t.shape for t in ([s] if isinstance(s, Tensor) else s)] for s in (state, twice)])
    assert all(one == two for one, two in sizes)
    off = (found[torch.float32].double() - found[DOUBLE]).abs().amax(-1)
    assert off.median() < 1e-6
    assert (off > 1e-4).double().mean() < 0.01


def test_rotations_are_the_models_own():
    one, other = build(), build()
    assert torch.equal(one.state_dict()["rotations"], other.rotations)
    torch.manual_seed(1)
    context = LayerContext(
        d_model=D, layer=0, n_layers=1, heads=1, span=8, scheme=lambda c, *, d_head: SCHEMES["none"](c, d_head=d_head)
    )
    layers = [Reformer(context, buckets=4, rounds=2, bucket_keys=2) for _ in range(2)]
    assert not torch.equal(layers[0].rotations, layers[1].rotations)


@pytest.mark.parametrize(("span", "buckets"), [(512, 8), (4096, 64), (64, 2), (16, 2), (447, 6)])
def test_buckets_follow_the_span_and_stay_what_they_were(span, buckets):
    layer = build(span=span, buckets=None, bucket_keys=64)
    assert layer.buckets == 2 * layer.rotations.shape[-1] == buckets
    layer.set_span(span // 4)
    assert layer.buckets == buckets
    assert build(span=span, buckets=6, bucket_keys=64).buckets == 6


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"buckets": 3}, r"buckets=3: allowed are even integers from 2"),
        ({"buckets": 0}, r"buckets=0: allowed are even integers from 2"),
        ({"rounds": 0}, r"rounds=0: allowed are integers from 1"),
        ({"bucket_keys": 0}, r"bucket_keys=0: allowed are integers from 1"),
        ({"d_head": -1}, r"d_head=-1: must be at least 1"),
    ],
)
def test_sizes_that_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        build(**keywords)


@pytest.mark.parametrize("position", ["relative", "rotary", "alibi", "none", "sinusoidal"])
def test_vectors_for_distances_are_refused_by_name(position):
    made = partial(plan, "variant=reformer", f"position={position}", "data=recall", *TINY)
    if position == "relative":
        with pytest.raises(
            ValueError, match=r"position=relative: adds a vector .*attention \(Reformer\) cannot follow"
        ):
            made().make_model()
    else:
        made().make_model()


def test_dropout_drops_pairs_and_keeps_the_mean():
    layer, x = build(dropout=0.5, span=40, bucket_keys=20, attend_self=True).train(), inputs(20)
    torch.manual_seed(0)
    dropped = layer(x.repeat(1000, 1, 1)).y.unflatten(0, (-1, B))
    expected = layer.eval()(x).y
    assert (dropped.mean(0) - expected).abs().max() < 0.15 * expected.abs().max()
    assert (dropped[0] - expected).abs().max() > 0.1


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


def test_dropout_of_a_byte_does_not_depend_on_later_ones():
    layer, x = build(dropout=0.5, span=20, attend_self=True).train(), inputs(20)
    other = x.clone()
    other[:, 12:] = inputs(8, seed=2)
    found = []
    for given in (x, other):
        torch.manual_seed(0)
        found.append(layer(given).y[:, :12])
    assert_near(*found)


def test_a_compiled_graph_is_whole():
    layer, x = build(position="rotary", rounds=2), inputs(30)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    state = layer(x[:, :15], None, starts(0)).state
    one, other = compiled(x[:, 15:], state, starts(15)), layer(x[:, 15:], state, starts(15))
    assert_same(one.y, other.y, named=dict(layer.named_parameters()))
    after = [layer(x[:, :1], layer.trim(out.state), starts(30)).y for out in (one, other)]
    assert_near(*after)
    torch.compiler.reset()


def test_it_needs_no_data_to_know_its_shapes():
    layer = build(position="rotary")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(B, 20, D, dtype=DOUBLE)
        out = layer(x, layer(x).state, torch.zeros(B, dtype=torch.int64))
        out.y.sum().backward()
    assert out.y.shape == x.shape


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_memory_grows_as_the_segment_and_not_as_its_square():
    layer, found = build(span=1000, dtype=torch.float32), []
    for length in (200, 400):
        with Largest() as largest:
            layer(inputs(length, dtype=torch.float32)).y.sum().backward()
        found.append(largest.elements)
    assert found[1] <= 2.1 * found[0]


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
