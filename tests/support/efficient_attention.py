"""torch's memory-efficient attention for CUDA, emulated on a CPU with the same arguments, layouts
and errors.

The emulation also checks what the CUDA kernels assume without checking, according to torch 2.13's
``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h`` and ``attention_backward.cu``:

- Widths, strides and addresses are multiples of 16 bytes, and the last stride is 1.
- Masks have the dtype of the queries and four dimensions without broadcasting.
- The log-sum-exp is float32 and padded with inf to a multiple of 32 queries.
- The backward assumes that the outputs of all heads of a query are contiguous, whatever the strides
  say.

Unlike the CUDA kernels, the emulation accepts float64, so that gradients can be compared
exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch
from torch import Tensor

PADDED_QUERIES = 32


def refuse_unaligned(name: str, x: Tensor):
    """Raise RuntimeError unless strides and offset are multiples of 8 elements: 16 bytes of a
    two-byte dtype."""
    alignment = 8
    if x.stride(-1) != 1:
        raise RuntimeError(f"{name} must be contiguous in the last dimension")
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and stride % alignment:
            raise RuntimeError(
                f"{name} is not correctly aligned: a stride is {stride}, not a multiple of "
                f"{alignment}"
            )
    if x.storage_offset() % alignment:
        raise RuntimeError(f"{name} is not correctly aligned: it begins at {x.storage_offset()}")


def check_arguments(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
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
            raise RuntimeError("a query sees no key: the output then depends on torch's version")


def softmax_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the kernels compute scores and softmax."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    raw = (query.to(softmax_dtype(query)) @ key.to(softmax_dtype(key)).mT) * scale
    return raw if mask is None else raw + mask.to(raw.dtype)


def heads_inside(x: Tensor) -> Tensor:
    """Return a copy of ``x [B, H, T, K]`` with the memory layout ``[B, T, H, K]``, in which the
    kernels write."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype).copy_(x)


def forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert compute_log_sumexp and not dropout_p and not is_causal, "not emulated"
    check_arguments(query, key, value, attn_bias)
    raw = scores(query, key, attn_bias, query.shape[-1] ** -0.5 if scale is None else scale)
    lse = raw.logsumexp(-1)
    y = torch.exp(raw - lse[..., None]) @ value.to(raw.dtype)
    rows = query.shape[2]
    padded = torch.full(
        (*query.shape[:2], ceil(rows / PADDED_QUERIES) * PADDED_QUERIES), torch.inf, dtype=raw.dtype
    )
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
    assert not dropout_p and not is_causal and list(grad_input_mask) == [True, True, True, False], (
        "not emulated"
    )
    check_arguments(query, key, value, attn_bias)
    streams, heads, rows, width = out.shape
    refuse_unaligned("out", out)
    if rows > 1 and out.stride(2) != heads * width:
        raise RuntimeError("out must have contiguous heads for each query")
    if logsumexp.dtype != softmax_dtype(query) or logsumexp.stride(-1) != 1:
        raise RuntimeError("the log-sum-exp must be float32 and contiguous in the queries")
    if (heads > 1 and logsumexp.stride(1) % 8) or (streams > 1 and logsumexp.stride(0) % 8):
        raise RuntimeError("LSE is not correctly aligned")
    if logsumexp.shape[2] % PADDED_QUERIES or not (logsumexp[..., rows:] == torch.inf).all():
        raise RuntimeError(
            f"the log-sum-exp must be padded with inf to a multiple of {PADDED_QUERIES} queries"
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(scores(query, key, attn_bias, factor) - logsumexp[..., :rows, None])
    g, y = grad_out_.to(weights.dtype), out.to(weights.dtype)
    d_scores = weights * (g @ value.to(g.dtype).mT - (g * y).sum(-1, keepdim=True)) * factor
    d_query, d_key = d_scores @ key.to(g.dtype), d_scores.mT @ query.to(g.dtype)
    gradients = (heads_inside(x.to(query.dtype)) for x in (d_query, d_key, weights.mT @ g))
    return *gradients, torch.empty(0, dtype=query.dtype)


@contextmanager
def emulated() -> Iterator[None]:
    """Context in which both CUDA operations exist on a CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield
