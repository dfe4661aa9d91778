"""Mixed keys: the first key, carried keys of heads with unequal spans, reach, sizes of states,
and the option's default."""

from dataclasses import replace

import pytest
import torch

from tests.support.attention_case import (
    B,
    Case,
    D,
    assert_near,
    set_fractions,
    starts,
    with_random_mix,
)
from tests.support.small_configs import TINY, plan, sized
from variants.attention import Attention
from variants.conformance.fixture import state_tensors
from variants.contract import Sublayer
from variants.latent import Latent
from variants.linformer import Linformer
from variants.local import LocalAttention
from variants.nsa import NativeSparse

pytestmark = pytest.mark.numeric
CACHES = pytest.mark.parametrize("cache", ["kv", "hidden"])
MAKES = {
    Attention: {},
    LocalAttention: {"block": 5},
    Latent: {},
    NativeSparse: {"block": 3},
    Linformer: {"ratio": 3},
}


def build(make: type[Sublayer], case: Case, **keywords) -> Sublayer:
    """Return the mechanism with a bias of the projections, where it may have one, and random
    parameters."""
    bias = {} if make is Linformer else {"bias": True}
    return with_random_mix(
        case.build(make, noise=0.3, key_shift=True, **bias, **MAKES[make], **keywords)
    )


@pytest.mark.parametrize(
    "make, cache", [(make, cache) for make in MAKES for cache in sorted(make.honours.cache)]
)
def test_the_key_before_the_first_byte_is_zero_in_whole_streams_and_single_bytes(make, cache):
    """Projections have biases, with which an input of zeros would have another key. No earlier
    byte is carried."""
    case = Case(length=23, position="rotary", cache=cache)
    layer, x = build(make, case), case.joined()
    expected = layer(x, None, starts(0)).y
    for cuts in ([1] * 23, [7, 1, 15]):
        state, position, pieces = None, 0, []
        for piece in x.split(cuts, dim=1):
            out = layer(piece, state, starts(position))
            state, position = layer.trim(out.state), position + piece.shape[1]
            pieces.append(out.y)
        assert_near(torch.cat(pieces, dim=1), expected)


@CACHES
def test_without_a_past_the_first_key_is_scaled_by_one_minus_m(cache):
    case = Case(length=1, heads=1, span=4, cache=cache, parts="sink")
    plain, shifted = case.build(bias=True), replace(case, key_shift=True).build(bias=True)
    plain.load_state_dict(shifted.state_dict(), strict=False)
    with torch.no_grad():
        plain.key.weight *= 1 - shifted.key_shift.mix[:, None]
        plain.key.bias *= 1 - shifted.key_shift.mix
    assert_near(shifted(case.joined()).y, plain(case.joined()).y)


@pytest.mark.cpu_kernel
@CACHES
def test_heads_of_unequal_spans_carry_their_keys_and_one_more_key_or_input(cache):
    case = Case(
        length=400,
        span=300,
        heads=4,
        spans="zero",
        position="rotary",
        kv_heads=2,
        key_shift=True,
        cache=cache,
    )
    layer, (_, x), following = (
        case.build(),
        case.stream(),
        torch.randn(B, 7, D, dtype=torch.float64),
    )
    set_fractions(layer, [0.0, 0.25, 0.25, 1.0])
    full_state = layer(x, None, starts(0)).state
    expected = layer(following, full_state, starts(400)).y
    layer.wanted_backend = "kernel"
    state = layer(x, None, starts(0)).state
    if cache == "kv":
        (keys, _), last_key = state
        assert [k.shape[2] for k in keys] == [191, 299] and last_key.shape == (B, 2, 1, 2)
    else:
        assert state.shape[1] == 300
    for carried in (state, full_state, layer.trim(full_state)):
        assert_near(layer(following, carried, starts(400)).y, expected)


@pytest.mark.parametrize(
    "variant", ["mhsa", "mhsa model.cache=hidden", "local", "latent", "nsa", "linformer", "linear"]
)
def test_the_option_adds_one_key_to_the_state_and_a_weight_per_channel_and_is_off_by_default(
    variant,
):
    words, sizes = [*TINY, *sized(variant.split()[0]), *variant.split()[1:]], []
    for option in ([], ["variant.attention.key_shift=false"], ["variant.attention.key_shift=true"]):
        layer = next(
            s for _, s in plan(*words, *option).make_model().sublayers() if s.honours is not None
        )
        state = layer(torch.randn(1, 90, 32)).state
        parameters = sum(p.numel() for p in layer.parameters())
        sizes.append(
            (
                layer.reach() or 0,
                parameters,
                sum(x.numel() for x in state_tensors(state)),
                layer.ideal_flops(),
            )
        )
    channels = {"nsa": 2 * 16}.get(variant, 32)  # nsa has two sets of keys, of one head
    carried = 40 if variant == "latent" else 32  # a latent and its rotary part, an input, or a key
    reach = 0 if variant == "linear" else 1
    assert sizes[1] == sizes[0]
    assert [b - a for a, b in zip(sizes[0], sizes[2], strict=True)] == [reach, channels, carried, 0]
