"""torch's memory-efficient attention for CUDA, pretended on a CPU: the same operations, arguments, layouts and refusals.

What is refused or filled with NaN here is what the kernels read, cut or take for granted without a word, from torch 2.13's
``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h`` and ``attention_backward.cu``:

- widths, strides and addresses are multiples of 16 bytes, the last stride is 1, masks have the type of the queries and four
  whole dimensions;
- the log-sum-exp is float32 and padded with inf to a multiple of 32 queries;
- the backward takes it for granted that a query's outputs of all heads lie one behind the other, whatever the strides say.

Only that float64 is taken, so that gradients can be compared to the last digits, is not so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch
from torch import Tensor

PADDED_QUERIES = 32


def refuse_unaligned(name: str, x: Tensor) -> None:
    """Strides and address in multiples of 16 bytes, as both kernels want them for two-byte numbers."""
    wanted = 8
    if x.stride(-1) != 1:
        raise RuntimeError(f"{name} must be contiguous in the last dimension")
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and stride % wanted:
            raise RuntimeError(f"{name} is not correctly aligned: a stride is {stride}, not a multiple of {wanted}")
    if x.storage_offset() % wanted:
        raise RuntimeError(f"{name} is not correctly aligned: it begins at {x.storage_offset()}")


def checked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    for name, x in {"query": query, "key": key, "value": value}.items():
        refuse_unaligned(name, x)
        if x.shape[-1] % 8:
            raise RuntimeError(f"{name} has a width of {x.shape[-1]}, not a multiple of 8")
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name} is {x.dtype}, the query {query.dtype}")
    if mask is not None:
        refuse_unaligned("attn_bias", mask)
        if mask.dtype != query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        if mask.shape != (*query.shape[:3], key.shape[2]):
            raise RuntimeError(f"attn_bias: wrong shape {tuple(mask.shape)}")
        if (mask == -torch.inf).all(-1).any():
            raise RuntimeError("a query sees nothing: what comes of it depends on torch's version")


def island(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    raw = (query.to(island(query)) @ key.to(island(key)).mT) * scale
    return raw if mask is None else raw + mask.to(raw.dtype)


def heads_inside(x: Tensor) -> Tensor:
    """The same ``[B, H, T, K]``, laid out as the kernels write it: ``[B, T, H, K]``."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype).copy_(x)


def forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert compute_log_sumexp and not dropout_p and not is_causal, "not pretended"
    checked(query, key, value, attn_bias)
    raw = scores(query, key, attn_bias, query.shape[-1] ** -0.5 if scale is None else scale)
    lse = raw.logsumexp(-1)
    y = torch.exp(raw - lse[..., None]) @ value.to(raw.dtype)
    rows = query.shape[2]
    padded = torch.full((*query.shape[:2], ceil(rows / PADDED_QUERIES) * PADDED_QUERIES), torch.inf, dtype=raw.dtype)
    padded[..., :rows] = lse
    seed, offset = torch.tensor(0), torch.tensor(0)
    return heads_inside(y.to(query.dtype)), padded, seed, offset


def backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    assert not dropout_p and not is_causal and list(grad_input_mask) == [True, True, True, False], "not pretended"
    checked(query, key, value, attn_bias)
    streams, heads, rows, width = out.shape
    refuse_unaligned("out", out)
    if rows > 1 and out.stride(2) != heads * width:
        raise RuntimeError("out is read at a wrong place: a query's heads must lie one behind the other")
    if logsumexp.dtype != island(query) or logsumexp.stride(-1) != 1:
        raise RuntimeError("the log-sum-exp must be float32, with the queries side by side")
    if (heads > 1 and logsumexp.stride(1) % 8) or (streams > 1 and logsumexp.stride(0) % 8):
        raise RuntimeError("LSE is not correctly aligned")
    if logsumexp.shape[2] % PADDED_QUERIES or not (logsumexp[..., rows:] == torch.inf).all():
        raise RuntimeError(f"the log-sum-exp is read to a multiple of {PADDED_QUERIES} queries")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(scores(query, key, attn_bias, factor) - logsumexp[..., :rows, None])
    g, y = grad_out_.to(weights.dtype), out.to(weights.dtype)
    d_scores = weights * (g @ value.to(g.dtype).mT - (g * y).sum(-1, keepdim=True)) * factor
    d_query, d_key = d_scores @ key.to(g.dtype), d_scores.mT @ query.to(g.dtype)
    raw = (heads_inside(x.to(query.dtype)) for x in (d_query, d_key, weights.mT @ g))
    return *raw, torch.empty(0, dtype=query.dtype)


@contextmanager
def pretended() -> Iterator[None]:
    """Both operations exist on a CPU inside."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield
