"""Attention over windows: pure functions by hand, every backend of a CPU against the plain one, and torch's CUDA operations
as the fused backend calls them, pretended on a CPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from harness.count.flops import count_flops
from tests.attention_case import DOUBLE, Largest, assert_near, assert_same, gradients
from tests.efficient_attention import backward, forward, pretended
from tests.window_case import ATTEND, AWKWARD, HEADS, MORE, Case, takes
from variants.kernels import causal, chunked, fused, window
from variants.kernels.given import Given
from variants.kernels.window import Persistent, Window, skew, soft_mask, visible

pytestmark = pytest.mark.numeric
KERNEL = pytest.param("kernel", marks=pytest.mark.cpu_kernel)
BACKENDS = pytest.mark.parametrize("backend", ["plain", "chunked", "fused", KERNEL])


@pytest.fixture(params=["chunked", "fused", "fused as on cuda"])
def backend_by_parts(request, monkeypatch):
    """Name of a backend whose forward and backward can be called apart, with CUDA's way of calling on a CPU."""
    if request.param.endswith("cuda"):
        monkeypatch.setitem(fused.ENGINES, "cpu", fused.ENGINES["cuda"])
    with pretended() if request.param.endswith("cuda") else nullcontext():
        yield request.param.split()[0]


fused_alone = pytest.mark.parametrize("backend_by_parts", ["fused", "fused as on cuda"], indirect=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_soft_mask_by_hand():
    mask = soft_mask(torch.tensor([2.0, 0.0, 0.5, 7.0]), 4, 8)
    assert mask.tolist() == [
        [1, 1, 1, 0.75, 0.5, 0.25, 0, 0],
        [1, 0.75, 0.5, 0.25, 0, 0, 0, 0],
        [1, 0.875, 0.625, 0.375, 0.125, 0, 0, 0],
        [1] * 8,
    ]


@drawn(
    rows=st.integers(1, 9),
    past=st.integers(0, 12),
    max_keys=st.integers(1, 15),
    shift=st.integers(0, 1),
    outer=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_skew_and_visible_are_the_loop(rows, past, max_keys, shift, outer):
    keys = rows + past
    band = normal(*((2, 3) if outer else ()), rows, max_keys).detach()
    expected = torch.zeros(*band.shape[:-1], keys, dtype=DOUBLE)
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for t in range(rows):
        for x in range(max_keys):
            if (j := past + t - shift - x) >= 0:
                expected[..., t, j] = band[..., t, x]
                seen[t, j] = True
    assert torch.equal(skew(band, keys, shift=shift), expected)
    assert torch.equal(visible(rows, keys, max_keys, shift=shift, device=band.device), seen)


@pytest.mark.parametrize("case", MORE.values(), ids=list(MORE))
@pytest.mark.parametrize("backend", ["chunked", KERNEL])
def test_it_is_plain(backend, case):
    if takes(backend, case):
        inputs = case.inputs()
        named = {name: x for name, x in inputs.items() if x.requires_grad}
        assert_same(case.call(ATTEND[backend], inputs), case.call(window.attend, inputs), named=named)


@pytest.mark.parametrize("case", MORE.values(), ids=list(MORE))
@fused_alone
def test_fused_is_plain(backend_by_parts, case):
    if takes("fused", case):
        test_it_is_plain("fused", case)


@pytest.mark.parametrize("name", ["all", "uneven width", "spans out of order", "one byte, blind", "vectors"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("backend", ["fused", KERNEL])
def test_lower_precision_is_near(backend, dtype, tolerance, name):
    """Spans and bias stay float32, as under autocast; parts in bfloat16 are rounded to 8 bits before they are added."""
    case = replace(MORE[name], dtype=dtype)
    if takes(backend, case):
        inputs = {n: x.detach().float() if n in ("z", "bias") else x for n, x in case.inputs().items()}
        found = case.call(ATTEND[backend], inputs)
        exact = case.call(window.attend, {n: x.double() for n, x in inputs.items()})
        assert found.dtype == dtype
        assert_near(found.double(), exact, tolerance=tolerance)


LARGE = replace(AWKWARD["all"], T=300, max_keys=(250, 64, 250), z=(180.0, 20.0, 240.0), width=64, ramp=32)
LONG = Case(T=1900, max_keys=(64,), streams=1, vectors=True, persistent=8)


def test_sums_over_parts_are_rounded_once(backend_by_parts):
    """In bfloat16 value and gradients are hardly farther from float64 than those of plain attention, however many parts."""
    case, factor = (LARGE, 2) if backend_by_parts == "fused" else (LONG, 1.3)
    exact = case.inputs()
    exact["q"].data /= case.width**0.5 if backend_by_parts == "fused" else 1
    found = {}
    for name, attend, dtype in (
        ("exact", window.attend, DOUBLE),
        ("plain", window.attend, torch.bfloat16),
        ("mine", ATTEND[backend_by_parts], torch.bfloat16),
    ):
        fine = torch.float32 if dtype != DOUBLE else DOUBLE
        inputs = {n: x.detach().to(fine if n in ("z", "bias") else dtype) for n, x in exact.items()}
        named = [x.requires_grad_() for n, x in inputs.items() if n != "bias"]
        y = case.call(attend, inputs)
        found[name] = [x.double() for x in (y, *gradients(y, named))]
    for exactly, plain, mine in zip(*found.values(), strict=True):
        assert (mine - exactly).norm() <= factor * (plain - exactly).norm()


@fused_alone
def test_parts_are_merged_before_they_are_rounded(backend_by_parts):
    """Values of 1 in the context and of -1 beside it, all weights equal: (n - N) / (n + N), in which much cancels."""
    case = Case(T=100, max_keys=(100,), persistent=33, width=8, dtype=torch.bfloat16, streams=1)
    inputs = {name: torch.zeros_like(x) for name, x in case.inputs().items()}
    inputs |= {"v": torch.ones_like(inputs["v"]), "extra_v": -torch.ones_like(inputs["extra_v"])}
    n = torch.arange(1.0, 101)[:, None]
    torch.testing.assert_close(
        case.call(fused.attend, inputs)[0, 0].float(), ((n - 33) / (n + 33)).expand(-1, 8), rtol=2**-8, atol=1e-6
    )


def test_the_softmax_is_no_bfloat16():
    """A constant on all scores changes nothing, though bfloat16 counts in steps of 4 there."""
    q, k, v = (normal(1, 1, 40, 8, seed=seed).bfloat16() for seed in range(3))
    bias = -0.5 * torch.arange(40.0)[None]
    found, expected = (window.attend(q, k, v, Window((40,)), bias=bias + constant) for constant in (1000, 0))
    assert_near(found.float(), expected.float(), tolerance=0.01)


@BACKENDS
@pytest.mark.parametrize("past", [0, 40, 300])
def test_trimmed_columns_are_all_that_matter(backend, past):
    """Keys beyond z + R change nothing, the gradient of z included."""
    trimmed = Case(T=129, past=past, persistent=1, **HEADS["long"])
    whole, inputs = replace(trimmed, max_keys=(290,) * 4), trimmed.inputs()
    assert_same(trimmed.call(ATTEND[backend], inputs), whole.call(ATTEND[backend], inputs), named=inputs)


@BACKENDS
def test_past_beyond_the_window_is_not_read(backend):
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 20, 4, seed=1), normal(1, 2, 20, 4, seed=2)
    with torch.no_grad():
        k[:, :, :13], v[:, :, :13] = torch.nan, torch.nan  # 3 rows and a window of 4 or 5: at most 7 keys
    for seen, shift in (((5, 4), 0), ((4, 4), 1)):
        assert Window(seen, shift).past() == 4
        assert ATTEND[backend](q, k, v, Window(seen, shift)).isfinite().all()


@BACKENDS
def test_huge_scores_do_not_overflow(backend):
    q, k, v = 1e4 * normal(1, 1, 6, 4), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 4, seed=2)
    z = torch.tensor([1.5], dtype=DOUBLE, requires_grad=True)
    persistent = Persistent(q, 1e2 * normal(1, 3, 4, seed=3), normal(1, 3, 4, seed=4))
    y = ATTEND[backend](q, k, v, Window((6,), 1, z=z, ramp=2), persistent=persistent)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(y, [q, k, v, z]))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("soft", [False, True])
def test_edges_at_every_place_of_a_chunk(soft):
    """The kernel takes keys by 256: heads whose windows and ramps end before, at and behind every place around that."""
    heads, rows, past, ramp = 48, 19, 420, 5
    spans = range(230, 230 + heads)
    q = normal(1, heads, rows, 3)
    k, v = (normal(1, heads, rows + past, 3, seed=seed) for seed in (1, 2))
    named = {"q": q, "k": k, "v": v}
    if soft:
        named["z"] = torch.tensor(list(spans), dtype=DOUBLE, requires_grad=True)
        seen = Window((max(spans) + ramp + 1,) * heads, z=named["z"], ramp=ramp)
        expected = window.attend(q, k, v, seen)
    else:
        seen, parts = Window(tuple(spans)), zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), spans, strict=True)
        expected = torch.cat([window.attend(*one, Window((max_keys,))) for *one, max_keys in parts], dim=1)
    assert_same(ATTEND["kernel"](q, k, v, seen), expected, named=named)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("rows, span, ramp", [(264, 263, 4), (272, 263, 4), (1024, 519, 32)])
def test_a_ramp_that_begins_where_a_chunk_ends_has_its_gradient(rows, span, ramp):
    """At a whole z the column x = z has weight 1 and is on the ramp."""
    q, k, v = (normal(1, 1, rows, 4, seed=seed) for seed in range(3))
    z = torch.tensor([span], dtype=DOUBLE, requires_grad=True)
    seen = Window((span + ramp + 1,), z=z, ramp=ramp)
    assert_same(ATTEND["kernel"](q, k, v, seen), window.attend(q, k, v, seen), named={"q": q, "k": k, "v": v, "z": z})


@BACKENDS
@pytest.mark.parametrize("gap", [60.0, 100.0, 400.0])
def test_a_key_of_weight_zero_may_have_the_largest_score(backend, gap):
    """At the far end of the ramp a key has weight 0 and moves the span alone: its gradient is bounded, and is no NaN."""
    q, k, v = (normal(1, 1, 6, 4, seed=seed).detach().repeat(2, 1, 1, 1) for seed in range(3))
    rewards = torch.tensor([3.0, -1.0])[
        :, None, None, None
    ]  # of two streams, which move the span in opposite directions
    k[:, :, 0] += gap * q[:, :, 3] / q[0, 0, 3].square().sum()

    def moved(dtype, attend):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.tensor([1.0]))]
        y = attend(leaves[0][:, :, 3:], *leaves[1:3], Window((4,), z=leaves[3], ramp=2))
        return [y.detach(), *torch.autograd.grad((rewards * y).sum(), leaves)]

    *found, dz = moved(torch.float32, ATTEND[backend])
    *exact, exact_dz = moved(DOUBLE, window.attend)
    for one, other in zip(found, exact, strict=True):
        assert_near(one.double(), other, tolerance=2e-5)
    assert dz.sign() == exact_dz.sign() and (gap > 80 or abs(dz / exact_dz - 1) < 1e-4)


def dense(q: Tensor, k: Tensor, v: Tensor, z: Tensor, ramp: int) -> Tensor:
    """Attention by torch.clamp and autograd over all keys: rows see themselves and everything before."""
    t = torch.arange(q.shape[2])
    x = t[:, None] - t
    mask = torch.clamp((ramp + z[:, None, None] - x) / ramp, 0, 1) * (x >= 0)
    weights = mask * (q @ k.mT).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ramp", [1, 3, 32])
def test_gradient_of_spans_at_kinks_is_that_of_clamp(backend, ramp, dtype):
    """At every whole z, and one rounding beside it: what matters is on which side z + R is when it is rounded."""
    whole = torch.tensor([0, 1, 2, 5, 9, 20, 39], dtype=dtype)
    beside = torch.cat([torch.nextafter(whole, whole + 1), torch.nextafter(whole[1:], whole[1:] - 1)])
    z = torch.cat([whole, beside]).requires_grad_()
    q, k, v = (normal(1, len(z), 40, 4, seed=n).to(dtype) for n in range(3))
    (found,) = gradients(ATTEND[backend](q, k, v, Window((40,) * len(z), z=z, ramp=ramp)), [z])
    (expected,) = gradients(dense(q, k, v, z, ramp), [z])
    assert_near(found, expected, tolerance=1e-11 if dtype == DOUBLE else 2e-5)


# Forward and backward apart


@pytest.mark.parametrize("case", AWKWARD.values(), ids=list(AWKWARD))
def test_own_keys_alone_and_executed_flops(backend_by_parts, case, request):
    """As ``backward`` is called inside an operation, where autograd records nothing, and what both say that they execute."""
    module, inputs = (
        {"chunked": chunked, "fused": fused}[backend_by_parts],
        {name: x.detach() for name, x in case.inputs().items()},
    )
    given, seen = Given(**inputs, dropout=case.dropout, seed=torch.tensor(7)), case.hard()
    wanted = frozenset(inputs) - ({"bias"} if backend_by_parts == "fused" else set())
    with torch.inference_mode():
        y, saved = module.forward(given, seen)
        g = torch.randn_like(y)
        whole = module.backward(g, y, saved, given, seen, wanted)
        own = module.backward(g, y, saved, given, seen, frozenset("qkv"), own_only=True)
    assert whole.keys() == wanted and own.keys() == set("qkv")
    assert_near(own["q"], whole["q"])
    for name in "kv":
        assert_near(own[name], whole[name][:, :, case.past :])
    sizes = {"streams": case.streams, "rows": case.T, "keys": case.T + case.past, "width": case.width}
    device = torch.device("cuda" if "cuda" in request.node.name else "cpu")
    sizes |= {"device": device} if backend_by_parts == "fused" else {"vectors": case.vectors}
    calls = lambda: module.forward(given, seen), lambda: module.backward(g, y, saved, given, seen, wanted)
    executed = module.executed_flops(seen, **sizes, persistent=case.persistent)
    assert tuple(count_flops(call).total for call in calls) == executed


@fused_alone
def test_what_is_not_wanted_is_not_computed(backend_by_parts, monkeypatch):
    case = AWKWARD["all"]
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    given, seen = Given(**inputs), case.hard()
    y, saved = fused.forward(given, seen)
    g = torch.randn_like(y)
    whole = fused.backward(g, y, saved, given, seen, frozenset(inputs) - {"bias"})
    for name, expected in whole.items():
        (only,) = fused.backward(g, y, saved, given, seen, frozenset({name})).items()
        assert only[0] == name and torch.equal(only[1], expected)
    monkeypatch.setattr(fused, "_span_gradient", None)
    assert fused.backward(g, y, saved, given, seen, frozenset("qkv")).keys() == set("qkv")
    monkeypatch.setattr(fused, "_context_gradients", None)
    fused.backward(g, y, saved, given, seen, frozenset({"extra_k"}))


@pytest.mark.parametrize("added", [{"vectors": True}, {"persistent": 8, "dropout": 0.1}])
def test_scores_of_a_chunk_at_a_time(added):
    """Sixteen times the length is sixteen times the memory, and not 256: nothing is as large as all scores."""
    for T, past in ((256, 256), (1024, 1024)):
        case = replace(Case(T=T, past=past, max_keys=(200, 40), z=(150.0, 9.0), streams=1), **added)
        inputs = case.inputs()
        with Largest() as largest:
            case.call(chunked.attend, inputs).sum().backward()
        states, chunk = 2 * (T + past) * case.width, 128 * (128 + 200 + 8)
        assert largest.numbers <= max(states, 2 * chunk)
        assert largest.numbers < 2 * T * (T + past) / 4


# CUDA's operations, pretended


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


def test_where_fused_cannot_run(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fused.obstacle(cpu, torch.float64) is fused.obstacle(cuda, torch.bfloat16) is None
    assert fused.obstacle(torch.device("mps"), torch.float32) == "runtime.device=mps"
    assert fused.obstacle(cuda, torch.float64) == "float64 on a GPU"
    assert fused.obstacle(cpu, torch.float32, dropout=0.1) == "model.dropout=0.1"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert fused.obstacle(cuda, torch.bfloat16) == "torch for ROCm"


# The whole triangle by torch's own attention


TRIANGLE = Case(T=37, max_keys=(40, 37))
NONE = {
    "carried": {"past": 3},
    "not itself": {"shift": 1},
    "a window of 36": {"max_keys": (40, 36)},
    "spans": {"z": (40.0, 40.0)},
    "bias": {"bias": "column"},
    "vectors": {"vectors": True},
    "persistent": {"persistent": 2},
}


def of_triangle(q, k, v, visible, *, dropout=0.0, seed=None, **same):
    assert causal.is_triangle(visible, rows=q.shape[2], keys=k.shape[2], **same)
    return causal.attend(q, k, v)


@pytest.mark.parametrize("changes", [{}, {"T": 1}, {"width": 12}])
def test_the_triangle_is_plain(changes):
    case = replace(TRIANGLE, **changes)
    inputs = case.inputs()
    assert_same(case.call(of_triangle, inputs), case.call(window.attend, inputs), named=inputs)


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_triangle(name):
    case = replace(TRIANGLE, **NONE[name])
    with pytest.raises(AssertionError):
        case.call(of_triangle, case.inputs())
    assert not causal.is_triangle(Window((8,), ramp=4), rows=8, keys=8), "a ramp alone says that spans are soft"
