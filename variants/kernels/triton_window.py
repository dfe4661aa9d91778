"""The kernel backend of ``window.attend`` on CUDA: ours, in Triton, no score matrix in memory, cost by each head's span.

The facts are those of ``fused.py``: the soft mask is an additive bias, log m, and beyond it nothing is computed; parts
of one softmax merge by their log-sum-exp; the gradient of a span is a sum over its ramp (1905.07799, 2.2).

    lse_t = log sum_x m_x exp(s_tx),   y_t = sum_x exp(s_tx + log m_x - lse_t) v_x
    dL/ds_tx = a_tx (g_t . v_x - g_t . y_t),   dL/dz = sum over z <= x <= z + R of exp(s_tx - lse_t) (..) / R

A program meets only the keys within its own head's z + R, read on the device, so moving spans neither recompile nor
wait. Vectors per distance, q_t . p_x, are products of a block of queries with the 2 BLOCK distances that its block of
keys can have, from which the diagonals are picked. Every sum has one order: results do not change between runs.
"""

import importlib.util
import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from variants.kernels.window import Persistent, Window

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STREAM_GROUPS = 8
"""Partial sums of the gradient of vectors: more of them fill a device, each holds [H, n, K] in float32."""


def available(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why ``attend`` cannot run for queries of this device, dtype and head width K; None if it can.

    On a CPU it can where triton interprets kernels (TRITON_INTERPRET=1), for tests without a device.
    """
    if not _installed():
        return "triton is not installed"
    interpreted = _kernels().INTERPRETED
    if device.type != "cuda" and not interpreted:
        return f"runtime.device={device.type}: the kernel needs cuda"
    if dtype not in DTYPES:
        return f"{dtype}: the kernel takes {', '.join(map(str, DTYPES))}"
    if dtype == torch.bfloat16 and interpreted:
        return "torch.bfloat16: triton's interpreter multiplies it as integers"
    if width not in WIDTHS:
        return f"head width {width}: the kernel takes {', '.join(map(str, WIDTHS))}"
    return None


@lru_cache
def _installed() -> bool:
    """Looked up once: ``available`` is asked at every forward pass."""
    return importlib.util.find_spec("triton") is not None


def launch_options(width: int, dtype: torch.dtype, *, vectors: bool) -> dict[str, int]:
    """Rows of a block (queries, keys and distances alike) and how the compiler is to spread them.

    Chosen by the compiler's report for Hopper, so that next to nothing spills out of registers; not by times.
    """
    block = 16 if dtype == torch.float32 else 32 if vectors else 64
    return {"BLOCK": block, "num_warps": 8 if width > 64 and dtype != torch.float32 else 4, "num_stages": 2}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    vectors: Tensor | None = None,
    bias: Tensor | None = None,
    persistent: Persistent | None = None,
) -> Tensor:
    """The same function as ``window.attend`` without dropout; ``z`` is ``[H]``.

    Args:
        vectors: p ``[n, K]``, shared by heads, n at least the largest of ``window.max_keys``: adds ``q @ vectors.T``.
        bias: a constant ``[H, n]`` over columns, added to scores.

    Raises:
        ValueError: where ``available`` says why not, and for shapes that are not the above.
    """
    if (reason := available(q.device, q.dtype, q.shape[-1])) is not None:
        raise ValueError(f"runtime.backend=kernel cannot run with {reason}")
    if window.z is not None and window.z.shape != q.shape[1:2]:
        raise ValueError(f"spans of shape {tuple(window.z.shape)}: the kernel takes one a head, [{q.shape[1]}]")
    most = max(window.max_keys)
    if vectors is not None and bias is not None:
        raise ValueError("vectors and a bias: the kernel takes one of them")
    given = vectors if bias is None else bias.mT  # [n, ..]
    if given is not None and len(given) < most:
        raise ValueError(f"vectors or bias of {len(given)} distances: window.max_keys needs {most}")
    extra = (None, None, None) if persistent is None else persistent
    return _Attend.apply(q, k, v, window.z, *extra, vectors, bias, window)


@lru_cache(maxsize=256)
def _heads(max_keys: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Keys that each head may see, and heads from the longest to the shortest; a copy to the device once for each value."""
    order = sorted(range(len(max_keys)), key=lambda h: -max_keys[h])
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (max_keys, order))


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, window: Window | None, vectors: Tensor | None, bias: Tensor | None
) -> dict:
    """What all kernels of one part of the softmax are given alike.

    ``window`` is None where every key is seen; ``k`` and ``v`` are ``[H, L, K]`` where all streams share them.
    """
    heads, rows, width = q.shape[1:]
    keys = k.shape[-2]
    max_keys, order = _heads((keys,) * heads if window is None else window.max_keys, q.device)
    far = None
    if window is not None and window.z is not None:
        far = (window.z.detach() + window.ramp).float()  # added as in soft_mask, to agree on the side of a kink
    given = vectors if bias is None else bias.mT
    return {
        "q": q.contiguous(),
        "k": k.detach().to(q.dtype).contiguous(),
        "v": v.detach().to(q.dtype).contiguous(),
        "far": far,
        "max_keys": max_keys,
        "order": order,
        "table": None if bias is None else bias.detach().float().contiguous(),
        "vectors": None if vectors is None else vectors.detach().to(q.dtype).contiguous(),
        "T": rows,
        "L": keys,
        "distances": 0 if given is None else len(given),
        "offset": keys - rows - (0 if window is None else window.shift),
        "ramp": 0 if window is None else window.ramp,
        "k_stream": heads * keys * width if k.dim() == 4 else 0,
        "K": width,
        "ALL": window is None,
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    } | launch_options(width, q.dtype, vectors=vectors is not None)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, window):
        y, lse = _forward(_arguments(q, k, v, window, vectors, bias))
        if extra_q is not None:
            out, part = _forward(_arguments(extra_q.to(q.dtype), extra_k, extra_v, None, None, None))
            alone = lse.isinf()  # nothing of the context is seen
            share = torch.sigmoid((part - lse) * math.log(2)).masked_fill_(alone, 1)
            y = torch.lerp(y, out, share[..., None].to(y.dtype))
            lse = torch.where(alone, part, torch.logaddexp2(lse, part))
        ctx.save_for_backward(q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, y, lse)
        ctx.window = window._replace(z=None)  # z is saved above
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k, v, z, extra_q, extra_k, extra_v, vectors, bias, y, lse = ctx.saved_tensors
        joint = {"g": g.to(q.dtype).contiguous(), "lse": lse, "delta": torch.empty_like(lse)}
        arguments = _arguments(q, k, v, ctx.window._replace(z=z), vectors, bias)
        dq, dz = _query_gradient(arguments, y, joint)
        dk, dv = _key_gradient(arguments, q.shape[0], joint, q.dtype)
        dvectors = None if vectors is None else _vector_gradient(arguments, joint).to(vectors.dtype)
        extras = (None, None, None)
        if extra_q is not None:
            shared = _arguments(extra_q.to(q.dtype), extra_k, extra_v, None, None, None)
            extra_dq, _ = _query_gradient(shared, y, joint)
            parts = _key_gradient(shared, q.shape[0], joint, torch.float32)
            extras = (extra_dq.to(extra_q.dtype), *(part.sum(0).to(extra_k.dtype) for part in parts))
        dz = None if z is None else dz.to(z.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dz, *extras, dvectors, None, None


def _forward(arguments: dict) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]`` of one part and its log-sum-exp in base 2 ``[B, H, T]``, inf where nothing is seen."""
    q = arguments["q"]
    y, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _kernels().forward[_grid(arguments, q.shape[2])](y=y, lse=lse, **arguments)
    return y, lse


def _query_gradient(arguments: dict, y: Tensor, joint: dict) -> tuple[Tensor, Tensor]:
    """Gradients of queries and of spans ``[H]``; fills ``joint["delta"]``, which the other gradients need."""
    q = arguments["q"]
    dq, grid = torch.empty_like(q), _grid(arguments, q.shape[2])
    dz = torch.empty(q.shape[1], grid[0], dtype=torch.float32, device=q.device)
    _kernels().query_gradient[grid](y=y, dq=dq, dz=dz, **joint, **arguments)
    return dq, dz.sum(1)


def _key_gradient(arguments: dict, streams: int, joint: dict, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values ``[B, H, L, K]``, for each stream also where all share them."""
    k = arguments["k"]
    dk, dv = (torch.empty(streams, *k.shape[-3:], dtype=dtype, device=k.device) for _ in range(2))
    _kernels().key_gradient[_grid(arguments, k.shape[-2])](dk=dk, dv=dv, **joint, **arguments)
    return dk, dv


def _vector_gradient(arguments: dict, joint: dict) -> Tensor:
    """``[n, K]`` in float32."""
    arguments = {name: value for name, value in arguments.items() if name not in ("k_stream", "ALL")}
    streams, heads, _, width = arguments["q"].shape
    groups, distances = min(streams, STREAM_GROUPS), arguments["distances"]
    parts = torch.empty(groups, heads, distances, width, dtype=torch.float32, device=joint["g"].device)
    grid = (-(-distances // arguments["BLOCK"]), heads, groups)
    _kernels().vector_gradient[grid](dvectors=parts, B=streams, **joint, **arguments)
    return parts.sum((0, 1))


def _grid(arguments: dict, rows: int) -> tuple[int, int]:
    """A program for each stream and block of rows, which start together, and head, the longest first."""
    streams, heads = arguments["q"].shape[:2]
    return streams * -(-rows // arguments["BLOCK"]), heads


def _kernels():
    from variants.kernels import _triton_kernels  # late: triton is no dependency

    return _triton_kernels
