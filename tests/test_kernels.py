"""Attention over windows: every backend of a CPU against the plain one, and torch's CUDA
operations as the fused backend calls them, pretended on a CPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.count.flops import count_flops
from tests.attention_case import DOUBLE, Largest, assert_near, assert_outcome, assert_same, gradients, outcome
from tests.efficient_attention import backward, forward, pretended
from tests.window_case import ATTEND, CASES, HEADS, LARGE, Case, packed, takes
from variants.kernels import chunked, fused, operation, window
from variants.kernels.window import Inputs, Persistent, Window

pytestmark = pytest.mark.numeric
KERNEL = pytest.param("kernel", marks=pytest.mark.cpu_kernel)
BACKENDS = pytest.mark.parametrize("backend", ["plain", "chunked", "fused", KERNEL])


@pytest.fixture(params=["cpu", "cuda"])
def engine(request, monkeypatch):
    """The kind of device whose operations the fused backend calls, CUDA's pretended on a CPU."""
    monkeypatch.setitem(fused.ENGINES, "cpu", fused.ENGINES[request.param])
    with pretended() if request.param == "cuda" else nullcontext():
        yield request.param


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_plain(backend: str, case: Case) -> None:
    """Heads of unequal windows also packed."""
    inputs, attend = case.inputs(), ATTEND[backend]
    named = {name: x for name, x in inputs.items() if x.requires_grad}
    expected = outcome(case.call(window.attend, inputs), named)
    assert_outcome(outcome(case.call(attend, inputs), named), expected)
    if backend != "kernel" and case.past and len({*case.max_keys}) > 1:
        assert_outcome(outcome(case.call(packed(attend), inputs), named), expected)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_backend_is_plain(case):
    """Value and every gradient; fused also as it calls torch on CUDA."""
    for backend in ATTEND.keys() - {"plain"}:
        if takes(backend, case):
            assert_plain(backend, case)
    if takes("fused", case):
        with pytest.MonkeyPatch.context() as patched, pretended():
            patched.setitem(fused.ENGINES, "cpu", fused.ENGINES["cuda"])
            assert_plain("fused", case)


WIDE = replace(LARGE["all"], T=300, max_keys=(250, 64, 250), z=(180.0, 20.0, 240.0), width=64, ramp=32)
LONG = Case(T=1900, max_keys=(64,), streams=1, vectors=True, persistent=8)


@pytest.mark.parametrize("backend", ["chunked", "fused"])
def test_sums_over_parts_are_rounded_once(backend):
    """In bfloat16 value and gradients are hardly farther from float64 than those of plain attention, however many parts."""
    case, factor = (WIDE, 2) if backend == "fused" else (LONG, 1.3)
    exact, outcomes = case.inputs(), []
    exact["q"].data /= case.width**0.5 if backend == "fused" else 1
    for attend, dtype in ((window.attend, DOUBLE), (window.attend, torch.bfloat16), (ATTEND[backend], torch.bfloat16)):
        fine = torch.float32 if dtype != DOUBLE else DOUBLE
        inputs = {n: x.detach().to(fine if n in ("z", "bias") else dtype) for n, x in exact.items()}
        moved = [x.requires_grad_() for n, x in inputs.items() if n != "bias"]
        y = case.call(attend, inputs)
        outcomes.append([x.double() for x in (y, *gradients(y, moved))])
    for exactly, plain, mine in zip(*outcomes, strict=True):
        assert (mine - exactly).norm() <= factor * (plain - exactly).norm()


def test_parts_are_merged_before_they_are_rounded(engine):
    """Values of 1 in the context and of -1 beside it, all weights equal: (n - N) / (n + N), in which much cancels."""
    case = Case(T=100, max_keys=(100,), persistent=33, width=8, dtype=torch.bfloat16, streams=1)
    inputs = {name: torch.zeros_like(x) for name, x in case.inputs().items()}
    inputs |= {"v": torch.ones_like(inputs["v"]), "extra_v": -torch.ones_like(inputs["extra_v"])}
    n, y = torch.arange(1.0, 101)[:, None], case.call(ATTEND["fused"], inputs)[0, 0].float()
    torch.testing.assert_close(y, ((n - 33) / (n + 33)).expand(-1, 8), rtol=2**-8, atol=1e-6)


@BACKENDS
def test_trimmed_columns_are_all_that_matter(backend):
    """Keys beyond z + R change nothing, the gradient of z included; and those beyond the window are not read."""
    trimmed = Case(T=129, past=40, persistent=1, **HEADS["long"])
    whole, inputs = replace(trimmed, max_keys=(290,) * 4), trimmed.inputs()
    assert_same(trimmed.call(ATTEND[backend], inputs), whole.call(ATTEND[backend], inputs), named=inputs)
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 20, 4, seed=1), normal(1, 2, 20, 4, seed=2)
    with torch.no_grad():
        k[:, :, :13], v[:, :, :13] = torch.nan, torch.nan  # 3 rows and a window of 4 or 5: at most 7 keys
    for seen in (Window((5, 4)), Window((4, 4), 1)):
        assert seen.past() == 4
        assert ATTEND[backend](q, k, v, seen).isfinite().all()


@BACKENDS
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(backend):
    case = Case(T=9, past=4, shift=1, max_keys=(6, 3), persistent=2, sink=True)
    for start, persistent in ((0, 2), (4, 0)):  # with nothing before it, a query sees nothing
        case = replace(case, past=start, persistent=persistent)
        inputs = case.inputs()
        none = {"sink": torch.full((2,), -torch.inf, dtype=DOUBLE)}
        without = {n: x for n, x in inputs.items() if n != "sink"}
        y = case.call(ATTEND[backend], inputs | none)
        assert torch.equal(y, case.call(ATTEND[backend], without))
        moved = [*without.values(), sink := (-none["sink"]).neg().requires_grad_()]
        *mine, dsink = gradients(case.call(ATTEND[backend], inputs | {"sink": sink}), moved)
        expected = gradients(case.call(ATTEND[backend], without), [*without.values()])
        assert all(map(torch.equal, mine, expected)) and not dsink.any()
        huge = torch.tensor([1e4, 1e4], dtype=DOUBLE).requires_grad_()
        y = case.call(ATTEND[backend], inputs | {"sink": huge})
        assert not y.any() and all(x.isfinite().all() for x in gradients(y, [*without.values(), huge]))


@BACKENDS
def test_huge_scores_do_not_overflow(backend):
    q, k, v = 1e4 * normal(1, 1, 6, 4), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 4, seed=2)
    z = torch.tensor([1.5], dtype=DOUBLE, requires_grad=True)
    persistent = Persistent(q, 1e2 * normal(1, 3, 4, seed=3), normal(1, 3, 4, seed=4))
    y = ATTEND[backend](q, k, v, Window((6,), 1, z=z, ramp=2), persistent=persistent)
    assert all(x.isfinite().all() for x in (y, *gradients(y, [q, k, v, z])))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("soft", [False, True])
def test_edges_at_every_place_of_a_chunk(soft):
    """The kernel takes keys by 256: heads whose windows and ramps end before, at and behind every place around that."""
    heads, rows, past, ramp = 48, 19, 420, 5
    spans = range(230, 230 + heads)
    q, k, v = (normal(1, heads, n, 3, seed=seed) for seed, n in enumerate((rows, rows + past, rows + past)))
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
@pytest.mark.parametrize("gap", [60.0, 400.0])
def test_a_key_of_weight_zero_may_have_the_largest_score(backend, gap):
    """At the far end of the ramp a key has weight 0 and moves the span alone: its gradient is bounded, and is no NaN."""
    q, k, v = (normal(1, 1, 6, 4, seed=seed).detach().repeat(2, 1, 1, 1) for seed in range(3))
    rewards = torch.tensor([3.0, -1.0])[:, None, None, None]  # two streams move the span in opposite directions
    k[:, :, 0] += gap * q[:, :, 3] / q[0, 0, 3].square().sum()

    def moved(dtype, attend) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.tensor([1.0]))]
        y = attend(leaves[0][:, :, 3:], *leaves[1:3], Window((4,), z=leaves[3], ramp=2))
        return [y.detach(), *torch.autograd.grad((rewards * y).sum(), leaves)]

    *low, dz = moved(torch.float32, ATTEND[backend])
    *exact, exact_dz = moved(DOUBLE, window.attend)
    for one, other in zip(low, exact, strict=True):
        assert_near(one.double(), other, tolerance=2e-5)
    assert dz.sign() == exact_dz.sign() and (gap > 80 or abs(dz / exact_dz - 1) < 1e-4)


def dense(q: Tensor, k: Tensor, v: Tensor, z: Tensor, ramp: int) -> Tensor:
    """Attention by torch.clamp and autograd over all keys: rows see themselves and everything before."""
    t = torch.arange(q.shape[2])
    x = t[:, None] - t
    weights = torch.clamp((ramp + z[:, None, None] - x) / ramp, 0, 1) * (x >= 0) * (q @ k.mT).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ramp", [1, 3, 32])
def test_gradient_of_spans_at_kinks_is_that_of_clamp(backend, ramp, dtype):
    """At every whole z, and one rounding beside it: what matters is on which side z + R is when it is rounded."""
    whole = torch.tensor([0, 1, 2, 5, 9, 20, 39], dtype=dtype)
    rounded = torch.cat([torch.nextafter(whole, whole + 1), torch.nextafter(whole[1:], whole[1:] - 1)])
    z = torch.cat([whole, rounded]).requires_grad_()
    q, k, v = (normal(1, len(z), 40, 4, seed=n).to(dtype) for n in range(3))
    (mine,) = gradients(ATTEND[backend](q, k, v, Window((40,) * len(z), z=z, ramp=ramp)), [z])
    assert_near(mine, gradients(dense(q, k, v, z, ramp), [z])[0], tolerance=1e-11 if dtype == DOUBLE else 2e-5)


# Forward and backward apart

SEPARATE = ("one byte that sees nothing", "uneven heads, out of order", "spans out of order", "bias", "all")


def arguments_of(case: Case) -> tuple[Inputs, Window, frozenset[str]]:
    """What a backend's forward and backward take, and what may have a gradient."""
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    return Inputs(**inputs), case.hard(), frozenset(inputs) - {"bias"}


@pytest.mark.parametrize("name", SEPARATE)
def test_the_segments_gradients_alone_and_executed_flops(engine, name, monkeypatch):
    """As ``backward`` is called inside an operation, where autograd records nothing, and what both say that they execute."""
    case = CASES[name]
    inputs, seen, wanted = arguments_of(case)
    with torch.inference_mode():
        y, saved = fused.forward(inputs, seen)
        g = torch.randn_like(y)
        whole = fused.backward(g, y, saved, inputs, seen, wanted)
        segment = fused.backward(g, y, saved, inputs, seen, frozenset("qkv"), segment_only=True)
    assert whole.keys() == wanted and segment.keys() == set("qkv")
    for field, gradient in segment.items():
        assert_near(gradient, whole[field][:, :, 0 if field == "q" else case.past :])
    if engine == "cpu":  # CUDA's heads are padded
        calls = lambda: fused.forward(inputs, seen), lambda: fused.backward(g, y, saved, inputs, seen, wanted)
        assert tuple(count_flops(call).total for call in calls) == fused.executed_flops(inputs, seen, wanted)
    monkeypatch.setattr(fused, "_span_gradient", None)
    assert fused.backward(g, y, saved, inputs, seen, frozenset("qkv")).keys() == set("qkv")


@pytest.mark.parametrize("added", [{"vectors": True}, {"persistent": 8, "dropout": 0.1}])
def test_scores_of_a_chunk_at_a_time(added):
    """Nothing is as large as all scores, which are over 2 x 1024 x 2048."""
    case = replace(Case(T=1024, past=1024, max_keys=(200, 40), z=(150.0, 9.0), streams=1), **added)
    with Largest() as largest:
        case.call(chunked.attend, case.inputs()).sum().backward()
    assert largest.numbers <= 2 * 128 * (128 + 200 + 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["all", "uneven width"])
def test_on_tensors_without_data(name, dtype, monkeypatch):
    """As on a GPU: no tensor that is made on a CPU meets them, and no value is waited for."""
    monkeypatch.setitem(fused.ENGINES, "meta", fused.ENGINES["cuda"])
    lost = {field: x.detach().to("meta", dtype) for field, x in CASES[name].inputs().items()}
    inputs, seen, wanted = Inputs(**lost), CASES[name].hard(), frozenset(lost) - {"bias"}
    y, saved = fused.forward(inputs, seen)
    made = {"q": y}, fused.backward(torch.ones_like(y), y, saved, inputs, seen, wanted)
    for field, tensor in (item for results in made for item in results.items()):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (lost[field].shape, dtype, "meta"), field


def test_the_pretended_operations_give_what_torch_says_of_them():
    """Shapes and types of all results, by the functions that describe the real ones to the compiler."""
    rows, width = 33, 96
    q, k, v = (torch.randn(2, 3, n, width) for n in (rows, 40, 40))
    mask, operations = torch.zeros(2, 3, rows, 40), torch.ops.aten
    results = forward(q, k, v, mask, True, scale=1.0)
    lost = [x.to("meta") for x in (q, k, v, mask)]
    real = operations._scaled_dot_product_efficient_attention(*lost, True, scale=1.0)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in real]
    assert results[0].stride() == real[0].stride()
    same = (0.0, [True, True, True, False])
    backwards = backward(q, q, k, v, mask, *results, *same, scale=1.0)[:3]
    saved = [x.to("meta") for x in results]
    real = operations._scaled_dot_product_efficient_attention_backward(lost[0], *lost, *saved, *same, scale=1.0)
    assert [(x.shape, x.dtype, x.stride()) for x in backwards] == [(x.shape, x.dtype, x.stride()) for x in real[:3]]


def test_where_fused_cannot_run(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fused.obstacle(cpu) is fused.obstacle(cuda) is None
    assert fused.obstacle(torch.device("mps")) == "runtime.device=mps"
    assert fused.obstacle(cpu, dropout=0.1) == "model.dropout=0.1"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert fused.obstacle(cuda) == "torch for ROCm"


# The whole triangle by torch's own attention

NONE = [{"past": 3}, {"shift": 1}, {"max_keys": (40, 36)}, {"z": (40.0, 40.0)}, {"bias": "column"}, {"vectors": True}]
TRIANGLE = Case(T=37, max_keys=(40, 37))


def test_the_triangle_is_plain_and_nothing_else_is_one():
    for changes in ({}, {"T": 1}, {"width": 12}):
        case = replace(TRIANGLE, **changes)
        inputs = case.inputs()
        assert fused.is_full_causal(case.hard(), Inputs(**inputs))
        assert_same(fused.full_causal(Inputs(**inputs)), case.call(window.attend, inputs), named=inputs)
    for changes in (*NONE, {"persistent": 2}):
        case = replace(TRIANGLE, **changes)
        assert not fused.is_full_causal(case.hard()._replace(z=case.inputs().get("z")), Inputs(**case.inputs())), (
            changes
        )
    assert not fused.is_full_causal(Window((40, 37), ramp=4), Inputs(**TRIANGLE.inputs())), "a ramp alone says soft"


# As one operation of torch's

SOFT = Case(T=5, past=7, max_keys=(11, 6), z=(8.0, 1.5), ramp=3, persistent=3, dtype=torch.float32)


def test_torch_finds_the_operation_well_made():
    """Schema, fake tensors, autograd registration, and that it traces with symbolic shapes."""
    inputs, max_keys = SOFT.inputs(), list(SOFT.max_keys)
    for limits in (None, torch.tensor(max_keys)):
        arguments = ("fused", " ".join(inputs), list(inputs.values()), max_keys, limits, 0, SOFT.ramp, 0.0)
        torch.library.opcheck(torch.ops.windtunnel.attention_forward.default, arguments)


def test_a_layout_that_a_graph_chose_changes_nothing():
    """Elements of a row that lie apart: torch's flash attention for CPUs reads them as if they did not."""
    inputs = [normal(1, 2, 5, 8, seed=n).detach().float() for n in range(3)]
    turned = [x.mT.contiguous().mT for x in inputs]
    assert turned[0].stride(-1) != 1
    assert torch.equal(ATTEND["fused"](*turned, Window((5, 5))), ATTEND["fused"](*inputs, Window((5, 5))))


def test_flops_of_the_operation_are_counted():
    inputs, seen = replace(SOFT, persistent=0).inputs(), SOFT.hard()
    loss = lambda q, k, v, z: operation.attend("fused", q, k, v, seen._replace(z=z)).square().sum()  # noqa: E731
    counted = count_flops(lambda: loss(**inputs).backward(), gradients=True).total
    assert counted == sum(fused.executed_flops(Inputs(**inputs), seen, frozenset(inputs)))
