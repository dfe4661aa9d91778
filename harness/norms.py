"""RMSNorm in few passes over memory on a CPU, where torch 2.13 takes it apart into six operations, fourteen in the backward.

y = x r w,   r = 1 / sqrt(mean(x^2) + eps)                                                            (1910.07467)
dx = r (g w - x r^2 mean(g w x)),   dw = sum over rows of g x r
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """As ``torch.nn.RMSNorm`` over the last dimension, to rounding; torch's own on a GPU, when compiled, and for mixed types."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _Norm.apply(x, self.weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        # LayerNorm's backward, told that the mean is 0, subtracts r mean(g w) too much: one kernel and one pass in all.
        nothing, needed = torch.zeros_like(r), [True, True, False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g.contiguous(), x, weight.shape, nothing, r, weight, None, needed
        )
        return dx.addcmul_(r, (g @ weight)[..., None], value=1 / x.shape[-1]), dw, None
