"""The chunked backend: ``window.attend`` for a few queries at a time, in less memory.

Each chunk reads only the band of keys that its heads may see. Only one chunk's scores are in memory at a time; torch's
checkpoints recompute them in the backward pass. Dropout is drawn from counters (``dropout.py``), so that chunks drop
the same weights as the whole."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from variants.kernels import dropout as dropout_counters
from variants.kernels import window as plain
from variants.kernels.fused import group_heads, query_chunks
from variants.kernels.window import Inputs, Window, replaced

KEY_FIELDS = ("k", "v", "key_bias")
SHARED_FIELDS = ("k", "v", "extra_k", "extra_v", "vectors")
"""Fields that several chunks read. They are cast to float32 or wider, in which the gradients of chunks are added."""


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, **options) -> Tensor:
    """Compute ``window.attend``; without a ``seed`` of the dropout, one is drawn."""
    inputs, rows = Inputs.from_call(q, k, v, window, **options), q.shape[2]
    dtype, seed = torch.promote_types(q.dtype, torch.float32), None
    shared = {name: x.to(dtype) for name in SHARED_FIELDS if (x := getattr(inputs, name)) is not None}
    if inputs.dropout:
        seed = dropout_counters.draw_seed(q.device) if inputs.seed is None else inputs.seed
        seed = dropout_counters.row_numbers(seed, *q.shape[:3])
    inputs = replaced(inputs, **shared, seed=seed)
    parts = []
    for (max_keys, keys), heads in group_heads(zip(window.max_keys, inputs.key_counts(), strict=True)):
        group_window = replaced(window, max_keys=(max_keys,) * (heads.stop - heads.start), max_keys_tensor=None)
        # The first rows may see no key, only persistent vectors.
        blind_rows = min(rows, max(0, rows + window.shift - keys))
        chunks = [(0, blind_rows, 0, blind_rows)] if blind_rows else []
        chunks += query_chunks(rows, keys, max_keys, window.shift)
        parts.append([])
        for begin, end, low, high in chunks:
            chunk = _cut(inputs, heads, slice(begin, end), slice(low, high), slice(max_keys))
            shift = window.shift if end <= blind_rows else 0  # other bands end with the last row's nearest key
            call = partial(_attend_chunk, chunk, replaced(group_window, shift=shift))
            parts[-1].append(checkpoint(call, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([torch.cat(group, dim=2) for group in parts], dim=1)


def _cut(inputs: Inputs, heads: slice, t: slice, j: slice, columns: slice) -> Inputs:
    """Cut ``inputs`` to some heads, their queries ``t``, keys ``j`` and columns."""
    keys = {n: inputs.of_heads(x, heads)[:, :, j] for n in KEY_FIELDS if (x := getattr(inputs, n)) is not None}
    queries = (slice(None), heads, t)
    has_queries = {n: x is not None and x.dim() > 2 for n, x in (("z", inputs.z), ("bias", inputs.bias))}
    indices = {
        **dict.fromkeys(("q", "extra_q", "seed", "query_bias"), queries),
        **dict.fromkeys(("extra_k", "extra_v", "sink"), (heads,)),
        "vectors": (columns,),
        "z": queries if has_queries["z"] else (heads,),
        "bias": (*queries, columns) if has_queries["bias"] else (heads, columns),
    }
    fields = {n: x[index] for n, index in indices.items() if (x := getattr(inputs, n)) is not None}
    return replaced(inputs, **keys, **fields, lengths=None)


def _attend_chunk(chunk: Inputs, window: Window) -> Tensor:
    shared = {name: x.to(chunk.q.dtype) for name in SHARED_FIELDS if (x := getattr(chunk, name)) is not None}
    return plain.attend_inputs(replaced(chunk, **shared), window)
