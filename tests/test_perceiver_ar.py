"""Perceiver AR: the configured model equals the reference, and bytes influence exactly the expected latents."""

import pytest
import torch

from tests.attention_case import DOUBLE, assert_same, matrices
from tests.reference.perceiver_ar import Layer, perceiver_ar
from tests.small_configs import plan
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
def test_the_model_equals_the_reference_and_a_byte_influences_latents_up_to_the_end_of_a_block(backend):
    """Through the window of the first layer a byte reaches 8 bytes, and from there the end of their block."""
    model = build(f"runtime.backend={backend}")
    tokens = torch.randint(7, (2, 14), generator=torch.Generator().manual_seed(4))
    named = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    stream = perceiver_ar(model.embedding(tokens), layers=layers_of(model), latents=4, span=9, heads=2)
    expected = torch.stack([torch.stack([model.head(model.norm(z)) for z in row]) for row in stream])
    assert_same(model(tokens).logits, expected, named=named, tolerance=1e-9)
    before = model.eval()(tokens).logits
    for at in (0, 5):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 3) % 7
        changed_positions = ((model(changed).logits - before).abs() > 1e-9).any(-1).all(0).nonzero().flatten().tolist()
        assert changed_positions == list(range(at, min(14, (at + 8) // 4 * 4 + 4)))
