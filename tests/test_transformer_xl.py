"""Transformer-XL's attention: against its loop reference in value and every gradient, its limits, its state, its paths."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from harness.count.flops import count_flops
from tests.attention_case import DOUBLE, B, Case, D, assert_near, assert_same, covering, run, starts
from tests.composing import TINY, plan
from tests.reference.transformer_xl import transformer_xl
from variants.attention import Attention
from variants.transformer_xl import TransformerXL

pytestmark = pytest.mark.numeric

UGLY = {
    "length": [1, 4, 9],
    "past": [0, 2, 11],
    "span": [3, 8, 40],
    "heads": [1, 3],
    "d_head": [2, 6],
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
}
VARIANT = "variant=transformer_xl"


def built(case: Case, **keywords) -> TransformerXL:
    """Moved off its start, where u and v are zero and scores are small."""
    torch.manual_seed(0)
    attention = TransformerXL(case.context(), d_head=case.d_head, **keywords).to(DOUBLE)
    with torch.no_grad():
        for parameter in (*attention.position.parameters(), attention.query.weight):
            parameter.normal_()
    return attention


def by_reference(attention: TransformerXL, *, x: Tensor, past: Tensor) -> Tensor:
    """What ``run`` gives, by loops. The past of ``cache: kv`` is constant: its inputs get dimensions of their own, which only
    detached copies of W_k and W_v read."""
    wq, wk, wv, wo = (getattr(attention, name).weight for name in ("query", "key", "value", "output"))
    position = attention.position
    if attention.cache == "kv":
        zeros = torch.zeros_like(wq)
        x, past = torch.cat([x, torch.zeros_like(x)], -1), torch.cat([torch.zeros_like(past), past], -1)
        wq, wk, wv = torch.cat([wq, zeros], 1), torch.cat([wk, wk.detach()], 1), torch.cat([wv, wv.detach()], 1)
        wo = torch.cat([wo, torch.zeros_like(wo)])
    matrices = {"wq": wq, "wk": wk, "wv": wv, "wo": wo, "wr": position.project.weight}
    window = {"span": attention.span.span, "attend_self": attention.shift == 0}
    return transformer_xl(x, **matrices, u=position.to_keys, v=position.to_distances, past=past, **window)[..., :D]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("choice", covering(UGLY, strength=2), ids=lambda c: "-".join(map(str, c.values())))
def test_value_and_every_gradient(choice):
    case = Case(**choice)
    attention = built(case)
    past, x = case.stream()
    named = {"x": x} | dict(attention.named_parameters())
    expected = by_reference(attention, x=x, past=past)
    for backend in ("plain", "chunked", "kernel"):
        attention.wanted_backend = backend
        assert_same(run(attention, x, past), expected, named=named)
    attention.wanted_backend = "fused"
    with pytest.raises(ValueError, match=r"runtime\.backend=fused.*bias depends on the query"):
        run(attention, x, past)


@pytest.mark.parametrize("queries", [1, 40])
def test_both_orders_of_the_products_are_the_same_bias(queries, monkeypatch):
    """W_R meets few queries before the sinusoids, and many queries meet p; the gradients agree too."""
    position = built(Case(span=30)).position
    q = torch.randn(B, 3, queries, 2, dtype=DOUBLE, requires_grad=True)
    assert position.few(q, 30) == (queries == 1)
    found = position.bias(q, 30)
    monkeypatch.setattr(position, "few", lambda *_: queries > 1)
    assert_same(found, position.bias(q, 30), named={"q": q} | dict(position.named_parameters()))


@pytest.mark.parametrize("position", ["none", "relative"])
def test_limits_that_are_other_attention(position):
    """Without W_R and u it has no positions; without u and v, a head has learned vectors that are W_R r."""
    case = Case(length=9, past=7, span=6, heads=1, cache="hidden", position=position)
    other, attention = case.build(), built(case)
    with torch.no_grad():
        attention.position.to_keys.zero_()
        attention.position.to_distances.mul_(position == "none")
        attention.position.project.weight.mul_(position == "relative")
        if position == "relative":
            other.position.table.copy_(attention.position.vectors(6)[0])
    own = dict(other.named_parameters())
    attention.load_state_dict({n: p for n, p in own.items() if not n.startswith("position")}, strict=False)
    past, x = case.stream()
    assert_same(run(attention, x, past), run(other, x, past), named={"x": x})


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("backend", ["plain", "chunked", "kernel"])
@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_segments_and_single_bytes_do_not_matter(cache, backend):
    case = Case(length=70, span=20, cache=cache, attend_self=False, backend=backend)
    attention = built(case)
    _, x = case.stream()
    whole, sizes = attention(x, None, starts(0)).y, set()
    for cuts in ([0, 3, 32, 33, 70], list(range(41)) + [70]):
        pieces, state = [], None
        for begin, end in pairwise(cuts):
            y, state, *_ = attention(x[:, begin:end], state, starts(begin))
            pieces.append(y)
            sizes |= {x.shape for x in (state if isinstance(state, tuple) else [state])} if end >= 20 else set()
        assert_near(torch.cat(pieces, dim=1), whole)
    assert sizes == {(B, 20, D) if cache == "hidden" else (B, 3, 20, 2)}  # however long the stream
    changed = x.detach().clone()
    changed[0, 40] += 1
    differs = (attention(changed, None, starts(0)).y - whole).abs().amax(-1) > 0
    assert differs[0].nonzero().flatten().tolist() == list(range(40, 41 + attention.reach()))
    assert not differs[1].any()


def test_a_float32_stream_stays_with_float64s():
    case = Case(length=1000, span=50, cache="hidden")
    exact, rounded = built(case), built(case).float()
    _, x = case.stream()
    states = [None, None]
    for begin in range(0, 1000, 250):
        piece = x[:, begin : begin + 250]
        (y, states[0], *_), (near, states[1], *_) = exact(piece, states[0]), rounded(piece.float(), states[1])
    assert near.dtype == torch.float32
    assert_near(near.double(), y, tolerance=1e-4)


def test_compiled_it_is_one_graph():
    case = Case(length=8, past=9, span=20, cache="hidden")
    attention = built(case)
    past, x = case.stream()
    state = attention(past).state
    torch.compiler.reset()
    found = torch.compile(attention, backend="eager", fullgraph=True)(x, state)
    torch.compiler.reset()
    expected = attention(x, state)
    assert_same(found.y, expected.y, named={"x": x} | dict(attention.named_parameters()))
    assert_near(attention.trim(found.state), expected.state)


def test_dropout_is_of_training_on_every_path():
    case = Case(length=40, span=8, dropout=0.5)
    _, x = case.stream()
    for backend in ("plain", "chunked"):
        attention = built(case)
        attention.wanted_backend = backend
        y, whole = attention(x).y, attention.eval()(x).y
        assert_near(whole, built(Case(length=40, span=8))(x).y)
        assert not torch.allclose(y, whole)


def test_layers_share_u_and_v_unless_each_has_its_own():
    counts = {}
    for share in ("network", "layer"):
        model = plan(*TINY, VARIANT, f"variant.attention.share={share}").make_model()
        first, second = (sublayer.position for _, sublayer in model.sublayers() if isinstance(sublayer, Attention))
        assert (first.to_keys is second.to_keys) == (first.to_distances is second.to_distances) == (share == "network")
        assert first.project.weight is not second.project.weight and first.to_keys is not first.to_distances
        counts[share] = sum(p.numel() for p in model.parameters())
    usual = sum(p.numel() for p in plan(*TINY, "variant=mhsa").make_model().parameters())
    assert counts == {"network": usual + 2 * 32**2 + 2 * 32, "layer": usual + 2 * 32**2 + 4 * 32}


def test_it_carries_past_inputs_and_needs_no_positions_unless_told():
    made = plan(*TINY, VARIANT)
    assert (made.model.cache, made.scheme.func.__name__) == ("hidden", "NoPosition")
    assert plan(*TINY, VARIANT, "model.cache=kv", "position=sinusoidal").make_model()
    for position in ("rotary", "relative", "alibi"):
        with pytest.raises(ValueError, match=rf"position={position}: .*variant\.attention \(TransformerXL\) cannot"):
            plan(*TINY, VARIANT, f"position={position}").make_model()
    with pytest.raises(ValueError, match=r"variant\.attention\.share=head: allowed are network, layer"):
        plan(*TINY, VARIANT, "variant.attention.share=head").make_model()


def test_no_projection_has_a_bias():
    attention = built(Case())
    assert {name for name, module in attention.named_modules() if isinstance(module, nn.Linear)} == {
        *("query", "key", "value", "output", "position.project")
    }
    assert not any(name.endswith("bias") for name, _ in attention.named_parameters())


@pytest.mark.cpu_kernel
def test_flops_by_hand_and_what_is_executed():
    """At the width of a default head: the number beside K rounds up to whole vectors in values only."""
    context = Case(heads=2, d_head=32, span=512, backend="kernel").context(d_model=64)
    attention = TransformerXL(context).eval()
    assert attention.ideal_flops() == 4 * 2 * 64**2 + 512 * 2 * 3 * 2 * 32
    whole = attention.needed_flops(1024, carried=0).forward
    assert 4 * 2 * 64**2 < whole < attention.ideal_flops()
    x = torch.randn(1, 1024, 64)
    state = attention(x).state
    executed = count_flops(lambda: attention(x, state)).total / 1024
    assert attention.ideal_flops() < executed < 1.5 * attention.ideal_flops()
