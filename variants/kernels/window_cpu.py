"""The kernel backend of ``window.attend`` on a CPU: ``window_cpu.cpp``, compiled at its first use (``native.py``).

Two operations, ``windtunnel::window_forward`` and ``window_backward``, are what dispatch modes see; they count the FLOPs of
the products that they execute, and torch's counter is told. ``_Call`` has their arguments as the source has them.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from variants.kernels import native
from variants.kernels.beside import Beside, gradients, merge
from variants.kernels.window import PastKV, Persistent, Window, soft_mask

SOURCE = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
NAMES = ("q", "k", "v", "z", "extra_q", "extra_k", "extra_v", "vectors")
"""Tensors that may have a gradient, in the order of the operations' arguments; the bias and those of the past follow."""
PAST = len(NAMES) + 1
EXTRA = ("extra_k", "extra_v")
TOGETHER = {"k": ("v", "past"), "v": ("k", "past"), "extra_k": EXTRA, "extra_v": EXTRA}
"""Gradients that come with others: keys with values, and those of the segment with those of the past."""
STRIDED = ("q", "k", "v", "extra_q", "g", "y", "dq", "dk", "dv", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vectors_turned flops dextra_k dextra_v dvectors dz"
)
SIZES = "streams heads rows width persistent distances shift threads"


def available() -> str | None:
    """Why there is no kernel on this machine; None if there is."""
    found = _library()
    return found if isinstance(found, str) else None


def geometry(dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a block and numbers of a vector: what is met, and a head's width, is rounded up to whole ones."""
    return _library().window_rows(), _library().window_bytes() // dtype.itemsize


@lru_cache
def _library() -> ctypes.CDLL | str:
    return native.load("window_cpu", SOURCE)


def _pasts(tensors: list[Tensor | None], owners: list[int], heads: int) -> list[int]:
    """Keys that each head has before the segment."""
    return [tensors[PAST + 2 * part].shape[2] for part in owners] or [0] * heads


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    past: Sequence[PastKV] = (),
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """The same function as ``window.attend`` without dropout; ``z`` is ``[H]``.

    Args:
        k, v: keys and values of the segment ``[B, H, T, K]``.
        past: what comes before, in parts that have all heads together, or nothing: heads that look far may have more
            than others. No work is done for gradients that nobody asks for.
        bias: a constant ``[H, n]``, added to scores.
        vectors: p ``[n, K]``, shared by heads: adds ``q @ vectors.T``.
        beside: what chunks of queries meet in the same softmax.
    """
    most = max(window.max_keys)
    for name, given in (("vectors", vectors), ("bias", None if bias is None else bias.mT)):
        if given is not None and len(given) < most:
            raise ValueError(f"{name} of {len(given)} distances: window.max_keys needs {most}")
    kind = torch.promote_types(q.dtype, torch.float32)
    old = [x.to(kind) for part in past for x in (part.k, part.v)]
    owners = [next(i for i, part in enumerate(past) if h in part.heads) for h in range(q.shape[1])] if past else []
    extra = (None, None, None) if persistent is None else (x.to(kind) for x in persistent)
    vectors = None if vectors is None else vectors[:most].to(kind)
    z = None if window.z is None else window.z.to(kind)
    own = (q.to(kind), k.to(kind), v.to(kind))
    more = (None, None, None) if beside is None else (x.to(kind) for x in beside)
    return _Attend.apply(window._replace(z=None), owners, *more, *own, z, *extra, vectors, bias, *old).to(q.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, window, owners, *tensors):
        more, own = tensors[:3], list(tensors[3:])
        sizes = (owners, window.max_keys, window.shift, window.ramp)
        y, lse, _ = _forward(own, *sizes)
        if more[0] is not None:
            y, lse = merge(y, lse, own[0], Beside(*more))
        ctx.save_for_backward(*tensors, y, lse)
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        *tensors, y, lse = ctx.saved_tensors
        more, tensors = tensors[:3], tensors[3:]
        _, _, *needs = ctx.needs_input_grad
        beside, needs = needs[:3], needs[3:]
        needed = {name for name, need in zip(NAMES, needs, strict=False) if need}
        needed |= {"past"} if any(needs[PAST:]) else set()
        wanted = [name for name in (*NAMES, "past") if needed & {name, *TOGETHER.get(name, ())}]
        *found, _ = _backward(g, y, lse, tensors, *ctx.sizes, " ".join(wanted))
        found = iter(found)
        own = [next(found) if name in wanted else None for name in NAMES]
        if more[0] is not None and (needs[0] or any(beside)):
            dq, more = gradients(g, y, lse, tensors[0], Beside(*more), added=beside[2])
            own[0] = None if own[0] is None else own[0] + dq
        return None, None, *more, *own, None, *(next(found, None) for _ in tensors[PAST:])


@torch.library.custom_op("windtunnel::window_forward", mutates_args=(), device_types="cpu")
def _forward(
    tensors: list[Tensor | None], owners: list[int], max_keys: list[int], shift: int, ramp: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, K]``, log-sum-exp ``[B, H, T]``, inf where nothing is seen, and FLOPs executed.

    ``tensors`` are those of ``NAMES``, the bias, keys and values of each part of the past; ``owners`` each head's part.
    """
    call = _call(tensors, owners, max_keys, shift, ramp, backward=False)
    y, lse, _ = _forward_results(tensors)
    call.put(y=y, lse=lse)
    return y, lse, call.run("forward")


@torch.library.custom_op("windtunnel::window_backward", mutates_args=(), device_types="cpu")
def _backward(
    g: Tensor,
    y: Tensor,
    lse: Tensor,
    tensors: list[Tensor | None],
    owners: list[int],
    max_keys: list[int],
    shift: int,
    ramp: int,
    wanted: str,
) -> list[Tensor]:
    """Gradients of the tensors whose names are wanted, in the order of ``NAMES``, of the past, and FLOPs executed."""
    call = _call(tensors, owners, max_keys, shift, ramp, backward=True)
    *found, _ = _backward_results(g, y, lse, tensors, owners, max_keys, shift, ramp, wanted)
    own = dict(zip(wanted.split(), found, strict=False))
    for name in ("q", "extra_q"):  # the kernel writes them in any case
        if (x := tensors[NAMES.index(name)]) is not None:
            own.setdefault(name, _like(x))
    call.put(g=g, y=y, lse=lse, **{f"d{name}": x for name, x in own.items() if name != "past"})
    if "past" in own:
        call.put_past(owners, found[-2 * (max(owners) + 1) :], names=("dk_old", "dv_old"))
    return [*found, call.run("backward")]


@_forward.register_fake
def _forward_results(tensors, *_):
    q = tensors[0]
    return _like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _backward_results(g, y, lse, tensors, owners, max_keys, shift, ramp, wanted):
    found = [_like(x) for name, x in zip(NAMES, tensors, strict=False) if name in wanted.split()]
    found += [_like(x) for x in tensors[PAST:] if "past" in wanted.split()]
    return [*found, g.new_empty((), dtype=torch.int64)]


@register_flop_formula(torch.ops.windtunnel.window_forward, get_raw=True)
def _forward_flops(tensors, owners, max_keys, *_, out_val) -> int:
    return _expected_flops(tensors, owners, max_keys) if isinstance(out_val[-1], FakeTensor) else int(out_val[-1])


@register_flop_formula(torch.ops.windtunnel.window_backward, get_raw=True)
def _backward_flops(_g, _y, _lse, tensors, owners, max_keys, _shift, _ramp, wanted, *, out_val) -> int:
    if isinstance(out_val[-1], FakeTensor):
        return _expected_flops(tensors, owners, max_keys, wanted.split())
    return int(out_val[-1])


def _expected_flops(
    tensors: list[Tensor | None], owners: list[int], max_keys: list[int], wanted: list[str] | None = None
) -> int:
    """Without data: at the heads' buckets, because spans have no values, and with nothing rounded up to whole vectors."""
    own = dict(zip(NAMES, tensors, strict=False))
    streams, _, rows, width = own["q"].shape
    products = 0.0  # with a key, for each row
    for n, past in zip(max_keys, _pasts(tensors, owners, len(max_keys)), strict=True):
        met = min(n + geometry(own["q"].dtype)[0] - 1, past + rows)
        segment = min(n, rows)
        learned = met if wanted and "past" in wanted else segment - segment**2 / (2 * rows)
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


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("stream", "head", "row")]


class _Rows(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("stream", ctypes.c_int64), ("row", ctypes.c_int64)]


class _Call(ctypes.Structure):
    """The ``Call`` of the source; keeps the tensors that it points to."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        *((name, ctypes.c_void_p) for name in STRIDED),
        *((f"{name}_", _Strides) for name in STRIDED),
        ("past", ctypes.c_void_p),
        *((name, ctypes.POINTER(_Rows)) for name in ("k_old", "v_old", "dk_old", "dv_old")),
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

    def put_past(self, owners: list[int], tensors: list[Tensor], *, names: tuple[str, str]) -> None:
        """Point to keys and values of the past, or to their gradients, head by head."""
        for name, parts in zip(names, (tensors[::2], tensors[1::2]), strict=True):
            parts = [x if x.stride(-1) == 1 else x.contiguous() for x in parts]
            heads = []
            for h, part in enumerate(owners):
                x, place = parts[part], owners[:h].count(part)
                heads.append(_Rows(x.data_ptr() + place * x.stride(1) * x.element_size(), x.stride(0), x.stride(2)))
            rows = (_Rows * len(heads))(*heads)
            self.kept += [*parts, rows]
            setattr(self, name, rows)

    def run(self, direction: str) -> Tensor:
        """FLOPs executed."""
        flops = torch.zeros((), dtype=torch.int64)
        self.put(flops=flops)
        kind = {torch.float32: "float", torch.float64: "double"}[self.dtype]
        getattr(_library(), f"window_{direction}_{kind}")(ctypes.byref(self))
        return flops


def _call(
    tensors: list[Tensor | None], owners: list[int], max_keys: list[int], shift: int, ramp: int, *, backward: bool
) -> _Call:
    own, bias = dict(zip(NAMES, tensors, strict=False)), tensors[len(NAMES)]
    q, z, vectors = own["q"], own.pop("z"), own.pop("vectors")
    call = _Call(streams=q.shape[0], heads=q.shape[1], rows=q.shape[2], width=q.shape[3], shift=shift)
    call.dtype, call.kept, call.threads = q.dtype, [], torch.get_num_threads()
    call.persistent = 0 if own["extra_k"] is None else own["extra_k"].shape[1]
    call.distances = max(max_keys)
    call.put(**own, past=torch.tensor(_pasts(tensors, owners, q.shape[1])))
    if owners:
        call.put_past(owners, tensors[PAST:], names=("k_old", "v_old"))
    met = _columns_met(max_keys, z, ramp)
    order = sorted(range(len(met)), key=lambda h: -met[h])
    call.put(columns=torch.tensor(met), order=torch.tensor(order))
    call.put(**_tables(q.dtype, z, bias, met, call.distances, ramp, backward=backward))
    if vectors is not None:
        pad, (_, lanes) = _library().window_pad(), geometry(q.dtype)
        around = F.pad(vectors.flip(0), (0, -call.width % lanes, pad, pad + -len(vectors) % lanes))
        call.put(vectors=around, vectors_turned=around.unflatten(0, (-1, lanes)).mT)  # panels
    return call


def _columns_met(max_keys: list[int], z: Tensor | None, ramp: int) -> list[int]:
    """Keys that each head meets: with a soft mask up to the far end of the closed ramp, not to the next round number."""
    if z is None:
        return list(max_keys)
    far = (z.detach() + ramp).floor()  # added as in soft_mask, so that both agree on which side of a kink z is
    return [min(n, int(x) + 1) for n, x in zip(max_keys, far.tolist(), strict=True)]


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
            # At a whole z the ramp begins where m is still 1.
            flat = torch.minimum(flat, (x < far.ceil() - ramp).sum(1))
            found = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            added = added + mask.log()
    found["table"] = (added.masked_fill(hidden, -torch.inf), -torch.inf)
    tables = {name: F.pad(band.flip(-1), (pad, pad), value=around) for name, (band, around) in found.items()}
    return tables | {"flat": flat if bias is None else torch.zeros_like(flat)}
