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
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from variants.kernels import native
from variants.kernels.beside import Beside, gradients, merge
from variants.kernels.window import Inputs, PastKV, Window, ramp_slope, sink_gradient, soft_mask, with_sink

SOURCE = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
NAMES = (*Inputs._fields[:8], "key_bias", "query_bias")
"""Tensors that may have a gradient, in the order of the operations' arguments; the bias and those of the past follow."""
PAST = len(NAMES) + 1
TOGETHER = ({"k", "v", "past"}, {"extra_k", "extra_v"})
"""Gradients that come together, but those of the past are computed only if they are asked for."""
STRIDED = ("q", "k", "v", "extra_q", "g", "y", "dq", "dk", "dv", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vectors_turned flops dextra_k dextra_v dvectors dz "
    "key_bias query_bias dkey_bias dquery_bias"
)
SIZES = "streams heads rows width persistent distances shift threads biases"


def available() -> str | None:
    """Why there is no kernel on this machine; None if there is."""
    library = _library()
    return library if isinstance(library, str) else None


@lru_cache
def _library() -> ctypes.CDLL | str:
    return native.load("window_cpu", SOURCE)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    past: Sequence[PastKV] = (),
    beside: Beside | None = None,
    **added,
) -> Tensor:
    """``window.attend`` without dropout; ``z`` is ``[H]``, the bias a constant ``[H, n]``.

    Args:
        k, v: keys and values of the segment ``[B, H, T, K]``; ``key_bias`` is its, too.
        past: what comes before, in parts that have all heads together, or nothing: heads that look far may have more
            than others. No work is done for gradients that nobody asks for.
        beside: what chunks of queries meet in the same softmax.
    """
    inputs, most = Inputs.of(q, k, v, window, **added), max(window.max_keys)
    for name, x in (("vectors", inputs.vectors), ("bias", None if inputs.bias is None else inputs.bias.mT)):
        if x is not None and len(x) < most:
            raise ValueError(f"{name} of {len(x)} distances: window.max_keys needs {most}")
    if inputs.vectors is not None:
        inputs = inputs._replace(vectors=inputs.vectors[:most])
    if past and inputs.key_bias is not None:
        inputs = inputs._replace(key_bias=torch.cat([_biases(past), inputs.key_bias], dim=2))
    owners = [next(i for i, part in enumerate(past) if h in part.heads) for h in range(q.shape[1])] if past else []
    tensors = [
        inputs.sink,
        *(beside or (None, None, None)),
        *(getattr(inputs, name) for name in NAMES),
        *(x for part in past for x in part[1:3]),
    ]
    kind, place = torch.promote_types(q.dtype, torch.float32), 4 + len(NAMES)
    tensors = [None if x is None else x.to(kind) for x in tensors]
    tensors.insert(place, inputs.bias)
    return _Attend.apply(owners, window, *tensors).to(q.dtype)


def _biases(past: Sequence[PastKV]) -> Tensor:
    """Those of all heads in order, ``[B, H, P]`` for the longest past; the others end where it does."""
    most = max(part.key_bias.shape[2] for part in past)
    padded = torch.cat([F.pad(part.key_bias, (most - part.key_bias.shape[2], 0)) for part in past], dim=1)
    heads = [h for part in past for h in part.heads]
    return padded[:, sorted(range(len(heads)), key=heads.__getitem__)]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owners, window, sink, *tensors):
        more, own = tensors[:3], list(tensors[3:])
        sizes = (owners, window.max_keys, window.shift, window.ramp)
        y, lse, _ = _forward(own, *sizes)
        if more[0] is not None:
            y, lse = merge(y, lse, own[0], Beside(*more))
        y, lse = with_sink(y, lse, sink)
        ctx.save_for_backward(sink, *tensors, y, lse)
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        sink, *tensors, y, lse = ctx.saved_tensors
        more, tensors = tensors[:3], tensors[3:]
        beside, needs = ctx.needs_input_grad[3:6], ctx.needs_input_grad[6:]
        wanted = {name for name, need in zip(NAMES, needs, strict=False) if need}
        wanted |= {"past"} if (learns := any(needs[PAST:])) else set()
        for together in TOGETHER:
            wanted |= together if wanted & together else set()
        wanted = [name for name in (*NAMES, "past") if name in wanted and (learns or name != "past")]
        *results, _ = _backward(g, y, lse, tensors, *ctx.sizes, " ".join(wanted))
        results = iter(results)
        own = [next(results) if name in wanted else None for name in NAMES]
        if more[0] is not None and (needs[0] or any(beside)):
            dq, more = gradients(g, y, lse, tensors[0], Beside(*more), added=beside[2])
            own[0] = None if own[0] is None else own[0] + dq
        dsink = sink_gradient((g * y).sum(-1), lse, sink) if ctx.needs_input_grad[2] else None
        return None, None, dsink, *more, *own, None, *(next(results, None) for _ in tensors[PAST:])


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
    g: Tensor, y: Tensor, lse: Tensor, tensors: list[Tensor | None], owners: list[int], max_keys: list[int],
    shift: int, ramp: int, wanted: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors whose names are wanted, in the order of ``NAMES``, of the past, and FLOPs executed."""
    call = _call(tensors, owners, max_keys, shift, ramp, backward=True)
    *results, _ = _backward_results(g, y, lse, tensors, owners, max_keys, shift, ramp, wanted)
    own = dict(zip(wanted.split(), results, strict=False))
    for name in ("q", "extra_q"):  # the kernel writes them in any case
        if (x := tensors[NAMES.index(name)]) is not None:
            own.setdefault(name, _like(x))
    call.put(g=g, y=y, lse=lse, **{f"d{name}": x for name, x in own.items() if name != "past"})
    if "past" in own:
        call.put_past(owners, results[-2 * (max(owners) + 1) :], names=("dk_old", "dv_old"))
    return [*results, call.run("backward")]


@_forward.register_fake
def _forward_results(tensors, *_):
    q = tensors[0]
    return _like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _backward_results(g, y, lse, tensors, owners, max_keys, shift, ramp, wanted):
    results = [_like(x) for name, x in zip(NAMES, tensors, strict=False) if name in wanted.split()]
    results += [_like(x) for x in tensors[PAST:] if "past" in wanted.split()]
    return [*results, g.new_empty((), dtype=torch.int64)]


@register_flop_formula([torch.ops.windtunnel.window_forward, torch.ops.windtunnel.window_backward], get_raw=True)
def _executed_flops(*_, out_val) -> int:
    return int(out_val[-1])


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
    """The ``Call`` of the source; keeps the tensors that it points to alive."""

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
            self.alive.append(x)
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
            self.alive += [*parts, rows]
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
    call.dtype, call.alive, call.threads = q.dtype, [], torch.get_num_threads()
    call.persistent = 0 if own["extra_k"] is None else own["extra_k"].shape[1]
    call.distances = max(max_keys)
    call.biases = 0 if own["key_bias"] is None else own["key_bias"].shape[2]
    past = [tensors[PAST + 2 * part].shape[2] for part in owners] or [0] * q.shape[1]  # keys before, of each head
    call.put(**own, past=torch.tensor(past))
    if owners:
        call.put_past(owners, tensors[PAST:], names=("k_old", "v_old"))
    met = list(max_keys)
    if z is not None:  # up to the far end of the closed ramp; added as in soft_mask, so that sides of kinks agree
        met = [min(n, int(x) + 1) for n, x in zip(max_keys, (z.detach() + ramp).floor().tolist(), strict=True)]
    order = sorted(range(len(met)), key=lambda h: -met[h])
    call.put(columns=torch.tensor(met), order=torch.tensor(order))
    call.put(**_tables(q.dtype, z, bias, met, call.distances, ramp, backward=backward))
    if vectors is not None:
        pad, lanes = _library().window_pad(), _library().window_bytes() // q.dtype.itemsize
        around = F.pad(vectors.flip(0), (0, -call.width % lanes, pad, pad + -len(vectors) % lanes))
        call.put(vectors=around, vectors_turned=around.unflatten(0, (-1, lanes)).mT)  # panels
    return call


def _tables(
    dtype: torch.dtype, z: Tensor | None, bias: Tensor | None, met: list[int], most: int, ramp: int, *, backward: bool
) -> dict[str, Tensor]:
    """What depends on head and distance, ``[H, n + 2 PAD]`` in reverse, and up to where nothing is added."""
    flat, pad = torch.tensor(met), _library().window_pad()
    added = torch.zeros(len(met), most, dtype=dtype) if bias is None else bias[:, :most].to(dtype)
    tables = {}
    if z is not None:
        mask = soft_mask(z.detach(), ramp, most).to(dtype)
        flat = torch.minimum(flat, (mask == 1).sum(1))
        if backward:
            slope = ramp_slope(z.detach(), ramp, most).to(dtype)
            # At a whole z the ramp begins where m is still 1.
            flat = torch.minimum(flat, (slope.cumsum(1) == 0).sum(1))
            tables = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            added = added + mask.log()
    tables["table"] = (added.masked_fill(torch.arange(most) >= flat.new_tensor(met)[:, None], -torch.inf), -torch.inf)
    padded = {name: F.pad(band.flip(-1), (pad, pad), value=around) for name, (band, around) in tables.items()}
    return padded | {"flat": flat if bias is None else torch.zeros_like(flat)}
