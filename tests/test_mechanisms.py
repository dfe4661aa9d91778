"""What holds of every mechanism beyond its reference and the contract's suite: compiled it is one graph, a long stream makes no
larger state and stays exact, streams of a batch stand anywhere, nothing looks at values, dropout keeps the mean, and what it
cannot follow is refused by name."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.attention_case import Case, Largest, assert_near, assert_same
from tests.composing import TINY, plan, sized
from variants.conformance import move
from variants.conformance.fixture import leaves
from variants.contract import Sublayer, cat_streams, map_state
from variants.differential import Differential
from variants.latent import Latent
from variants.linear import LinearAttention
from variants.linformer import Linformer
from variants.local import LocalAttention
from variants.longformer import Longformer
from variants.nsa import NativeSparse
from variants.perceiver_ar import LatentAttention
from variants.reformer import Reformer

WIDTH, STREAMS = 32, 2
CPU = torch.device("cpu")


def mechanism(variant: str, *words: str) -> Sublayer:
    """The last sublayer that sees a past, at the small sizes that the variant's file names, in float64, off its start."""
    torch.manual_seed(0)
    model = plan(*TINY, *sized(variant), "data=recall", *words).make_model()
    sees = [sublayer for _, sublayer in model.sublayers() if sublayer.honours is not None]
    return move(sees[-1].double())


def inputs(length: int, *, streams: int = STREAMS) -> Tensor:
    return torch.randn(streams, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def at(place: int, *, streams: int = STREAMS) -> Tensor:
    return torch.full((streams,), place)


GRAPHS = ["local runtime.backend=fused", "gated_delta model.attend_self=false"]
MORE_GRAPHS = (
    *("longformer runtime.backend=fused model.cache=hidden model.attend_self=false", "nsa runtime.backend=fused"),
    *("differential runtime.backend=fused", "latent runtime.backend=fused", "compressed_top_k runtime.backend=plain"),
    *("performer_decay model.attend_self=false", "gated_linear model.attend_self=false"),
    *("gated_delta_channel", "reformer"),
)


@pytest.mark.parametrize("words", [*GRAPHS, *(pytest.param(words, marks=pytest.mark.faults) for words in MORE_GRAPHS)])
def test_compiled_it_is_one_graph(words):
    """Value, every gradient and the state that is carried, of two segments behind a past."""
    layer, x = mechanism(*words.split()), inputs(60)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    state = layer(x[:, :20], None, at(0)).state
    for place in (20, 40):
        segment = x[:, place : place + 20].clone().requires_grad_()
        one, expected = (layer_of(segment, state, at(place)) for layer_of in (compiled, layer))
        assert_same(one.y, expected.y, named={"x": segment} | dict(layer.named_parameters()))
        for mine, theirs in zip(leaves(layer.trim(one.state)), leaves(expected.state), strict=True):
            assert_near(mine.double(), theirs.double())
        state = expected.state
    torch.compiler.reset()


STEADY = (
    *("local position=rotary", "compressed_top_k position=rotary", "nsa position=rotary", "latent position=rotary"),
    *("longformer position=rotary model.cache=hidden", "reformer position=rotary model.cache=hidden"),
    *("transformer_xl model.cache=hidden", "linear_decay", "differential"),
    *("gated_linear", "gated_delta", "gated_delta_channel"),
)


@pytest.mark.numeric
@pytest.mark.parametrize("words", STEADY)
def test_a_state_does_not_grow_and_float32_stays_near(words):
    """Over a thousand bytes in segments of 125, and then single bytes, far along. Where a rounded score chooses keys otherwise,
    only single bytes are off."""
    layers = {dtype: mechanism(*words.split()).to(dtype) for dtype in (torch.float64, torch.float32)}
    lengths, place = [125] * 8 + [1] * 8, 10**7
    states, shapes, off = dict.fromkeys(layers), [], []
    with torch.no_grad():
        for piece in inputs(sum(lengths)).split(lengths, 1):
            outs = {dtype: layer(piece.to(dtype), states[dtype], at(place)) for dtype, layer in layers.items()}
            states, place = {dtype: out.state for dtype, out in outs.items()}, place + piece.shape[1]
            shapes.append([part.shape for part in leaves(states[torch.float64])])
            off.append((outs[torch.float32].y.double() - outs[torch.float64].y).abs().amax(-1))
    assert all(shape == shapes[0] for shape in shapes)
    rounded = [outs[torch.float32].y, *leaves(states[torch.float32])]
    assert all(part.dtype == torch.float32 for part in rounded if part.is_floating_point())
    off = torch.cat(off, dim=1)
    if words.startswith(("compressed_top_k", "nsa", "reformer")):
        assert off.median() < 1e-6 and (off > 1e-4).double().mean() < 0.01
    else:
        assert off.max() < 1e-5


@pytest.mark.numeric
@pytest.mark.parametrize(
    "words", ["compressed runtime.backend=plain position=rotary", "compressed_top_k position=alibi model.cache=hidden"]
)
def test_streams_of_a_batch_may_be_at_any_phase_and_of_any_age(words):
    layer, x = mechanism(*words.split()), inputs(90, streams=1)
    ages = [1, 5, 24, 25, 60]
    state = cat_streams([layer(x[:, :age], None, at(0, streams=1)).state for age in ages])
    start, pieces = torch.tensor(ages), []
    for length in (1, 20, 4):
        out = layer(torch.cat([x[:, first : first + length] for first in start.tolist()]), state, start)
        state, start = out.state, start + length
        pieces.append(out.y)
    whole = layer(x, None, at(0, streams=1)).y
    for row, age in zip(torch.cat(pieces, dim=1), ages, strict=True):
        assert_near(row, whole[0, age : age + 25], tolerance=1e-9)


@pytest.mark.parametrize(
    "words",
    [
        "compressed_top_k runtime.backend=plain",
        "nsa runtime.backend=plain",
        pytest.param("compressed runtime.backend=kernel", marks=pytest.mark.cpu_kernel),
        "reformer position=rotary",
        "performer_decay",
        "gated_delta_channel",
    ],
)
def test_nothing_looks_at_values(words):
    """Forward and backward of tensors that have none, which any look at a value would end."""
    layer = mechanism(*words.split())
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(STREAMS, 40, WIDTH, dtype=torch.float64)
        out = layer(x, layer(x, None, at(0)).state, at(40))
        total = out.y.sum() + (0 if out.loss is None else out.loss)
        gradients = torch.autograd.grad(total, list(layer.parameters()))
    assert [g.shape for g in gradients] == [p.shape for p in layer.parameters()]


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *(("mhsa", "plain"), ("compressed", "plain"), ("nsa", "plain"), ("reformer", "auto")),
        *(("local", "chunked"), ("longformer", "chunked")),
    ],
)
def test_dropout_keeps_the_mean_follows_the_seed_and_is_for_training(variant, backend):
    """Where a stream begins, and behind a past; and it tells an earlier byte nothing of a later."""
    words = ("model.dropout=0.5", f"runtime.backend={backend}")
    layer, still = mechanism(variant, *words), mechanism(variant, words[1])
    for past, length in ((0, 12), (20, 9)):
        x = inputs(45, streams=1)[:, : past + length]
        state = layer.eval()(x[:, :past], None, at(0, streams=1)).state if past else None
        expected, y = (one.eval()(x[:, past:], state, at(past, streams=1)).y for one in (still, layer))
        assert_near(y, expected)

        def drawn(x: Tensor, seed: int, *, streams: int = 1, state=state, past=past) -> Tensor:
            torch.manual_seed(seed)
            many = map_state(lambda part: part.expand(streams, *part.shape[1:]), state)
            with torch.no_grad():
                return layer.train()(x[:, past:].expand(streams, -1, -1), many, at(past, streams=streams)).y

        off = (drawn(x, 3, streams=2000).mean(0) - expected[0]).detach()
        assert off.abs().max() < 0.1 * expected.abs().max() and off.norm() < 0.1 * expected.norm()
        assert torch.equal(drawn(x, 1), drawn(x, 1)) and not torch.allclose(drawn(x, 1), drawn(x, 2))
        early = length // 2
        later = torch.cat([x[:, : past + early], x[:, past + early :] + 1], dim=1)
        assert_near(drawn(later, 1)[:, :early], drawn(x, 1)[:, :early])


@pytest.mark.parametrize(
    "variant", ["linear", "performer", "gated_linear", "gated_delta", "gated_delta_channel", "reformer"]
)
def test_memory_goes_by_the_segment(variant):
    """Forward and backward make nothing that has a number for each pair of places."""
    layer, sizes = mechanism(variant, "model.span=1000"), []
    for length in (200, 400):
        with Largest() as largest:
            layer(inputs(length)).y.sum().backward()
        sizes.append(largest.numbers)
    assert sizes[1] <= 2.1 * sizes[0]


REFUSED = [
    (LinearAttention, {"chunk": 0}, "chunk=0: allowed are numbers from 1"),
    (Differential, {}, "model.heads=3: must be even"),
    (Latent, {"latent": 0}, "latent=0: allowed are numbers from 1, or null for 2 d_head"),
    (Reformer, {"buckets": 3, "rounds": 1, "bucket_keys": 1}, "buckets=3: allowed are even integers from 2"),
    (Longformer, {"windows": (9,)}, r"windows=\[9\]: must be 1 integers, one for each layer, from 1 to model.span=8"),
    (Longformer, {"dilated_heads": 4}, "dilated_heads=4: allowed are 0 to model.heads=3"),
    (LatentAttention, {"latents": 9}, "latents=9: allowed are integers from 1 to model.span=8"),
    (LocalAttention, {"block": 1, "attend_self": False}, "block=1: allowed are integers from 2 to model.span=8"),
    (Linformer, {"ratio": 3, "share": "all"}, "share=all with compressor=linear: allowed are none, heads, key_value"),
    (NativeSparse, {"block": 9}, "block=9: allowed are integers from 1 to model.span=8"),
    (NativeSparse, {"window": 0}, "window=0: allowed are numbers from 1"),
    (Linformer, {"ratio": 3, "window": 8}, "model.span=8: must be above window=8 and ratio=3"),
]


@pytest.mark.parametrize(("make", "choices", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_size_is_refused_by_name(make, choices, message):
    keywords = {"d_head": 2} | choices
    context = Case(attend_self=keywords.pop("attend_self", True)).context()
    with pytest.raises(ValueError, match=message):
        make(context, **keywords)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("variant=linear position=rotary", "position=rotary"),
        ("variant=linear model.cache=hidden", "model.cache=hidden"),
        ("variant=reformer position=relative", r"adds a vector .*attention \(Reformer\) cannot follow"),
        ("variant=transformer_xl position=alibi", r"position=alibi: .*variant\.attention \(TransformerXL\) cannot"),
    ],
)
def test_a_choice_that_it_cannot_follow_is_refused_by_name(words, message):
    with pytest.raises(ValueError, match=message):
        plan(*TINY, *words.split()).make_model()
