"""torch's kernels as the fused backend calls them: on a CPU, and as on CUDA, whose operations are pretended."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from harness.count.flops import count_flops
from tests.attention_case import assert_same, gradients
from tests.efficient_attention import backward, forward, pretended
from tests.window_case import AWKWARD, Case
from variants.kernels import fused, window
from variants.kernels.given import Given

pytestmark = pytest.mark.numeric
CASES = pytest.mark.parametrize("case", AWKWARD.values(), ids=list(AWKWARD))


@pytest.fixture(params=["cpu", "cuda"])
def engine(request, monkeypatch):
    """CUDA's way of calling, on a CPU."""
    monkeypatch.setitem(fused.ENGINES, "cpu", fused.ENGINES[request.param])
    with pretended() if request.param == "cuda" else nullcontext():
        yield request.param


@CASES
def test_it_is_plain(case, engine):
    inputs = case.inputs()
    named = {name: x for name, x in inputs.items() if x.requires_grad}
    assert_same(case.call(fused.attend, inputs), case.call(window.attend, inputs), named=named)


def test_bfloat16_is_rounded_where_plain_is(engine):
    """Joint sums are kept in float32: error of each gradient is at most twice that of plain attention in bfloat16."""
    case = replace(AWKWARD["all"], T=300, max_keys=(250, 64, 250), z=(180.0, 20.0, 240.0), width=64, ramp=32)
    exact = case.inputs()
    exact["q"].data /= 8
    found = {}
    for name, attend, dtype in (
        ("exact", window.attend, torch.float64),
        ("plain", window.attend, torch.bfloat16),
        ("fused", fused.attend, torch.bfloat16),
    ):
        inputs = {
            n: x.detach().to(torch.float32 if n in ("z", "bias") and dtype != torch.float64 else dtype)
            for n, x in exact.items()
        }
        named = [x.requires_grad_() for n, x in inputs.items() if n != "bias"]
        y = case.call(attend, inputs)
        found[name] = [x.double() for x in (y, *gradients(y, named))]
    for exactly, plain, mine in zip(*found.values(), strict=True):
        assert (mine - exactly).norm() <= 2 * (plain - exactly).norm()


def test_parts_are_merged_before_they_are_rounded(engine):
    """Values of 1 in the context and of -1 beside it, all weights equal: (n - N) / (n + N), in which much cancels."""
    case = Case(T=100, max_keys=(100,), persistent=33, width=8, dtype=torch.bfloat16, streams=1)
    inputs = {name: torch.zeros_like(x) for name, x in case.inputs().items()}
    inputs |= {"v": torch.ones_like(inputs["v"]), "extra_v": -torch.ones_like(inputs["extra_v"])}
    n = torch.arange(1.0, 101)[:, None]
    torch.testing.assert_close(
        case.call(fused.attend, inputs)[0, 0].float(), ((n - 33) / (n + 33)).expand(-1, 8), rtol=2**-8, atol=1e-6
    )


def test_gradients_of_keys_are_summed_before_they_are_rounded(engine, monkeypatch):
    case = Case(T=600, max_keys=(600,), dtype=torch.bfloat16, streams=1)
    given, seen = Given(**{name: x.detach() for name, x in case.inputs().items()}), case.hard()
    y, saved = fused.forward(given, seen)
    real, parts = fused.ENGINES["cpu"], []

    def recorded(*arguments):
        parts.append(real.backward(*arguments))
        return parts[-1]

    monkeypatch.setitem(fused.ENGINES, "cpu", real._replace(backward=recorded))
    found = fused.backward(torch.ones_like(y), y, saved, given, seen, frozenset({"k"}))["k"]
    total = torch.zeros(given.k.shape)
    for (_, _, low, high), part in zip(fused.chunks(600, 600, 600, 0), parts, strict=True):
        total[:, :, low:high] += part[1]
    assert len(parts) == 5 and torch.equal(found, total.bfloat16())


def test_what_is_not_wanted_is_not_computed(engine, monkeypatch):
    case = AWKWARD["all"]
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    given, seen = Given(**inputs), case.hard()
    y, saved = fused.forward(given, seen)
    g = torch.randn_like(y)
    whole = fused.backward(g, y, saved, given, seen, frozenset(inputs) - {"bias"})
    assert whole.keys() == set(inputs) - {"bias"}
    for name, expected in whole.items():
        (only,) = fused.backward(g, y, saved, given, seen, frozenset({name})).items()
        assert only[0] == name and torch.equal(only[1], expected)
    monkeypatch.setattr(fused, "_span_gradient", None)
    assert fused.backward(g, y, saved, given, seen, frozenset("qkv")).keys() == set("qkv")
    monkeypatch.setattr(fused, "_context_gradients", None)
    fused.backward(g, y, saved, given, seen, frozenset({"extra_k"}))


@CASES
def test_own_keys_alone(case, engine):
    given, seen = Given(**{name: x.detach() for name, x in case.inputs().items()}), case.hard()
    y, saved = fused.forward(given, seen)
    g = torch.randn_like(y)
    whole, own = (fused.backward(g, y, saved, given, seen, frozenset("qkv"), own_only=only) for only in (False, True))
    assert torch.equal(own["q"], whole["q"])
    for name in "kv":
        assert own[name].shape == given.q.shape
        assert torch.equal(own[name], whole[name][:, :, case.past :])


@pytest.mark.parametrize("rows, width", [(1, 8), (32, 24), (33, 96)])
def test_the_pretended_operations_give_what_torch_says_of_them(rows, width):
    """Shapes and types of all results, by the functions that describe the real ones to the compiler."""
    q, k, v = (torch.randn(2, 3, n, width) for n in (rows, 40, 40))
    mask = torch.zeros(2, 3, rows, 40)
    operations = torch.ops.aten
    found = forward(q, k, v, mask, True, scale=1.0)
    lost = [x.to("meta") for x in (q, k, v, mask)]
    said = operations._scaled_dot_product_efficient_attention(*lost, True, scale=1.0)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in said]
    assert found[0].stride() == said[0].stride()
    y, lse, seed, offset = found
    wanted = [True, True, True, False]
    backwards = backward(q, q, k, v, mask, y, lse, seed, offset, 0.0, wanted, scale=1.0)[:3]
    kept = [x.to("meta") for x in (y, lse, seed, offset)]
    said = operations._scaled_dot_product_efficient_attention_backward(lost[0], *lost, *kept, 0.0, wanted, scale=1.0)
    assert [(x.shape, x.dtype, x.stride()) for x in backwards] == [(x.shape, x.dtype, x.stride()) for x in said[:3]]


def test_what_cuda_refuses_is_refused_here():
    q, k = torch.randn(1, 2, 32, 12), torch.randn(1, 2, 33, 12)
    wide_q, wide_k = torch.randn(1, 2, 32, 16), torch.randn(1, 2, 33, 16)
    mask = torch.zeros(1, 2, 32, 40)[..., :33]
    with pytest.raises(RuntimeError, match="aligned"):
        forward(q, k, k, None, True)
    with pytest.raises(RuntimeError, match="attn_bias is not correctly aligned"):
        forward(wide_q, wide_k, wide_k, mask.contiguous(), True)
    with pytest.raises(RuntimeError, match="dtype for bias"):
        forward(wide_q, wide_k, wide_k, torch.zeros(1, 2, 32, 40).double()[..., :33], True)
    with pytest.raises(RuntimeError, match="wrong shape"):
        forward(wide_q, wide_k, wide_k, mask[:, :1], True)
    y, lse, seed, offset = forward(wide_q, wide_k, wide_k, mask, True, scale=1.0)
    rest = (seed, offset, 0.0, [True, True, True, False])
    with pytest.raises(RuntimeError, match="read at a wrong place"):
        backward(y, wide_q, wide_k, wide_k, mask, y.contiguous(), lse, *rest, scale=1.0)
    with pytest.raises(RuntimeError, match="multiple of 32"):
        backward(y, wide_q, wide_k, wide_k, mask, y, lse[..., :24], *rest, scale=1.0)


@CASES
def test_executed_flops_are_those_of_the_calls(case, engine):
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    given, seen, wanted = Given(**inputs), case.hard(), frozenset(inputs) - {"bias"}
    arguments = {"streams": case.streams, "rows": case.T, "keys": case.T + case.past, "width": case.width}
    said = fused.executed_flops(seen, **arguments, persistent=case.persistent, device=torch.device(engine))
    y, saved = fused.forward(given, seen)
    calls = (
        lambda: fused.forward(given, seen),
        lambda: fused.backward(torch.ones_like(y), y, saved, given, seen, wanted),
    )
    assert tuple(count_flops(call).total for call in calls) == said


def test_where_it_cannot_run(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fused.obstacle(cpu, torch.float64) is fused.obstacle(cuda, torch.bfloat16) is None
    assert fused.obstacle(torch.device("mps"), torch.float32) == "runtime.device=mps"
    assert fused.obstacle(cuda, torch.float64) == "float64 on a GPU"
    assert fused.obstacle(cpu, torch.float32, dropout=0.1) == "model.dropout=0.1"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert fused.obstacle(cuda, torch.bfloat16) == "torch for ROCm"


def test_a_blind_query_is_nobodys_question(engine):
    """What kernels answer where all is masked has changed with versions: the pretended one refuses it."""
    case = Case(T=3, shift=1, max_keys=(2, 2))
    inputs = case.inputs()
    y = case.call(fused.attend, inputs)
    assert not y[:, :, 0].any()
    assert all(g.isfinite().all() for g in gradients(y, list(inputs.values())))
    with pytest.raises(RuntimeError, match="sees nothing"):
        forward(*(torch.ones(1, 1, n, 8) for n in (2, 8, 8)), torch.full((1, 1, 2, 8), -torch.inf), True)
