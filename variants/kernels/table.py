"""A weighted sum of a few rows of a table for each byte, with gradients for the table and the
weights.

    y_n = sum_r w_nr v_(s_nr)        dw_nr = g_n . v_(s_nr)
    dv_m = sum over (n, r) with s_nr = m of w_nr g_n

with s the rows that byte n reads and g the gradient of y. The backward pass sorts the pairs (n, r)
by row instead of by byte. Then the table's gradient is itself a weighted sum of rows of g. Each of
its rows is written once, g stays in the cache (2 MiB at 2048 bytes of width 256; the table has 16
to 256 MiB), and a row that many bytes read is loaded once. torch's derivative (2.13, CPU) sorts
too, but it clears the table's gradient first and then adds one pair at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EMBEDDING_BAG_SUM = 0
"""The number of ``mode="sum"`` in torch's dispatcher."""


def read_rows(values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
    """Return weighted sums ``[n, D]`` of the rows ``slots [n, r]`` of ``values [M, D]``, by
    ``weights [n, r]``.

    With ``sparse``, the gradient of ``values`` is a sparse tensor with the rows that were read."""
    # embedding_bag needs one dtype for both, and autocast does not convert its arguments.
    weights = weights.to(values.dtype)
    if values.device.type == "cpu":
        return _Read.apply(values, slots, weights, sparse)
    return F.embedding_bag(slots, values, mode="sum", per_sample_weights=weights, sparse=sparse)


_read_uncompiled = torch.compiler.disable(read_rows)


def sum_rows(values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
    """Return ``read_rows``, not compiled if ``sparse``: torch.compile (2.13) fails on the shape of
    a sparse gradient."""
    return (_read_uncompiled if sparse else read_rows)(values, slots, weights, sparse=sparse)


class _Read(torch.autograd.Function):
    """``read_rows`` on a CPU."""

    @staticmethod
    def forward(ctx, values: Tensor, slots: Tensor, weights: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(values, slots, weights)
        ctx.sparse = sparse
        return F.embedding_bag(slots, values, mode="sum", per_sample_weights=weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        values, slots, weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        index = torch.int32 if max(len(values), slots.numel()) < 2**31 else torch.int64
        # sorting is four times as fast with 32 bits
        by_row, order = slots.flatten().to(index).sort()
        byte = (order // slots.shape[1]).to(index)
        if ctx.sparse:
            rows, reads = torch.unique_consecutive(by_row, return_counts=True)
        else:
            reads = by_row.new_zeros(len(values)).scatter_add_(
                0, by_row.long(), torch.ones_like(by_row)
            )
        first = (reads.cumsum(0) - reads).to(index)  # index of each row's first pair
        d_values = d_weights = None
        if ctx.needs_input_grad[0]:
            weight = weights.flatten()[order]
            d_values = F.embedding_bag(byte, gradient, first, mode="sum", per_sample_weights=weight)
            if ctx.sparse:
                d_values = torch.sparse_coo_tensor(
                    rows[None], d_values, values.shape, is_coalesced=True, check_invariants=False
                )
        if ctx.needs_input_grad[2]:
            products = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                values, gradient, byte, first, by_row, EMBEDDING_BAG_SUM
            )
            d_weights = torch.empty_like(products).scatter_(0, order, products).view_as(weights)
        return d_values, None, d_weights, None
