"""The kernel backend of ``window.attend`` on CUDA, in Triton: no score matrix in memory, cost by each head's own span.

It uses the facts of ``fused.py``: the soft mask is an additive bias, log m, and keys beyond it are skipped; parts
of one softmax merge by their log-sum-exp; the gradient of a span is a sum over its ramp (1905.07799, 2.2).

    lse_t = log sum_x m_x exp(s_tx),   y_t = sum_x exp(s_tx + log m_x - lse_t) v_x
    dL/ds_tx = a_tx (g_t . v_x - g_t . y_t),   dL/dz = sum over z <= x <= z + R of exp(s_tx - lse_t) (..) / R

A program visits only the keys within its own head's z + R. It reads z + R on the device, so moving spans neither
recompile nor wait. For vectors per distance, q_t . p_x, a block of queries is multiplied with all 2 BLOCK distances to
its block of keys, and the diagonals are read. Every sum has a fixed order, so results do not change between runs.
"""

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

WIDTH_STEP, MAX_WIDTH = 8, 128
LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STREAM_GROUPS = 8
"""Most partial sums of the gradient of vectors: more of them fill a device better; each holds [H, n, K] in float32."""


def available(device: torch.device, width: int) -> str | None:
    """Why ``forward`` cannot run on this device for heads of width K; None if it can.

    On a CPU it can if triton interprets kernels (TRITON_INTERPRET=1), for tests without a device.
    """
    if not _installed():
        return "triton is not installed"
    if device.type != "cuda" and not _kernels().INTERPRETED:
        return f"runtime.device={device.type}: the kernel needs cuda"
    if width % WIDTH_STEP or width > MAX_WIDTH:
        return f"head width {width}: the kernel takes multiples of {WIDTH_STEP} up to {MAX_WIDTH}"
    return None


@lru_cache
def _installed() -> bool:
    """Whether triton is installed. Cached, because every forward pass calls ``available``."""
    return importlib.util.find_spec("triton") is not None


def precision() -> str:
    """How products of float32 are rounded, by torch's setting for CUDA."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def launch_options(
    width: int, dtype: torch.dtype, *, precision: str, vectors: bool, architecture: int = 90
) -> dict[str, int]:
    """Rows of a block (the same for queries, keys and distances) and the launch options of the compiler.

    Blocks are the largest for which the compiler keeps everything in registers on the architectures that
    ``tests/triton_spills.py`` names, and each warp has elements of its own. They are not chosen by timing.
    """
    columns = padded(width)
    if dtype != torch.float32:
        block, warps = 16 if vectors and columns == 32 else 64 >> ((columns > 64) + vectors), 4
    elif precision == "tf32":
        block, warps = 32 if columns in (16, 64) and not vectors else 16, 4
    else:  # by multiply-add, without tensor cores
        block, warps = 32 >> (columns > 64 or vectors), 8
    options = {"BLOCK": block, "num_warps": warps, "num_stages": 1 if vectors and warps == 4 else 2}
    if block == columns == 64:  # before sm_90, only key_gradient has registers for copies ahead
        return options if architecture >= 90 else options | {"num_stages": 1}
    return options | {"maxnreg": 255}  # else the compiler spills a little to run more threads


def key_options(options: dict) -> dict:
    """The options of ``key_gradient`` that differ from ``options``, those (or all arguments) of the other kernels."""
    return {"num_stages": 2, "maxnreg": 255} if options["BLOCK"] == 64 else {}


def forward(inputs: Inputs, window: Window) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]`` and, for ``backward``, the joint log-sum-exp in base 2 ``[B, H, T]``.

    Each head has one span. Vectors or a constant bias, not both, are allowed, for at least the distances heads see.
    """
    q, z, distances = inputs.q, inputs.z, _distances(inputs)
    assert q.dtype in DTYPES and (z is None or z.shape == q.shape[1:2]), (q.dtype, z)
    assert inputs.vectors is None or inputs.bias is None, "vectors and a bias"
    assert not distances or distances >= max(window.max_keys), f"vectors or a bias of {distances} distances"
    start = (None, None)
    if inputs.sink is not None:  # a sink is a part whose output is 0
        lse = (inputs.sink.float() * LOG2E).clamp(min=-1e30)[:, None].expand(q.shape[:3]).contiguous()
        start = torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse
    if inputs.extra_q is not None:
        start = _forward(_beside(inputs), *start, torch.float32)
    return _forward(_context(inputs, window), *start, inputs.q.dtype)


def backward(
    g: Tensor,
    y: Tensor,
    saved: Tensor,
    inputs: Inputs,
    window: Window,
    wanted: frozenset[str],
    *,
    own_only: bool = False,
) -> dict[str, Tensor]:
    """Gradients by the names of ``Inputs``, from the upstream gradient ``g`` and the results of ``forward``.

    Args:
        wanted: names; some gradients, as that of spans, are computed only if they are named.
        own_only: the past is a constant: ``k`` and ``v`` get gradients of the last T keys only, ``[B, H, T, K]``.
    """
    joint = {"g": g.to(y.dtype).contiguous(), "lse": saved, "delta": torch.empty_like(saved)}
    context, streams = _context(inputs, window), y.shape[0]
    results = _query_gradient(context, y, joint, span="z" in wanted, bias="query_bias" in wanted)
    shape, longest = (y.shape, y.shape[2]) if own_only else (inputs.k.shape, max(inputs.key_counts()))
    results |= _key_gradient(context, shape, joint, longest=longest, OWN=own_only, bias="key_bias" in wanted)
    if inputs.vectors is not None:
        results["vectors"] = _vector_gradient(context, joint)
    if inputs.extra_q is not None:
        beside = _beside(inputs)
        results["extra_q"] = _query_gradient(beside, y, joint)["q"]
        shape = (streams, *inputs.extra_k.shape)
        of_streams = _key_gradient(beside, shape, joint, longest=shape[2], dtype=torch.float32)
        results |= {f"extra_{name}": of_streams[name].sum(0) for name in "kv"}
    if "sink" in wanted:
        results["sink"] = sink_gradient(joint["delta"], saved / LOG2E, inputs.sink)
    return {name: results[name].to(getattr(inputs, name).dtype) for name in wanted}


def executed_flops(
    inputs: Inputs, window: Window, wanted: frozenset[str], *, own_only: bool = False
) -> tuple[int, int]:
    """FLOPs of the products that ``forward`` and ``backward`` launch, in whole tiles, padding included.

    If spans are fake tensors without values, each head counts with all keys that it may see.
    """
    (streams, _, rows, width), far = inputs.q.shape, None
    vectors = inputs.vectors is not None
    block = launch_options(width, inputs.q.dtype, precision=precision(), vectors=vectors)["BLOCK"]
    persistent = 0 if inputs.extra_k is None else inputs.extra_k.shape[1]
    if inputs.z is not None and not isinstance(inputs.z, FakeTensor):
        far = (inputs.z.detach() + window.ramp).tolist()  # this waits for the device, but counting is not timed
    starts = range(0, rows, block)
    by_queries = by_keys = by_distances = 0
    for h, (most, keys) in enumerate(zip(window.max_keys, inputs.key_counts(), strict=True)):
        offset = keys - rows - window.shift
        visible = most if far is None else max(0, min(most, math.floor(far[h]) + 1))
        for t0 in starts:  # as in _key_blocks
            first = max(offset + t0 - visible + 1, 0) // block
            by_queries += max(0, -(-(offset + min(t0 + block, rows)) // block) - first)
        for j0 in range(keys - rows if own_only else 0, keys, block):  # as in _query_blocks
            first = max(j0 - offset, 0) // block
            by_keys += max(0, -(-min(j0 + block - 1 - offset + visible, rows) // block) - first)
        for x0 in range(0, visible, block):  # as in vector_gradient
            by_distances += max(0, len(starts) - max(x0 - offset, 0) // block)
    beside = len(window.max_keys) * len(starts) * -(-persistent // block)
    near = 2 * vectors  # q . p of the 2 BLOCK distances on a tile's diagonals
    forward = by_queries * (2 + near) + beside * 2
    backward = by_queries * (3 + 2 * near) + by_keys * (4 + near) + by_distances * 6 * vectors + beside * 7
    tile = 2 * streams * block**2 * padded(width)
    return forward * tile, backward * tile


@lru_cache(maxsize=256)
def _heads(max_keys: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The argument ``heads`` of the kernels. Cached, so that each value is copied to the device once."""
    order = sorted(range(len(max_keys)), key=lambda h: -max_keys[h])
    first = [0, *accumulate(lengths)][:-1]
    return torch.tensor((max_keys, order, lengths, first), dtype=torch.int32, device=device)


def _distances(inputs: Inputs) -> int:
    if inputs.vectors is not None:
        return len(inputs.vectors)
    return 0 if inputs.bias is None else inputs.bias.shape[1]


def _context(inputs: Inputs, window: Window) -> dict:
    """Arguments that all kernels share for the part of the softmax over visible keys."""
    lengths = inputs.key_counts()
    far = None if inputs.z is None else (inputs.z + window.ramp).float()  # rounded as in soft_mask: both agree at kinks
    return _arguments(inputs, inputs.q, inputs.k, inputs.v) | {
        "far": far,
        "heads": _heads(window.max_keys, lengths, inputs.q.device),
        "stream_keys": sum(lengths),
        "shift": window.shift,
        "table": None if inputs.bias is None else inputs.bias.float().contiguous(),
        "key_bias": None if inputs.key_bias is None else inputs.key_bias.float().contiguous(),
        "query_bias": None if inputs.key_bias is None else inputs.query_bias.float().contiguous(),
        "vectors": None if inputs.vectors is None else inputs.vectors.to(inputs.q.dtype).contiguous(),
        "distances": _distances(inputs),
        "ramp": window.ramp,
        "ALL": False,
    }


def _beside(inputs: Inputs) -> dict:
    """The same for the part over persistent vectors: every query sees all of them, and all streams share them."""
    (heads, number), device = inputs.extra_k.shape[:2], inputs.q.device
    arguments = _arguments(inputs, inputs.extra_q.to(inputs.q.dtype), inputs.extra_k, inputs.extra_v)
    return arguments | {"heads": _heads((number,) * heads, (number,) * heads, device), "stream_keys": heads * number}


def _arguments(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> dict:
    """Arguments of kernels for a part in which every query sees every key."""
    width, rate = q.shape[-1], inputs.dropout
    capability = 90 if q.device.type != "cuda" else 10 * torch.cuda.get_device_capability(q.device)[0]
    return {
        "q": q.contiguous(),
        "k": k.to(q.dtype).contiguous(),
        "v": v.to(q.dtype).contiguous(),
        **dict.fromkeys(("far", "table", "key_bias", "query_bias", "vectors")),
        "seed": inputs.seed if rate else None,
        "T": q.shape[2],
        **dict.fromkeys(("distances", "shift", "ramp"), 0),
        "DROP": threshold(rate),
        "SCALE": 1 / (1 - rate),
        "K": width,
        "WIDTH": padded(width),
        "ALL": True,
        "PRECISION": precision(),
    } | launch_options(
        width, q.dtype, precision=precision(), vectors=inputs.vectors is not None, architecture=capability
    )


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _forward(
    arguments: dict, start: Tensor | None, start_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output of one part, merged with ``start``, and the log-sum-exp in base 2, inf where nothing is seen."""
    q = arguments["q"]
    y, lse = torch.empty_like(q, dtype=dtype), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    grid = _grid(arguments, q.shape[2])
    _kernels().forward[grid](start=start, start_lse=start_lse, y=y, lse=lse, **arguments)
    return y, lse


def _query_gradient(
    arguments: dict, y: Tensor, joint: dict, *, span: bool = False, bias: bool = False
) -> dict[str, Tensor]:
    """Gradients of queries, spans ``[H]`` and biases; fills ``joint["delta"]``, which the other gradients need."""
    q, grid = arguments["q"], _grid(arguments, arguments["T"])
    dq = torch.empty_like(q)
    dz = torch.empty(q.shape[1], grid[0], dtype=torch.float32, device=q.device) if span else None
    dbias = torch.empty_like(joint["lse"]) if bias else None
    _kernels().query_gradient[grid](y=y, dq=dq, dz=dz, dquery_bias=dbias, **joint, **arguments)
    return {"q": dq, "query_bias": dbias} | ({"z": dz.sum(1)} if span else {})


def _key_gradient(
    arguments: dict,
    shape: Sequence[int],
    joint: dict,
    *,
    longest: int,
    OWN: bool = False,
    dtype: torch.dtype | None = None,
    bias: bool = False,
) -> dict[str, Tensor | None]:
    """Gradients of keys, values and biases: of all keys, or of each head's last T, according to ``shape``."""
    k = arguments["k"]
    dk, dv = (torch.empty(shape, dtype=dtype or k.dtype, device=k.device) for _ in range(2))
    dbias = torch.empty(shape[:-1], dtype=torch.float32, device=k.device) if bias else None
    arguments = (
        arguments | {"dk": dk, "dv": dv, "dkey_bias": dbias, "longest": longest, "OWN": OWN} | key_options(arguments)
    )
    _kernels().key_gradient[_grid(arguments, longest)](**joint, **arguments)
    return {"k": dk, "v": dv, "key_bias": dbias}


def _vector_gradient(arguments: dict, joint: dict) -> Tensor:
    """The gradient of vectors, ``[n, K]`` in float32."""
    others = ("table", "ALL")
    arguments = {name: value for name, value in arguments.items() if name not in others}
    streams, heads, _, width = arguments["q"].shape
    groups, distances = min(streams, STREAM_GROUPS), arguments["distances"]
    parts = torch.empty(groups, heads, distances, width, dtype=torch.float32, device=joint["g"].device)
    grid = (-(-distances // arguments["BLOCK"]), heads, groups)
    _kernels().vector_gradient[grid](dvectors=parts, B=streams, **joint, **arguments)
    return parts.sum((0, 1))


def _grid(arguments: dict, rows: int) -> tuple[int, int]:
    """One program per stream, block of rows and head. Those of a head start together, the longest head first."""
    streams, heads = arguments["q"].shape[:2]
    return streams * -(-rows // arguments["BLOCK"]), heads


def _kernels():
    from variants.kernels import _triton_kernels  # late: triton is optional

    return _triton_kernels
