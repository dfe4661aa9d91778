"""Perceiver AR: the configured model is the paper's, far bytes reach a latent through the first layer alone, and segments."""

import pytest
import torch

from harness.model import LanguageModel
from tests.attention_case import DOUBLE, assert_same, matrices
from tests.composing import plan
from tests.reference.perceiver_ar import Layer, perceiver_ar
from variants.attention import Attention
from variants.perceiver_ar import LatentAttention

SIZES = (
    *("model.d_model=8", "model.heads=2", "model.span=9", "model.layers=3", "data.vocabulary=7"),
    *("runtime.device=cpu", "variant.attention.latents=4"),
)


def build(*words: str) -> LanguageModel:
    model = plan("variant=perceiver_ar", "data=recall", *SIZES, *words).make_model().to(DOUBLE)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at zero hides what is behind it
            parameter.copy_(torch.randn(parameter.shape, dtype=DOUBLE, generator=generator) / 2)
    return model


def tokens(length: int) -> torch.Tensor:
    return torch.randint(7, (2, length), generator=torch.Generator().manual_seed(4))


def layers_of(model: LanguageModel) -> list[Layer]:
    found = []
    for layer in model.layers:
        attention, feed = layer.values()
        ours = matrices(attention.sublayer)
        enter, leave = feed.sublayer.enter, feed.sublayer.leave
        ours |= {"up": enter.weight, "up_bias": enter.bias, "down": leave.weight, "down_bias": leave.bias}
        found.append(Layer(**ours, first_gain=attention.norm.weight, second_gain=feed.norm.weight))
    return found


@pytest.mark.numeric
@pytest.mark.parametrize(("length", "backend"), [(1, "auto"), (14, "plain"), (14, "auto")])
def test_the_model_of_the_paper(length, backend):
    """Three blocks of 4 latents and a piece, where the last inputs of the first layer's window are out of sight."""
    model = build(f"runtime.backend={backend}")
    assert [type(next(iter(layer.values())).sublayer) for layer in model.layers] == [Attention, *[LatentAttention] * 2]
    given = tokens(length)
    named = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    stream = perceiver_ar(model.embedding(given), layers=layers_of(model), latents=4, span=9, heads=2)
    expected = torch.stack([torch.stack([model.head(model.norm(z)) for z in row]) for row in stream])
    assert_same(model(given).logits, expected, named=named, tolerance=1e-9)


def test_how_far_a_byte_is_seen():
    """Through the first layer 8 bytes on, and from there to the end of the block in which that ends."""
    model, given = build().eval(), tokens(23)
    before = model(given).logits
    for at in (0, 5):
        other = given.clone()
        other[:, at] = (other[:, at] + 3) % 7
        moved = ((model(other).logits - before).abs() > 1e-9).any(-1).all(0).nonzero().flatten().tolist()
        assert moved == list(range(at, (at + 8) // 4 * 4 + 4))
