"""Longformer beside its paper's equations, where it must be plain attention, and what it sees, carries and refuses."""

import pytest
import torch
from torch import Tensor

from bench.conformance import findings
from harness.plan.small import shrunk
from tests.attention_case import (
    DOUBLE,
    SCHEMES,
    B,
    Case,
    D,
    assert_near,
    assert_same,
    covering,
    gradients,
    matrices,
    run,
)
from tests.composing import plan
from tests.reference.longformer import longformer_attention, visible_keys
from variants.attention import Attention
from variants.contract import cat_streams
from variants.longformer import Longformer, grown_dilation, grown_window

HEADS, SPAN = 3, 12


def build(
    window: int = 4, step: int = 3, *, dilated: int = 2, first: int = 0, dtype: torch.dtype = DOUBLE, **of_case
) -> Longformer:
    """A layer whose last ``dilated`` of three heads have a step, with weights that depend on nothing but the seed."""
    context = Case(**{"heads": HEADS, "span": SPAN} | of_case).context()
    sizes = {"windows": (window,), "dilation": (step,), "dilated_heads": dilated, "global_bytes": first}
    torch.manual_seed(0)
    return Longformer(context, d_head=2, **sizes).to(dtype)


def stream(length: int, *, seed: int = 1, streams: int = B) -> Tensor:
    return torch.randn(streams, length, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def by_paper(layer: Longformer, x: Tensor, past: Tensor, *, position: str) -> Tensor:
    return longformer_attention(
        x,
        **matrices(layer),
        windows=list(layer.span.visible_keys()),
        dilations=list(layer.span.steps),
        attend_self=not layer.shift,
        position=position,
        table=getattr(layer.position, "table", None),
        global_positions=layer.global_bytes,
        past=past,
        past_is_constant=layer.cache == "kv",
    )


FACTORS = {
    "length": [1, 2, 7],
    "past": [0, 1, 4, 13],
    "window": [1, 4],
    "step": [1, 2, 3],
    "dilated": [1, 3],
    "position": list(SCHEMES),
    "cache": ["kv", "hidden"],
    "attend_self": [True, False],
    "backend": ["plain", "auto", "chunked", "fused"],
}
WITH_FIRST = FACTORS | {
    "length": [1, 5],
    "past": [0, 1, 9],
    "first": [1, 5],
    "position": ["none", "rotary", "alibi"],
    "backend": ["plain", "auto"],
}


@pytest.mark.numeric
@pytest.mark.parametrize("case", [*covering(FACTORS, strength=2), *covering(WITH_FIRST, strength=2)], ids=str)
def test_value_and_every_gradient_are_the_papers(case):
    sizes = dict(case)
    length, before = sizes.pop("length"), sizes.pop("past")
    if (sizes["backend"], sizes["position"]) == ("fused", "relative"):
        sizes["backend"] = "auto"
    layer, everything = build(**sizes), stream(before + length)
    past, x = everything[:, :before], everything[:, before:].clone().requires_grad_()
    named = {"x": x} | dict(layer.named_parameters())
    assert_same(run(layer, x, past), by_paper(layer, x, past, position=sizes["position"]), named=named)


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_undilated_windows_of_all_are_plain_attention(backend, cache):
    case = Case(heads=HEADS, span=SPAN, position="rotary", cache=cache, backend=backend)
    plain, layer = case.build(), build(SPAN, 1, position="rotary", cache=cache, backend=backend)
    plain.load_state_dict(layer.state_dict())
    everything = stream(28)
    past, x = everything[:, :15], everything[:, 15:].clone().requires_grad_()
    assert isinstance(layer, Attention) and layer.ideal_flops() == plain.ideal_flops()
    for carried in (0, 5, 40):
        assert layer.needed_flops(7, carried=carried) == plain.needed_flops(7, carried=carried)
    theirs = dict(plain.named_parameters())
    one, other = run(layer, x, past), run(plain, x, past)
    assert_near(one, other)
    for mine, their in zip(
        gradients(one, [x, *layer.parameters()]), gradients(other, [x, *theirs.values()]), strict=True
    ):
        assert_near(mine, their)


@pytest.mark.numeric
def test_windows_and_dilation_by_depth():
    assert [grown_window(512, layer=i, n_layers=4) for i in range(4)] == [32, 64, 128, 256]
    assert [grown_window(13, layer=i, n_layers=2) for i in range(2)] == [2, 6]
    assert grown_window(512, layer=0, n_layers=1) == 256
    small = [0] * 6 + [1, 1, 2, 2, 3, 3]  # gaps of the paper's models of 12 and of 30 layers
    assert [grown_dilation(layer=i, n_layers=12) - 1 for i in range(12)] == small
    large = [0] * 15 + [1] * 5 + [2] * 5 + [3] * 5
    assert [grown_dilation(layer=i, n_layers=30) - 1 for i in range(30)] == large
    layers = [Longformer(Case(heads=4, span=512).context(layer=i, n_layers=4), d_head=2) for i in range(4)]
    assert [layer.span.visible_keys() for layer in layers] == [
        (32,) * 4,
        (64,) * 4,
        (128, 128, 128, 128),
        (256, 256, 171, 171),
    ]
    assert [layer.reach() for layer in layers] == [31, 63, 254, 510]
    assert [layer.period for layer in layers] == [1, 1, 2, 3]
    layers[3].set_span(64)
    assert layers[3].span.visible_keys() == (32, 32, 22, 22)
    assert build(4, 6, dilated=1).span.visible_keys() == (4, 4, 2)  # S = 12 leaves distances 0 and 6
    given = build(10, 2, dilated=1)
    given.set_span(7)
    assert given.span.visible_keys() == (7, 7, 4)
    given.set_span(100)
    assert given.span.visible_keys() == (10, 10, 10)


@pytest.mark.numeric
@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_streams_of_a_batch_have_first_bytes_and_phases_of_their_own(cache):
    """Bytes seen are 12, 17 and 200 of 15 first ones: the first two go on to fill theirs."""
    layer = build(4, 3, first=15, cache=cache, position="alibi", backend="auto")
    lengths, more = (12, 17, 200), stream(9, streams=3, seed=5)
    alone = [stream(n, streams=1, seed=n) for n in lengths]
    states = [layer(x, None, torch.tensor([0])).state for x in alone]
    found = layer(more, cat_streams(states), torch.tensor(lengths)).y
    for i, (n, x) in enumerate(zip(lengths, alone, strict=True)):
        whole = layer(torch.cat([x, more[i : i + 1]], dim=1), None, torch.tensor([0])).y
        assert_near(found[i : i + 1], whole[:, n:], what=f"after {n} bytes")


@pytest.mark.numeric
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_needed_flops_by_loops_over_pairs(first, attend_self, cache):
    layer = build(3, 3, first=first, attend_self=attend_self, cache=cache)
    matrices = 4 * 2 * D * 2 * HEADS
    for segment, carried in ((1, 0), (2, 1), (7, 0), (7, 3), (5, 30)):
        own = past = inputs = 0
        for window, step in zip(layer.span.visible_keys(), layer.span.steps, strict=True):
            far = set()
            for t in range(carried, carried + segment):
                seen = {"window": window, "dilation": step, "global_positions": first, "attend_self": attend_self}
                keys = visible_keys(t, **seen)
                far |= {j for j in keys if j < carried}
                own, past = own + sum(j >= carried for j in keys), past + sum(j < carried for j in keys)
            inputs += len(far)
        forward = matrices + 4 * 2 * (own + past) / segment
        backward = 2 * forward - (4 * 2 * past / segment if cache == "kv" else 0)
        if cache == "hidden":
            again = 4 * 2 * D * inputs / segment
            forward, backward = forward + again, backward + again
        assert layer.needed_flops(segment, carried=carried) == pytest.approx((forward, backward))
    warm = layer.needed_flops(5, carried=100)._replace(backward=0)
    assert cache == "hidden" or layer.ideal_flops() == pytest.approx(warm.forward)


def test_lists_for_each_layer_are_checked_on_a_small_model_of_other_layers():
    words = ("variant.attention.windows=[32,85,170,256]", "variant.attention.dilation=[1,1,2,3]")
    found = findings(shrunk(plan("variant=longformer", *words)))
    assert len(found) > 1 and all(finding.passed for finding in found)
