"""Attention as a user could write it, which reaches our kernels only through
``variants/backends.py``."""

from einops import rearrange
from torch import nn

from variants import backends
from variants.context import VisibleKeys, before
from variants.contract import WAYS, Honours, LayerContext, SublayerOutput
from variants.kernels.window import Window


class OutsideAttention(backends.OnKernels):
    honours = Honours(position=WAYS.keys(), attend_self={True, False}, span=True)

    def __init__(self, context: LayerContext):
        super().__init__()
        d, self.heads, self.d_head = (
            context.d_model,
            context.heads,
            context.d_model // context.heads,
        )
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.position, self.wanted_backend = context.position(self.d_head), context.backend
        self.cache, self.dropout = "kv", 0.0
        self.span, self.shift = context.span, 0 if context.attend_self else 1

    def reach(self):
        return self.span - 1 + self.shift

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        q, k, v = rearrange(self.qkv(x), "B T (n H K) -> n B H T K", n=3, H=self.heads)
        q, k = self.position.rotate(q * self.d_head**-0.5, start), self.position.rotate(k, start)
        visible = Window((self.span,) * self.heads, self.shift)
        keys = VisibleKeys.joined(k, v, before(state, visible.past(), k.dtype))
        backend, vectors = (
            self.backend(x.device, training=self.training),
            self.position.vectors(self.span),
        )
        takes_vectors = backend in backends.TAKE_VECTORS
        bias = None if takes_vectors and vectors is not None else self.position.bias(q, self.span)
        y = backends.attend(
            backend, q, keys, visible, bias=bias, vectors=vectors if takes_vectors else None
        )
        return SublayerOutput(
            self.out(rearrange(y, "B H T K -> B T (H K)")), keys.last(visible.past())
        )
