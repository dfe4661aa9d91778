"""What mechanisms say that they look at: the weights of their own forward, whichever backend computes it."""

import pytest
import torch
from einops import rearrange

from tests.attention_case import Case
from tests.composing import TINY, plan, small
from tests.promises import memory, model_of
from variants.contract import Inspection

# Weighted means by definition; summaries of blocks (linformer) are not weights of single bytes.
MAPPED = ("all_attention", "local", "longformer", "perceiver_ar", "transformer_xl", "reformer", "linear", "performer")


def whole(found: Inspection) -> torch.Tensor:
    """What each query gives to all that it sees, ``[B, H, T]``."""
    return found.weights.sum(-1) + (0 if found.shares is None else found.shares.sum(-1))


CASES = (
    ({"position": "rotary", "spans": "between", "persistent": 3}, ("plain", "chunked", "kernel")),
    ({"position": "relative", "cache": "hidden", "attend_self": False}, ("plain", "kernel")),
    ({"position": "alibi", "spans": "zero", "attend_self": False, "persistent": 3}, ("plain", "fused")),
    ({"position": "none", "spans": "dynamic", "cache": "hidden"}, ("plain", "chunked")),
)


@pytest.mark.parametrize(
    "choices, backend",
    [
        pytest.param(choices, backend, marks=pytest.mark.cpu_kernel if backend == "kernel" else ())
        for choices, backends in CASES
        for backend in backends
    ],
)
def test_weights_make_the_output_again_on_every_backend(choices, backend):
    case = Case(length=19, backend=backend, **choices)
    attention, x = case.build().eval(), case.stream()[1].detach()
    found = attention.inspect(x)
    _, (_, v), _, persistent = attention._made_of(x, torch.zeros(len(x), dtype=torch.int64))
    y = found.weights @ v + (0 if persistent is None else found.shares @ persistent.v)
    assert torch.allclose(attention.output(rearrange(y, "B H T K -> B T (H K)")), attention(x).y)
    assert not found.weights.triu(1).any()
    seen = whole(found)
    assert torch.allclose(seen[:, :, 1:], torch.ones_like(seen[:, :, 1:]))
    blind = not case.attend_self and not case.persistent
    assert torch.allclose(seen[:, :, 0], torch.full_like(seen[:, :, 0], 0.0 if blind else 1.0))
    assert not blind or not found.weights[:, :, 0].any()
    plain = Case(length=19, **choices).build().eval().inspect(x)
    assert torch.allclose(found.weights, plain.weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", MAPPED)
def test_rows_of_other_mechanisms_sum_to_one_but_where_nothing_is_seen(variant):
    torch.manual_seed(0)
    model = plan(f"variant={variant}", *TINY, *small(variant), "model.attend_self=false").make_model().eval()
    tokens = torch.randint(256, (2, 41))
    logits, found = model.inspect(tokens)
    assert torch.equal(logits, model(tokens).logits)
    attending = [name for name, sublayer in model.sublayers() if sublayer.honours is not None]
    assert [*found] == attending
    for name, sublayer in model.sublayers():
        if name not in found:
            continue
        weights, seen, reach = found[name].weights, whole(found[name]), sublayer.reach()
        assert weights.shape[2:] == (41, 41) and not weights.triu(1).any()
        assert reach is None or not weights.tril(-reach - 1).any()
        blind = seen == 0
        assert torch.allclose(seen[~blind], torch.ones(()), atol=1e-5)
        assert blind[:, :, 0].all() == (found[name].shares is None)


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
    found = layer.inspect(x)
    y = (layer.values[found.entries] * found.shares[..., None]).sum(dim=(1, 3))
    assert found.weights is None and torch.allclose(y, layer(x).y, atol=1e-5)
