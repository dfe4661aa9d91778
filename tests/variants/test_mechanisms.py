"""Properties of many mechanisms: one compiled graph, long streams, changing spans, dropout,
memory, refused sizes."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.support.attention_case import Case, LargestTensor, assert_near, assert_same
from tests.support.reference_case import normal
from tests.support.small_configs import TINY, plan, sized
from variants.adaptive_span import AdaptiveSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.conformance import perturb
from variants.conformance.fixture import state_tensors
from variants.contract import Sublayer, cat_streams, map_state
from variants.differential import Differential
from variants.latent import Latent
from variants.linear import LinearAttention
from variants.linformer import Linformer
from variants.local import LocalAttention
from variants.longformer import Longformer
from variants.nsa import NativeSparse
from variants.perceiver_ar import PerceiverAR
from variants.position import Relative
from variants.reformer import Reformer

WIDTH, STREAMS = 32, 2


def mechanism(variant: str, *words: str) -> Sublayer:
    """Return the last sublayer of a variant that sees a past, in float64, with noise added to its
    initial parameters."""
    torch.manual_seed(0)
    model = plan(*TINY, *sized(variant), "data=recall", *words).make_model()
    with_past = [sublayer for _, sublayer in model.sublayers() if sublayer.honours is not None]
    return perturb(with_past[-1].double())


def inputs(length: int, *, streams: int = STREAMS) -> Tensor:
    return normal(streams, length, WIDTH).detach()


def starts(position: int, *, streams: int = STREAMS) -> Tensor:
    """Return the same stream position for every stream."""
    return torch.full((streams,), position)


SHIFT = "variant.attention.key_shift=true"
GRAPHS = [
    "local runtime.backend=fused",
    "gated_delta model.attend_self=false",
    f"mhsa runtime.backend=fused {SHIFT}",
]
MORE_GRAPHS = (
    *(
        "longformer runtime.backend=fused model.cache=hidden model.attend_self=false",
        "nsa runtime.backend=fused",
    ),
    *(
        "differential runtime.backend=fused",
        "latent runtime.backend=fused",
        "compressed_top_k runtime.backend=plain",
    ),
    *("performer_decay model.attend_self=false", "gated_linear model.attend_self=false"),
    *("gated_delta_channel", "reformer", f"linear {SHIFT}", f"nsa runtime.backend=fused {SHIFT}"),
    *(
        f"local runtime.backend=fused model.cache=hidden {SHIFT}",
        f"latent runtime.backend=fused {SHIFT}",
    ),
    f"compressed_top_k runtime.backend=plain model.cache=hidden {SHIFT}",
)


@pytest.mark.parametrize(
    "words", [*GRAPHS, *(pytest.param(words, marks=pytest.mark.faults) for words in MORE_GRAPHS)]
)
def test_a_mechanism_compiles_to_one_graph_with_the_same_output_gradients_and_state(words):
    layer, x = mechanism(*words.split()), inputs(60)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    state = layer(x[:, :20], None, starts(0)).state
    for position in (20, 40):
        segment = x[:, position : position + 20].clone().requires_grad_()
        actual, expected = (
            forward(segment, state, starts(position)) for forward in (compiled, layer)
        )
        assert_same(actual.y, expected.y, named={"x": segment} | dict(layer.named_parameters()))
        states = (state_tensors(layer.trim(actual.state)), state_tensors(expected.state))
        for part, expected_part in zip(*states, strict=True):
            assert_near(part.double(), expected_part.double())
        state = expected.state
    torch.compiler.reset()


# rounding of scores may select other keys for a few bytes
SELECTING = ("compressed_top_k", "nsa", "reformer")
STREAMED = (
    *(
        "local position=rotary",
        "compressed_top_k position=rotary",
        "nsa position=rotary",
        "latent position=rotary",
    ),
    *(
        "longformer position=rotary model.cache=hidden",
        "reformer position=rotary model.cache=hidden",
    ),
    *("transformer_xl model.cache=hidden", "linear_decay", "differential"),
    *("gated_linear", "gated_delta", "gated_delta_channel", f"gated_delta {SHIFT}", f"nsa {SHIFT}"),
    *(f"local model.cache=hidden {SHIFT}", f"latent {SHIFT}", f"linformer {SHIFT}"),
)


@pytest.mark.numeric
@pytest.mark.parametrize("words", STREAMED)
def test_far_along_a_stream_the_state_does_not_grow_and_float32_stays_close_to_float64(words):
    layers = {
        dtype: mechanism(*words.split()).to(dtype) for dtype in (torch.float64, torch.float32)
    }
    lengths, position = [125] * 8 + [1] * 8, 10**7
    states, shapes, errors = dict.fromkeys(layers), [], []
    with torch.no_grad():
        for piece in inputs(sum(lengths)).split(lengths, 1):
            outs = {
                dtype: layer(piece.to(dtype), states[dtype], starts(position))
                for dtype, layer in layers.items()
            }
            states, position = (
                {dtype: out.state for dtype, out in outs.items()},
                position + piece.shape[1],
            )
            shapes.append([part.shape for part in state_tensors(states[torch.float64])])
            errors.append((outs[torch.float32].y.double() - outs[torch.float64].y).abs().amax(-1))
    assert all(shape == shapes[0] for shape in shapes)
    rounded = [outs[torch.float32].y, *state_tensors(states[torch.float32])]
    assert all(part.dtype == torch.float32 for part in rounded if part.is_floating_point())
    errors = torch.cat(errors, dim=1)
    if words.startswith(SELECTING):
        assert errors.median() < 1e-6 and (errors > 1e-4).double().mean() < 0.01
    else:
        assert errors.max() < 1e-5


@pytest.mark.numeric
@pytest.mark.parametrize(
    "words, ages",
    [
        ("compressed runtime.backend=plain position=rotary", [1, 5, 24, 25, 60]),
        ("compressed_top_k position=alibi model.cache=hidden", [1, 5, 24, 25, 60]),
        (f"compressed model.cache=hidden {SHIFT}", [1, 5, 24, 25, 60]),
        (f"compressed {SHIFT}", [1, 5, 24, 25, 60]),
        # its states have equal shapes only after a full window
        ("nsa position=rotary", [50, 53, 58]),
    ],
)
def test_streams_of_a_batch_may_be_at_any_phase_of_a_block(words, ages):
    layer, x = mechanism(*words.split()), inputs(90, streams=1)
    state = cat_streams([layer(x[:, :age], None, starts(0, streams=1)).state for age in ages])
    start, pieces = torch.tensor(ages), []
    for length in (1, 20, 4):
        out = layer(
            torch.cat([x[:, first : first + length] for first in start.tolist()]), state, start
        )
        state, start = out.state, start + length
        pieces.append(out.y)
    expected = layer(x, None, starts(0, streams=1)).y
    for row, age in zip(torch.cat(pieces, dim=1), ages, strict=True):
        assert_near(row, expected[0, age : age + 25], tolerance=1e-9)


@pytest.mark.numeric
@pytest.mark.parametrize("words, oldest", [("nsa variant.attention.block=4", 20), ("reformer", 19)])
def test_the_span_may_change_between_segments(words, oldest):
    """After a span of 6, the state has the bytes from 19 on, and complete blocks of 4 bytes from
    20 on."""
    layer, x = mechanism(*words.split(), "model.span=13", "position=rotary"), inputs(25)
    wide = layer(x[:, :20], None, starts(0))
    layer.set_span(6)
    narrow = layer(x[:, 20:24], wide.state, starts(20))
    assert_near(narrow.y, layer(x, None, starts(0)).y[:, 20:24])
    layer.set_span(13)
    grown = layer(x[:, 24:], narrow.state, starts(24))
    assert_near(grown.y, layer(x[:, oldest:], None, starts(oldest)).y[:, -1:])


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
def test_no_tensor_is_read_on_the_host(words):
    """Fake tensors have no values, so reading one raises an error."""
    layer = mechanism(*words.split())
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(STREAMS, 40, WIDTH, dtype=torch.float64)
        out = layer(x, layer(x, None, starts(0)).state, starts(40))
        total = out.y.sum() + (0 if out.loss is None else out.loss)
        gradients = torch.autograd.grad(total, list(layer.parameters()))
    assert [g.shape for g in gradients] == [p.shape for p in layer.parameters()]


@pytest.mark.parametrize(
    "variant, backend",
    [
        *(("mhsa", "plain"), ("compressed", "plain"), ("nsa", "plain"), ("reformer", "auto")),
        *(("local", "chunked"), ("longformer", "chunked")),
    ],
)
def test_dropout_in_training_is_causal_and_reproducible_and_keeps_the_mean(variant, backend):
    words = ("model.dropout=0.5", f"runtime.backend={backend}")
    layer, without_dropout = mechanism(variant, *words), mechanism(variant, words[1])
    for past, length in ((0, 12), (20, 9)):
        x = inputs(45, streams=1)[:, : past + length]
        state = layer.eval()(x[:, :past], None, starts(0, streams=1)).state if past else None
        expected, y = (
            part.eval()(x[:, past:], state, starts(past, streams=1)).y
            for part in (without_dropout, layer)
        )
        assert_near(y, expected)

        def drawn(x: Tensor, seed: int, *, streams: int = 1, state=state, past=past) -> Tensor:
            torch.manual_seed(seed)
            states = map_state(lambda tensor: tensor.expand(streams, *tensor.shape[1:]), state)
            with torch.no_grad():
                return layer.train()(
                    x[:, past:].expand(streams, -1, -1), states, starts(past, streams=streams)
                ).y

        error = (drawn(x, 3, streams=2000).mean(0) - expected[0]).detach()
        assert (
            error.abs().max() < 0.1 * expected.abs().max() and error.norm() < 0.1 * expected.norm()
        )
        assert torch.equal(drawn(x, 1), drawn(x, 1)) and not torch.allclose(
            drawn(x, 1), drawn(x, 2)
        )
        early = length // 2
        later = torch.cat([x[:, : past + early], x[:, past + early :] + 1], dim=1)
        assert_near(drawn(later, 1)[:, :early], drawn(x, 1)[:, :early])


@pytest.mark.parametrize(
    "variant",
    ["linear", "performer", "gated_linear", "gated_delta", "gated_delta_channel", "reformer"],
)
def test_memory_grows_linearly_with_the_segment(variant):
    """No tensor of the forward or backward has an element for each pair of positions."""
    layer, sizes = mechanism(variant, "model.span=1000"), []
    for length in (200, 400):
        with LargestTensor() as largest:
            layer(inputs(length)).y.sum().backward()
        sizes.append(largest.elements)
    assert sizes[1] <= 2.1 * sizes[0]


REFUSED = [
    (AdaptiveSpan, {"ramp": 0}, r"span\.ramp=0: must be at least 1"),
    (AdaptiveSpan, {"initial": 1.5}, r"span\.initial=1\.5: allowed are fractions .* 0 to 1"),
    (PersistentKV, {"d_head": 2, "number": 0}, r"persistent\.number=0: must be at least 1"),
    (PersistentKV, {"d_head": 2, "key_std": -1}, r"persistent\.key_std=-1: must be at least 0"),
    (
        Relative,
        {"d_head": 2, "share": "heads"},
        r"position\.share=heads: allowed are network, layer",
    ),
    (Attention, {"kv_heads": 2}, "kv_heads=2: must divide model.heads=3"),
    (LinearAttention, {"chunk": 0}, "chunk=0: allowed are numbers from 1"),
    (Differential, {}, "model.heads=3: must be even"),
    (Latent, {"latent": 0}, "latent=0: allowed are numbers from 1, or null for 2 d_head"),
    (
        Reformer,
        {"buckets": 3, "rounds": 1, "bucket_keys": 1},
        "buckets=3: allowed are even integers from 2",
    ),
    (
        Reformer,
        {"buckets": 2, "rounds": 1, "bucket_keys": 1, "key_shift": True},
        "key_shift=true: allowed is false",
    ),
    (
        Longformer,
        {"windows": (9,)},
        r"windows=\[9\]: must be 1 integers, one for each layer, from 1 to model.span=8",
    ),
    (Longformer, {"dilated_heads": 4}, "dilated_heads=4: allowed are 0 to model.heads=3"),
    (PerceiverAR, {"latents": 9}, "latents=9: allowed are integers from 1 to model.span=8"),
    (
        LocalAttention,
        {"block": 1, "attend_self": False},
        "block=1: allowed are integers from 2 to model.span=8",
    ),
    (
        Linformer,
        {"ratio": 3, "share": "all"},
        "share=all with compressor=linear: allowed are none, heads, key_value",
    ),
    (NativeSparse, {"block": 9}, "block=9: allowed are integers from 1 to model.span=8"),
    (NativeSparse, {"window": 0}, "window=0: allowed are numbers from 1"),
    (Linformer, {"ratio": 3, "window": 8}, "model.span=8: must be above window=8 and ratio=3"),
]


@pytest.mark.parametrize("make, choices, message", REFUSED, ids=lambda value: str(value)[:40])
def test_an_invalid_size_is_refused_by_name(make, choices, message):
    keywords = dict(choices)
    context = Case(attend_self=keywords.pop("attend_self", True)).context(d_model=6)
    with pytest.raises(ValueError, match=message):
        make(context, **keywords)


@pytest.mark.parametrize(
    "words, message",
    [
        ("variant=linear position=rotary", "position=rotary"),
        ("variant=linear model.cache=hidden", "model.cache=hidden"),
        (
            "variant=reformer position=relative",
            r"adds a vector .*attention \(Reformer\) does not support",
        ),
        (
            "variant=transformer_xl position=alibi",
            r"position=alibi: .*attention \(TransformerXL\) does not support",
        ),
    ],
)
def test_a_choice_that_a_variant_cannot_follow_is_refused_by_name(words, message):
    with pytest.raises(ValueError, match=message):
        plan(*TINY, *words.split()).make_model()
