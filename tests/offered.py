"""An outsider's attention that has its kernels from here: ``variants/backends.py`` says what is offered."""

from einops import rearrange
from torch import nn

from variants import backends
from variants.backends import Need
from variants.context import VisibleKeys, before
from variants.contract import WAYS, Honours, LayerContext, Sublayer, SublayerOutput
from variants.kernels.window import Window


class Offered(Sublayer):
    honours = Honours(position=WAYS.keys(), attend_self={True, False}, span=True)

    def __init__(self, context: LayerContext):
        super().__init__()
        d, self.heads = context.d_model, context.heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.position, self.d_head = context.position(d // context.heads), d // context.heads
        self.span, self.shift, self.wanted = context.span, 0 if context.attend_self else 1, context.backend

    def reach(self):
        return self.span - 1 + self.shift

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        q, k, v = rearrange(self.qkv(x), "B T (n H K) -> n B H T K", n=3, H=self.heads)
        q, k = self.position.rotate(q * self.d_head**-0.5, start), self.position.rotate(k, start)
        visible = Window((self.span,) * self.heads, self.shift)
        keys = VisibleKeys.joined(k, v, before(state, visible.past(), k.dtype))
        backend, vectors = self.backend(x.device, training=self.training), self.position.vectors(self.span)
        takes = backend in backends.TAKE_VECTORS
        bias = None if takes and vectors is not None else self.position.bias(q, self.span)
        y = backends.attend(backend, q, keys, visible, bias=bias, vectors=vectors if takes else None)
        return SublayerOutput(self.out(rearrange(y, "B H T K -> B T (H K)")), keys.last(visible.past()))

    def need(self) -> Need:
        scheme = self.position
        known = {"constant_bias": scheme.constant_bias, "vectors": scheme.vectors(1) is not None}
        return Need(d_head=self.d_head, dropout=0.0, spans_of_input=False, **known)

    def backend(self, device, *, training):
        return backends.choose(self.wanted, self.need(), device)

    def backends(self, device, *, training):
        return backends.possible(self.need(), device)
