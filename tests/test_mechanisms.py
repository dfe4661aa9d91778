"""What holds of every mechanism beyond the contract's suite: compiled it is one graph, a long stream makes no larger state and
stays exact, nothing looks at values, dropout keeps the mean, and what it cannot follow is refused by name."""

import pytest
import torch
import yaml
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.attention_case import assert_near, assert_same
from tests.composing import CONF, TINY, plan, small
from variants.conformance import move
from variants.contract import Sublayer, map_state

WIDTH, STREAMS = 32, 2
DROPPING = {
    "mhsa": ("plain", "chunked"),
    "local": ("plain", "chunked"),
    "longformer": ("plain", "chunked"),
    "compressed": ("plain",),
    "reformer": ("auto",),
    "transformer_xl": ("plain", "chunked"),
}


def words_of(variant: str) -> tuple[str, ...]:
    """A variant at the small sizes that its file names."""
    node = yaml.safe_load((CONF / "variant" / f"{variant}.yaml").read_text(encoding="utf-8"))
    sizes = (node.get("variant", node).get("small") or {}).get("model") or {}
    return (f"variant={variant}", *small(variant), *(f"model.{key}={value}" for key, value in sizes.items()))


def mechanism(variant: str, *words: str) -> Sublayer:
    """The last sublayer that sees a past, in float64, off its start."""
    torch.manual_seed(0)
    model = plan(*TINY, *words_of(variant), "data=recall", *words).make_model()
    sees = [sublayer for _, sublayer in model.sublayers() if sublayer.honours is not None]
    return move(sees[-1].double())


def inputs(length: int, *, streams: int = STREAMS) -> Tensor:
    return torch.randn(streams, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def at(place: int, *, streams: int = STREAMS) -> Tensor:
    return torch.full((streams,), place)


GRAPHS = [
    ("all_attention", "runtime.backend=fused"),
    ("longformer", "runtime.backend=fused", "model.cache=hidden", "model.attend_self=false"),
    ("local", "runtime.backend=fused"),
    ("local", "model.cache=hidden", "runtime.backend=plain"),
    ("compressed", "runtime.backend=plain"),
    ("compressed_top_k", "runtime.backend=plain"),
    ("linformer", "runtime.backend=plain"),
    ("reformer",),
    ("linear_decay", "model.attend_self=false"),
    ("performer_decay", "model.attend_self=false"),
    ("transformer_xl", "runtime.backend=plain"),
    ("perceiver_ar", "runtime.backend=fused"),
]


@pytest.mark.parametrize("words", GRAPHS, ids=" ".join)
def test_compiled_it_is_one_graph(words):
    """Value, every gradient and the state that is carried, of two segments behind a past."""
    layer, x = mechanism(*words), inputs(60)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    state = layer(x[:, :20], None, at(0)).state
    for place in (20, 40):
        segment = x[:, place : place + 20].clone().requires_grad_()
        found, expected = (one(segment, state, at(place)) for one in (compiled, layer))
        assert_same(found.y, expected.y, named={"x": segment} | dict(layer.named_parameters()))
        assert_same_state(layer.trim(found.state), state := expected.state)
    torch.compiler.reset()


def assert_same_state(found, expected) -> None:
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert_near(one.double(), other.double())


def tensors(state) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(lambda x: found.append(x) or x, state)
    return found


STREAMED = [
    (variant, f"model.cache={cache}", *words)
    for variant, *words in (
        ("local", "position=rotary"),
        ("longformer", "position=rotary"),
        ("longformer", "position=rotary", "variant.attention.global_bytes=6"),
        ("compressed", "position=rotary"),
        ("compressed_top_k", "position=rotary"),
        ("reformer", "position=rotary"),
        ("linear",),
        ("linear_decay",),
        ("transformer_xl",),
    )
    for cache in ("kv", "hidden")
    if cache == "kv" or not variant.startswith("linear")
]


@pytest.mark.numeric
@pytest.mark.parametrize("words", STREAMED, ids=" ".join)
def test_a_state_does_not_grow_and_float32_stays_near(words):
    """Over 4,000 bytes in segments of 125, and then single bytes, far along unless first bytes are others' keys.
    Where a rounded score chooses keys otherwise, only single bytes are off."""
    layers = {dtype: mechanism(*words).to(dtype) for dtype in (torch.float64, torch.float32)}
    lengths, place = [125] * 32 + [1] * 8, 0 if "variant.attention.global_bytes=6" in words else 10**7
    states, shapes, off = dict.fromkeys(layers), [], []
    with torch.no_grad():
        for piece in inputs(sum(lengths)).split(lengths, 1):
            outs = {dtype: layer(piece.to(dtype), states[dtype], at(place)) for dtype, layer in layers.items()}
            states, place = {dtype: out.state for dtype, out in outs.items()}, place + piece.shape[1]
            shapes.append([part.shape for part in tensors(states[torch.float64])])
            off.append((outs[torch.float32].y.double() - outs[torch.float64].y).abs().amax(-1))
    assert all(shape == shapes[0] for shape in shapes)
    assert not any(part.requires_grad for part in tensors(states[torch.float64]))
    rounded = [outs[torch.float32].y, *tensors(states[torch.float32])]
    assert all(part.dtype == torch.float32 for part in rounded if part.is_floating_point())
    off = torch.cat(off, dim=1)
    if words[0] in ("compressed_top_k", "reformer"):
        assert off.median() < 1e-6 and (off > 1e-4).double().mean() < 0.01
    else:
        assert off.max() < 1e-5


@pytest.mark.parametrize(
    "words",
    [
        ("compressed", "runtime.backend=plain"),
        ("compressed_top_k", "runtime.backend=plain"),
        pytest.param(("compressed", "runtime.backend=kernel"), marks=pytest.mark.cpu_kernel),
        ("reformer", "position=rotary"),
        ("linear_decay",),
        ("performer_decay",),
    ],
    ids=" ".join,
)
def test_nothing_looks_at_values(words):
    """Forward and backward of tensors that have none, which any look at a value would end."""
    layer = mechanism(*words)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(STREAMS, 40, WIDTH, dtype=torch.float64)
        y = layer(x, layer(x, None, at(0)).state, at(40)).y
        gradients = torch.autograd.grad(y.sum(), list(layer.parameters()))
    assert [g.shape for g in gradients] == [p.shape for p in layer.parameters()]


@pytest.mark.parametrize(
    ("variant", "backend"), [(variant, backend) for variant, backends in DROPPING.items() for backend in backends]
)
def test_dropout_keeps_the_mean_follows_the_seed_and_is_for_training(variant, backend):
    """Where a stream begins, behind a past, and of a few bytes behind one; and it tells an earlier byte nothing of a later."""
    words = ("model.dropout=0.5", f"runtime.backend={backend}")
    layer, still = mechanism(variant, *words), mechanism(variant, words[1])
    for past, length in ((0, 25), (20, 25), (20, 3)):
        x = inputs(45, streams=1)[:, : past + length]
        state = layer.eval()(x[:, :past], None, at(0, streams=1)).state if past else None
        expected, found = (one.eval()(x[:, past:], state, at(past, streams=1)).y for one in (still, layer))
        assert_near(found, expected)

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


REFUSED = {
    "linear": {
        "position=rotary": "position=rotary",
        "position=relative": "position=relative",
        "model.cache=hidden": "model.cache=hidden",
        "variant.attention.chunk=0": "chunk=0: allowed are integers from 1",
        "variant.attention.feature_map=cosine": "feature_map=cosine: allowed are elu, relu",
        "model.heads=3": "model.heads=3 must divide model.d_model=32",
        "variant.attention.d_head=0": "d_head=0: must be at least 1",
    },
    "performer": {
        "position=rotary": "position=rotary",
        "variant.attention.features=0": "features=0: must be at least 1, or null",
    },
    "reformer": {
        "position=relative": r"position=relative: adds a vector .*attention \(Reformer\) cannot follow",
        "variant.attention.buckets=3": "buckets=3: allowed are even integers from 2",
        "variant.attention.buckets=0": "buckets=0: allowed are even integers from 2",
        "variant.attention.rounds=0": "rounds=0: allowed are integers from 1",
        "variant.attention.bucket_keys=0": "bucket_keys=0: allowed are integers from 1",
    },
    "longformer": {
        "variant.attention.windows=[4]": r"windows=\[4\]: must be 2 integers, one for each layer, from 1 to model\.span=40",
        "variant.attention.windows=[4,41]": r"windows=\[4, 41\]: must be 2 integers",
        "variant.attention.windows=[0,3]": r"windows=\[0, 3\]: must be 2 integers",
        "variant.attention.dilation=[1,0]": r"dilation=\[1, 0\]: must be 2 integers, .* at least 1; or null",
        "variant.attention.dilated_heads=3": r"dilated_heads=3: allowed are 0 to model\.heads=2",
        "variant.attention.global_bytes=-1": "global_bytes=-1: must be at least 0",
        "variant.attention.global_bytes=2 position=relative": r"position=relative: .*Longformer.* cannot follow",
        "variant.attention.global_bytes=2 runtime.backend=fused": "backend=fused cannot run with global_bytes .* plain",
    },
    "transformer_xl": {
        "position=rotary": r"position=rotary: .*variant\.attention \(TransformerXL\) cannot",
        "position=relative": r"position=relative: .*variant\.attention \(TransformerXL\) cannot",
        "position=alibi": r"position=alibi: .*variant\.attention \(TransformerXL\) cannot",
        "variant.attention.share=head": r"variant\.attention\.share=head: allowed are network, layer",
    },
    "perceiver_ar": {
        "variant.attention.latents=13": r"variant\.attention\.latents=13: allowed are integers from 1 to model\.span=12",
    },
    "local": {
        "variant.attention.block=13": r"block=13: allowed are integers from 1 to model\.span=12, or null for a quarter",
        "variant.attention.block=0": r"block=0: allowed are integers from 1 to model\.span=12, or null for a quarter",
        "variant.attention.block=1 model.attend_self=false": r"block=1: allowed are integers from 2 to model\.span=12",
    },
}


@pytest.mark.parametrize(
    ("variant", "words"), [(variant, words) for variant, lines in REFUSED.items() for words in lines]
)
def test_what_it_cannot_follow_is_refused_by_name(variant, words):
    """When it is built, or before it runs."""
    with pytest.raises(ValueError, match=REFUSED[variant][words]):
        mechanism(variant, *words.split()).backend(torch.device("cpu"), training=True)
