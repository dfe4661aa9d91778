"""The kernel backend of ``window.attend`` on a CPU: ``window_cpu.cpp``, compiled at its first use
(``native.py``).

torch sees two operations, ``windtunnel::window_forward`` and ``windtunnel::window_backward``. Each
counts the FLOPs of the products that it executes, and returns them for torch's counter.
``_Call`` mirrors the source's struct ``Call``."""

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
from variants.kernels.chunk_keys import ChunkKeys, chunk_key_gradients, merge_chunk_keys
from variants.kernels.window import (
    Inputs,
    PastKV,
    Window,
    merge_sink,
    ramp_slope,
    sink_gradient,
    soft_mask,
)

SOURCE = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
DIFFERENTIABLE = (*Inputs._fields[:8], "key_bias", "query_bias")  # from q to vectors, and biases
"""Fields of ``Inputs`` that the kernel differentiates. Part i of the past is named ``k_old{i}``
and ``v_old{i}``."""
CHUNK_NAMES = ("chunk_k", "chunk_v", "chunk_bias")
STRIDED = ("q", "k", "v", "extra_q", "g", "y", "dq", "dk", "dv", "dextra_q")
DENSE = (
    "extra_k extra_v lse columns flat order table mask slope vectors vector_panels flops dextra_k "
    "dextra_v dvectors dz key_bias query_bias dkey_bias dquery_bias"
)
SIZES = "streams heads rows width persistent distances shift threads biases"  # also fields of Call


def obstacle(*_: object) -> str | None:
    """Return the reason why the kernel cannot run on this machine; None if it can."""
    library = _library()
    if isinstance(library, str):
        return library
    return None


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
    chunk_keys: ChunkKeys | None = None,
    **options,
) -> Tensor:
    """Compute ``window.attend`` without dropout; ``z`` is ``[H]``, and the bias is a constant ``[H,
    n]``.

    Args:
        k, v: keys and values of the segment ``[B, H, T, K]``; ``key_bias`` is also the segment's.
        past: keys and values before the segment, in parts for heads with pasts of equal length, in
            the order of heads. Empty without a past. Their gradients are computed only if they are
            needed.
        chunk_keys: keys and values for each chunk of queries, in the same softmax."""
    inputs = Inputs.from_call(q, k, v, window, **options)
    n_distances = max(window.max_keys)
    for name, x in (
        ("vectors", inputs.vectors),
        ("bias", None if inputs.bias is None else inputs.bias.mT),
    ):
        if x is not None and len(x) < n_distances:
            raise ValueError(f"{name} has {len(x)} distances: window.max_keys needs {n_distances}")
    if inputs.vectors is not None:
        inputs = inputs._replace(vectors=inputs.vectors[:n_distances])
    if past and inputs.key_bias is not None:
        inputs = inputs._replace(key_bias=torch.cat([_past_biases(past), inputs.key_bias], dim=2))
    named = {name: getattr(inputs, name) for name in (*DIFFERENTIABLE, "sink")}
    named |= dict(zip(CHUNK_NAMES, chunk_keys or (), strict=False))
    for i, part in enumerate(past):
        named |= {f"k_old{i}": part.k, f"v_old{i}": part.v}
    dtype = torch.promote_types(q.dtype, torch.float32)
    named = {name: x.to(dtype) for name, x in named.items() if x is not None}
    if inputs.bias is not None:
        named["bias"] = inputs.bias
    return _Attend.apply([*named], window, *named.values()).to(q.dtype)


def _past_biases(past: Sequence[PastKV]) -> Tensor:
    """Return key biases of the past, ``[B, H, P]``. Shorter parts are padded in front."""
    longest = max(part.key_bias.shape[2] for part in past)
    return torch.cat(
        [F.pad(part.key_bias, (longest - part.key_bias.shape[2], 0)) for part in past], dim=1
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, names: list[str], window: Window, *tensors: Tensor) -> Tensor:
        named = dict(zip(names, tensors, strict=True))
        ctx.names = names
        ctx.sizes = (window.max_keys, window.shift, window.ramp)
        y, lse, _ = _forward(*_kernel_inputs(named), *ctx.sizes)
        if CHUNK_NAMES[0] in named:
            y, lse = merge_chunk_keys(
                y, lse, named["q"], ChunkKeys(*(named[name] for name in CHUNK_NAMES))
            )
        if "sink" in named:
            y, lse = merge_sink(y, lse, named["sink"])
        ctx.save_for_backward(*tensors, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        *tensors, y, lse = ctx.saved_tensors
        named = dict(zip(ctx.names, tensors, strict=True))
        needed = {
            name for name, needs in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if needs
        }
        names, tensors = _kernel_inputs(named)
        past = {name for name in named if "_old" in name}
        computed = set(needed)
        # the kernel computes a group's gradients in one pass
        for group in ({"k", "v", *past}, {"extra_k", "extra_v"}):
            if needed & group:
                computed |= group
        if not needed & past:
            computed -= past
        gradient_names = [name for name in names.split() if name in computed]
        *computed_gradients, _ = _backward(
            g, y, lse, names, tensors, *ctx.sizes, " ".join(gradient_names)
        )
        gradients = dict(zip(gradient_names, computed_gradients, strict=True))
        if CHUNK_NAMES[0] in named and needed & {"q", *CHUNK_NAMES}:
            chunk_keys = ChunkKeys(*(named[name] for name in CHUNK_NAMES))
            dq, of_chunks = chunk_key_gradients(
                g, y, lse, named["q"], chunk_keys, bias=CHUNK_NAMES[2] in needed
            )
            gradients |= dict(zip(CHUNK_NAMES, of_chunks, strict=True))
            if "q" in gradients:
                gradients["q"] = gradients["q"] + dq
        if "sink" in needed:
            gradients["sink"] = sink_gradient((g * y).sum(-1), lse, named["sink"])
        return None, None, *(gradients.get(name) for name in ctx.names)


def _kernel_inputs(named: dict[str, Tensor]) -> tuple[str, list[Tensor]]:
    """Return the names of the kernel's inputs, separated by spaces, and their tensors in the same
    order."""
    names = [name for name in named if name not in ("sink", *CHUNK_NAMES)]
    return " ".join(names), [named[name] for name in names]


@torch.library.custom_op("windtunnel::window_forward", mutates_args=(), device_types="cpu")
def _forward(
    names: str,
    tensors: list[Tensor],
    max_keys: list[int],
    shift: int,
    ramp: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[B, H, T, K]``, log-sum-exp ``[B, H, T]`` (inf for a query that sees no key),
    and executed FLOPs. The first tensor is q."""
    call = _call(
        dict(zip(names.split(), tensors, strict=True)),
        max_keys,
        shift,
        ramp,
        backward=False,
    )
    y, lse, _ = _empty_outputs(names, tensors)
    call.set_pointers(y=y, lse=lse)
    return y, lse, call.run("forward")


@torch.library.custom_op("windtunnel::window_backward", mutates_args=(), device_types="cpu")
def _backward(
    g: Tensor, y: Tensor, lse: Tensor, names: str, tensors: list[Tensor], max_keys: list[int],
    shift: int, ramp: int, gradient_names: str,
) -> list[Tensor]:  # fmt: skip
    """Return gradients of the tensors in ``gradient_names``, and executed FLOPs."""
    named = dict(zip(names.split(), tensors, strict=True))
    call = _call(named, max_keys, shift, ramp, backward=True)
    returned = [_empty_like(named[name]) for name in gradient_names.split()]
    # The kernel always writes the gradients of queries.
    gradients = {name: _empty_like(named[name]) for name in ("q", "extra_q") if name in named}
    gradients |= dict(zip(gradient_names.split(), returned, strict=True))
    call.set_pointers(
        g=g, y=y, lse=lse, **{f"d{name}": x for name, x in gradients.items() if "_old" not in name}
    )
    if "k_old0" in gradients:
        call.set_past(gradients, prefix="d")
    return [*returned, call.run("backward")]


@_forward.register_fake
def _empty_outputs(names, tensors, *_):
    q = tensors[0]
    return _empty_like(q), q.new_empty(q.shape[:3]), q.new_empty((), dtype=torch.int64)


@_backward.register_fake
def _empty_gradients(g, y, lse, names, tensors, max_keys, shift, ramp, gradient_names):
    named = dict(zip(names.split(), tensors, strict=True))
    return [
        *(_empty_like(named[name]) for name in gradient_names.split()),
        g.new_empty((), dtype=torch.int64),
    ]


@register_flop_formula(
    [torch.ops.windtunnel.window_forward, torch.ops.windtunnel.window_backward], get_raw=True
)
def _executed_flops(*_, out_val) -> int:
    return int(out_val[-1])


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor like ``x``. With four dimensions it is ``[B, T, H, K]`` in memory:
    heads join without a copy."""
    if x.dim() < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("stream", "head", "row")]


class _Rows(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("stream", ctypes.c_int64), ("row", ctypes.c_int64)]


class _Call(ctypes.Structure):
    """The struct ``Call`` of the source; ``alive`` holds the tensors to whose memory it points."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES.split()),
        *((name, ctypes.c_void_p) for name in STRIDED),
        *((f"{name}_", _Strides) for name in STRIDED),
        ("past", ctypes.c_void_p),
        *((name, ctypes.POINTER(_Rows)) for name in ("k_old", "v_old", "dk_old", "dv_old")),
        *((name, ctypes.c_void_p) for name in DENSE.split()),
    ]

    def set_pointers(self, **tensors: Tensor) -> None:
        """Point to tensors; those that the kernel writes must have the layout of
        ``_empty_like``."""
        for name, x in tensors.items():
            has_strides = name in STRIDED
            x = x if has_strides and x.stride(-1) == 1 else x.contiguous()
            self.alive.append(x)
            setattr(self, name, x.data_ptr())
            if has_strides:
                setattr(self, f"{name}_", _Strides(*x.stride()[:3]))

    def set_past(self, named: dict[str, Tensor], *, prefix: str = "") -> None:
        """Point to keys and values of the past, or to their gradients, head by head."""
        for name in ("k_old", "v_old"):
            parts = [x for key, x in named.items() if key.startswith(name)]
            parts = [x if x.stride(-1) == 1 else x.contiguous() for x in parts]
            heads = [head for x in parts for head in x.unbind(1)]  # [B, P, K]
            rows = (_Rows * len(heads))(
                *(_Rows(x.data_ptr(), x.stride(0), x.stride(1)) for x in heads)
            )
            self.alive += [*parts, rows]
            setattr(self, prefix + name, rows)

    def run(self, direction: str) -> Tensor:
        """Run the kernel, and return the executed FLOPs."""
        flops = torch.zeros((), dtype=torch.int64)
        self.set_pointers(flops=flops)
        c_type = {torch.float32: "float", torch.float64: "double"}[self.dtype]
        getattr(_library(), f"window_{direction}_{c_type}")(ctypes.byref(self))
        return flops


def _call(
    named: dict[str, Tensor],
    max_keys: list[int],
    shift: int,
    ramp: int,
    *,
    backward: bool,
) -> _Call:
    """Return the struct with sizes, inputs and tables; pointers to outputs are still missing."""
    q, z, bias, vectors = (named.get(name) for name in ("q", "z", "bias", "vectors"))
    call = _Call(
        streams=q.shape[0], heads=q.shape[1], rows=q.shape[2], width=q.shape[3], shift=shift
    )
    call.dtype = q.dtype
    call.alive = []
    call.threads = torch.get_num_threads()
    if "extra_k" in named:
        call.persistent = named["extra_k"].shape[1]
    if "key_bias" in named:
        call.biases = named["key_bias"].shape[2]
    call.distances = max(max_keys)
    # keys of each head's past
    parts = [x for name, x in named.items() if name.startswith("k_old")]
    past = [x.shape[2] for x in parts for _ in range(x.shape[1])] or [0] * q.shape[1]
    direct = {
        name: x
        for name, x in named.items()
        if name not in ("z", "bias", "vectors") and "_old" not in name
    }
    call.set_pointers(**direct, past=torch.tensor(past))
    if parts:
        call.set_past(named)
    visible_keys = list(max_keys)
    # to the end of the closed ramp; rounded as in soft_mask, to agree with it at kinks
    if z is not None:
        ramp_ends = (z.detach() + ramp).floor().tolist()
        visible_keys = [
            min(n, int(ramp_end) + 1) for n, ramp_end in zip(max_keys, ramp_ends, strict=True)
        ]
    order = sorted(range(len(visible_keys)), key=visible_keys.__getitem__, reverse=True)
    call.set_pointers(columns=torch.tensor(visible_keys), order=torch.tensor(order))
    call.set_pointers(
        **_tables(q.dtype, z, bias, visible_keys, call.distances, ramp, backward=backward)
    )
    if vectors is not None:
        pad = _library().window_pad()
        lanes = _library().window_bytes() // q.dtype.itemsize
        padded = F.pad(vectors.flip(0), (0, -call.width % lanes, pad, pad + -len(vectors) % lanes))
        call.set_pointers(vectors=padded, vector_panels=padded.unflatten(0, (-1, lanes)).mT)
    return call


def _tables(
    dtype: torch.dtype, z: Tensor | None, bias: Tensor | None, visible_keys: list[int],
    n_distances: int, ramp: int, *, backward: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return tables by head and reversed distance ``[H, n + 2 PAD]``; and ``flat [H]``, how many of
    the nearest columns have no bias, m = 1 and, for the backward pass, dm/dz = 0."""
    flat = torch.tensor(visible_keys)
    pad = _library().window_pad()
    shape = len(visible_keys), n_distances
    terms = torch.zeros(shape, dtype=dtype) if bias is None else bias[:, :n_distances].to(dtype)
    tables = {}
    if z is not None:
        mask = soft_mask(z.detach(), ramp, n_distances).to(dtype)
        flat = torch.minimum(flat, (mask == 1).sum(1))
        if backward:
            slope = ramp_slope(z.detach(), ramp, n_distances).to(dtype)
            # If z is an integer, the ramp begins at a column where m is still 1.
            flat = torch.minimum(flat, (slope.cumsum(1) == 0).sum(1))
            tables = {"mask": (mask, 0.0), "slope": (slope, 0.0)}
        else:
            terms = terms + mask.log()
    hidden = torch.arange(n_distances) >= flat.new_tensor(visible_keys)[:, None]
    tables["table"] = (terms.masked_fill(hidden, -torch.inf), -torch.inf)
    padded = {
        name: F.pad(table.flip(-1), (pad, pad), value=padding)
        for name, (table, padding) in tables.items()
    }
    return padded | {"flat": flat if bias is None else torch.zeros_like(flat)}
