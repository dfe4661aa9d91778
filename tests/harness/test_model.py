"""The language model: torch's encoder layers, initial output, numbers of parameters, and dropout
of the embedding."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from harness.model import LanguageModel
from tests.reference.positions import sinusoid
from tests.support.attention_case import matrices
from tests.support.small_configs import plan

pytestmark = pytest.mark.numeric

V, D, H, S, F, LAYERS = 256, 8, 2, 4, 12, 2
T, START = 7, 9
SMALL = (
    *(
        "data=recall",
        f"model.d_model={D}",
        f"model.heads={H}",
        f"model.layers={LAYERS}",
        f"model.span={S}",
    ),
    *("model.norm=layer", "runtime.device=cpu", "runtime.precision=float32"),
)
HIDDEN_WIDTH = (f"variant.feed_forward.hidden={F}",)
C, K, MEMORY_HEADS, DQ = 6, 3, 2, 4
MEMORY = (
    *(f"variant.memory.half_keys={C}", f"variant.memory.top_k={K}"),
    *(f"variant.memory.heads={MEMORY_HEADS}", f"variant.memory.d_query={DQ}"),
)
ATTENTION = 4 * D * D
FEED_FORWARD = 2 * D * F + F + D
NORM = 2 * D
RELATIVE = S * (D // H)
MEMORY_WITHOUT_TABLE = (D + 1) * MEMORY_HEADS * DQ + 2 * DQ + MEMORY_HEADS * C * DQ
TABLE = C * C * D


def build(*overrides: str, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return plan(*SMALL, *overrides).make_model()


def logits_of_torch(
    model: LanguageModel, tokens: Tensor, *, sinusoidal: bool, after: bool, tied: bool
) -> Tensor:
    """Return the logits of encoder layers of torch with the parameters of ``model``, for bytes from
    position START on."""
    x = model.embedding(tokens) * model.scale
    if sinusoidal:
        x = x + torch.stack([sinusoid(START + t, d_model=D) for t in range(T)])
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) | torch.ones(T, T, dtype=torch.bool).tril(
        -S
    )
    options = {"dropout": 0.0, "batch_first": True, "norm_first": not after, "dtype": torch.float64}
    layer_of_torch = nn.TransformerEncoderLayer(D, H, F, **options)
    for attention, feed_forward in (layer.values() for layer in model.layers):
        wq, wk, wv, wo = matrices(attention.sublayer).values()
        parameters = {
            "self_attn.in_proj_weight": torch.cat([wq, wk, wv]),
            "self_attn.out_proj.weight": wo,
        }
        biases = {"in_proj_bias": 3 * D, "out_proj.bias": D}
        parameters |= {f"self_attn.{name}": x.new_zeros(size) for name, size in biases.items()}
        modules = {"norm1": attention.norm, "norm2": feed_forward.norm}
        modules |= {"linear1": feed_forward.sublayer.enter, "linear2": feed_forward.sublayer.leave}
        parameters |= {
            f"{name}.{key}": p
            for name, module in modules.items()
            for key, p in module.named_parameters()
        }
        x = functional_call(layer_of_torch, parameters, (x,), {"src_mask": hidden})
    x = x if after else functional.layer_norm(x, (D,), model.norm.weight, model.norm.bias)
    return functional.linear(
        x, model.embedding.weight if tied else model.head.weight, model.head.bias
    )


@pytest.mark.parametrize(
    "position, after, tied, more",
    [
        ("sinusoidal", False, False, ("model.embedding_scale=1.5",)),
        ("sinusoidal", True, False, ("model.head_bias=true",)),
        ("none", True, True, ()),
        ("sinusoidal", False, True, ()),
        ("none", False, False, ("model.cache=hidden",)),
    ],
)
def test_logits_and_every_gradient_equal_those_of_torch(position, after, tied, more):
    choices = (f"position={position}", f"model.norm_after={after}", f"model.tied={tied}")
    model = build(*HIDDEN_WIDTH, *choices, *more).double()
    for parameter in model.parameters():  # many are initially zero
        parameter.data += 0.3 * torch.randn_like(parameter)
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
    # the segment begins inside of a stream whose past is not carried
    states = tuple(None for _ in model.sublayers())
    actual = model(tokens, (torch.full((2,), START), states)).logits
    expected = logits_of_torch(
        model, tokens, sinusoidal=position == "sinusoidal", after=after, tied=tied
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    upstream = torch.randn(
        actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    parameters = dict(model.named_parameters())
    gradients = [
        torch.autograd.grad(y, list(parameters.values()), upstream) for y in (actual, expected)
    ]
    for name, x, y in zip(parameters, *gradients, strict=True):
        assert x.abs().max() > 0, name
        torch.testing.assert_close(
            x, y, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_initial_output_is_the_uniform_distribution():
    assert torch.equal(build()(torch.zeros(1, 3, dtype=torch.int64)).logits, torch.zeros(1, 3, V))
    assert build("model.head_zero_init=false")(torch.zeros(1, 3, dtype=torch.int64)).logits.any()


BODY = LAYERS * (ATTENTION + FEED_FORWARD) + 5 * NORM
MEMORY_READ = MEMORY_WITHOUT_TABLE + MEMORY_HEADS * K * D
TWO_MEMORIES = "+variant.at={1: [attention, memory]}"  # by default only layer 0 has a memory
SHARED = ("variant=product_key_memory", *MEMORY, "variant.memory.share=network", TWO_MEMORIES)


@pytest.mark.parametrize(
    "overrides, counts, touched",
    [
        (
            HIDDEN_WIDTH,
            {
                "layers.0.attention": ATTENTION,
                "layers.1.feed_forward": FEED_FORWARD,
                "norms": 5 * NORM,
                "head": V * D,
            },
            BODY + V * D + D,
        ),
        # A tied matrix counts as the embedding. A byte reads all of it.
        ((*HIDDEN_WIDTH, "model.tied=true"), {"embedding": V * D, "head": 0}, BODY + V * D),
        (
            (*HIDDEN_WIDTH, "position=relative"),
            {"layers.0.attention": ATTENTION + RELATIVE, "layers.1.attention": ATTENTION},
            BODY + RELATIVE + V * D + D,
        ),
        (
            ("variant=all_attention_fixed", "variant.attention.persistent.number=5"),
            {"layers.1.attention": ATTENTION + 2 * 5 * D, "norms": 3 * NORM},
            LAYERS * (ATTENTION + 2 * 5 * D) + 3 * NORM + V * D + D,
        ),
        (  # two layers that share a table
            SHARED,
            {
                "layers.0.memory": MEMORY_WITHOUT_TABLE + TABLE,
                "layers.1.memory": MEMORY_WITHOUT_TABLE,
            },
            BODY - 2 * FEED_FORWARD + 2 * MEMORY_READ + V * D + D,
        ),
        (  # a table of input vectors beside that of output vectors
            ("variant=experts", *MEMORY, *HIDDEN_WIDTH),
            {"layers.0.memory": MEMORY_WITHOUT_TABLE + 2 * TABLE},
            BODY - FEED_FORWARD + MEMORY_READ + MEMORY_HEADS * K * D + V * D + D,
        ),
    ],
)
def test_parameters_of_each_sublayer_and_parameters_that_a_byte_touches_are_counted(
    overrides, counts, touched
):
    model = build(*overrides)
    by_sublayer, total = model.parameters_by_sublayer(), sum(p.numel() for p in model.parameters())
    assert {name: by_sublayer[name] for name in counts} == counts
    assert sum(by_sublayer.values()) == total >= touched
    assert model.touched_parameters() == touched


def test_embedding_dropout_follows_the_seed_and_applies_only_in_training():
    model = build("model.embedding_dropout=0.5", "model.head_zero_init=false")
    plain = build("model.head_zero_init=false")
    tokens = torch.arange(24).view(2, 12)

    def logits(model, *, seed: int, training: bool) -> Tensor:
        torch.manual_seed(seed)
        return model.train(training)(tokens).logits

    assert torch.equal(logits(model, seed=1, training=True), logits(model, seed=1, training=True))
    assert not torch.equal(
        logits(model, seed=1, training=True), logits(model, seed=2, training=True)
    )
    assert torch.equal(logits(model, seed=1, training=False), logits(plain, seed=2, training=False))
    inputs = []
    model.layers[0]["attention"].register_forward_pre_hook(
        lambda module, arguments: inputs.append(arguments[0])
    )
    logits(model, seed=1, training=True)
    embedded, mask = model.embedding(tokens), inputs[0] != 0
    assert torch.equal(inputs[0][mask], 2 * embedded[mask])
    assert 0.3 < mask.double().mean() < 0.7
