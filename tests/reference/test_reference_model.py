"""The references of feed-forward and product-key memory, compared with torch's layers.
``test_model.py`` has the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.feed_forward import feed_forward
from tests.reference.product_key_memory import product_key_memory, queries
from tests.support.reference_case import (
    B,
    D,
    H,
    T,
    assert_same,
    normal,
    stream,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.numeric

C, DQ = 3, 4  # of the product-key memory: half-keys in each set and width of a query


@pytest.mark.parametrize(
    "activation, by_torch",
    [
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("relu2", lambda inner: F.relu(inner).square()),
        ("swiglu", lambda inner: F.silu(inner[..., :3]) * inner[..., 3:]),
        ("softmax", lambda inner: F.softmax(inner, dim=-1)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_the_feed_forward_equals_two_linear_layers_of_torch(x, activation, by_torch, biased):
    inner = 6 if activation == "swiglu" else 3
    up, down = normal(inner, D), normal(D, 3)
    up_bias, down_bias = (normal(inner), normal(D)) if biased else (None, None)
    actual = feed_forward(
        x, up=up, down=down, activation=activation, up_bias=up_bias, down_bias=down_bias
    )
    expected = F.linear(by_torch(F.linear(x, up, up_bias)), down, down_bias)
    assert_same(actual, expected, inputs=[x, up, down, *([up_bias, down_bias] if biased else [])])


@pytest.fixture
def memory() -> dict[str, Tensor]:
    return {
        "query_weight": normal(H * DQ, D),
        "query_bias": normal(H * DQ),
        "keys": normal(H, 2, C, DQ // 2),
        "values": normal(C * C, D),
    }


def test_reading_all_slots_equals_the_product_of_two_softmaxes(x, memory):
    scale, shift = normal(DQ, seed=7), normal(DQ, seed=8)
    norm = ("layer", scale, shift, 1e-5)
    actual = product_key_memory(x, **memory, norm=norm, top_k=C * C, activation="softmax")
    query = F.linear(x, memory["query_weight"], memory["query_bias"]).unflatten(-1, (H, DQ))
    query = F.layer_norm(query, (DQ,), scale, shift).unflatten(-1, (2, DQ // 2))
    scores = torch.einsum("bthsd,hscd->bthsc", query, memory["keys"])
    first, second = scores.softmax(-1).unbind(3)  # [B, T, H, C] each
    shares = torch.einsum("bthi,bthj->bthij", first, second).flatten(3)  # slot i C + j
    assert_same(
        actual, (shares @ memory["values"]).sum(2), inputs=[x, scale, shift, *memory.values()]
    )


def test_layer_norm_is_over_each_head_and_batch_norm_over_all_bytes(x, memory):
    weight, bias = memory["query_weight"], memory["query_bias"]
    scale, shift = normal(DQ, seed=7), normal(DQ, seed=8)
    actual = queries(x, weight=weight, bias=bias, norm=("layer", scale, shift, 1e-5), heads=H)
    expected = F.layer_norm(F.linear(x, weight, bias).unflatten(-1, (H, DQ)), (DQ,), scale, shift)
    assert_same(actual, expected, inputs=[x, weight, bias, scale, shift])
    scale, shift = normal(H * DQ, seed=7), normal(H * DQ, seed=8)
    actual = queries(x, weight=weight, bias=bias, norm=("batch", scale, shift, 1e-5), heads=H)
    expected = F.batch_norm(
        F.linear(x, weight, bias).flatten(0, 1), None, None, scale, shift, training=True
    )
    assert_same(actual, expected.reshape(B, T, H, DQ), inputs=[x, weight, scale, shift])
