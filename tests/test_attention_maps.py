"""What sublayers say that they look at: the weights of their own forward, whichever backend computes it.

That rows are shares of what is seen, and none of them of later bytes, is the contract's promise, which the gate checks.
"""

import pytest
import torch
from einops import rearrange

from tests.attention_case import Case
from tests.promises import memory, model_of

CASES = [
    ({"position": "rotary", "spans": "between", "persistent": 3}, ("plain", "chunked", "fused", "kernel")),
    ({"position": "relative", "cache": "hidden", "attend_self": False}, ("plain", "kernel")),
    ({"position": "alibi", "spans": "zero", "attend_self": False, "persistent": 3}, ("plain", "fused", "kernel")),
    ({"position": "none", "spans": "dynamic", "cache": "hidden"}, ("plain", "chunked")),
]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize(("choices", "backends"), CASES, ids=str)
def test_weights_make_the_output_again_on_every_backend(choices, backends):
    case = Case(length=19, **choices)
    attention, x = case.build().eval(), case.stream()[1].detach()
    plain = attention.inspect(x).weights
    for attention.wanted_backend in backends:
        shown = attention.inspect(x)
        segment = attention.project_qkv(x, torch.zeros(len(x), dtype=torch.int64))
        v, persistent = segment.v, segment.persistent
        y = shown.weights @ v + (0 if persistent is None else shown.shares @ persistent.v)
        assert torch.allclose(attention.output(rearrange(y, "B H T K -> B T (H K)")), attention(x).y)
        assert torch.allclose(shown.weights, plain, rtol=0, atol=1e-12) and not shown.weights.triu(1).any()


def test_a_soft_mask_is_as_its_span():
    attention = Case(spans="between", span=8, ramp=3).build().eval()  # fractions 0.37, 1, 0
    mask = attention.inspect(torch.zeros(1, 4, 5, dtype=torch.float64)).mask
    z = attention.span.fraction * 8
    assert mask.shape == (3, 8)
    assert torch.allclose(mask, ((3 + z[:, None] - torch.arange(8)) / 3).clamp(0, 1))
    assert Case().build().inspect(torch.zeros(1, 4, 5, dtype=torch.float64)).mask is None


def test_slots_and_shares_read_the_same_values():
    model = model_of(memory)().eval()
    layer, x = next(iter(dict(model.sublayers()).values())), torch.randn(2, 9, model.embedding.embedding_dim)
    shown = layer.inspect(x)
    y = (layer.values[shown.entries] * shown.shares[..., None]).sum(dim=(1, 3))
    assert shown.weights is None and torch.allclose(y, layer(x).y, atol=1e-5)
