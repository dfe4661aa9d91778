"""The kernel backend of ``window.attend`` on CUDA, in Triton. It stores no scores, and skips blocks
of hidden keys.

It uses the three facts of ``fused.py``. The soft mask m is an additive bias, log m. The window,
persistent vectors and sink are parts of one softmax, merged by their log-sum-exps. The gradient of
a span is a sum over its ramp. With g_t the gradient of y_t, and without dropout:

    lse_t = log sum_x m_x exp(s_tx),   a_tx = m_x exp(s_tx - lse_t),   y_t = sum_x a_tx v_x,
    d_tx = g_t . (v_x - y_t)
    dL/ds_tx = a_tx d_tx,   dL/dz = sum over t and z <= x <= z + R of exp(s_tx - lse_t) d_tx / R

Kernels load z + R from device memory, so that new spans need neither a compilation nor a copy to
the host. To add q_t . p_x, with p_x the vector of distance x, a block of queries is multiplied with
the vectors of the 2 BLOCK distances to a block of keys, and the diagonals are read. Every sum
has a fixed order, so repeated runs give equal numbers."""

import importlib.util
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants.kernels.dropout import threshold
from variants.kernels.window import Inputs, Window, sink_gradient

# a compiled forward pass reads it, and cannot search
INSTALLED = importlib.util.find_spec("triton") is not None
WIDTH_STEP = 8
MAX_WIDTH = 128
LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STREAM_GROUPS = 8
"""Largest number of groups of streams. Each has its own sum ``[H, n, K]``, in float32, for the
gradient of ``Inputs.vectors``. More groups run in more parallel programs, and take more memory."""


def obstacle(device: torch.device, width: int) -> str | None:
    """Return the reason why ``forward`` cannot run on this device for heads of this width; None if
    it can.

    On a CPU it can run if triton interprets kernels (TRITON_INTERPRET=1), for tests without a
    GPU."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type != "cuda" and not _kernels().INTERPRETED:
        return f"runtime.device={device.type}: the kernel needs cuda"
    if width % WIDTH_STEP or width > MAX_WIDTH:
        return f"head width {width}: the kernel takes multiples of {WIDTH_STEP} up to {MAX_WIDTH}"
    return None


def precision() -> str:
    """Return the precision of float32 products, by torch's setting for CUDA."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def launch_options(
    width: int, dtype: torch.dtype, *, precision: str, vectors: bool, architecture: int = 90
) -> dict[str, int]:
    """Return BLOCK, the number of queries, keys or distances in a block, and the compiler's
    options.

    Blocks are the largest with which no register spills (checked for the architectures of
    ``tests/support/triton_spills.py``) and no two warps hold the same elements. They are not
    selected by timing."""
    columns = padded_width(width)
    if dtype != torch.float32:
        block = 16
        if not (vectors and columns == 32):
            block = 64 >> ((columns > 64) + vectors)
        warps = 4
    elif precision == "tf32":
        block = 16
        if columns in (16, 64) and not vectors:
            block = 32
        warps = 4
    else:  # by multiply-add, without tensor cores
        block = 32 >> (columns > 64 or vectors)
        warps = 8
    options = {"BLOCK": block, "num_warps": warps, "num_stages": 1 if vectors and warps == 4 else 2}
    # before sm_90, only key_gradient has enough registers to prefetch the next block
    if block == columns == 64:
        if architecture >= 90:
            return options
        return options | {"num_stages": 1}
    # without it, the compiler spills some registers to run more threads
    return options | {"maxnreg": 255}


def key_gradient_options(options: dict) -> dict:
    """Return the options of ``key_gradient`` that replace entries of ``options``, with which the
    other kernels are compiled."""
    if options["BLOCK"] == 64:
        return {"num_stages": 2, "maxnreg": 255}
    return {}


def forward(inputs: Inputs, window: Window) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, T, K]`` and, for ``backward``, the log-sum-exp of the whole softmax in
    base 2, ``[B, H, T]``.

    Each head has one span for all queries. ``inputs`` may have vectors or a constant bias, but not
    both, for n >= ``max(window.max_keys)`` distances."""
    q = inputs.q
    z = inputs.z
    n_distances = _n_distances(inputs)
    assert q.dtype in DTYPES and (z is None or z.shape == q.shape[1:2]), (
        f"{q.dtype} or z {z} is not supported"
    )
    assert inputs.vectors is None or inputs.bias is None, (
        "vectors and a bias: only one of them is allowed"
    )
    assert not n_distances or n_distances >= max(window.max_keys), (
        f"{n_distances} distances for {window.max_keys}"
    )
    prior = (None, None)
    if inputs.sink is not None:  # a part of the softmax whose output is 0
        lse = (
            (inputs.sink.float() * LOG2E).clamp(min=-1e30)[:, None].expand(q.shape[:3]).contiguous()
        )
        prior = torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse
    if inputs.extra_q is not None:
        prior = _forward(_persistent_arguments(inputs), *prior, torch.float32)
    return _forward(_window_arguments(inputs, window), *prior, inputs.q.dtype)


def backward(
    g: Tensor, y: Tensor, lse: Tensor, inputs: Inputs, window: Window, fields: frozenset[str], *,
    segment_only: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return gradients of ``fields`` of ``inputs``. ``g`` is the output's gradient; ``y`` and
    ``lse`` are from ``forward``. With ``segment_only``, gradients of keys and values are ``[B, H,
    T, K]``, for the segment only."""
    common = {"g": g.to(y.dtype).contiguous(), "lse": lse, "delta": torch.empty_like(lse)}
    arguments = _window_arguments(inputs, window)
    streams = y.shape[0]
    gradients = _query_gradient(
        arguments, y, common, span="z" in fields, bias="query_bias" in fields
    )
    shape, longest = (
        (y.shape, y.shape[2]) if segment_only else (inputs.k.shape, max(inputs.key_counts()))
    )
    options = {"longest": longest, "segment_only": segment_only, "bias": "key_bias" in fields}
    gradients |= _key_gradient(arguments, shape, common, **options)
    if inputs.vectors is not None:
        gradients["vectors"] = _vector_gradient(arguments, common)
    if inputs.extra_q is not None:
        arguments = _persistent_arguments(inputs)
        gradients["extra_q"] = _query_gradient(arguments, y, common)["q"]
        shape = (streams, *inputs.extra_k.shape)
        by_stream = _key_gradient(arguments, shape, common, longest=shape[2], dtype=torch.float32)
        gradients |= {f"extra_{name}": by_stream[name].sum(0) for name in "kv"}
    if "sink" in fields:
        gradients["sink"] = sink_gradient(common["delta"], lse / LOG2E, inputs.sink)
    return {name: gradients[name].to(getattr(inputs, name).dtype) for name in fields}


def executed_flops(
    inputs: Inputs, window: Window, fields: frozenset[str], *, segment_only: bool = False
) -> tuple[int, int]:
    """Return FLOPs of the products in ``forward``, and of those in ``backward``, counted in whole
    tiles with padding.

    If spans are fake tensors, which have no values, every head is taken to see ``max_keys``
    keys."""
    (streams, _, rows, width), ramp_end = inputs.q.shape, None
    vectors = inputs.vectors is not None
    block = launch_options(width, inputs.q.dtype, precision=precision(), vectors=vectors)["BLOCK"]
    persistent = 0
    if inputs.extra_k is not None:
        persistent = inputs.extra_k.shape[1]
    if inputs.z is not None and not isinstance(inputs.z, FakeTensor):
        # waits for the device; no timed code counts FLOPs
        ramp_end = (inputs.z.detach() + window.ramp).tolist()
    starts = range(0, rows, block)
    by_queries = by_keys = by_distances = 0
    for h, (max_keys, keys) in enumerate(zip(window.max_keys, inputs.key_counts(), strict=True)):
        offset = keys - rows - window.shift
        visible = max_keys
        if ramp_end is not None:
            visible = max(0, min(max_keys, math.floor(ramp_end[h]) + 1))
        for t0 in starts:  # as in _key_blocks
            first = max(offset + t0 - visible + 1, 0) // block
            by_queries += max(0, -(-(offset + min(t0 + block, rows)) // block) - first)
        for j0 in range(keys - rows if segment_only else 0, keys, block):  # as in _query_blocks
            first = max(j0 - offset, 0) // block
            by_keys += max(0, -(-min(j0 + block - 1 - offset + visible, rows) // block) - first)
        for x0 in range(0, visible, block):  # as in vector_gradient
            by_distances += max(0, len(starts) - max(x0 - offset, 0) // block)
    by_persistent = len(window.max_keys) * len(starts) * -(-persistent // block)
    # the product with vectors of 2 BLOCK distances is as large as two tiles
    diagonals = 2 * vectors
    forward = by_queries * (2 + diagonals) + by_persistent * 2
    backward = (
        by_queries * (3 + 2 * diagonals) + by_keys * (4 + diagonals) + by_distances * 6 * vectors
    )
    backward += by_persistent * 7
    tile = 2 * streams * block**2 * padded_width(width)
    return forward * tile, backward * tile


@lru_cache(maxsize=256)
def _heads(max_keys: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the kernels' argument ``heads``. Cached, so that each combination is copied to the
    device once."""
    order = sorted(range(len(max_keys)), key=lambda h: -max_keys[h])
    first = [0, *accumulate(lengths)][:-1]
    return torch.tensor((max_keys, order, lengths, first), dtype=torch.int32, device=device)


def _n_distances(inputs: Inputs) -> int:
    """Return distances of the vectors or of the bias; 0 if there are neither."""
    if inputs.vectors is not None:
        return len(inputs.vectors)
    if inputs.bias is None:
        return 0
    return inputs.bias.shape[1]


def _window_arguments(inputs: Inputs, window: Window) -> dict:
    """Return arguments that all kernels share for the part of the softmax over visible keys."""
    lengths = inputs.key_counts()
    # z + R is rounded as in soft_mask, so that both put a key on the same side of a kink of m.
    added = {
        "ramp_end": None if inputs.z is None else inputs.z + window.ramp,
        "table": inputs.bias,
        "key_bias": inputs.key_bias,
        "query_bias": inputs.query_bias,
    }
    added = {name: x.float().contiguous() for name, x in added.items() if x is not None}
    return (
        _arguments(inputs, inputs.q, inputs.k, inputs.v)
        | added
        | {
            "heads": _heads(window.max_keys, lengths, inputs.q.device),
            "stream_keys": sum(lengths),
            "shift": window.shift,
            "vectors": None
            if inputs.vectors is None
            else inputs.vectors.to(inputs.q.dtype).contiguous(),
            "distances": _n_distances(inputs),
            "ramp": window.ramp,
            "ALL": False,
        }
    )


def _persistent_arguments(inputs: Inputs) -> dict:
    """Return arguments for the part over persistent vectors: every query sees all of them, and all
    streams share them."""
    heads, n_vectors = inputs.extra_k.shape[:2]
    arguments = _arguments(
        inputs, inputs.extra_q.to(inputs.q.dtype), inputs.extra_k, inputs.extra_v
    )
    lengths = (n_vectors,) * heads
    return arguments | {
        "heads": _heads(lengths, lengths, inputs.q.device),
        "stream_keys": heads * n_vectors,
    }


def _arguments(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> dict:
    """Return arguments of kernels for a part of the softmax; by default every query sees every
    key."""
    width = q.shape[-1]
    rate = inputs.dropout
    architecture = 90
    if q.device.type == "cuda":
        architecture = 10 * torch.cuda.get_device_capability(q.device)[0]
    return {
        "q": q.contiguous(),
        "k": k.to(q.dtype).contiguous(),
        "v": v.to(q.dtype).contiguous(),
        **dict.fromkeys(("ramp_end", "table", "key_bias", "query_bias", "vectors")),
        "seed": inputs.seed if rate else None,
        "T": q.shape[2],
        **dict.fromkeys(("distances", "shift", "ramp"), 0),
        "DROP": threshold(rate),
        "SCALE": 1 / (1 - rate),
        "K": width,
        "WIDTH": padded_width(width),
        "ALL": True,
        "PRECISION": precision(),
    } | launch_options(
        width,
        q.dtype,
        precision=precision(),
        vectors=inputs.vectors is not None,
        architecture=architecture,
    )


def padded_width(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _forward(
    arguments: dict, prior: Tensor | None, prior_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return output of one part, merged with ``prior``, and log-sum-exp in base 2, +inf (not -inf)
    if a query sees no key."""
    q = arguments["q"]
    y = torch.empty_like(q, dtype=dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    grid = _grid(arguments, q.shape[2])
    _kernels().forward[grid](prior=prior, prior_lse=prior_lse, y=y, lse=lse, **arguments)
    return y, lse


def _query_gradient(
    arguments: dict, y: Tensor, common: dict, *, span: bool = False, bias: bool = False
) -> dict[str, Tensor]:
    """Return gradients of queries, spans ``[H]`` and query biases. Writes ``common["delta"]``,
    which other kernels read."""
    q = arguments["q"]
    grid = _grid(arguments, arguments["T"])
    dq = torch.empty_like(q)
    dz = None
    if span:
        dz = torch.empty(q.shape[1], grid[0], dtype=torch.float32, device=q.device)
    dbias = None
    if bias:
        dbias = torch.empty_like(common["lse"])
    _kernels().query_gradient[grid](y=y, dq=dq, dz=dz, dquery_bias=dbias, **common, **arguments)
    return {"q": dq, "query_bias": dbias} | ({"z": dz.sum(1)} if span else {})


def _key_gradient(
    arguments: dict, shape: Sequence[int], common: dict, *, longest: int,
    segment_only: bool = False, dtype: torch.dtype | None = None, bias: bool = False,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Return gradients of keys, values and key biases, for all keys or, with ``segment_only``, for
    the last T of each head."""
    k = arguments["k"]
    dk, dv = (torch.empty(shape, dtype=dtype or k.dtype, device=k.device) for _ in range(2))
    dbias = None
    if bias:
        dbias = torch.empty(shape[:-1], dtype=torch.float32, device=k.device)
    arguments = (
        arguments
        | key_gradient_options(arguments)
        | {"longest": longest, "SEGMENT_ONLY": segment_only}
    )
    grid = _grid(arguments, longest)
    _kernels().key_gradient[grid](dk=dk, dv=dv, dkey_bias=dbias, **common, **arguments)
    return {"k": dk, "v": dv, "key_bias": dbias}


def _vector_gradient(arguments: dict, common: dict) -> Tensor:
    """Return the gradient of vectors, ``[n, K]`` in float32."""
    arguments = {
        name: argument for name, argument in arguments.items() if name not in ("table", "ALL")
    }
    streams, heads, _, width = arguments["q"].shape
    groups = min(streams, STREAM_GROUPS)
    distances = arguments["distances"]
    parts = torch.empty(
        groups, heads, distances, width, dtype=torch.float32, device=common["g"].device
    )
    grid = (-(-distances // arguments["BLOCK"]), heads, groups)
    _kernels().vector_gradient[grid](dvectors=parts, B=streams, **common, **arguments)
    return parts.sum((0, 1))


def _grid(arguments: dict, rows: int) -> tuple[int, int]:
    """Return one program per stream, block of rows and head. Programs of a head are consecutive;
    the longest head is first."""
    streams, heads = arguments["q"].shape[:2]
    return streams * -(-rows // arguments["BLOCK"]), heads


def _kernels():
    from variants.kernels import _triton_kernels  # imported here because triton is optional

    return _triton_kernels
