"""Linear attention: its reference, its chunks and its sums, on streams short, long and cut anywhere."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.attention_case import DOUBLE, Case, assert_near, assert_same, gradients, run
from tests.composing import plan
from tests.reference import linear as reference
from variants.kernels import carried_sums
from variants.linear import LinearAttention

pytestmark = pytest.mark.numeric


def build(case: Case, **keywords) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(case.context(), d_head=case.d_head, **keywords).to(DOUBLE)


def by_reference(attention: LinearAttention, x, past, *, case: Case, features=reference.elu) -> torch.Tensor:
    return reference.linear_attention(
        x,
        **{f"w{name[0]}": getattr(attention, name).weight for name in ("query", "key", "value", "output")},
        heads=case.heads,
        product=lambda head, query, key: features(query) @ features(key),
        attend_self=case.attend_self,
        position=case.position,
        past=past,
    )


CASES = [
    (Case(length=1, position="alibi"), 3),
    (Case(length=1, attend_self=False), 3),
    (Case(length=1, past=5, position="alibi"), 3),
    (Case(length=9, past=4), 4),
    (Case(length=8, past=3, position="alibi"), 4),
    (Case(length=10, past=3, position="alibi", attend_self=False, span=2), 3),
    (Case(length=9, attend_self=False, heads=2, d_head=3), 2),
    (Case(length=7, past=3, position="alibi"), 1),
    (Case(length=5, past=3, position="alibi", d_head=3), 64),
]


@pytest.mark.parametrize(("case", "chunk"), CASES)
def test_value_and_gradient_by_the_reference(case, chunk, monkeypatch):
    """Chunks that divide the segment, that do not, that are longer; two chunks in memory, and then a loop."""
    monkeypatch.setattr(carried_sums, "AT_ONCE", 2)
    attention = build(case, chunk=chunk)
    past, x = case.stream()
    named = {"x": x} | dict(attention.named_parameters())
    assert_same(run(attention, x, past), by_reference(attention, x, past, case=case), named=named)


@pytest.mark.parametrize("attend_self", [True, False])
def test_relu_by_the_reference_where_weights_may_all_be_zero(attend_self):
    case = Case(length=6, past=2, attend_self=attend_self, heads=5)
    attention = build(case, chunk=4, feature_map="relu")
    past, x = case.stream()
    expected = by_reference(attention, x, past, case=case, features=reference.relu)
    named = {"x": x} | dict(attention.named_parameters())
    assert_same(run(attention, x, past), expected, named=named)
    attention.output = torch.nn.Identity()
    heads = run(attention, x, past).unflatten(-1, (5, 2)).abs().sum(-1)
    assert (heads == 0).any(), "no query is without weight"


@pytest.mark.parametrize("position", ["none", "alibi"])
def test_cut_anywhere_it_is_the_same(position):
    case = Case(length=29, position=position)
    attention = build(case, chunk=4)
    x = case.stream()[1].detach()
    whole = attention(x)
    for cuts in ([1] * 29, [3, 4, 5, 17], [28, 1], [4, 8, 16, 1]):
        state, pieces = None, []
        for piece in x.split(cuts, dim=1):
            y, state, *_ = attention(piece, state)
            pieces.append(y)
        assert_near(torch.cat(pieces, dim=1), whole.y)
        for one, other in zip(state, whole.state, strict=True):
            assert_near(one, other)


def test_no_key_gives_zero_and_the_first_key_gives_its_value():
    case = Case(length=4, attend_self=False)
    attention = build(case, bias=True, chunk=3)
    x = case.stream()[1]
    attention.output = torch.nn.Identity()
    y = attention(x).y
    assert y[:, 0].abs().max() == 0
    assert_near(y[:, 1], attention.value(x[:, 0]))
    assert all(g.isfinite().all() for g in gradients(y, [x, *attention.query.parameters()]))


def test_features_far_below_zero_do_not_round_to_nothing():
    """elu(x) + 1 in float32, added up, is 0 from -17 on."""
    case = Case(length=6)
    attention = build(case, bias=True, chunk=4)
    with torch.no_grad():
        attention.query.bias -= 30
        attention.key.bias -= 30
    x = case.stream()[1].detach()
    expected = attention(x).y
    assert_near(attention.float()(x.float()).y.double(), expected, tolerance=1e-5)


@pytest.mark.parametrize("position", ["none", "alibi"])
def test_a_long_stream_in_float32_stays_near_float64(position):
    case = Case(heads=2, d_head=4, position=position, length=4000)
    x = case.stream()[1].detach()
    found = []
    for dtype in (torch.float32, DOUBLE):
        attention, state, last = build(case, chunk=32).to(dtype), None, None
        with torch.no_grad():
            for piece in x.to(dtype).split([333] * 12 + [1] * 4, dim=1):
                last, state, *_ = attention(piece, state)
        found.append((last, state))
    assert_near(found[0][0].double(), found[1][0], tolerance=1e-5)
    assert all(s.dtype == torch.float32 for s in found[0][1])


def test_state_has_one_size_and_is_made_of_no_graph():
    case = Case(length=40, position="alibi")
    attention = build(case, chunk=4)
    x = case.stream()[1]
    sizes = {tuple(tuple(part.shape) for part in attention(x[:, :n]).state) for n in (1, 7, 40)}
    assert sizes == {((2, 3, 2, 3),)}
    assert not attention(x).state[0].requires_grad


class Largest(TorchDispatchMode):
    """Most numbers that one operation returned."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def test_memory_goes_by_the_segment():
    """Nothing has T x T or T x F x K numbers, forward or backward."""
    case, length = Case(heads=2, d_head=16), 512
    attention = build(case, chunk=16)
    x = torch.randn(1, length, 5, dtype=DOUBLE, requires_grad=True)
    with Largest() as largest:
        attention(x).y.sum().backward()
    assert largest.numbers <= 2 * length * 3 * 17


def test_executed_flops_are_near_the_ideal():
    torch.manual_seed(0)
    case = Case(heads=4, d_head=32)
    attention = LinearAttention(case.context(d_model=128))
    with FlopCounterMode(display=False) as counter:
        attention(torch.randn(1, 1024, 128))
    assert counter.get_total_flops() / 1024 == pytest.approx(attention.ideal_flops(), rel=0.15)
    assert attention.ideal_flops() == 8 * 128 * 128 + 4 * 2 * 32 * 65
    assert attention.needed_flops(7, carried=0).training == 3 * attention.ideal_flops()


def test_one_graph():
    case = Case(length=5, past=3, position="alibi", attend_self=False)
    attention = build(case, chunk=4)
    past, x = case.stream()
    state, expected = attention(past).state, run(attention, x, past)
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=False)
    assert_same(compiled(x, state).y, expected, named={"x": x} | dict(attention.named_parameters()))


def test_autocast_sums_in_float32():
    case = Case(length=40)
    attention = build(case, chunk=8).float()
    x = case.stream()[1].float()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x)
    assert out.state[0].dtype == torch.float32
    assert out.y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["position=rotary"], "position=rotary"),
        (["position=relative"], "position=relative"),
        (["model.cache=hidden"], "model.cache=hidden"),
        (["variant.attention.chunk=0"], "chunk=0: allowed are integers from 1"),
        (["variant.attention.feature_map=cosine"], "feature_map=cosine: allowed are elu, relu"),
        (["model.heads=3"], "model.heads=3 must divide model.d_model=128"),
    ],
)
def test_refused(words, match):
    with pytest.raises(ValueError, match=match):
        plan("variant=linear", "data=recall", *words).make_model()


def test_heads_have_a_width():
    with pytest.raises(ValueError, match="d_head=0: must be at least 1"):
        build(Case(d_head=0))


def test_the_papers_has_no_decay_and_all_go_the_way_back():
    schemes = {"linear": "NoPosition", "linear_decay": "Alibi", "performer": "NoPosition", "performer_decay": "Alibi"}
    for variant, scheme in schemes.items():
        found = plan(f"variant={variant}", "data=recall")
        assert found.config["position"]["_target_"] == f"variants.position.{scheme}"
    attention = build(Case())
    assert attention.reach() is None
    assert attention.honours.span is False
