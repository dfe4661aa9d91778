"""The Triton kernels, interpreted on a CPU or compiled on a GPU, compared with the plain
backend."""

import importlib.util
import re
import sys
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch
from torch import Tensor

import variants
from tests.support import window_case
from tests.support.attention_case import assert_near
from tests.support.efficient_attention import heads_inside
from tests.support.requirements import require
from variants.kernels import operation, triton_window, window
from variants.kernels.window import Inputs, Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.numeric
needs_triton = pytest.mark.usefixtures("triton_installed")
SMALL = {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
IN_FLOAT32 = ("z", "bias", "sink", "key_bias", "query_bias")
KERNEL = partial(operation.attend, "kernel")


@pytest.fixture
def triton_installed():
    require(importlib.util.find_spec("triton"), "triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    """On a CPU, import Triton again with TRITON_INTERPRET set, which it reads when it is
    imported."""
    if DEVICE == "cuda":
        yield
        return

    def triton_modules() -> list[str]:
        return [
            n
            for n in sys.modules
            if re.match(r"triton(?!\._C)\b|variants\.kernels\._triton_kernels", n)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        others = {name: sys.modules.pop(name) for name in triton_modules()}
        vars(variants.kernels).pop("_triton_kernels", None)
        yield
        for name in triton_modules():
            del sys.modules[name]
        vars(variants.kernels).pop("_triton_kernels", None)
        sys.modules.update(others)


@needs_triton
def test_kernels_are_not_specialised_on_lengths():
    """By default Triton compiles a kernel again for integer arguments that are 1 or multiples of
    16."""
    from variants.kernels import _triton_kernels as kernels

    for name in ("forward", "query_gradient", "key_gradient", "vector_gradient"):
        params = [p for p in getattr(kernels, name).params if not p.is_constexpr]
        specialised = {p.name for p in params if not p.do_not_specialize}
        assert specialised.isdisjoint(("B", "T", "stream_keys", "longest", "distances")), name


@pytest.fixture
def small_blocks(interpreted, monkeypatch):
    """Set blocks of 16, so that a few dozen bytes fill several, and patch the interpreter for NumPy
    2.4.

    The interpreter stores scalars as arrays of one element, which NumPy 2.4 refuses as indices."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(triton_window, "launch_options", lambda *_, **__: SMALL)
    monkeypatch.setattr(triton_window, "STREAM_GROUPS", 2)


@dataclass(frozen=True, kw_only=True)
class Case(window_case.Case):
    """A case with the memory layout ``[B, T, H, K]`` of the sublayers, and spans and biases in
    float32."""

    T: int = 20
    ramp: int = 5
    streams: int = 1
    width: int = 16
    dtype: torch.dtype = torch.float32

    def inputs(self) -> dict[str, Tensor]:
        unscaled = {"v", "extra_v", "bias", "z", "key_bias", "query_bias"}
        scaled = {
            n: x if n in unscaled else x * self.width**-0.25 for n, x in super().inputs().items()
        }
        inputs = {n: heads_inside(x) if x.dim() == 4 else x for n, x in scaled.items()}
        dtypes = {n: torch.float32 if n in IN_FLOAT32 else self.dtype for n in inputs}
        return {n: x.detach().to(DEVICE, dtypes[n]) for n, x in inputs.items()}

    def compare(self, *, like: torch.dtype = torch.float64, tolerance: float):
        """Assert that output and gradients equal those of the plain backend in the dtype
        ``like``."""
        drawn = self.inputs()
        names = [name for name in drawn if name != "bias"]
        attend = window_case.packed(KERNEL) if self.past and len({*self.max_keys}) > 1 else KERNEL
        inputs, exact = (
            {n: x.detach().to(to).requires_grad_() for n, x in drawn.items()} for to in (None, like)
        )
        y, expected_y = self.call(attend, inputs), self.call(window.attend, exact)
        assert y.dtype == self.dtype and y.isfinite().all()
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(
            DEVICE, self.dtype
        )
        actual = [y, *torch.autograd.grad(y, [inputs[n] for n in names], upstream)]
        expected = [
            expected_y,
            *torch.autograd.grad(expected_y, [exact[n] for n in names], upstream.to(like)),
        ]
        for name, x, expected_x in zip(["value", *names], actual, expected, strict=True):
            assert_near(x.to(like), expected_x, tolerance=tolerance, what=name)


INTERPRETED = (
    "one byte that sees nothing",
    "a past longer than the window",
    "uneven heads, out of order",
)
INTERPRETED += (
    "a ramp wider than blocks",
    "blind first rows and a bias",
    "persistent and everything",
)
INTERPRETED += ("a sink beside vectors",)
INTERPRETED += (
    "a sink and nothing else",
    "a hidden byte and nothing else",
    "key biases",
    "key biases and vectors",
)


@needs_triton
@pytest.mark.parametrize("name", INTERPRETED)
def test_output_and_gradients_of_the_interpreted_kernel_equal_those_of_plain(small_blocks, name):
    """Every second case has dropout."""
    fields_of = {
        f.name: getattr(window_case.SMALL_CASES[name], f.name) for f in fields(window_case.Case)
    }
    rate = 0.4 * (INTERPRETED.index(name) % 2)
    Case(**fields_of | {"dtype": torch.float32, "dropout": rate}).compare(tolerance=2e-5)


@needs_triton
@pytest.mark.parametrize(
    "changes, tolerance",
    [
        ({"width": 24, "dropout": 0.1}, 2e-5),
        ({"width": 96, "vectors": True, "dropout": 0.1, "streams": 2}, 2e-5),
        ({"dtype": torch.float16, "persistent": 0}, 5e-3),
    ],
)
def test_the_width_may_be_any_multiple_of_8_and_the_dtype_float16(small_blocks, changes, tolerance):
    Case(**{"T": 19, "past": 7, "z": (2.5, 17.0), "persistent": 2} | changes).compare(
        tolerance=tolerance
    )


@needs_triton
def test_context_and_persistent_vectors_are_merged_before_they_are_rounded(small_blocks):
    """With equal weights and 2^n vectors only the output is rounded, so y must be the nearest
    float16 number."""
    case = Case(T=33, persistent=32, streams=2, dtype=torch.float16)
    inputs = {name: x * ("v" in name) for name, x in case.inputs().items()}
    expected = case.call(window.attend, {name: x.double() for name, x in inputs.items()})
    errors = (case.call(KERNEL, inputs).double() - expected).abs()
    assert (errors <= (expected.half().double() - expected).abs() + 1e-6).all()


@pytest.fixture
def executed(monkeypatch):
    """A list of the FLOPs of each product that the interpreter executes."""
    require(DEVICE == "cpu", "products can be counted in the interpreter only")
    from triton.runtime.interpreter import InterpreterBuilder

    flops, product = [], InterpreterBuilder.create_dot

    def counted(builder, a, b, *others):
        flops.append(2 * a.data.shape[0] * b.data.size)
        return product(builder, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    return flops


@needs_triton
@pytest.mark.parametrize("packed", [False, True])
def test_backward_can_omit_the_past_and_executed_flops_counts_the_executed_products(
    small_blocks, executed, packed
):
    spans = {"max_keys": (10, 39), "z": (3.5, 33.0)}
    case = Case(
        T=18, past=21, **spans, persistent=5, vectors=True, key_bias=True, streams=2, dropout=0.3
    )
    inputs = Inputs(**case.inputs(), dropout=case.dropout, seed=torch.tensor(7, device=DEVICE))
    visible = case.hard_window()
    inputs = window_case.packed_inputs(inputs, visible) if packed else inputs
    g, wanted = (
        torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(2)),
        frozenset(case.inputs()),
    )
    y, saved = triton_window.forward(inputs, visible)
    assert sum(executed) == triton_window.executed_flops(inputs, visible, wanted)[0]
    executed.clear()
    all_gradients = triton_window.backward(g, y, saved, inputs, visible, wanted)
    assert sum(executed) == triton_window.executed_flops(inputs, visible, wanted)[1]
    executed.clear()
    segment = triton_window.backward(g, y, saved, inputs, visible, wanted, segment_only=True)
    assert (
        sum(executed) == triton_window.executed_flops(inputs, visible, wanted, segment_only=True)[1]
    )
    for name, gradient in segment.items():
        expected = all_gradients[name]
        if name in ("k", "v", "key_bias"):
            heads = [inputs.of_heads(expected, slice(h, h + 1)) for h in range(2)]
            expected = torch.cat([x[:, :, -case.T :] for x in heads], 1)
        assert_near(gradient, expected, tolerance=1e-6, what=name)


@needs_triton
def test_the_gradient_of_spans_at_the_kinks_of_the_mask_is_that_of_plain(small_blocks):
    """Spans are integers and their neighbours in float32, for which rounding of z + R decides
    the side of a kink."""
    integers = torch.tensor([1.0, 5.0, 14.0])
    z = torch.cat(
        [integers, torch.nextafter(integers, integers + 1), torch.nextafter(integers, integers - 1)]
    )
    case = Case(T=18, max_keys=(20,) * len(z), z=tuple(z.tolist()), ramp=3, dropout=0.25)
    case.compare(like=torch.float32, tolerance=2e-5)


@needs_triton
def test_heads_may_have_hard_windows_of_different_lengths(small_blocks):
    """The plain backend has one hard window for all heads, so each head is compared separately."""
    case = Case(T=33, past=12, max_keys=(5, 40))
    inputs = case.inputs()
    for h, (y, max_keys) in enumerate(
        zip(case.call(KERNEL, inputs).split(1, 1), case.max_keys, strict=True)
    ):
        qkv = [inputs[name][:, h : h + 1].double() for name in "qkv"]
        assert_near(y.double(), window.attend(*qkv, Window((max_keys,))), tolerance=2e-5)


def test_obstacle_returns_why_the_kernels_cannot_run(interpreted, monkeypatch):
    device = torch.device(DEVICE)
    if importlib.util.find_spec("triton") is None:
        assert triton_window.obstacle(device, 64) == "triton is not installed"
        return
    assert triton_window.obstacle(device, 64) is None
    assert "multiples of 8 up to 128" in triton_window.obstacle(
        device, 60
    ) and triton_window.obstacle(device, 136)
    monkeypatch.setattr(triton_window._kernels(), "INTERPRETED", False)
    assert "runtime.device=cpu" in triton_window.obstacle(torch.device("cpu"), 64)


@pytest.mark.filterwarnings("error")
def test_a_compiled_forward_pass_can_ask_whether_the_kernels_run():
    obstacle = torch.compile(
        lambda x: (x + 1, triton_window.obstacle(x.device, 64)), fullgraph=True, backend="eager"
    )
    assert (obstacle(torch.ones(1))[1] != "triton is not installed") == triton_window.INSTALLED


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    "added", [{}, {"bias": "column"}, {"vectors": True}, {"key_bias": True}, {"sink": True}]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [256, 300])
@pytest.mark.parametrize("width", [64, 128])
def test_output_and_gradients_of_the_compiled_kernel_equal_those_of_plain(
    width, T, dtype, dropout, added
):
    spans = {"max_keys": (64, 320, 600, 600), "z": (0.0, 250.5, 600.0, 31.0), "ramp": 32}
    case = Case(
        T=T,
        past=2 * T,
        width=width,
        streams=2,
        shift=1,
        persistent=100,
        dtype=dtype,
        dropout=dropout,
        **added,
        **spans,
    )
    case.compare(tolerance=1e-4 if dtype == torch.float32 else 2e-2)
