"""Product-key memories: the brute-force references, the search, initial scales, sharing of
values, and statistics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.model import unread_parameters
from tests.reference.memory_plus import experts, gated
from tests.reference.product_key_memory import product_key_memory
from tests.support.attention_case import DOUBLE, Case, assert_near, gradients
from tests.support.reference_case import normal
from variants.contract import LayerContext
from variants.kernels import product_search
from variants.memory_plus import Experts, MemoryPlus
from variants.product_key_memory import ProductKeyMemory, SelectSlots, candidate_pairs, search

pytestmark = pytest.mark.numeric

B, T, D = 2, 3, 5  # streams, bytes, width
SIZES = {"half_keys": 7, "top_k": 5, "heads": 3, "d_query": 6}
CHOICES = {"query_norm": "layer", "activation": "softmax", "share": "layer", "sparse": False}


def with_noise(memory: ProductKeyMemory) -> ProductKeyMemory:
    """Return the memory in float64 with a random norm, whose initial values 1 and 0 would hide
    mistakes."""
    for parameter in memory.to(DOUBLE).norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    return memory


def build(context: LayerContext | None = None, seed: int | None = 0, **changes) -> ProductKeyMemory:
    if seed is not None:
        torch.manual_seed(seed)
    return with_noise(ProductKeyMemory(context or Case().context(), **SIZES | CHOICES | changes))


def weights_of(memory: ProductKeyMemory) -> dict:
    """Return the reference's arguments."""
    kind = {torch.nn.LayerNorm: "layer", torch.nn.BatchNorm1d: "batch"}.get(type(memory.norm))
    weights = {
        "query_weight": memory.query.weight,
        "query_bias": memory.query.bias,
        "keys": memory.keys,
    }
    weights |= {
        "norm": kind and (kind, memory.norm.weight, memory.norm.bias, memory.norm.eps),
        "values": memory.values,
    }
    return weights | {"top_k": memory.top_k, "activation": memory.activation}


def assert_equals_reference(memory: ProductKeyMemory, y: Tensor, expected: Tensor, *, x: Tensor):
    assert_near(y, expected, tolerance=1e-12)
    inputs = [x, *memory.parameters()]
    for actual, reference_gradient in zip(
        gradients(y, inputs), gradients(expected, inputs), strict=True
    ):
        assert reference_gradient.abs().max() > 1e-6, "the gradient must be more than rounding"
        assert_near(actual.to_dense(), reference_gradient, tolerance=1e-11)


NORMS = [
    {"query_norm": n, "activation": a}
    for n in ("layer", "batch", "none")
    for a in ("softmax", "relu")
]


@pytest.mark.parametrize(
    "changes", [*NORMS, {"top_k": 1, "activation": "relu"}, {"sparse": True}], ids=str
)
# all bytes at once, or four and then two
@pytest.mark.parametrize("scores_at_once", [2**20, 4 * 2 * 3 * 7])
def test_output_and_every_gradient_equal_those_of_the_reference(
    monkeypatch, changes, scores_at_once
):
    monkeypatch.setattr("variants.product_key_memory.SCORES_AT_ONCE", scores_at_once)
    memory, x = build(**changes), normal(B, T, D)
    out = memory(x, collect_stats=True)
    assert_equals_reference(memory, out.y, product_key_memory(x, **weights_of(memory)), x=x)
    (dvalues,) = gradients(out.y, [memory.values])
    unread = out.stats["usage_count"] == 0
    assert dvalues.is_sparse == memory.sparse and not dvalues.to_dense()[unread].any(), (
        "an unread row has a gradient"
    )


@pytest.mark.parametrize("activation", ["softmax", "relu"])
def test_output_and_every_gradient_of_its_successors_equal_those_of_the_references(activation):
    torch.manual_seed(0)
    choices = SIZES | {"activation": activation}
    plus = with_noise(MemoryPlus(Case().context(), **choices, zero_init=False))
    with_experts = with_noise(Experts(Case().context(), **choices))
    x = normal(B, T, D)
    expected = gated(x, **weights_of(plus), w1=plus.gate.weight, w2=plus.output.weight)
    assert_equals_reference(plus, plus(x).y, expected, x=x)
    expected = experts(x, **weights_of(with_experts), inputs=with_experts.inputs)
    out = with_experts(x, collect_stats=True)
    assert_equals_reference(with_experts, out.y, expected, x=x)
    # weights may be negative, so their divergence is not reported
    metrics = with_experts.metrics(out.stats)
    assert (
        out.stats["usage_weight"].min() < 0
        and with_experts.metrics({}) == {}
        and metrics["usage_percent"] > 0
    )
    assert metrics.keys() == {"usage_percent", "usage_bytes", "kl_count_nats"}


def best_of_all(first: Tensor, second: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of all slots, the ``top_k`` best scores, and their slots. Slots of equal scores
    are in ascending order."""
    scores = (first[..., :, None] + second[..., None, :]).flatten(-2)
    return scores, *(part[..., :top_k] for part in scores.sort(descending=True, stable=True))


@given(
    half_keys=st.integers(1, 9), share=st.floats(0, 1), ties=st.booleans(), seed=st.integers(0, 999)
)
@settings(max_examples=40, deadline=None)
def test_the_pruned_search_finds_the_best_slots(half_keys, share, ties, seed):
    top_k = 1 + round(share * (half_keys**2 - 1))
    halves = torch.randn(
        2, 2, 3, half_keys, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)
    )
    halves = halves.round() if ties else halves
    (i, j), sums = search(
        halves, top_k=top_k, pairs=candidate_pairs(top_k=top_k, half_keys=half_keys)
    )
    _, best, lowest = best_of_all(*halves, top_k)
    assert torch.equal(sums, best) and torch.equal(i * half_keys + j, lowest)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("half_keys", [1, 2, 7, 16, 33, 130])
def test_the_search_of_the_cpu_kernel_finds_the_best_slots(dtype, half_keys):
    for seed in range(2):
        for top_k in {1, 1 + half_keys // 3, half_keys}:
            scores = torch.randn(
                4, 5, half_keys, dtype=dtype, generator=torch.Generator().manual_seed(seed)
            )
            if seed:
                scores = scores.round()  # many equal scores
                scores[:, 0, 0], scores[:, 1, -1] = -torch.inf, torch.inf
            slots, sums = product_search.search(scores, top_k)
            halves = scores.unflatten(0, (2, 2)).transpose(1, 2).unbind(2)  # of [H, n, C]
            all_sums, best, lowest = (part.transpose(0, 1) for part in best_of_all(*halves, top_k))
            assert torch.equal(sums, all_sums.gather(-1, slots))
            assert torch.equal(sums.sort(descending=True).values, best)
            finite = best[..., -1].isfinite()  # all sums with -inf are equal
            assert torch.equal(slots.sort().values[finite], lowest.sort().values[finite])


def test_under_bfloat16_autocast_the_slots_are_those_of_float32():
    torch.manual_seed(0)
    query, keys = (
        torch.randn(50, 4, 8, requires_grad=True),
        torch.randn(4, 30, 8, requires_grad=True),
    )
    outcomes = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            slots, sums = SelectSlots.apply(
                query, keys, candidate_pairs(top_k=4, half_keys=30), 4, False
            )
        outcomes.append([slots, sums, *torch.autograd.grad(sums.square().sum(), (query, keys))])
    assert all(map(torch.equal, *outcomes))
    first = torch.tensor([128.0, 127.5], dtype=torch.bfloat16)
    # in bfloat16, 128 + low and 127.5 + 0.5 are both 128
    for low, runner_up in ((0.125, (0, 1)), (-0.125, (1, 0))):
        second = torch.tensor([0.5, low], dtype=torch.bfloat16)
        (i, j), _ = search(
            torch.stack([first, second]), top_k=2, pairs=candidate_pairs(top_k=2, half_keys=2)
        )
        assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 0), runner_up]


def test_initial_scales_follow_the_widths_and_few_pairs_of_half_keys_are_candidates():
    memory = build(Case().context(d_model=100), half_keys=40, d_query=16)
    assert math.isclose(memory.values.std().item(), 0.1, rel_tol=0.02)
    assert memory.keys.abs().max() <= 8**-0.5
    query = torch.randn(2000, 16, dtype=DOUBLE)
    scores = query[:, :8] @ memory.keys[0, 0].T + query[:, 8:] @ memory.keys[0, 1].T
    assert math.isclose(scores.var().item(), 2 / 3, rel_tol=0.1)
    assert candidate_pairs(top_k=32, half_keys=512).shape == (2, 119)


def test_layers_share_values_only_where_it_is_configured():
    context = Case().context(pool={})
    first, second = (build(context, seed=None, share="network") for _ in range(2))
    assert first.values is second.values and first.keys is not second.keys
    assert build(Case().context(pool={}), share="network").values is not first.values
    assert build(context, half_keys=6, share="network").values.shape == (36, D)
    assert build(context).values is not first.values
    first, second = (MemoryPlus(context, **SIZES) for _ in range(2))  # shares values by default
    assert first.values is second.values and first.keys is not second.keys
    assert MemoryPlus(context, **SIZES, share="layer").values is not first.values


def test_usage_and_divergence_equal_numbers_worked_out_by_hand():
    memory = build(half_keys=2, top_k=2, heads=1)
    slots, weights = torch.tensor([[0, 1], [0, 3]]), torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    stats = memory.usage(slots, weights)
    assert stats["usage_count"].tolist() == [2, 1, 0, 1]
    assert stats["usage_weight"].tolist() == [1.75, 0.25, 0.0, 0.0]
    metrics = memory.metrics(stats)
    assert (metrics["usage_percent"], metrics["usage_bytes"]) == (50, 2)
    assert math.isclose(
        metrics["kl_count_nats"], math.log(4) + 0.5 * math.log(0.5) + 0.5 * math.log(0.25)
    )
    expected = math.log(4) + 0.875 * math.log(0.875) + 0.125 * math.log(0.125)
    assert math.isclose(metrics["kl_weighted_nats"], expected)
    assert memory.metrics({}) == {}
    assert "kl_weighted_nats" not in memory.metrics(memory.usage(slots, torch.zeros(2, 2)))


def test_ideal_flops_and_unread_parameters_have_their_closed_forms():
    memory = build()
    assert memory.ideal_flops() == 2 * (5 * 18 + 3 * 7 * 6 + 3 * 5 * 5)
    assert unread_parameters(memory) == (7 * 7 - 3 * 5) * 5
    assert unread_parameters(build(half_keys=3, top_k=3, heads=4)) == 0


def test_no_shape_depends_on_values():
    """Tensors on the meta device have no values, so reading one raises an error."""
    memory = build().to("meta")
    memory(torch.zeros(B, T, D, device="meta", dtype=DOUBLE), collect_stats=True).y.sum().backward()
    assert memory.values.grad.shape == (49, D)


@pytest.mark.parametrize("sparse, compiled", [(False, True), (True, True), (True, False)])
def test_gradients_in_float32_equal_those_in_float64(sparse, compiled):
    """Compilation must avoid a fault that only PyTorch's float32 code for reading a table has."""
    exact, memory = build(sparse=sparse), build(sparse=sparse).float()
    module = (
        torch.compile(memory, fullgraph=not sparse, backend="aot_eager") if compiled else memory
    )
    x, gradients_by_dtype = normal(B, T, D), []
    for part, forward in ((memory, module), (exact, exact)):
        leaf = x.detach().to(part.values.dtype).requires_grad_()
        gradients_by_dtype.append(
            torch.autograd.grad(forward(leaf).y.square().sum(), [leaf, *part.parameters()])
        )
    for actual, expected in zip(*gradients_by_dtype, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(
            actual.to_dense().double(), expected.to_dense(), rtol=1e-4, atol=1e-5
        )


WRONG = (
    "top_k=8 top_k=0 top_k=1 half_keys=0 heads=0 d_query=5 query_norm=rms activation=gelu "
    "share=head"
)


@pytest.mark.parametrize("key, value", [word.split("=") for word in WRONG.split()])
def test_invalid_values_are_refused_with_the_key_and_the_allowed_values(key, value):
    with pytest.raises(ValueError, match=f"{key}={value}.*allowed are") as error:
        build(**{key: int(value) if value.isdigit() else value})
    if key == "top_k":
        assert "half_keys=7" in str(error.value)
