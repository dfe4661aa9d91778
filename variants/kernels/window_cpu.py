"""The kernel backend of ``window.attend`` on a CPU: ``window_cpu.cpp``, compiled at its first use (``native.py``).

Dispatch modes see two operations, ``windtunnel::window_forward`` and ``window_backward``. Each counts the FLOPs of the
products that it executes, and torch's counter gets this number. ``_Call`` is the source's struct of arguments.
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
"""Fields of ``Inputs`` that may have a gradient; keys and values of the past's part i: ``k_old{i}``, ``v_old{i}``."""
BESIDE = ("beside_k", "beside_v", "beside_added")
STRIDED = ("q", "k", "v", "extra_q", "g", "y", "dq", "dk", "dv", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vectors_turned flops dextra_k dextra_v dvectors "
    "dz key_bias query_bias dkey_bias dquery_bias"
)
SIZES = "streams heads rows width persistent distances shift threads biases"


def available() -> str | None:
    """Why the kernel cannot run on this machine; None if it can."""
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
        k, v: keys and values of the segment ``[B, H, T, K]``; ``key_bias`` is of the segment, too.
        past: keys and values before the segment, in parts that together have every head, or nothing. Heads that look
            far may have a longer past. Gradients of the past are computed only if they are asked for.
        beside: keys and values per chunk of queries, in the same softmax.
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
    named = {name: getattr(inputs, name) for name in (*NAMES, "sink")} | dict(zip(BESIDE, beside or (), strict=False))
    named |= {f"{n}_old{i}": x for i, part in enumerate(past) for n, x in zip("kv", part[1:3], strict=True)}
    kind = torch.promote_types(q.dtype, torch.float32)
    named = {name: x.to(kind) for name, x in named.items() if x is not None}
    named |= {} if inputs.bias is None else {"bias": inputs.bias}
    return _Attend.apply([*named], owners, window, *named.values()).to(q.dtype)


def _biases(past: Sequence[PastKV]) -> Tensor:
    """Key biases of the past, ``[B, H, P]`` with heads in order and the longest P; shorter ones are padded in front."""
    most = max(part.key_bias.shape[2] for part in past)
    padded = torch.cat([F.pad(part.key_bias, (most - part.key_bias.shape[2], 0)) for part in past], dim=1)
    heads = [h for part in past for h in part.heads]
    return padded[:, sorted(range(len(heads)), key=heads.__getitem__)]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, names: list[str], owners: list[int], window: Window, *tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        ctx.names, ctx.sizes = names, (owners, window.max_keys, window.shift, window.ramp)
        y, lse, _ = _forward(*_of_window(named), *ctx.sizes)
        if BESIDE[0] in named:
            y, lse = merge(y, lse, named["q"], Beside(*(named[name] for name in BESIDE)))
        y, lse = with_sink(y, lse, named.get("sink"))
        ctx.save_for_backward(*tensors, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        *tensors, y, lse = ctx.saved_tensors
        named = dict(zip(ctx.names, tensors, strict=True))
        needs = {name for name, need in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if need}
        names, of_window = _of_window(named)
        past = {name for name in named if "_old" in name}
        groups = [
            {"k", "v", *past},
            {"extra_k", "extra_v"},
        ]  # computed together, but those of the past only if they are asked for
        wanted = needs.union(*(group for group in groups if needs & group)) - (set() if needs & past else past)
        wanted = [name for name in names.split() if name in wanted]
        *results, _ = _backward(g, y, lse, names, of_window, *ctx.sizes, " ".join(wanted))
        made = dict(zip(wanted, results, strict=True))
        if BESIDE[0] in named and needs & {"q", *BESIDE}:
            summaries = Beside(*(named[name] for name in BESIDE))
            dq, of_beside = gradients(g, y, lse, named["q"], summaries, added=BESIDE[2] in needs)
            made |= dict(zip(BESIDE, of_beside, strict=True)) | ({"q": made["q"] + dq} if "q" in made else {})
        if "sink" in needs:
            made["sink"] = sink_gradient((g * y).sum(-1), lse, named["sink"])
        return None, None, None, *(made.get(name) for name in ctx.names)


def _of_window(named: dict[str, Tensor]) -> tuple[str, list[Tensor]]:
    """Inputs of the kernel: names, and tensors in the same order."""
    names = [name for name in named if name not in ("sink", *BESIDE)]
    return " ".join(names), [named[name] for name in names]


@torch.library.custom_op("windtunnel::window_forward", mutates_args=(), device_types="cpu")
def _forward(
    names: str, tensors: list[Tensor], owners: list[int], max_keys: list[int], shift: int, ramp: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, K]``, log-sum-exp ``[B, H, T]``, inf if nothing is seen, and FLOPs executed.

    The first tensor is q; ``owners`` has the number of each head's part of the past.
    """
    call = _call(dict(zip(names.split(), tensors, strict=True)), owners, max_keys, shift, ramp, backward=False)
    y, lse, _ = _forward_results(names, tensors)
    call.put(y=y, lse=lse)
    return y, lse, call.run("forward")


@torch.library.custom_op("windtunnel::window_backward", mutates_args=(), device_types="cpu")
def _backward(
    g: Tensor, y: Tensor, lse: Tensor, names: str, tensors: list[Tensor], owners: list[int], max_keys: list[int],
    shift: int, ramp: int, wanted: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors whose names are wanted, and FLOPs executed."""
    named = dict(zip(names.split(), tensors, strict=True))
    call, results = (
        _call(named, owners, max_keys, shift, ramp, backward=True),
        [_like(named[n]) for n in wanted.split()],
    )
    made = {name: _like(named[name]) for name in ("q", "extra_q") if name in named}  # the kernel always writes these
    made |= dict(zip(wanted.split(), results, strict=True))
    call.put(g=g, y=y, lse=lse, **{f"d{name}": x for name, x in made.items() if "_old" not in name})
    if "k_old0" in made:
        call.put_past(owners, made, prefix="d")
    return [*results, call.run("backward")]


@_forward.register_fake
def _forward_results(names, tensors, *_):
    q = tensors[0]
    return _like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _backward_results(g, y, lse, names, tensors, owners, max_keys, shift, ramp, wanted):
    named = dict(zip(names.split(), tensors, strict=True))
    return [*(_like(named[name]) for name in wanted.split()), g.new_empty((), dtype=torch.int64)]


@register_flop_formula([torch.ops.windtunnel.window_forward, torch.ops.windtunnel.window_backward], get_raw=True)
def _executed_flops(*_, out_val) -> int:
    return int(out_val[-1])


def _like(x: Tensor) -> Tensor:
    """An empty tensor like ``x``. With four dimensions, memory is ``[B, T, H, K]``, so heads join without a copy."""
    if x.dim() < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("stream", "head", "row")]


class _Rows(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("stream", ctypes.c_int64), ("row", ctypes.c_int64)]


class _Call(ctypes.Structure):
    """The struct ``Call`` of the source. It keeps alive the tensors that it points to."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        *((name, ctypes.c_void_p) for name in STRIDED),
        *((f"{name}_", _Strides) for name in STRIDED),
        ("past", ctypes.c_void_p),
        *((name, ctypes.POINTER(_Rows)) for name in ("k_old", "v_old", "dk_old", "dv_old")),
        *((name, ctypes.c_void_p) for name in DENSE.split()),
    ]

    def put(self, **tensors: Tensor) -> None:
        """Point to tensors; tensors that the kernel writes must have the layout of ``_like``."""
        for name, x in tensors.items():
            strided = name in STRIDED
            x = x if strided and x.stride(-1) == 1 else x.contiguous()
            self.alive.append(x)
            setattr(self, name, x.data_ptr())
            if strided:
                setattr(self, f"{name}_", _Strides(*x.stride()[:3]))

    def put_past(self, owners: list[int], named: dict[str, Tensor], *, prefix: str = "") -> None:
        """Point to keys and values of the past, or to their gradients, head by head."""
        for name in ("k_old", "v_old"):
            parts = [named[f"{name}{i}"] for i in range(max(owners) + 1)]
            parts, heads = [x if x.stride(-1) == 1 else x.contiguous() for x in parts], []
            for h, part in enumerate(owners):
                x, place = parts[part], owners[:h].count(part)
                heads.append(_Rows(x.data_ptr() + place * x.stride(1) * x.element_size(), x.stride(0), x.stride(2)))
            rows = (_Rows * len(heads))(*heads)
            self.alive += [*parts, rows]
            setattr(self, prefix + name, rows)

    def run(self, direction: str) -> Tensor:
        """Run the kernel; returns the FLOPs executed."""
        flops = torch.zeros((), dtype=torch.int64)
        self.put(flops=flops)
        kind = {torch.float32: "float", torch.float64: "double"}[self.dtype]
        getattr(_library(), f"window_{direction}_{kind}")(ctypes.byref(self))
        return flops


def _call(
    named: dict[str, Tensor], owners: list[int], max_keys: list[int], shift: int, ramp: int, *, backward: bool
) -> _Call:
    q, z, bias, vectors = (named.get(name) for name in ("q", "z", "bias", "vectors"))
    call = _Call(streams=q.shape[0], heads=q.shape[1], rows=q.shape[2], width=q.shape[3], shift=shift)
    call.dtype, call.alive, call.threads = q.dtype, [], torch.get_num_threads()
    call.persistent = named["extra_k"].shape[1] if "extra_k" in named else 0
    call.biases = named["key_bias"].shape[2] if "key_bias" in named else 0
    call.distances = max(max_keys)
    past = [named[f"k_old{part}"].shape[2] for part in owners] or [0] * q.shape[1]  # keys of each head's past
    pointed = [name for name in named if name not in ("z", "bias", "vectors") and "_old" not in name]
    call.put(**{name: named[name] for name in pointed}, past=torch.tensor(past))
    if owners:
        call.put_past(owners, named)
    met = list(max_keys)
    if z is not None:  # to the far end of the closed ramp; rounded as in soft_mask, so that both agree at kinks
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
    """Tables by head and distance ``[H, n + 2 PAD]``, reversed; and per head, how many first columns add nothing."""
    flat, pad = torch.tensor(met), _library().window_pad()
    added = torch.zeros(len(met), most, dtype=dtype) if bias is None else bias[:, :most].to(dtype)
    tables = {}
    if z is not None:
        mask = soft_mask(z.detach(), ramp, most).to(dtype)
        flat = torch.minimum(flat, (mask == 1).sum(1))
        if backward:
            slope = ramp_slope(z.detach(), ramp, most).to(dtype)
            # If z is an integer, the ramp begins at a column where m is still 1.
            flat = torch.minimum(flat, (slope.cumsum(1) == 0).sum(1))
            tables = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            added = added + mask.log()
    tables["table"] = (added.masked_fill(torch.arange(most) >= flat.new_tensor(met)[:, None], -torch.inf), -torch.inf)
    padded = {name: F.pad(band.flip(-1), (pad, pad), value=around) for name, (band, around) in tables.items()}
    return padded | {"flat": flat if bias is None else torch.zeros_like(flat)}
