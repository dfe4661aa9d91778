"""The chunked backend. Computes the same as ``window.attend``, a few queries at a time, in less memory.

Each chunk reads only the band of keys its heads may see. Only one chunk's scores exist at a time; torch's checkpoints
recompute them in the backward pass. Dropout is drawn from counters (``dropout.py``), so chunks drop the same weights.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from variants.kernels import dropout as dropout_counters
from variants.kernels import window as plain
from variants.kernels.fused import chunks, runs
from variants.kernels.window import Inputs, Persistent, Window

KEYS = ("k", "v", "key_bias")
SUMMED = ("k", "v", "extra_k", "extra_v", "vectors")
"""Read by several chunks: cast to float32 here and back in each chunk, so that gradients add up in float32."""


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, **added) -> Tensor:
    """Same as ``window.attend``; dropout requires a ``seed``."""
    inputs, rows = Inputs.of(q, k, v, window, **added), q.shape[2]
    dtype, seed = torch.promote_types(q.dtype, torch.float32), None
    wide = {name: x.to(dtype) for name in SUMMED if (x := getattr(inputs, name)) is not None}
    if inputs.dropout:
        streams, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
        seed = dropout_counters.rows(inputs.seed, streams=streams, heads=heads, queries=queries)
    inputs = inputs._replace(**wide, seed=seed)
    parts = []
    for (number, keys), heads in runs(zip(window.max_keys, inputs.key_counts(), strict=True)):
        seen = window._replace(max_keys=(number,) * (heads.stop - heads.start), limits=None)
        # Some first rows may see no key, only persistent vectors.
        blind = min(rows, max(0, rows + window.shift - keys))
        cut = [(0, blind, 0, blind)] if blind else []
        parts.append([])
        for begin, end, low, high in (*cut, *chunks(rows, keys, number, window.shift)):
            part = _part(inputs, heads, slice(begin, end), slice(low, high), slice(number))
            call = partial(_of_part, part, seen._replace(shift=window.shift if end <= blind else 0))
            parts[-1].append(checkpoint(call, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([torch.cat(of_heads, dim=2) for of_heads in parts], dim=1)


def _part(inputs: Inputs, heads: slice, t: slice, j: slice, columns: slice) -> Inputs:
    """``inputs`` cut to some heads, their queries ``t``, keys ``j`` and columns."""
    keys = {n: inputs.of_heads(x, heads)[:, :, j] for n in KEYS if (x := getattr(inputs, n)) is not None}
    places = {**dict.fromkeys(("q", "extra_q", "seed"), (slice(None), heads, t)), "vectors": (columns,)}
    places |= dict.fromkeys(("extra_k", "extra_v", "sink"), (heads,)) | {"query_bias": places["q"]}
    of_query = {n: x is not None and x.dim() > 2 for n, x in (("z", inputs.z), ("bias", inputs.bias))}
    places["z"] = places["q"] if of_query["z"] else (heads,)
    places["bias"] = (*(places["q"] if of_query["bias"] else (heads,)), columns)
    others = {n: x[at] for n, at in places.items() if (x := getattr(inputs, n)) is not None}
    return inputs._replace(**keys, **others, lengths=None)


def _of_part(part: Inputs, window: Window) -> Tensor:
    narrow = {name: x.to(part.q.dtype) for name in SUMMED if (x := getattr(part, name)) is not None}
    q, k, v, z, *extra = part._replace(**narrow)
    added = dict(zip(Inputs._fields[7:-1], extra[3:-1], strict=True))
    persistent = None if extra[0] is None else Persistent(*extra[:3])
    return plain.attend(q, k, v, window._replace(z=z), persistent=persistent, **added)
