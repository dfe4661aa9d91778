"""``Sublayer.inspect``: the reported attention weights reproduce the output of every backend."""

import pytest
import torch
from einops import rearrange

from tests.support.attention_case import Case
from tests.support.promises import memory, model_of

CASES = [
    (
        {"position": "rotary", "spans": "fractional", "persistent": 3},
        ("plain", "chunked", "fused", "kernel"),
    ),
    ({"position": "relative", "cache": "hidden", "attend_self": False}, ("plain", "kernel")),
    (
        {"position": "alibi", "spans": "zero", "attend_self": False, "persistent": 3},
        ("plain", "fused", "kernel"),
    ),
    ({"position": "none", "spans": "dynamic", "cache": "hidden"}, ("plain", "chunked")),
]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("choices, backends", CASES, ids=str)
def test_reported_weights_and_shares_reproduce_the_output_of_every_backend(choices, backends):
    case = Case(length=19, **choices)
    attention, x = case.build().eval(), case.stream()[1].detach()
    plain = attention.inspect(x).weights
    for backend in backends:
        attention.wanted_backend = backend
        inspection = attention.inspect(x)
        segment = attention.project_qkv(x, torch.zeros(len(x), dtype=torch.int64))
        y = inspection.weights @ segment.v
        if segment.persistent is not None:
            y = y + inspection.shares @ segment.persistent.v
        assert torch.allclose(
            attention.output(rearrange(y, "B H T K -> B T (H K)")), attention(x).y
        )
        assert torch.allclose(inspection.weights, plain, rtol=0, atol=1e-12)
        assert not inspection.weights.triu(1).any()


def test_the_reported_soft_mask_follows_the_spans():
    attention = Case(spans="fractional", span=8, ramp=3).build().eval()  # fractions 0.37, 1, 0
    mask = attention.inspect(torch.zeros(1, 4, 5, dtype=torch.float64)).mask
    z = attention.span.fraction * 8
    assert mask.shape == (3, 8)
    assert torch.allclose(mask, ((3 + z[:, None] - torch.arange(8)) / 3).clamp(0, 1))
    assert Case().build().inspect(torch.zeros(1, 4, 5, dtype=torch.float64)).mask is None


def test_the_reported_slots_of_a_product_key_memory_reproduce_its_output():
    model = model_of(memory)().eval()
    layer, x = (
        next(iter(dict(model.sublayers()).values())),
        torch.randn(2, 9, model.embedding.embedding_dim),
    )
    inspection = layer.inspect(x)
    y = (layer.values[inspection.entries] * inspection.shares[..., None]).sum(dim=(1, 3))
    assert inspection.weights is None and torch.allclose(y, layer(x).y, atol=1e-5)
