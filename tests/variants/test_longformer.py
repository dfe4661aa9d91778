"""Longformer: FLOPs if undilated, and windows and dilations by depth."""

import pytest
import torch

from harness.check.small import shrink
from tests.support.attention_case import Case
from tests.support.small_configs import plan
from variants.longformer import Longformer, grown_dilation, grown_window

CASE = Case(heads=3, span=12)


def build(window: int, step: int, *, dilated: int = 2) -> Longformer:
    """Return a layer of three heads, of which the last ``dilated`` have the dilation ``step``."""
    return CASE.build(Longformer, windows=(window,), dilation=(step,), dilated_heads=dilated)


def test_undilated_windows_of_the_whole_span_have_the_flops_of_plain_attention():
    plain, layer = CASE.build(), build(12, 1)
    assert layer.ideal_flops() == plain.ideal_flops()
    for carried in (0, 5, 40):
        assert layer.needed_flops(7, carried=carried) == plain.needed_flops(7, carried=carried)


@pytest.mark.numeric
def test_default_windows_and_dilations_grow_with_depth():
    assert [grown_window(512, layer=i, n_layers=4) for i in range(4)] == [32, 64, 128, 256]
    assert [grown_window(13, layer=i, n_layers=2) for i in range(2)] == [2, 6]
    for n_layers, published in (
        (12, [1] * 6 + [2, 2, 3, 3, 4, 4]),
        (30, [1] * 15 + [2] * 5 + [3] * 5 + [4] * 5),
    ):
        assert [grown_dilation(layer=i, n_layers=n_layers) for i in range(n_layers)] == published
    layers = [
        Longformer(Case(heads=4, span=512).context(layer=i, n_layers=4), d_head=2) for i in range(4)
    ]
    windows = [(32,) * 4, (64,) * 4, (128,) * 4, (256, 256, 256, 171)]
    assert [layer.span.visible_keys for layer in layers] == windows
    assert [layer.reach() for layer in layers] == [31, 63, 254, 510]
    assert [layer.period for layer in layers] == [1, 1, 2, 3]
    layers[3].set_span(64)
    assert layers[3].span.visible_keys == (32, 32, 32, 22)
    fixed = build(10, 2, dilated=1)
    for span, keys in ((7, (7, 7, 4)), (100, (10, 10, 10))):
        fixed.set_span(span)
        assert fixed.span.visible_keys == keys


def test_lists_with_an_entry_for_each_layer_are_dropped_for_a_small_model():
    words = ("variant.attention.windows=[32,85,170,256]", "variant.attention.dilation=[1,1,2,3]")
    model = shrink(plan("variant=longformer", *words)).make_model()
    assert model(torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()
