"""Transformer-XL's attention: equality with simpler position schemes, shared parameters, and defaults."""

import pytest
import torch

from tests.attention_case import Case, assert_same, run
from tests.small_configs import TINY, plan
from variants.attention import Attention
from variants.transformer_xl import TransformerXL


@pytest.mark.numeric
@pytest.mark.parametrize("position", ["none", "relative"])
def test_with_zeroed_parameters_it_equals_attention_of_a_simpler_position_scheme(position):
    """u (``to_keys``) is 0. W_R (``project``) = 0 leaves no positions; v (``to_distances``) = 0 leaves q . W_R r."""
    case = Case(length=9, past=7, span=6, heads=1, cache="hidden", position=position)
    plain, attention = case.build(), case.build(TransformerXL, noise=1.0)
    with torch.no_grad():
        attention.position.to_keys.zero_()
        attention.position.to_distances.mul_(position == "none")
        attention.position.project.weight.mul_(position == "relative")
        if position == "relative":
            plain.position.table.copy_(attention.position.vectors(6)[0])
    matrices = {n: p for n, p in plain.named_parameters() if not n.startswith("position")}
    attention.load_state_dict(matrices, strict=False)
    past, x = case.stream()
    assert_same(run(attention, x, past), run(plain, x, past), named={"x": x})


def test_by_default_layers_share_u_and_v_and_the_cache_is_hidden():
    run_plan = plan(*TINY, "variant=transformer_xl")
    assert (run_plan.model.cache, run_plan.scheme.func.__name__) == ("hidden", "NoPosition")
    mhsa_parameters, counts = sum(p.numel() for p in plan(*TINY, "variant=mhsa").make_model().parameters()), {}
    for share in ("network", "layer"):
        model = plan(*TINY, "variant=transformer_xl", f"variant.attention.share={share}").make_model()
        first, second = (sublayer.position for _, sublayer in model.sublayers() if isinstance(sublayer, Attention))
        assert (first.to_keys is second.to_keys) == (first.to_distances is second.to_distances) == (share == "network")
        counts[share] = sum(p.numel() for p in model.parameters())
    assert counts == {"network": mhsa_parameters + 2 * 32**2 + 2 * 32, "layer": mhsa_parameters + 2 * 32**2 + 4 * 32}
