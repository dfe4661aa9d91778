"""The kernel path of ``window.attend`` on a CPU: ``window_cpu.cpp``, compiled at its first use (``native.py``).

Two operations, ``windtunnel::window_forward`` and ``window_backward``, are what dispatch modes see; they count the FLOPs of
the products that they execute, and torch's counter is told.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from variants import native
from variants.window import Persistent, Window, soft_mask

NAMES = ("q", "k", "v", "k_old", "v_old", "z", "extra_q", "extra_k", "extra_v", "vectors")
"""Tensors that may have a gradient, in the order of the operations' arguments."""
OLD, EXTRA = ("k_old", "v_old"), ("extra_k", "extra_v")
TOGETHER = {"k": ("v", *OLD), "v": ("k", *OLD), "k_old": OLD, "v_old": OLD, "extra_k": EXTRA, "extra_v": EXTRA}
"""Gradients that come with others: keys with values, and those of the segment with those of the past."""


def available() -> str | None:
    """Why there is no kernel on this machine; None if there is."""
    found = _library()
    return found if isinstance(found, str) else None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    past: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
) -> Tensor:
    """The same function as ``window.attend`` without dropout; ``z`` is ``[H]``.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values of the segment ``[B, H, T, K]``.
        window: what a query may see.
        past: keys and values before the segment ``[B, H, P, K]``; no work is done for gradients that they do not ask for.
        bias: a constant ``[H, n]``, added to scores.
        vectors: p ``[n, K]``, shared by heads: adds ``q @ vectors.T``.
        persistent: key-value vectors in the same softmax, never masked.

    Returns: ``[B, H, T, K]``.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    parts = [None if x is None else x.to(kind) for x in (k, v, *(past or (None, None)))]
    extra = (None, None, None) if persistent is None else (x.to(kind) for x in persistent)
    vectors = None if vectors is None else vectors[: max(window.columns)].to(kind)
    z = None if window.z is None else window.z.to(kind)
    return _Attend.apply(q.to(kind), *parts, z, *extra, vectors, bias, window).to(q.dtype)


def geometry(dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a block and numbers of a vector: what is met, and a head's width, is rounded up to whole ones."""
    return _library().window_rows(), _library().window_bytes() // dtype.itemsize


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, k_old, v_old, z, extra_q, extra_k, extra_v, vectors, bias, window):
        tensors = [q, k, v, k_old, v_old, z, extra_q, extra_k, extra_v, vectors, bias]
        sizes = (window.columns, window.shift, window.ramp)
        y, lse, _ = _forward(tensors, *sizes)
        ctx.save_for_backward(*tensors, y, lse)
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        *tensors, y, lse = ctx.saved_tensors
        needed = {name for name, need in zip(NAMES, ctx.needs_input_grad, strict=False) if need}
        wanted = [name for name in NAMES if needed & {name, *TOGETHER.get(name, ())}]
        *gradients, _ = _backward(g, y, lse, tensors, *ctx.sizes, " ".join(wanted))
        found = dict(zip(wanted, gradients, strict=True))
        return (*(found.get(name) for name in NAMES), None, None)


@torch.library.custom_op("windtunnel::window_forward", mutates_args=(), device_types="cpu")
def _forward(tensors: list[Tensor | None], columns: list[int], shift: int, ramp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, K]``, log-sum-exp ``[B, H, T]``, inf where nothing is seen, and FLOPs executed.

    Args:
        tensors: those of ``NAMES``, then the bias.
    """
    call = _call(tensors, columns, shift, ramp, backward=False)
    y, lse, _ = _forward_results(tensors)
    call.put(y=y, lse=lse)
    return y, lse, call.run("forward")


@torch.library.custom_op("windtunnel::window_backward", mutates_args=(), device_types="cpu")
def _backward(
    g: Tensor,
    y: Tensor,
    lse: Tensor,
    tensors: list[Tensor | None],
    columns: list[int],
    shift: int,
    ramp: int,
    wanted: str,
) -> list[Tensor]:
    """Gradients of the tensors whose names are wanted, in the order of ``NAMES``, and FLOPs executed."""
    call = _call(tensors, columns, shift, ramp, backward=True)
    own = dict(zip(NAMES, tensors, strict=False))
    written = {name for name in ("q", "extra_q") if own[name] is not None}  # in any case
    made = {name: _like(own[name]) for name in {*wanted.split(), *written}}
    call.put(g=g, y=y, lse=lse, **{f"d{name}": x for name, x in made.items()})
    flops = call.run("backward")
    return [*(made[name] for name in wanted.split()), flops]


@_forward.register_fake
def _forward_results(tensors, *_):
    q = tensors[0]
    return _like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _backward_results(g, y, lse, tensors, columns, shift, ramp, wanted):
    own = dict(zip(NAMES, tensors, strict=False))
    return [*(_like(own[name]) for name in wanted.split()), g.new_empty((), dtype=torch.int64)]


@register_flop_formula(torch.ops.windtunnel.window_forward, get_raw=True)
def _forward_flops(tensors, columns, *_, out_val) -> int:
    return _expected_flops(tensors, columns) if isinstance(out_val[-1], FakeTensor) else int(out_val[-1])


@register_flop_formula(torch.ops.windtunnel.window_backward, get_raw=True)
def _backward_flops(_g, _y, _lse, tensors, columns, _shift, _ramp, wanted, *, out_val) -> int:
    if isinstance(out_val[-1], FakeTensor):
        return _expected_flops(tensors, columns, wanted.split())
    return int(out_val[-1])


def _expected_flops(tensors: list[Tensor | None], columns: list[int], wanted: list[str] | None = None) -> int:
    """Without data: at the heads' buckets, because spans have no values, and with nothing rounded up to whole vectors."""
    own = dict(zip(NAMES, tensors, strict=False))
    streams, _, rows, width = own["q"].shape
    past = 0 if own["k_old"] is None else own["k_old"].shape[2]
    products = 0.0  # with a key, for each row
    for n in columns:
        met = min(n + geometry(own["q"].dtype)[0] - 1, past + rows)
        segment = min(n, rows)
        learned = met if wanted and "k_old" in wanted else segment - segment**2 / (2 * rows)
        products += 2 * met if wanted is None else 3 * met + 2 * learned * ("k" in wanted)
        if own["vectors"] is not None:
            products += met if wanted is None else met * (2 + ("vectors" in wanted))
    if own["extra_k"] is not None:
        products += own["extra_k"][..., 0].numel() * (2 if wanted is None else 3 + 2 * ("extra_k" in wanted))
    return round(2 * streams * rows * width * products)


def _like(x: Tensor) -> Tensor:
    """Empty; of four dimensions in memory as ``[B, T, H, K]``, from where heads are joined without a copy."""
    if x.dim() < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@lru_cache
def _library() -> ctypes.CDLL | str:
    return native.load(Path(__file__).with_suffix(".cpp"))


STRIDED = ("q", "k", "v", "k_old", "v_old", "extra_q", "g", "y", "dq", "dk", "dv", "dk_old", "dv_old", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vectors_turned flops dextra_k dextra_v dvectors dz"
)
SIZES = "streams heads rows past width persistent distances shift threads"


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("stream", "head", "row")]


class _Call(ctypes.Structure):
    """The ``Call`` of the source; keeps the tensors that it points to."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        *((name, ctypes.c_void_p) for name in STRIDED),
        *((f"{name}_", _Strides) for name in STRIDED),
        *((name, ctypes.c_void_p) for name in DENSE.split()),
    ]

    def put(self, **tensors: Tensor | None) -> None:
        """Point to tensors; what is written to must have the layout that ``_like`` gives."""
        for name, x in tensors.items():
            if x is None:
                continue
            strided = name in STRIDED
            x = x if strided and x.stride(-1) == 1 else x.contiguous()
            self.kept.append(x)
            setattr(self, name, x.data_ptr())
            if strided:
                setattr(self, f"{name}_", _Strides(*x.stride()[:3]))

    def run(self, direction: str) -> Tensor:
        """FLOPs executed."""
        flops = torch.zeros((), dtype=torch.int64)
        self.put(flops=flops)
        kind = {torch.float32: "float", torch.float64: "double"}[self.dtype]
        getattr(_library(), f"window_{direction}_{kind}")(ctypes.byref(self))
        return flops


def _call(tensors: list[Tensor | None], columns: list[int], shift: int, ramp: int, *, backward: bool) -> _Call:
    *learned, bias = tensors
    own = dict(zip(NAMES, learned, strict=True))
    q, z, vectors = own["q"], own.pop("z"), own.pop("vectors")
    call = _Call(streams=q.shape[0], heads=q.shape[1], rows=q.shape[2], width=q.shape[3], shift=shift)
    call.dtype, call.kept, call.threads = q.dtype, [], torch.get_num_threads()
    call.past = 0 if own["k_old"] is None else own["k_old"].shape[2]
    call.persistent = 0 if own["extra_k"] is None else own["extra_k"].shape[1]
    call.distances = max(columns)
    call.put(**own)
    met = columns_met(columns, z, ramp)
    order = sorted(range(len(met)), key=lambda h: -met[h])
    call.put(columns=torch.tensor(met), order=torch.tensor(order))
    call.put(**_tables(q.dtype, z, bias, met, call.distances, ramp, backward=backward))
    if vectors is not None:
        pad, (_, lanes) = _library().window_pad(), geometry(q.dtype)
        around = F.pad(vectors.flip(0), (0, -call.width % lanes, pad, pad + -len(vectors) % lanes))
        call.put(vectors=around, vectors_turned=around.unflatten(0, (-1, lanes)).mT)  # panels
    return call


def columns_met(columns: list[int], z: Tensor | None, ramp: int) -> list[int]:
    """Keys that each head meets: with a soft mask up to the far end of the closed ramp, not to the next round number."""
    if z is None:
        return list(columns)
    far = (z.detach() + ramp).floor()  # added as in soft_mask, so that both agree on which side of a kink z is
    return [min(n, int(x) + 1) for n, x in zip(columns, far.tolist(), strict=True)]


def _tables(
    dtype: torch.dtype, z: Tensor | None, bias: Tensor | None, met: list[int], most: int, ramp: int, *, backward: bool
) -> dict[str, Tensor]:
    """What depends on head and distance, ``[H, n + 2 PAD]`` in reverse, and up to where nothing is added."""
    pad = _library().window_pad()
    x = torch.arange(most)
    hidden = x >= torch.tensor(met)[:, None]
    added = torch.zeros(len(met), most, dtype=dtype) if bias is None else bias[:, :most].to(dtype)
    flat, found = torch.tensor(met), {}
    if z is not None:
        mask = soft_mask(z.detach(), ramp, most).to(dtype)
        flat = torch.minimum(flat, (mask == 1).sum(1))
        if backward:
            far = (z.detach() + ramp)[:, None]
            slope = ((x >= far.ceil() - ramp) & (x <= far)).to(dtype) / ramp
            found = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            added = added + mask.log()
    found["table"] = (added.masked_fill(hidden, -torch.inf), -torch.inf)
    tables = {name: F.pad(band.flip(-1), (pad, pad), value=around) for name, (band, around) in found.items()}
    return tables | {"flat": flat if bias is None else torch.zeros_like(flat)}
