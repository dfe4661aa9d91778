"""Transformer-XL's attention: shared parameters, and defaults."""

from tests.support.small_configs import TINY, plan
from variants.attention import Attention


def test_by_default_layers_share_u_and_v_and_the_cache_is_hidden():
    run_plan = plan(*TINY, "variant=transformer_xl")
    assert (run_plan.model.cache, run_plan.scheme.func.__name__) == ("hidden", "NoPosition")
    mhsa_parameters, counts = (
        sum(p.numel() for p in plan(*TINY, "variant=mhsa").make_model().parameters()),
        {},
    )
    for share in ("network", "layer"):
        model = plan(
            *TINY, "variant=transformer_xl", f"variant.attention.share={share}"
        ).make_model()
        first, second = (
            sublayer.position
            for _, sublayer in model.sublayers()
            if isinstance(sublayer, Attention)
        )
        assert (
            (first.to_keys is second.to_keys)
            == (first.to_distances is second.to_distances)
            == (share == "network")
        )
        counts[share] = sum(p.numel() for p in model.parameters())
    assert counts == {
        "network": mhsa_parameters + 2 * 32**2 + 2 * 32,
        "layer": mhsa_parameters + 2 * 32**2 + 4 * 32,
    }
