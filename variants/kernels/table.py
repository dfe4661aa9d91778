"""Reading a table: a weighted sum of a few rows for each byte, with gradients for the table and the weights.

    y_n = sum_r w_nr v_(s_nr)        dw_nr = g_n . v_(s_nr)        dv_m = sum over reads (n, r) of m of w_nr g_n

with s the rows that byte n reads and g the gradient of y. The backward pass sorts the reads by row instead of by byte.
Then the table's gradient is itself a weighted sum of rows of g: each of its rows is written once, g stays in the cache
(2 MiB at 2048 bytes of width 256, where the table has 16 to 256), and a row that many bytes read is loaded only once.
torch's own derivative (2.13, CPU) sorts too, but first clears the table's gradient and then adds one read at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EMBEDDING_BAG_SUM = 0
"""The number for ``mode="sum"`` in the dispatcher's operations."""


def read(values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
    """Weighted sums ``[n, D]`` of the rows ``slots [n, r]`` of ``values [M, D]``, by ``weights [n, r]``.

    With ``sparse``, the gradient of the values is a sparse tensor of the rows that were read.
    """
    # Autocast does not cover embedding_bag, which needs one type for both.
    weights = weights.to(values.dtype)
    if values.device.type == "cpu":
        return _Read.apply(values, slots, weights, sparse)
    return F.embedding_bag(slots, values, mode="sum", per_sample_weights=weights, sparse=sparse)


# torch.compile of torch 2.13 gets the shape of a sparse gradient wrong and stops, so this one step stays outside.
_read_uncompiled = torch.compiler.disable(read)


def sum_rows(values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
    return (_read_uncompiled if sparse else read)(values, slots, weights, sparse=sparse)


class _Read(torch.autograd.Function):
    """``read`` on a CPU."""

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
        by_row, order = slots.flatten().to(index).sort()  # 32-bit numbers sort four times as fast
        byte = (order // slots.shape[1]).to(index)
        if ctx.sparse:
            rows, reads = torch.unique_consecutive(by_row, return_counts=True)
        else:
            reads = by_row.new_zeros(len(values)).scatter_add_(0, by_row.long(), torch.ones_like(by_row))
        first = (reads.cumsum(0) - reads).to(index)  # where the reads of each row begin
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
