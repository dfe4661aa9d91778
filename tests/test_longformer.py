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
    run,
    starts,
)
from tests.composing import TINY, plan
from tests.reference.longformer import longformer_attention, visible_keys
from variants.attention import Attention
from variants.contract import State, cat_streams, map_state
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
    linears = (layer.query, layer.key, layer.value, layer.output)
    table = getattr(layer.position, "table", None)
    weights = dict(zip(("wq", "wk", "wv", "wo"), (linear.weight for linear in linears), strict=True))
    return longformer_attention(
        x,
        **weights,
        windows=list(layer.span.visible_keys()),
        dilations=list(layer.span.steps),
        attend_self=not layer.shift,
        position=position,
        table=table,
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
    outputs = []
    for made in (layer, plain):
        y = run(made, x, past)
        outputs.append([y, *gradients(y, [x, *made.parameters()])])
    for mine, theirs in zip(*outputs, strict=True):
        assert_near(mine, theirs)


@pytest.mark.numeric
def test_first_bytes_make_a_narrow_window_see_all():
    narrow, whole = build(1, 1, first=20, position="alibi"), build(12, 1, position="alibi")
    x = stream(12)
    assert_near(run(narrow, x, x[:, :0]), run(whole, x, x[:, :0]))


def seen_from(layer: Longformer, at: int, head: int) -> list[int]:
    """Bytes of a cold stream on which the values of one head at a byte depend."""
    x = stream(at + 3).requires_grad_()
    with torch.no_grad():
        layer.output.weight.zero_()[0, 2 * head] = 1.0
        layer.query.weight.zero_()  # so that keys do not matter: what is left are values
    (moved,) = torch.autograd.grad(layer(x, None, starts(0)).y[0, at, 0], x)
    return (moved[0].abs().amax(-1) > 1e-12).nonzero().flatten().tolist()


@pytest.mark.numeric
def test_what_is_seen_by_hand():
    layer = build(3, 2, dilated=1)
    assert seen_from(layer, 10, 0) == [8, 9, 10]
    assert seen_from(layer, 10, 2) == [6, 8, 10]
    assert layer.reach() == 4
    layer = build(3, 4, dilated=1, attend_self=False)  # the nearest is seen whatever the step
    assert seen_from(layer, 10, 0) == [7, 8, 9]
    assert seen_from(layer, 10, 2) == [1, 5, 9]
    assert layer.reach() == 9
    layer = build(4, 6, dilated=1)  # S = 12 leaves distances 0 and 6
    assert seen_from(layer, 13, 2) == [7, 13]
    layer = build(2, 3, dilated=1, first=2, attend_self=False)
    assert seen_from(layer, 10, 0) == [0, 1, 8, 9]
    assert seen_from(layer, 10, 2) == [0, 1, 6, 9]
    assert layer.reach() is None


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
    given = build(10, 2, dilated=1)
    given.set_span(7)
    assert given.span.visible_keys() == (7, 7, 4)
    given.set_span(100)
    assert given.span.visible_keys() == (10, 10, 10)


CUTS = [(1, 2, 3, 17), (7,), (12, 13, 20), tuple(range(1, 21))]


@pytest.mark.numeric
@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("attend_self", [True, False])
def test_segments_do_not_matter(cache, first, attend_self):
    layer = build(4, 3, first=first, cache=cache, attend_self=attend_self, position="rotary", backend="auto")
    x = stream(21)
    whole = layer(x, None, starts(0)).y
    for cuts in CUTS:
        state, found = None, []
        for begin, end in zip((0, *cuts), (*cuts, 21), strict=True):
            out = layer(x[:, begin:end], state, starts(begin))
            found.append(out.y)
            state = out.state
        assert_near(torch.cat(found, dim=1), whole, what=str(cuts))


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
@pytest.mark.parametrize("cache", ["kv", "hidden"])
@pytest.mark.parametrize("first", [0, 6])
def test_a_state_does_not_grow_and_float32_stays_near(cache, first):
    """State of the longest reach and no more; the same after twice as many bytes, with first bytes far behind."""
    sizes = {"first": first, "cache": cache, "position": "rotary", "backend": "auto"}
    layers = {dtype: build(4, 3, dtype=dtype, **sizes) for dtype in (DOUBLE, torch.float32)}
    x, shapes, states = stream(1600), [], dict.fromkeys(layers)
    with torch.no_grad():
        for begin in range(0, 1600, 400):
            found = {}
            for dtype, layer in layers.items():
                out = layer(x[:, begin : begin + 400].to(dtype), states[dtype], starts(begin))
                found[dtype], states[dtype] = out.y, out.state
            assert_near(found[torch.float32].double(), found[DOUBLE], tolerance=1e-4)
            shapes.append(shapes_of(states[DOUBLE]))
    dim = 1 if cache == "hidden" else 2
    assert shapes[0] == shapes[-1]
    of_first = 0 if not first else 2 if cache == "hidden" else 3  # bytes seen, and keys and values or inputs
    of_window = shapes[0][: len(shapes[0]) - of_first]
    assert max(shape[dim] for shape in of_window) == 9  # 3 (4 - 1)
    layers[DOUBLE].set_span(2)
    shorter = shapes_of(layers[DOUBLE].trim(states[DOUBLE]))
    assert {shape[dim] for shape in shorter[: len(of_window)]} <= {0, 1}
    assert shorter[len(of_window) :] == shapes[0][len(of_window) :]


def shapes_of(state: State) -> list[tuple[int, ...]]:
    found = []
    map_state(lambda x: found.append(tuple(x.shape)), state)
    return found


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


def test_it_is_one_graph_where_attention_is_one_operation():
    sizes = {"cache": "hidden", "attend_self": False}  # gradients go to weights by the past, too
    layer, plain = (build(2, 3, backend=backend, **sizes) for backend in ("fused", "plain"))
    torch.compiler.reset()
    compiled, state, expected = torch.compile(layer, backend="eager", fullgraph=True), None, None
    x = stream(14)
    for begin in (0, 7):
        at, given = starts(begin), x[:, begin : begin + 7]
        out, wanted = compiled(given, state, at), plain(given, expected, at)
        assert_near(out.y, wanted.y)
        assert_near(gradients(out.y, [layer.key.weight])[0], gradients(wanted.y, [plain.key.weight])[0])
        state, expected = layer.trim(out.state), wanted.state
    torch.compiler.reset()


@pytest.mark.parametrize("first", [0, 4])
def test_dropout_drops_weights_and_keeps_their_mean(first):
    sizes = {"first": first, "backend": "auto"}
    dropping, still = build(4, 3, dropout=0.5, **sizes), build(4, 3, **sizes)
    x = stream(9, streams=1)
    torch.manual_seed(3)
    with torch.no_grad():
        drawn = dropping(x.expand(800, -1, -1), None, torch.zeros(800, dtype=torch.int64)).y
        assert_near(dropping.eval()(x).y, still(x).y)
        assert drawn.std(dim=0).max() > 0.01
        assert_near(drawn.mean(dim=0), still(x).y[0], tolerance=0.1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["windows=[4]"], r"windows=\[4\]: must be 2 integers, one for each layer, from 1 to model\.span=16"),
        (["windows=[4,17]"], r"windows=\[4, 17\]: must be 2 integers"),
        (["windows=[0,3]"], r"windows=\[0, 3\]: must be 2 integers"),
        (["dilation=[1,0]"], r"dilation=\[1, 0\]: must be 2 integers, .* at least 1; or null"),
        (["dilated_heads=3"], r"dilated_heads=3: allowed are 0 to model\.heads=2"),
        (["global_bytes=-1"], r"global_bytes=-1: must be at least 0"),
        (["global_bytes=2", "position=relative"], r"position=relative: .*Longformer.* cannot follow"),
        (["global_bytes=2", "runtime.backend=fused"], r"backend=fused cannot run with global_bytes .* chunked, plain"),
    ],
)
def test_wrong_choices_are_refused_by_name(words, told):
    of_run = ("position", "runtime")
    words = [word if word.startswith(of_run) else f"variant.attention.{word}" for word in words]
    with pytest.raises(ValueError, match=told):
        for _, sublayer in plan(*TINY, "variant=longformer", *words).make_model().sublayers():
            sublayer.backend(torch.device("cpu"), training=True)


def test_lists_for_each_layer_are_checked_on_a_small_model_of_other_layers():
    words = ("variant.attention.windows=[32,85,170,256]", "variant.attention.dilation=[1,1,2,3]")
    found = findings(shrunk(plan("variant=longformer", *words)))
    assert len(found) > 1 and all(finding.passed for finding in found)
