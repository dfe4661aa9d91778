"""The call of ``window_cpu.cpp``: its library, its arguments as the source has them, and what it is told of each distance."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels import native
from variants.kernels.window import soft_mask

SOURCE = Path(__file__).with_name("window_cpu.cpp").read_text(encoding="utf-8")
NAMES = ("q", "k", "v", "z", "extra_q", "extra_k", "extra_v", "vectors")
"""Tensors that may have a gradient, in the order of the operations' arguments; the bias and those of the past follow."""
PAST = len(NAMES) + 1


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


def pasts(tensors: list[Tensor | None], owners: list[int], heads: int) -> list[int]:
    """Keys that each head has before the segment."""
    return [tensors[PAST + 2 * part].shape[2] for part in owners] or [0] * heads


STRIDED = ("q", "k", "v", "extra_q", "g", "y", "dq", "dk", "dv", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vectors_turned flops dextra_k dextra_v dvectors dz"
)
SIZES = "streams heads rows width persistent distances shift threads"


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("stream", "head", "row")]


class _Rows(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("stream", ctypes.c_int64), ("row", ctypes.c_int64)]


class Call(ctypes.Structure):
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


def make_call(
    tensors: list[Tensor | None], owners: list[int], columns: list[int], shift: int, ramp: int, *, backward: bool
) -> Call:
    own, bias = dict(zip(NAMES, tensors, strict=False)), tensors[len(NAMES)]
    q, z, vectors = own["q"], own.pop("z"), own.pop("vectors")
    call = Call(streams=q.shape[0], heads=q.shape[1], rows=q.shape[2], width=q.shape[3], shift=shift)
    call.dtype, call.kept, call.threads = q.dtype, [], torch.get_num_threads()
    call.persistent = 0 if own["extra_k"] is None else own["extra_k"].shape[1]
    call.distances = max(columns)
    call.put(**own, past=torch.tensor(pasts(tensors, owners, q.shape[1])))
    if owners:
        call.put_past(owners, tensors[PAST:], names=("k_old", "v_old"))
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
            # At a whole z the ramp begins where m is still 1.
            flat = torch.minimum(flat, (x < far.ceil() - ramp).sum(1))
            found = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            added = added + mask.log()
    found["table"] = (added.masked_fill(hidden, -torch.inf), -torch.inf)
    tables = {name: F.pad(band.flip(-1), (pad, pad), value=around) for name, (band, around) in found.items()}
    return tables | {"flat": flat if bias is None else torch.zeros_like(flat)}
