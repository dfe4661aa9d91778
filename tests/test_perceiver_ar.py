"""Perceiver AR: the configured model is the paper's, and far bytes reach a latent through the first layer alone."""

import pytest
import torch

from tests.attention_case import DOUBLE, assert_same, matrices
from tests.composing import plan
from tests.reference.perceiver_ar import Layer, perceiver_ar
from variants.conformance import perturb

SIZES = (
    *("model.d_model=8", "model.heads=2", "model.span=9", "model.layers=3", "data.vocabulary=7"),
    *("runtime.device=cpu", "variant.attention.latents=4"),
)


def build(*words: str) -> torch.nn.Module:
    model = plan("variant=perceiver_ar", "data=recall", *SIZES, *words).make_model().to(DOUBLE)
    torch.manual_seed(3)
    for _ in range(5):
        perturb(model)
    return model


def layers_of(model: torch.nn.Module) -> list[Layer]:
    layers = []
    for layer in model.layers:
        attention, feed = layer.values()
        enter, leave = feed.sublayer.enter, feed.sublayer.leave
        ends = {"up": enter.weight, "up_bias": enter.bias, "down": leave.weight, "down_bias": leave.bias}
        gains = {"first_gain": attention.norm.weight, "second_gain": feed.norm.weight}
        layers.append(Layer(attention=matrices(attention.sublayer), feed_forward=ends, **gains))
    return layers


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_the_model_of_the_paper(backend):
    """Three blocks of 4 latents and a piece, where the last inputs of the first layer's window are out of sight: a byte is seen
    through the first layer 8 bytes on, and from there to the end of the block in which that ends."""
    model = build(f"runtime.backend={backend}")
    tokens = torch.randint(7, (2, 14), generator=torch.Generator().manual_seed(4))
    named = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    stream = perceiver_ar(model.embedding(tokens), layers=layers_of(model), latents=4, span=9, heads=2)
    expected = torch.stack([torch.stack([model.head(model.norm(z)) for z in row]) for row in stream])
    assert_same(model(tokens).logits, expected, named=named, tolerance=1e-9)
    before = model.eval()(tokens).logits
    for at in (0, 5):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 3) % 7
        moved = ((model(other).logits - before).abs() > 1e-9).any(-1).all(0).nonzero().flatten().tolist()
        assert moved == list(range(at, min(14, (at + 8) // 4 * 4 + 4)))
