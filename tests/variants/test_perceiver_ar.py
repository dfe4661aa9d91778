"""Perceiver AR: the configured model equals the reference, and a byte influences exactly the
expected positions."""

import pytest
import torch

from tests.reference.perceiver_ar import Layer, perceiver_ar
from tests.support.attention_case import DOUBLE, assert_same, matrices
from tests.support.small_configs import plan
from variants.conformance import perturb

SIZES = (
    *("model.d_model=8", "model.heads=2", "model.span=9", "model.layers=3", "data.vocabulary=7"),
    *("runtime.device=cpu", "variant.attention.latents=4"),
)


def build(*words: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = plan("variant=perceiver_ar", "data=recall", *SIZES, *words).make_model().to(DOUBLE)
    return perturb(model)


def layers_of(model: torch.nn.Module) -> list[Layer]:
    layers = []
    for layer in model.layers:
        attention, feed_forward = layer.values()
        up, down = feed_forward.sublayer.enter, feed_forward.sublayer.leave
        weights = {"up": up.weight, "up_bias": up.bias, "down": down.weight, "down_bias": down.bias}
        gains = {"first_gain": attention.norm.weight, "second_gain": feed_forward.norm.weight}
        layers.append(Layer(attention=matrices(attention.sublayer), feed_forward=weights, **gains))
    return layers


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_the_model_equals_the_reference_and_a_byte_influences_positions_up_to_the_end_of_a_block(
    backend,
):
    """In layer 0 a byte influences the next 8 positions; in later layers, also the rest of the
    last of their blocks."""
    model = build(f"runtime.backend={backend}")
    tokens = torch.randint(7, (2, 14), generator=torch.Generator().manual_seed(4))
    named = dict(model.named_parameters())
    stream = perceiver_ar(
        model.embedding(tokens), layers=layers_of(model), latents=4, span=9, heads=2
    )
    expected = torch.stack(
        [torch.stack([model.head(model.norm(z)) for z in row]) for row in stream]
    )
    assert_same(model(tokens).logits, expected, named=named, tolerance=1e-9)
    before = model.eval()(tokens).logits
    for at in (0, 3):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 3) % 7
        # [B, T]; at + 8 is in the block 8 to 11
        moved = ((model(changed).logits - before).abs() > 1e-9).any(-1)
        assert (
            moved.all(0).tolist()
            == moved.any(0).tolist()
            == [at <= position < 12 for position in range(14)]
        )
