"""Windows of the past: the pure functions in numbers worked out by hand, and the fast backends against the plain one."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention_case import DOUBLE, assert_near, assert_same, gradients
from variants.adaptive_span import bucket
from variants.kernels import fused, window, window_cpu
from variants.kernels.window import PastKV, Persistent, Window, skew, soft_mask, visible
from variants.position import alibi_slopes

pytestmark = pytest.mark.numeric


def kernel(q: Tensor, k: Tensor, v: Tensor, window: Window, **added) -> Tensor:
    """The kernel is given past and segment one by one."""
    past = k.shape[2] - q.shape[2]
    half = q.shape[1] // 2  # heads may have pasts of their own, as far as they look
    parts = [range(half), range(half, q.shape[1])] if half else [range(1)]
    before = []
    for heads in parts if past else ():
        begin = max(0, past - max(window.max_keys[h] for h in heads) + 1 - window.shift)
        before.append(PastKV(tuple(heads), *(x[:, heads.start : heads.stop, begin:past] for x in (k, v))))
    return window_cpu.attend(q, k[:, :, past:], v[:, :, past:], window, past=before, **added)


ATTEND = {"plain": window.attend, "fused": fused.attend, "kernel": kernel}
FAST = pytest.mark.parametrize("backend", ["fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
BACKENDS = pytest.mark.parametrize(
    "attend", [window.attend, fused.attend, pytest.param(kernel, marks=pytest.mark.cpu_kernel)], ids=list(ATTEND)
)


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
    assert soft_mask(torch.zeros(2, 3, 5), 1, 4).shape == (2, 3, 5, 4)


def test_skew_by_hand():
    band = torch.tensor([[1, 2, 3], [4, 5, 6]])  # row t, column x: x = 0 is the nearest key
    assert skew(band, 4, shift=0).tolist() == [[3, 2, 1, 0], [0, 6, 5, 4]]
    assert skew(band, 4, shift=1).tolist() == [[2, 1, 0, 0], [6, 5, 4, 0]]
    assert skew(band, 2, shift=0).tolist() == [[1, 0], [5, 4]]
    assert skew(band, 6, shift=1).tolist() == [[0, 3, 2, 1, 0, 0], [0, 0, 6, 5, 4, 0]]


@given(
    rows=st.integers(1, 9),
    past=st.integers(0, 12),
    max_keys=st.integers(1, 15),
    shift=st.integers(0, 1),
    outer=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_skew_and_visible_are_the_loop(rows, past, max_keys, shift, outer):
    keys = rows + past
    band = normal(*((2, 3) if outer else ()), rows, max_keys).detach()
    expected = torch.zeros(*band.shape[:-1], keys, dtype=DOUBLE)
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for t in range(rows):
        for x in range(max_keys):
            j = past + t - shift - x
            if j >= 0:
                expected[..., t, j] = band[..., t, x]
                seen[t, j] = True
    assert torch.equal(skew(band, keys, shift=shift), expected)
    assert torch.equal(visible(rows, keys, max_keys, shift=shift, device=band.device), seen)


@BACKENDS
def test_renormalised_mask_is_a_bias_of_its_logarithm(attend):
    """m exp(s) / sum m exp(s) = softmax(s + log m), the identity that the fused backend rests on."""
    q, k, v = normal(1, 2, 6, 4), normal(1, 2, 9, 4, seed=1), normal(1, 2, 9, 4, seed=2)
    z = torch.tensor([1.5, 4.0], dtype=DOUBLE)
    log_m = torch.full((2, 6, 9), -torch.inf, dtype=DOUBLE)
    for h in range(2):
        for t in range(6):
            for x in range(3 + t + 1):
                log_m[h, t, 3 + t - x] = ((3 + z[h] - x) / 3).clamp(0, 1).log()
    expected = torch.softmax(q @ k.mT + log_m, dim=-1) @ v
    assert_same(attend(q, k, v, Window((9, 9), z=z, ramp=3)), expected, named={"q": q, "k": k, "v": v})


@BACKENDS
def test_past_beyond_the_window_is_not_read(attend):
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 20, 4, seed=1), normal(1, 2, 20, 4, seed=2)
    with torch.no_grad():
        k[:, :, :13], v[:, :, :13] = torch.nan, torch.nan  # 3 rows and a window of 4 or 5: at most 7 keys
    for seen, shift in (((5, 4), 0), ((4, 4), 1)):
        assert Window(seen, shift).past() == 4
        assert attend(q, k, v, Window(seen, shift)).isfinite().all()


@BACKENDS
def test_huge_scores_do_not_overflow(attend):
    q, k, v = 1e4 * normal(1, 1, 6, 4), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 4, seed=2)
    z = torch.tensor([1.5], dtype=DOUBLE, requires_grad=True)
    persistent = Persistent(q, 1e2 * normal(1, 3, 4, seed=3), normal(1, 3, 4, seed=4))
    y = attend(q, k, v, Window((6,), 1, z=z, ramp=2), persistent=persistent)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(y, [q, k, v, z]))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("soft", [False, True])
def test_edges_at_every_place_of_a_chunk(soft):
    """The kernel takes keys by 256: heads whose windows and ramps end before, at and behind every place around that."""
    heads, rows, past, ramp = 48, 19, 420, 5
    spans = range(230, 230 + heads)
    q, k, v = (
        normal(1, heads, rows, 3),
        normal(1, heads, rows + past, 3, seed=1),
        normal(1, heads, rows + past, 3, seed=2),
    )
    named = {"q": q, "k": k, "v": v}
    if soft:
        named["z"] = torch.tensor(list(spans), dtype=DOUBLE, requires_grad=True)
        seen = Window((max(spans) + ramp + 1,) * heads, z=named["z"], ramp=ramp)
        expected = window.attend(q, k, v, seen)
    else:
        seen, parts = Window(tuple(spans)), zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), spans, strict=True)
        expected = torch.cat([window.attend(*one, Window((max_keys,))) for *one, max_keys in parts], dim=1)
    assert_same(kernel(q, k, v, seen), expected, named=named)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("rows, span, ramp", [(264, 263, 4), (272, 263, 4), (1024, 519, 32)])
def test_a_ramp_that_begins_where_a_chunk_ends_has_its_gradient(rows, span, ramp):
    """At a whole z the column x = z has weight 1 and is on the ramp."""
    q, k, v = (normal(1, 1, rows, 4, seed=seed) for seed in range(3))
    z = torch.tensor([span], dtype=DOUBLE, requires_grad=True)
    seen = Window((span + ramp + 1,), z=z, ramp=ramp)
    assert_same(kernel(q, k, v, seen), window.attend(q, k, v, seen), named={"q": q, "k": k, "v": v, "z": z})


@BACKENDS
@pytest.mark.parametrize("gap", [60.0, 100.0, 400.0])
def test_a_key_of_weight_zero_may_have_the_largest_score(attend, gap):
    """At the far end of the ramp a key has weight 0 and moves the span alone: its gradient is bounded, and is no NaN."""
    q, k, v = (normal(1, 1, 6, 4, seed=seed).detach().repeat(2, 1, 1, 1) for seed in range(3))
    rewards = torch.tensor([3.0, -1.0])[
        :, None, None, None
    ]  # of two streams, which move the span in opposite directions
    k[:, :, 0] += gap * q[:, :, 3] / q[0, 0, 3].square().sum()

    def gradients(dtype, attend):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.tensor([1.0]))]
        y = attend(leaves[0][:, :, 3:], *leaves[1:3], Window((4,), z=leaves[3], ramp=2))
        return [y.detach(), *torch.autograd.grad((rewards * y).sum(), leaves)]

    *found, dz = gradients(torch.float32, attend)
    *exact, exact_dz = gradients(torch.float64, window.attend)
    for one, other in zip(found, exact, strict=True):
        assert_near(one.double(), other, tolerance=2e-5)
    assert dz.sign() == exact_dz.sign() and (gap > 80 or abs(dz / exact_dz - 1) < 1e-4)


@pytest.mark.cpu_kernel
def test_a_huge_score_under_a_weight_of_zero_spoils_nothing():
    """The key at the far end of the ramp has weight 0 and a gradient for the span, however large."""
    q, k, v = normal(1, 1, 6, 4), normal(1, 1, 6, 4, seed=1), normal(1, 1, 6, 4, seed=2)
    with torch.no_grad():
        k[:, :, 0] = 1e4 * q[:, :, 3]
        v[:, :, 0] *= 10
    z = torch.tensor([1.0], dtype=DOUBLE, requires_grad=True)
    rows = slice(3, None)  # the first of them has key 0 at x = 3 = z + R
    y = kernel(q[:, :, rows], k, v, Window((4,), z=z, ramp=2))
    assert y.isfinite().all()
    found = torch.autograd.grad(3 * y.sum(), [q, k, v, z])
    assert all(g.isfinite().all() for g in found[:-1]) and found[-1].abs() > 1e300


def test_dropped_weights_are_zero_and_the_rest_is_scaled():
    """Dropout comes after the softmax: nothing is renormalised."""
    torch.manual_seed(0)
    rows = 200
    uniform = torch.zeros(1, 1, rows, 4, dtype=DOUBLE)
    extra = Persistent(uniform, torch.zeros(1, 1, 4, dtype=DOUBLE), torch.tensor([[[0, 0, 0, 1.0]]], dtype=DOUBLE))
    values = torch.tensor([1.0, 0, 0, 0], dtype=DOUBLE).expand(1, 1, rows, 4)
    y = window.attend(uniform, uniform, values, Window((1,)), persistent=extra, dropout=0.2)  # two weights of 1/2
    for column in (0, 3):
        found = y[0, 0, :, column]
        assert sorted(set(found.tolist())) == pytest.approx([0, 0.5 / 0.8])
        assert (found == 0).double().mean().item() == pytest.approx(0.2, abs=0.08)
    assert (y[0, 0, :, 0] != y[0, 0, :, 3]).any()


@dataclass
class Draw:
    """Random inputs of one call."""

    inputs: dict[str, Tensor]
    seen: Window
    bias: Tensor | None

    def attend(self, backend: str, **changes) -> Tensor:
        persistent = Persistent(*(self.inputs[n] for n in ("extra_q", "m_k", "m_v"))) if "m_k" in self.inputs else None
        q, k, v = (self.inputs[name] for name in "qkv")
        added = {"bias": self.bias}
        if (vectors := self.inputs.get("p")) is not None:
            added = {"vectors": vectors} if backend == "kernel" else {"bias": q @ vectors.T}
        return ATTEND[backend](q, k, v, self.seen._replace(**changes), **added, persistent=persistent)


@st.composite
def draws(draw, dtype: torch.dtype = DOUBLE, *, backend: str = "kernel") -> Draw:
    """Heads of several bucket sizes, segments longer than a chunk of queries, pasts shorter and longer than windows."""
    heads, width = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 16]))
    rows, past = draw(st.sampled_from([1, 2, 31, 33, 127, 129, 200, 300])), draw(st.sampled_from([0, 1, 40, 300]))
    span = draw(st.sampled_from([1, 9, 64, 150, 290]))
    z, ramp = None, draw(st.sampled_from([1, 4, 33]))
    max_keys = (span,) * heads
    if draw(st.booleans()):
        whole = st.integers(0, span)
        spans = draw(st.lists(whole | st.floats(0, span, width=32), min_size=heads, max_size=heads))
        z = torch.tensor(spans, dtype=dtype, requires_grad=True)
        max_keys = tuple(min(span, bucket(int(n) + ramp + 1)) for n in spans)
    batch = draw(st.integers(1, 2))
    shapes = {"q": (batch, heads, rows, width), "k": (batch, heads, rows + past, width)}
    shapes["v"] = shapes["k"]
    if draw(st.booleans()):
        number = draw(st.sampled_from([1, 40]))
        shapes |= {"extra_q": shapes["q"], "m_k": (heads, number, width), "m_v": (heads, number, width)}
    kind = draw(st.sampled_from(["nothing", "bias", *(["vectors"] if backend == "kernel" else [])]))
    if kind == "vectors":
        shapes["p"] = (max(max_keys), width)
    seed = draw(st.integers(0, 99))
    inputs = {
        n: normal(*shape, seed=seed + i).detach().to(dtype).requires_grad_()
        for i, (n, shape) in enumerate(shapes.items())
    }
    bias = None
    if kind == "bias":
        bias = (-alibi_slopes(heads)[:, None] * torch.arange(max(max_keys))).to(dtype)
    return Draw(inputs | ({} if z is None else {"z": z}), Window(max_keys, draw(st.integers(0, 1)), z, ramp), bias)


@FAST
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_fast_path_is_plain(backend, data):
    drawn = data.draw(draws(backend=backend))
    assert_same(drawn.attend(backend), drawn.attend("plain"), named=drawn.inputs)


@pytest.mark.parametrize("backend", ["plain", "fused", pytest.param("kernel", marks=pytest.mark.cpu_kernel)])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_trimmed_columns_are_all_that_matter(backend, data):
    """Keys beyond z + R change nothing, the gradient of z included."""
    drawn = data.draw(draws(backend=backend).filter(lambda drawn: drawn.seen.z is not None))
    whole = (max(drawn.seen.max_keys),) * len(drawn.seen.max_keys)
    assert_same(drawn.attend(backend), drawn.attend(backend, max_keys=whole), named=drawn.inputs)


@FAST
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_fast_path_is_plain_in_float32_too(backend, data):
    drawn = data.draw(draws(torch.float32, backend=backend))
    assert_same(drawn.attend(backend), drawn.attend("plain"), named=drawn.inputs, tolerance=2e-4)


@FAST
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_bfloat16_is_close_to_float32(backend, data):
    """Inputs are bfloat16; spans and bias are float32, as under autocast."""
    drawn = data.draw(draws(torch.bfloat16, backend=backend))
    z = drawn.seen.z
    drawn.seen = drawn.seen._replace(z=None if z is None else z.detach().float().requires_grad_())
    drawn.bias = None if drawn.bias is None else drawn.bias.float()
    found = drawn.attend(backend)
    drawn.inputs = {name: x.float() for name, x in drawn.inputs.items()}
    assert found.dtype == torch.bfloat16
    # Parts are rounded to 8 bits before they are added.
    assert_near(found.float(), drawn.attend("plain"), tolerance=0.03)


def test_the_softmax_is_no_bfloat16():
    """A constant on all scores changes nothing, though bfloat16 counts in steps of 4 there."""
    q, k, v = (normal(1, 1, 40, 8, seed=seed).bfloat16() for seed in range(3))
    bias = -0.5 * torch.arange(40.0)[None]
    found, expected = (window.attend(q, k, v, Window((40,)), bias=bias + constant) for constant in (1000, 0))
    assert_near(found.float(), expected.float(), tolerance=0.01)


def test_groups_and_chunks_meet_every_visible_key_once():
    assert fused.groups((64, 128, 64)) == [(64, [0, 2]), (128, [1])]
    for rows, keys, max_keys, shift in ((300, 300, 200, 0), (300, 450, 64, 1), (1, 5, 3, 0), (33, 33, 1, 1)):
        met = torch.zeros(rows, keys)
        for begin, end, low, high in fused.chunks(rows, keys, max_keys, shift):
            met[begin:end, low:high] += 1
        assert met.max() <= 1
        assert met[visible(rows, keys, max_keys, shift=shift, device=met.device)].min() == 1


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
def test_gradient_of_spans_at_kinks_is_that_of_clamp(attend, ramp, dtype):
    """At every whole z, and one rounding beside it: what matters is on which side z + R is when it is rounded."""
    whole = torch.tensor([0, 1, 2, 5, 9, 20, 39], dtype=dtype)
    beside = torch.cat([torch.nextafter(whole, whole + 1), torch.nextafter(whole[1:], whole[1:] - 1)])
    z = torch.cat([whole, beside]).requires_grad_()
    q, k, v = (normal(1, len(z), 40, 4, seed=n).to(dtype) for n in range(3))
    (found,) = gradients(attend(q, k, v, Window((40,) * len(z), z=z, ramp=ramp)), [z])
    (expected,) = gradients(dense(q, k, v, z, ramp), [z])
    assert_near(found, expected, tolerance=1e-11 if dtype == DOUBLE else 2e-5)


def test_the_kinks_are_kinks():
    """The gradient jumps at a whole z, so the test above can tell."""
    q, k, v = normal(1, 3, 20, 4), normal(1, 3, 20, 4, seed=1), normal(1, 3, 20, 4, seed=2)
    q, k, v = (x[:, :1].detach().expand(-1, 3, -1, -1) for x in (q, k, v))
    z = torch.tensor([5 - 1e-9, 5, 5 + 1e-9], dtype=DOUBLE, requires_grad=True)
    y = dense(q, k, v, z, 4)
    (found,) = torch.autograd.grad(y[..., 0].sum(), [z])
    assert (found[:-1] - found[1:]).abs().min() > 1e-3
