"""MemoryPlus and Experts, which extend the product-key memory: references, sharing of values, and metrics."""

import pytest
import torch

from tests.attention_case import DOUBLE, Case, assert_near, gradients
from tests.reference.memory_plus import experts, gated
from tests.reference.product_key_memory import product_key_memory
from tests.reference_case import normal
from tests.test_product_key_memory import SIZES, B, D, T
from variants.memory_plus import Experts, MemoryPlus

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("make", [MemoryPlus, Experts])
@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_output_and_every_gradient_equal_those_of_the_reference(make, activation):
    torch.manual_seed(0)
    memory, x = make(Case().context(), **SIZES, activation=activation).to(DOUBLE), normal(B, T, D)
    for parameter in memory.norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    weights = {"query_weight": memory.query.weight, "query_bias": memory.query.bias, "keys": memory.keys}
    weights |= {"norm": ("layer", memory.norm.weight, memory.norm.bias, memory.norm.eps), "values": memory.values}
    weights |= {"top_k": memory.top_k, "activation": activation}
    if make is Experts:
        expected = experts(x, **weights, inputs=memory.inputs)
    else:
        expected = gated(x, product_key_memory(x, **weights), w1=memory.gate.weight, w2=memory.output.weight)
    y, parameters = memory(x).y, [x, *memory.parameters()]
    assert_near(y, expected, tolerance=1e-12)
    for actual, reference in zip(gradients(y, parameters), gradients(expected, parameters), strict=True):
        assert reference.abs().max() > 1e-6, "the gradient must be more than rounding"
        assert_near(actual, reference, tolerance=1e-11)


def test_layers_share_values_by_default_but_no_keys():
    context = Case().context()
    first, second = (MemoryPlus(context, **SIZES) for _ in range(2))
    assert first.values is second.values and first.keys is not second.keys
    assert MemoryPlus(context, **SIZES, share="layer").values is not first.values


def test_experts_do_not_report_the_divergence_of_weights_because_they_may_be_negative():
    torch.manual_seed(0)
    memory = Experts(Case().context(), **SIZES).to(DOUBLE)
    stats = memory(normal(B, T, D), collect_stats=True).stats
    assert stats["usage_weight"].min() < 0 and memory.metrics({}) == {} and memory.metrics(stats)["usage_percent"] > 0
    assert memory.metrics(stats).keys() == {"usage_percent", "usage_bytes", "kl_count_nats"}
