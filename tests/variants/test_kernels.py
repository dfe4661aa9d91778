"""Every CPU backend of attention over windows equals the plain one, also fused with emulated
CUDA operations."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.count.flops import count_flops
from tests.support.attention_case import (
    DOUBLE,
    LargestTensor,
    assert_near,
    assert_outcome,
    assert_same,
    gradients,
    outcome,
)
from tests.support.efficient_attention import backward, emulated, forward
from tests.support.reference_case import normal
from tests.support.window_case import ATTEND, CASES, HEADS, LARGE, Case, can_compute, packed
from variants.kernels import chunked, fused, operation, window
from variants.kernels.window import Inputs, Persistent, Window

pytestmark = pytest.mark.numeric
KERNEL = pytest.param("kernel", marks=pytest.mark.cpu_kernel)
BACKENDS = pytest.mark.parametrize("backend", ["plain", "chunked", "fused", KERNEL])


@pytest.fixture(params=["cpu", "cuda"])
def engine(request, monkeypatch):
    """The device type whose operations the fused backend calls. Those of CUDA are emulated."""
    monkeypatch.setitem(fused.ENGINES, "cpu", fused.ENGINES[request.param])
    with emulated() if request.param == "cuda" else nullcontext():
        yield request.param


def assert_equals_plain(backend: str, case: Case):
    """Assert that a backend has the output and gradients of the plain one. With a past and heads of
    different windows, assert the same for ``packed`` keys, which the CPU kernel does not take."""
    inputs, attend = case.inputs(), ATTEND[backend]
    named = {name: x for name, x in inputs.items() if x.requires_grad}
    expected = outcome(case.call(window.attend, inputs), named)
    assert_outcome(outcome(case.call(attend, inputs), named), expected)
    if backend != "kernel" and case.past and len({*case.max_keys}) > 1:
        assert_outcome(outcome(case.call(packed(attend), inputs), named), expected)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_output_and_every_gradient_of_each_backend_equal_those_of_plain(case):
    for backend in ATTEND.keys() - {"plain"}:
        if can_compute(backend, case):
            assert_equals_plain(backend, case)
    if can_compute("fused", case):
        with pytest.MonkeyPatch.context() as patched, emulated():
            patched.setitem(fused.ENGINES, "cpu", fused.ENGINES["cuda"])
            assert_equals_plain("fused", case)


WIDE = replace(
    LARGE["all"], T=300, max_keys=(250, 64, 250), z=(180.0, 20.0, 240.0), width=64, ramp=32
)
LONG = Case(T=1900, max_keys=(64,), streams=1, vectors=True, persistent=8)


@pytest.mark.parametrize("backend", ["chunked", "fused"])
def test_in_bfloat16_the_errors_of_attention_computed_in_parts_are_close_to_those_of_plain(backend):
    """Errors of the output and gradients are measured against float64."""
    case, factor = (WIDE, 2) if backend == "fused" else (LONG, 1.3)
    exact, outcomes = case.inputs(), []
    exact["q"].data /= case.width**0.5 if backend == "fused" else 1
    for attend, dtype in (
        (window.attend, DOUBLE),
        (window.attend, torch.bfloat16),
        (ATTEND[backend], torch.bfloat16),
    ):
        span_dtype = torch.float32 if dtype != DOUBLE else DOUBLE
        inputs = {
            n: x.detach().to(span_dtype if n in ("z", "bias") else dtype) for n, x in exact.items()
        }
        leaves = [x.requires_grad_() for n, x in inputs.items() if n != "bias"]
        y = case.call(attend, inputs)
        outcomes.append([x.double() for x in (y, *gradients(y, leaves))])
    for expected, plain, actual in zip(*outcomes, strict=True):
        assert (actual - expected).norm() <= factor * (plain - expected).norm()


def test_context_and_persistent_vectors_are_merged_before_they_are_rounded(engine):
    """With equal weights, values 1 in the context and -1 in the persistent vectors, the output
    is (n - N) / (n + N)."""
    case = Case(T=100, max_keys=(100,), persistent=33, width=8, dtype=torch.bfloat16, streams=1)
    inputs = {name: torch.zeros_like(x) for name, x in case.inputs().items()}
    inputs |= {"v": torch.ones_like(inputs["v"]), "extra_v": -torch.ones_like(inputs["extra_v"])}
    n, y = torch.arange(1.0, 101)[:, None], case.call(ATTEND["fused"], inputs)[0, 0].float()
    torch.testing.assert_close(y, ((n - 33) / (n + 33)).expand(-1, 8), rtol=2**-8, atol=1e-6)


@BACKENDS
def test_columns_beyond_the_ramp_change_nothing_and_keys_beyond_the_window_are_not_read(backend):
    trimmed = Case(T=129, past=40, persistent=1, **HEADS["long"])
    untrimmed, inputs = replace(trimmed, max_keys=(290,) * 4), trimmed.inputs()
    assert_same(
        trimmed.call(ATTEND[backend], inputs), untrimmed.call(ATTEND[backend], inputs), named=inputs
    )
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 20, 4, seed=1), normal(1, 2, 20, 4, seed=2)
    with torch.no_grad():
        # 3 rows and a window of 4 or 5: at most 7 keys
        k[:, :, :13], v[:, :, :13] = torch.nan, torch.nan
    for visible in (Window((5, 4)), Window((4, 4), 1)):
        assert visible.past() == 4
        assert ATTEND[backend](q, k, v, visible).isfinite().all()


@BACKENDS
def test_a_sink_of_minus_infinity_has_no_effect_and_a_huge_one_takes_all_weight(backend):
    for past, persistent in ((0, 2), (4, 0)):
        case = Case(T=9, past=past, shift=1, max_keys=(6, 3), persistent=persistent, sink=True)
        inputs = case.inputs()
        infinite_sink = {"sink": torch.full((2,), -torch.inf, dtype=DOUBLE)}
        without = {n: x for n, x in inputs.items() if n != "sink"}
        y = case.call(ATTEND[backend], inputs | infinite_sink)
        assert torch.equal(y, case.call(ATTEND[backend], without))
        leaves = [*without.values(), sink := infinite_sink["sink"].clone().requires_grad_()]
        *actual, dsink = gradients(case.call(ATTEND[backend], inputs | {"sink": sink}), leaves)
        expected = gradients(case.call(ATTEND[backend], without), [*without.values()])
        assert all(map(torch.equal, actual, expected)) and not dsink.any()
        huge = torch.tensor([1e4, 1e4], dtype=DOUBLE).requires_grad_()
        y = case.call(ATTEND[backend], inputs | {"sink": huge})
        assert not y.any() and all(
            x.isfinite().all() for x in gradients(y, [*without.values(), huge])
        )


@BACKENDS
def test_huge_scores_do_not_overflow(backend):
    q, k, v = 1e4 * normal(1, 1, 6, 4), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 4, seed=2)
    z = torch.tensor([1.5], dtype=DOUBLE, requires_grad=True)
    persistent = Persistent(q, 1e2 * normal(1, 3, 4, seed=3), normal(1, 3, 4, seed=4))
    y = ATTEND[backend](q, k, v, Window((6,), 1, z=z, ramp=2), persistent=persistent)
    assert all(x.isfinite().all() for x in (y, *gradients(y, [q, k, v, z])))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("soft", [False, True])
def test_windows_and_ramps_may_end_at_any_position_of_a_chunk(soft):
    """The kernel processes keys in chunks of 256. The heads' windows end at consecutive
    distances around 256."""
    heads, rows, past, ramp = 48, 19, 420, 5
    spans = range(230, 230 + heads)
    q, k, v = (
        normal(1, heads, n, 3, seed=seed) for seed, n in enumerate((rows, rows + past, rows + past))
    )
    named = {"q": q, "k": k, "v": v}
    if soft:
        named["z"] = torch.tensor(list(spans), dtype=DOUBLE, requires_grad=True)
        visible = Window((max(spans) + ramp + 1,) * heads, z=named["z"], ramp=ramp)
        expected = window.attend(q, k, v, visible)
    else:
        visible, parts = (
            Window(tuple(spans)),
            zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), spans, strict=True),
        )
        expected = torch.cat(
            [window.attend(*qkv, Window((max_keys,))) for *qkv, max_keys in parts], dim=1
        )
    assert_same(ATTEND["kernel"](q, k, v, visible), expected, named=named)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("rows, span, ramp", [(264, 263, 4), (272, 263, 4), (1024, 519, 32)])
def test_a_ramp_that_begins_at_the_end_of_a_chunk_has_a_gradient(rows, span, ramp):
    """At an integer z the key at distance z has weight 1, where the ramp begins: it contributes
    to z's gradient."""
    q, k, v = (normal(1, 1, rows, 4, seed=seed) for seed in range(3))
    z = torch.tensor([span], dtype=DOUBLE, requires_grad=True)
    visible = Window((span + ramp + 1,), z=z, ramp=ramp)
    named = {"q": q, "k": k, "v": v, "z": z}
    assert_same(ATTEND["kernel"](q, k, v, visible), window.attend(q, k, v, visible), named=named)


@BACKENDS
@pytest.mark.parametrize("gap", [60.0, 400.0])
def test_a_key_of_weight_zero_with_the_largest_score_gives_a_finite_gradient_of_the_span(
    backend, gap
):
    q, k, v = (normal(1, 1, 6, 4, seed=seed).detach().repeat(2, 1, 1, 1) for seed in range(3))
    # two streams move the span in opposite directions
    rewards = torch.tensor([3.0, -1.0])[:, None, None, None]
    k[:, :, 0] += gap * q[:, :, 3] / q[0, 0, 3].square().sum()

    def output_and_gradients(dtype, attend) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.tensor([1.0]))]
        y = attend(leaves[0][:, :, 3:], *leaves[1:3], Window((4,), z=leaves[3], ramp=2))
        return [y.detach(), *torch.autograd.grad((rewards * y).sum(), leaves)]

    *rounded, dz = output_and_gradients(torch.float32, ATTEND[backend])
    *exact, exact_dz = output_and_gradients(DOUBLE, window.attend)
    for actual, expected in zip(rounded, exact, strict=True):
        assert_near(actual.double(), expected, tolerance=2e-5)
    assert dz.sign() == exact_dz.sign()
    if gap < 80:
        assert abs(dz / exact_dz - 1) < 1e-4


def dense(q: Tensor, k: Tensor, v: Tensor, z: Tensor, ramp: int) -> Tensor:
    """Return causal attention over all keys with a soft mask, by torch.clamp and autograd."""
    t = torch.arange(q.shape[2])
    x = t[:, None] - t
    weights = torch.clamp((ramp + z[:, None, None] - x) / ramp, 0, 1) * (x >= 0) * (q @ k.mT).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ramp", [1, 3, 32])
def test_the_gradient_of_spans_at_the_kinks_of_the_mask_is_that_of_clamp(backend, ramp, dtype):
    """Spans are integers and their floating-point neighbours, for which rounding of z + R
    decides the side of a kink."""
    integers = torch.tensor([0, 1, 2, 5, 9, 20, 39], dtype=dtype)
    rounded = torch.cat(
        [torch.nextafter(integers, integers + 1), torch.nextafter(integers[1:], integers[1:] - 1)]
    )
    z = torch.cat([integers, rounded]).requires_grad_()
    q, k, v = (normal(1, len(z), 40, 4, seed=n).to(dtype) for n in range(3))
    (dz,) = gradients(ATTEND[backend](q, k, v, Window((40,) * len(z), z=z, ramp=ramp)), [z])
    assert_near(
        dz, gradients(dense(q, k, v, z, ramp), [z])[0], tolerance=1e-11 if dtype == DOUBLE else 2e-5
    )


# Forward and backward called separately

SEPARATE = (
    "one byte that sees nothing",
    "uneven heads, out of order",
    "spans out of order",
    "bias",
    "all",
)


def arguments_of(case: Case) -> tuple[Inputs, Window, frozenset[str]]:
    """Return inputs and window of a backend's forward and backward, and the names of inputs with a
    gradient."""
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    return Inputs(**inputs), case.hard_window(), frozenset(inputs) - {"bias"}


@pytest.mark.parametrize("name", SEPARATE)
def test_backward_can_omit_the_past_and_executed_flops_are_counted(engine, name, monkeypatch):
    """Inference mode stands for the inside of a torch operation, where autograd records nothing."""
    case = CASES[name]
    inputs, visible, wanted = arguments_of(case)
    with torch.inference_mode():
        y, saved = fused.forward(inputs, visible)
        g = torch.randn_like(y)
        all_gradients = fused.backward(g, y, saved, inputs, visible, wanted)
        segment = fused.backward(g, y, saved, inputs, visible, frozenset("qkv"), segment_only=True)
    assert all_gradients.keys() == wanted and segment.keys() == set("qkv")
    for field, gradient in segment.items():
        assert_near(gradient, all_gradients[field][:, :, 0 if field == "q" else case.past :])
    if engine == "cpu":  # on CUDA the heads are padded to a larger width
        calls = (
            lambda: fused.forward(inputs, visible),
            lambda: fused.backward(g, y, saved, inputs, visible, wanted),
        )
        assert tuple(count_flops(call).total for call in calls) == fused.executed_flops(
            inputs, visible, wanted
        )
    monkeypatch.setattr(fused, "_span_gradient", None)
    assert fused.backward(g, y, saved, inputs, visible, frozenset("qkv")).keys() == set("qkv")


@pytest.mark.parametrize("added", [{"vectors": True}, {"persistent": 8, "dropout": 0.1}])
def test_the_chunked_backend_never_stores_all_scores(added):
    """All scores would be 2 x 1024 x 2048 numbers."""
    case = replace(Case(T=1024, past=1024, max_keys=(200, 40), z=(150.0, 9.0), streams=1), **added)
    with LargestTensor() as largest:
        case.call(chunked.attend, case.inputs()).sum().backward()
    assert largest.elements <= 2 * 128 * (128 + 200 + 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["all", "uneven width"])
def test_the_fused_backend_runs_on_tensors_without_data(name, dtype, monkeypatch):
    """It reads no value of a tensor and mixes no tensors of the CPU with those of the device."""
    monkeypatch.setitem(fused.ENGINES, "meta", fused.ENGINES["cuda"])
    meta = {field: x.detach().to("meta", dtype) for field, x in CASES[name].inputs().items()}
    inputs, visible, wanted = Inputs(**meta), CASES[name].hard_window(), frozenset(meta) - {"bias"}
    y, saved = fused.forward(inputs, visible)
    gradients = fused.backward(torch.ones_like(y), y, saved, inputs, visible, wanted)
    for field, tensor in [("q", y), *gradients.items()]:
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (
            meta[field].shape,
            dtype,
            "meta",
        ), field


def test_the_emulated_operations_have_the_shapes_and_dtypes_of_torchs_meta_functions():
    rows, width = 33, 96
    q, k, v = (torch.randn(2, 3, n, width) for n in (rows, 40, 40))
    mask, operations = torch.zeros(2, 3, rows, 40), torch.ops.aten
    outputs = forward(q, k, v, mask, True, scale=1.0)
    meta = [x.to("meta") for x in (q, k, v, mask)]
    real = operations._scaled_dot_product_efficient_attention(*meta, True, scale=1.0)
    assert [(x.shape, x.dtype) for x in outputs] == [(x.shape, x.dtype) for x in real]
    assert outputs[0].stride() == real[0].stride()
    options = (0.0, [True, True, True, False])
    backwards = backward(q, q, k, v, mask, *outputs, *options, scale=1.0)[:3]
    saved = [x.to("meta") for x in outputs]
    real = operations._scaled_dot_product_efficient_attention_backward(
        meta[0], *meta, *saved, *options, scale=1.0
    )
    assert [(x.shape, x.dtype, x.stride()) for x in backwards] == [
        (x.shape, x.dtype, x.stride()) for x in real[:3]
    ]


def test_the_fused_backend_names_why_it_cannot_run(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fused.obstacle(cpu) is fused.obstacle(cuda) is None
    assert fused.obstacle(torch.device("mps")) == "runtime.device=mps"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert fused.obstacle(cuda) == "torch for ROCm"


# Plain causal attention by torch's own operation

NOT_FULL_CAUSAL = [
    {"past": 3},
    {"shift": 1},
    {"max_keys": (40, 36)},
    {"z": (40.0, 40.0)},
    {"bias": "column"},
]
NOT_FULL_CAUSAL += [{"vectors": True}, {"persistent": 2}, {"sink": True}]
FULL_CAUSAL = Case(T=37, max_keys=(40, 37))


def test_the_shortcut_for_plain_causal_attention_is_exact_and_taken_for_nothing_else():
    for changes in ({}, {"T": 1}, {"width": 12}, {"both": True}):
        case = replace(FULL_CAUSAL, **changes)
        inputs = case.inputs()
        assert fused.is_full(case.hard_window(), Inputs(**inputs))
        assert_same(
            fused.full(Inputs(**inputs), causal=not case.both),
            case.call(window.attend, inputs),
            named=inputs,
        )
    for changes in NOT_FULL_CAUSAL:
        case = replace(FULL_CAUSAL, **changes)
        visible = case.hard_window()._replace(z=case.inputs().get("z"))
        assert not fused.is_full(visible, Inputs(**case.inputs())), changes
    assert not fused.is_full(Window((40, 37), ramp=4), Inputs(**FULL_CAUSAL.inputs())), (
        "the mask is soft"
    )


# The registered torch operation

SOFT = Case(T=5, past=7, max_keys=(11, 6), z=(8.0, 1.5), ramp=3, persistent=3, dtype=torch.float32)


def test_the_operation_passes_torchs_opcheck():
    inputs, max_keys = SOFT.inputs(), list(SOFT.max_keys)
    # constants, or a tensor that may change in a graph
    for max_keys_tensor in (None, torch.tensor(max_keys)):
        windows = (max_keys, max_keys_tensor, 0, SOFT.ramp)
        arguments = ("fused", " ".join(inputs), list(inputs.values()), *windows, 0.0, False)
        torch.library.opcheck(torch.ops.windtunnel.attention_forward.default, arguments)


def test_rows_with_strided_elements_give_the_same_output():
    """torch's flash attention for CPUs would read the rows as if their elements were contiguous."""
    inputs = [normal(1, 2, 5, 8, seed=n).detach().float() for n in range(3)]
    strided = [x.mT.contiguous().mT for x in inputs]
    assert strided[0].stride(-1) != 1
    assert torch.equal(
        ATTEND["fused"](*strided, Window((5, 5))), ATTEND["fused"](*inputs, Window((5, 5)))
    )


def test_the_flop_counter_counts_the_operation():
    inputs, visible = replace(SOFT, persistent=0).inputs(), SOFT.hard_window()

    def loss(q, k, v, z):
        return operation.attend("fused", q, k, v, visible._replace(z=z)).square().sum()

    counted = count_flops(lambda: loss(**inputs).backward(), gradients=True).total
    assert counted == sum(fused.executed_flops(Inputs(**inputs), visible, frozenset(inputs)))
