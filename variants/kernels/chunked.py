"""The chunked backend: ``window.attend`` for a few queries at a time, in less memory.

Each chunk reads only the band of keys that its heads may see. Only one chunk's scores are in memory
at a time; torch's checkpoints recompute them in the backward pass. Dropout is drawn from counters
(``dropout.py``), so that chunks drop the same weights as the whole."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from variants.kernels import dropout as dropout_counters
from variants.kernels import window as plain
from variants.kernels.fused import query_chunks, window_groups
from variants.kernels.window import Inputs, Window, replaced

KEY_FIELDS = ("k", "v", "key_bias")
SHARED_FIELDS = ("k", "v", "extra_k", "extra_v", "vectors")
"""Fields that several chunks read. They are cast to float32 or wider, in which the gradients of
chunks are added."""


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, **options) -> Tensor:
    """Compute ``window.attend``; without a ``seed`` of the dropout, one is drawn."""
    inputs = Inputs.from_call(q, k, v, window, **options)
    rows = q.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    seed = None
    shared = {
        name: x.to(dtype) for name in SHARED_FIELDS if (x := getattr(inputs, name)) is not None
    }
    if inputs.dropout:
        seed = dropout_counters.draw_seed(q.device) if inputs.seed is None else inputs.seed
        seed = dropout_counters.row_numbers(seed, *q.shape[:3])
    inputs = replaced(inputs, **shared, seed=seed)
    parts = []
    for (max_keys, keys), heads in window_groups(inputs, window):
        group_window = replaced(
            window, max_keys=(max_keys,) * (heads.stop - heads.start), max_keys_tensor=None
        )
        # The first rows may see no key, only persistent vectors.
        blind_rows = min(rows, max(0, rows + window.shift - keys))
        chunks = []
        if blind_rows:
            chunks = [(0, blind_rows, 0, blind_rows, window.shift)]
        chunks += query_chunks(rows, keys, max_keys, window.shift, both=window.both)
        parts.append([])
        for begin, end, low, high, shift in chunks:
            chunk = _cut(inputs, heads, slice(begin, end), slice(low, high), slice(max_keys))
            call = partial(_attend_chunk, chunk, replaced(group_window, shift=shift))
            parts[-1].append(checkpoint(call, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([torch.cat(group, dim=2) for group in parts], dim=1)


def _cut(inputs: Inputs, heads: slice, t: slice, j: slice, columns: slice) -> Inputs:
    """Cut ``inputs`` to some heads, their queries ``t``, keys ``j`` and columns."""

    def cut(name: str, x: Tensor) -> Tensor:
        if name in KEY_FIELDS:
            return inputs.of_heads(x, heads)[:, :, j]
        if name == "vectors":
            return x[columns]
        if name == "valid":
            return x - j.start
        of_heads = name in ("extra_k", "extra_v") or x.dim() < 3
        x = x[heads] if of_heads else x[:, heads, t]
        if name == "bias":
            return x[..., columns]
        return x

    tensors = inputs._replace(lengths=None, dropout=None)._asdict().items()
    return replaced(
        inputs, **{name: cut(name, x) for name, x in tensors if x is not None}, lengths=None
    )


def _attend_chunk(chunk: Inputs, window: Window) -> Tensor:
    shared = {
        name: x.to(chunk.q.dtype)
        for name in SHARED_FIELDS
        if (x := getattr(chunk, name)) is not None
    }
    return plain.attend_inputs(replaced(chunk, **shared), window)
