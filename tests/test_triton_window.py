"""The CUDA kernels against the plain backend: in Triton's interpreter where there is no device, compiled where there is."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import variants
from tests.attention_case import assert_near, gradients
from tests.needs import need
from tests.patience import PATIENCE_SECONDS
from variants.kernels import operation, triton_window, window
from variants.kernels.given import Given
from variants.kernels.window import Persistent, Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.usefixtures("triton_installed")
ROOT = Path(__file__).resolve().parents[1]
SMALL = {"BLOCK": 16, "num_warps": 4, "num_stages": 1}
SEED = 0x2468ACE13579BDF
KERNEL = partial(operation.attend, "kernel")


@pytest.fixture
def triton_installed():
    need(importlib.util.find_spec("triton"), "triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    """Where there is no device: a triton of these tests alone that interprets, which it must know when it is imported."""
    if DEVICE == "cuda":
        yield
        return
    ours = lambda: [n for n in sys.modules if re.match(r"triton(?!\._C)\b|variants\.kernels\._triton_kernels", n)]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        others = {name: sys.modules.pop(name) for name in ours()}
        vars(variants.kernels).pop("_triton_kernels", None)
        yield
        for name in ours():
            del sys.modules[name]
        vars(variants.kernels).pop("_triton_kernels", None)
        sys.modules.update(others)


@pytest.fixture
def small_blocks(interpreted, monkeypatch):
    """Blocks of 16, so that a few dozen bytes are many of them; and loops that run under NumPy 2.4.

    The interpreter holds scalars as arrays of one element, which that NumPy no longer takes for an index.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(triton_window, "launch_options", lambda *_, **__: SMALL)
    monkeypatch.setattr(triton_window, "STREAM_GROUPS", 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call: T new keys after ``past`` old ones, heads that see ``max_keys``, spans ``z`` or a hard window."""

    T: int = 20
    past: int = 0
    max_keys: tuple[int, ...] = (24, 24)
    shift: int = 0
    z: tuple[float, ...] | None = None
    ramp: int = 5
    persistent: int = 0
    added: str = "nothing"
    streams: int = 1
    width: int = 16
    dropout: float = 0.0

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        heads, rows = len(self.max_keys), self.T
        shapes = {
            "q": (self.streams, rows, heads, self.width),
            "k": (self.streams, rows + self.past, heads, self.width),
        }
        shapes["v"] = shapes["k"]
        if self.persistent:
            shapes["extra_q"] = shapes["q"]
            shapes["m_k"] = shapes["m_v"] = (self.persistent, heads, self.width)
        random = torch.Generator().manual_seed(0)
        found = {name: torch.randn(shape, generator=random).transpose(-2, -3) for name, shape in shapes.items()}
        if self.added == "vectors":
            found["p"] = torch.randn(max(self.max_keys), self.width, generator=random)
        found = {name: x if name in ("v", "m_v") else x * self.width**-0.25 for name, x in found.items()}
        found = {name: x.to(DEVICE, dtype) for name, x in found.items()}
        return found if self.z is None else found | {"z": torch.tensor(self.z, device=DEVICE)}

    def given(self, inputs: dict[str, Tensor]) -> tuple[Given, Window]:
        """The same for ``forward`` and ``backward`` of the kernel; a bias is not among the inputs."""
        names = {"extra_k": "m_k", "extra_v": "m_v", "vectors": "p"}
        tensors = {name: inputs.get(names.get(name, name)) for name in Given._fields[:8]}
        given = Given(**tensors, dropout=self.dropout, seed=torch.tensor(SEED, device=DEVICE))
        return given, Window(self.max_keys, self.shift, ramp=self.ramp)

    def flops(self, **wanted) -> tuple[int, int]:
        """What the kernel says that forward and backward execute."""
        return triton_window.executed_flops(
            Window(self.max_keys, self.shift, ramp=self.ramp),
            None if self.z is None else [z + self.ramp for z in self.z],
            streams=self.streams,
            rows=self.T,
            keys=self.past + self.T,
            width=self.width,
            persistent=self.persistent,
            vectors=self.added == "vectors",
            block=SMALL["BLOCK"],
            **wanted,
        )

    def attend(self, inputs: dict[str, Tensor], *, plain: bool) -> Tensor:
        seen = Window(self.max_keys, self.shift, inputs.get("z"), self.ramp)
        persistent = Persistent(*(inputs[name] for name in ("extra_q", "m_k", "m_v"))) if self.persistent else None
        q, k, v = (inputs[name] for name in "qkv")
        added: dict[str, Tensor | float] = {}
        if self.added == "bias":
            added["bias"] = torch.randn(
                len(self.max_keys), max(self.max_keys), generator=torch.Generator().manual_seed(1)
            )
            added["bias"] = added["bias"].to(DEVICE, inputs["q"].dtype if plain else torch.float32)
        if self.added == "vectors":
            added = {"bias": q @ inputs["p"].T} if plain else {"vectors": inputs["p"]}
        if self.dropout:
            added |= {"dropout": self.dropout, "seed": torch.tensor(SEED, device=DEVICE)}
        way = window.attend if plain else KERNEL
        return way(q, k, v, seen, **added, persistent=persistent)

    def compare(
        self, *, dtype: torch.dtype = torch.float32, like: torch.dtype = torch.float64, tolerance: float
    ) -> None:
        """Value and every gradient, for a random upstream gradient, against the plain backend in ``like``."""
        drawn = self.inputs(dtype)
        mine, theirs = ({name: x.detach().to(to).requires_grad_() for name, x in drawn.items()} for to in (None, like))
        y, expected = self.attend(mine, plain=False), self.attend(theirs, plain=True)
        assert y.dtype == dtype and y.isfinite().all()
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
        found = [y, *torch.autograd.grad(y, list(mine.values()), upstream)]
        wanted = [expected, *torch.autograd.grad(expected, list(theirs.values()), upstream.to(like))]
        for name, one, other in zip(["value", *drawn], found, wanted, strict=True):
            assert_near(one.to(like), other, tolerance=tolerance, what=name)


UGLY = {
    "one byte": Case(T=1),
    "one byte that sees nothing": Case(T=1, shift=1, z=(0.0, 3.5), persistent=3),
    "one byte after a long past": Case(T=1, past=40, z=(2.5, 19.0), added="vectors"),
    "a segment longer than the window": Case(T=37, max_keys=(9, 9), added="bias"),
    "whole blocks": Case(T=32, past=16, max_keys=(48, 48)),
    "a past longer than the window": Case(T=19, past=50, max_keys=(17, 17), shift=1),
    "spans none and all": Case(T=35, past=9, max_keys=(8, 40), z=(0.0, 40.0), ramp=7),
    "uneven heads, out of order": Case(T=33, past=30, max_keys=(16, 50, 30), z=(3.3, 47.6, 20.0), ramp=3, shift=1),
    "columns wider than spans": Case(T=20, past=40, max_keys=(60, 60), z=(1.5, 20.25)),
    "a ramp wider than blocks": Case(T=20, past=40, max_keys=(60, 60), z=(0.0, 18.5), ramp=40),
    "blind first rows and a bias": Case(T=18, max_keys=(20, 20), shift=1, z=(0.5, 20.0), added="bias"),
    "vectors": Case(T=21, past=14, max_keys=(16, 33), z=(6.0, 30.5), added="vectors", shift=1),
    "vectors, hard, streams": Case(T=17, max_keys=(20, 20), added="vectors", streams=3),
    "persistent and everything": Case(
        T=18, past=5, max_keys=(12, 23), z=(4.5, 16.0), persistent=19, added="vectors", shift=1, streams=2
    ),
}


@pytest.mark.numeric
@needs_triton
@pytest.mark.parametrize("case", UGLY.values(), ids=UGLY)
def test_kernel_is_the_plain_path(small_blocks, case):
    case.compare(tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
@pytest.mark.parametrize("case", UGLY.values(), ids=UGLY)
def test_kernel_drops_the_weights_of_the_plain_path(small_blocks, case):
    replace(case, dropout=0.4).compare(tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
@pytest.mark.parametrize("added", ["nothing", "vectors"])
@pytest.mark.parametrize("width", [8, 24, 96])
def test_width_need_not_be_a_power_of_two(small_blocks, width, added):
    case = Case(T=19, past=7, z=(2.5, 17.0), width=width, persistent=2, streams=2, added=added, dropout=0.1)
    case.compare(tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
def test_parts_are_merged_before_they_are_rounded(small_blocks):
    """Of equal weights beside 2^n vectors nothing else is rounded: y is as near to float64 as float16 can be."""
    case = Case(T=33, persistent=32, streams=2)
    inputs = {name: x * ("v" in name) for name, x in case.inputs(torch.float16).items()}
    expected = case.attend({name: x.double() for name, x in inputs.items()}, plain=True)
    off = (case.attend(inputs, plain=False).double() - expected).abs()
    assert (off <= (expected.half().double() - expected).abs() + 1e-6).all()


@pytest.fixture
def executed(monkeypatch):
    """FLOPs of the interpreter's products, which a test may clear."""
    need(DEVICE == "cpu", "products can be watched in the interpreter only")
    from triton.runtime.interpreter import InterpreterBuilder

    found, product = [], InterpreterBuilder.create_dot

    def counted(builder, a, b, *others):
        found.append(2 * a.data.shape[0] * b.data.size)
        return product(builder, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    return found


@pytest.mark.numeric
@needs_triton
def test_what_is_not_wanted_is_not_computed(small_blocks, executed):
    """Of a detached past in particular: neither computed nor stored."""
    case = Case(T=18, past=21, max_keys=(20, 39), z=(3.5, 33.0), persistent=5, added="vectors", streams=2, dropout=0.3)
    given, seen = case.given(case.inputs(torch.float32))
    g = torch.randn(given.q.shape, generator=torch.Generator().manual_seed(2))
    y, saved = triton_window.forward(given, seen)
    everything = triton_window.backward(g, y, saved, given, seen, frozenset(given._fields[:8]))
    for own_only, names in [*((False, name) for name in everything), (True, "k v"), (True, "q z v extra_k")]:
        wanted = frozenset(names.split())
        executed.clear()
        found = triton_window.backward(g, y, saved, given, seen, wanted, own_only=own_only)
        assert set(found) == wanted
        for name, gradient in found.items():
            whole = everything[name][:, :, -case.T :] if own_only and name in ("k", "v") else everything[name]
            assert_near(gradient, whole, tolerance=1e-6, what=name)
        assert sum(executed) == case.flops(wanted=wanted, own_only=own_only)[1]


BLOCKS = ["a segment longer than the window", "uneven heads, out of order", "vectors, hard, streams"]
BLOCKS += ["one byte that sees nothing", "persistent and everything"]


@needs_triton
@pytest.mark.parametrize("case", [UGLY[name] for name in BLOCKS], ids=BLOCKS)
def test_flops_are_those_of_the_products_that_run(small_blocks, executed, case):
    case = replace(case, width=24)
    inputs = {name: x.requires_grad_() for name, x in case.inputs(torch.float32).items()}
    y = case.attend(inputs, plain=False)
    forward = sum(executed)
    y.sum().backward()
    assert (forward, sum(executed) - forward) == case.flops(wanted=frozenset(case.given(inputs)[0]._fields))


@pytest.mark.numeric
@needs_triton
def test_wide_heads_and_half_precision(small_blocks):
    Case(T=17, past=7, z=(2.5, 17.0), width=64, persistent=2).compare(tolerance=2e-5)
    Case(T=17, past=7, z=(2.5, 17.0)).compare(dtype=torch.float16, tolerance=5e-3)


@pytest.mark.numeric
@needs_triton
@pytest.mark.parametrize("added", ["nothing", "vectors"])
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_gradient_of_spans_at_kinks(small_blocks, added, rate):
    """At whole spans, and one rounding beside them: on which side z + R is, when it is rounded, decides."""
    whole = torch.tensor([1.0, 5.0, 14.0])
    z = torch.cat([whole, torch.nextafter(whole, whole + 1), torch.nextafter(whole, whole - 1)])
    case = Case(T=18, max_keys=(20,) * len(z), z=tuple(z.tolist()), ramp=3, added=added, dropout=rate)
    case.compare(like=torch.float32, tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
def test_a_ramp_may_begin_anywhere_in_a_block(small_blocks):
    """The last key of a block without a mask has m = 1 and no gradient of the span: not even that of a kink."""
    Case(T=16, past=48, max_keys=(64,) * 16, z=tuple(map(float, range(30, 46))), ramp=3).compare(tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
def test_each_head_has_its_own_hard_window(small_blocks):
    """The plain backend has one window for all heads; so head by head."""
    case = Case(T=33, past=12, max_keys=(5, 40))
    inputs = case.inputs(torch.float32)
    y = case.attend(inputs, plain=False)
    for h, max_keys in enumerate(case.max_keys):
        one = [inputs[name][:, h : h + 1].double() for name in "qkv"]
        assert_near(y[:, h : h + 1].double(), window.attend(*one, Window((max_keys,))), tolerance=2e-5)


@pytest.mark.numeric
@needs_triton
def test_huge_scores_do_not_overflow(small_blocks):
    case = Case(T=18, max_keys=(6, 18), shift=1, z=(1.5, 17.5), ramp=2, persistent=3)
    inputs = {name: x * (3e3 if name in ("q", "extra_q") else 1) for name, x in case.inputs(torch.float32).items()}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = case.attend(inputs, plain=False)
    assert all(x.isfinite().all() for x in [y, *gradients(y, list(inputs.values()))])


@needs_triton
def test_what_it_cannot_do_is_refused(small_blocks):
    q, k, v = (torch.randn(1, 2, 4, 16, device=DEVICE) for _ in range(3))
    attend = KERNEL
    with pytest.raises(ValueError, match=r"one a head, \[2\]"):
        attend(q, k, v, Window((4, 4), z=torch.zeros(1, 2, 4, device=DEVICE), ramp=2))
    with pytest.raises(ValueError, match="one of them"):
        attend(q, k, v, Window((4, 4)), vectors=q[0, 0], bias=q.new_zeros(2, 4))
    with pytest.raises(ValueError, match="3 distances: window.max_keys needs 4"):
        attend(q, k, v, Window((4, 4)), vectors=q[0, 0, :3])
    with pytest.raises(ValueError, match="runtime.backend=kernel cannot run with head width 20"):
        attend(*(torch.cat([x, x[..., :4]], -1) for x in (q, k, v)), Window((4, 4)))


def why(q: Tensor) -> str | None:
    return triton_window.available(q.device, q.dtype, q.shape[-1])


def test_available_says_why_not(interpreted, monkeypatch):
    q = torch.empty(0, 64)
    if importlib.util.find_spec("triton") is None:
        assert why(q) == "triton is not installed"
        return
    q = q.to(DEVICE)
    assert why(q) is None
    assert "float64" in why(q.double())
    assert "multiples of 8 up to 128" in why(q[:, :60])
    assert why(torch.cat([q, q, q[:, :8]], 1)) is not None
    if DEVICE == "cpu":
        assert "interpreter" in why(q.bfloat16())
    monkeypatch.setattr(triton_window._kernels(), "INTERPRETED", False)
    assert "runtime.device=cpu" in why(q.cpu())


@needs_triton
@pytest.mark.parametrize(
    ("what", "kernels"),
    [
        ("sm_90 bf16 K=64 soft dropout", 3),
        ("sm_90 bf16 K=64 soft+vectors dropout vector_gradient", 1),
        ("sm_100 bf16 K=64 soft dropout key_gradient", 1),
    ],
)
def test_tiles_in_use_compile_without_a_device_and_spill_nothing(tmp_path, what, kernels):
    """The interpreter takes Python that the compiler does not. ``tests/triton_spills.py`` compiles all of them."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton_spills", *what.split()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 bytes spilled") == kernels


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("added", ["nothing", "bias", "vectors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [256, 300])
@pytest.mark.parametrize("width", [64, 128])
def test_compiled_kernel_is_the_plain_path(width, T, dtype, added):
    """Blocks as in use, at lengths that are and are not multiples of 128."""
    spans = {"max_keys": (64, 320, 600, 600), "z": (0.0, 250.5, 600.0, 31.0), "ramp": 32}
    case = Case(T=T, past=2 * T, width=width, streams=2, shift=1, persistent=100, added=added, **spans)
    case.compare(dtype=dtype, tolerance=1e-4 if dtype == torch.float32 else 2e-2)


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_two_runs_agree_to_the_bit():
    case = Case(
        T=300, past=512, max_keys=(128, 700), z=(64.5, 640.0), ramp=32, persistent=64, added="vectors", width=64
    )
    inputs = {name: x.detach().requires_grad_() for name, x in case.inputs(torch.bfloat16).items()}
    one, other = (gradients(case.attend(inputs, plain=False).cpu(), list(inputs.values())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
