"""Transformer-XL's attention: its own relative positions, and past inputs as the state
(1901.02860).

    A_tj = q_t . k_j + q_t . W_R r_x + u . k_j + v . W_R r_x,   a_t = softmax_j(A_tj / sqrt(K))
    (section 3.3)

r_x is the sinusoid of distance x, and each layer has a W_R. u and v are vectors per head: one pair
for all layers, as in the paper's code, or one pair per layer. By default the state is past inputs,
which the present weights project again (3.2).

Departures: every query sees the same number of keys, the last S, also in training; the paper's code
does so in evaluation ("same length"). x counts visible keys from the nearest, x = 0. Sinusoids have
no dropout. Norm and residual connection are those of the model.

Content and position terms are one product of width K + 1, which backends can compute:

    A_tj = [q_t + u, 1] . ([k_j, 0] + [p_x, (v - u) . p_x])   with p = W_R r

For each head, this is a window with one vector per distance. For few queries, (q + v) W_R is
computed first."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.attention import Attention
from variants.backends import Backend, Plain
from variants.context import VisibleKeys
from variants.contract import Honours, LayerContext, Position, check_choice
from variants.kernels.window import PastKV, Window
from variants.position import rotary_frequencies, sinusoids, turns


class Distances(Position):
    """W_R r_x per head, and the vectors that are added to queries: u for products with keys, v
    for those with r_x."""

    constant_bias = False

    def __init__(self, context: LayerContext, *, d_head: int, share: str = "network"):
        super().__init__(context, d_head=d_head)
        check_choice(("network", "layer"), share=share)

        def shared_vector(name: str) -> nn.Parameter:
            sizes = context.heads, d_head
            return context.shared(
                Distances, (name, sizes), lambda: nn.Parameter(torch.zeros(sizes)), share=share
            )

        self.heads = context.heads
        self.d_head = d_head
        self.project = nn.Linear(context.d_model, context.heads * d_head, bias=False)
        # u, v: [H, K]
        self.to_keys = shared_vector("keys")
        self.to_distances = shared_vector("distances")
        self.register_buffer("turns", turns(rotary_frequencies(context.d_model)), persistent=False)

    def sinusoids(self, max_keys: int, dtype: torch.dtype) -> Tensor:
        """Return r ``[max_keys, D]``, in float32 or wider."""
        x = torch.arange(max_keys, device=self.turns.device)
        return sinusoids(x, self.turns, dtype)[:, : self.project.in_features]

    def vectors(self, max_keys: int) -> Tensor:
        """Return p ``[H, max_keys, K]``, one vector for each head and distance."""
        p = self.project(self.sinusoids(max_keys, self.project.weight.dtype))
        return rearrange(p, "x (H K) -> H x K", H=self.heads)

    def query_vectors(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return u and v ``[H, 1, K]``, scaled, in the dtype of the scaled queries ``q``."""
        return tuple(
            x[:, None].to(q.dtype) * self.d_head**-0.5 for x in (self.to_keys, self.to_distances)
        )

    def bias(self, q: Tensor, max_keys: int) -> Tensor:
        """Return (q + v) . W_R r_x, ``[B, H, T, max_keys]``, in the order of products that needs
        fewer FLOPs."""
        q = q + self.query_vectors(q)[1]
        if not self.has_few_queries(q, max_keys):
            return q @ self.vectors(max_keys).mT.to(q.dtype)
        weights = self.project.weight.unflatten(0, (self.heads, -1)).to(q.dtype)  # [H, K, D]
        return q @ weights @ self.sinusoids(max_keys, q.dtype).mT.to(q.dtype)

    def has_few_queries(self, q: Tensor, max_keys: int) -> bool:
        """Return whether queries ``[B, H, T, K]`` are so few that W_R times queries needs fewer
        FLOPs than W_R times r."""
        queries = q.shape[0] * q.shape[2]
        width = self.project.in_features
        return queries * width * (self.d_head + max_keys) < max_keys * self.d_head * (
            width + queries
        )

    def ideal_flops(self, max_keys: float) -> float:
        """Count the products of p with queries; p itself does not depend on the bytes."""
        return 2 * max_keys * self.d_head


class TransformerXL(Attention):
    """Causal multi-head attention over the last S positions with Transformer-XL's relative
    positions.

    Args:
        d_head, zero_init, key_shift: see ``MultiHead``.
        share: ``network`` for one pair u, v in the whole model, as in the paper's code;
            ``layer`` for one in each."""

    honours = Honours(cache={"kv", "hidden"}, attend_self={True, False}, span=True)

    def __init__(
        self,
        context: LayerContext,
        *,
        d_head: int | None = None,
        zero_init: bool = True,
        key_shift: bool = False,
        share: str = "network",
    ):
        super().__init__(context, d_head=d_head, zero_init=zero_init, key_shift=key_shift)
        # at small sizes half of the FLOPs project past inputs again, and this is one input more
        if key_shift:
            self.limits = frozenset({"ideal_flops"})
        self.position = Distances(context, d_head=self.d_head, share=share)

    traces_plain = True

    @property
    def kernel_width(self) -> int:
        return self.d_head + 1

    def attend(
        self, backend: Backend, q: Tensor, keys: VisibleKeys, visible: Window, **options
    ) -> Tensor:
        max_keys = max(visible.max_keys)
        u, v = self.position.query_vectors(q)
        if backend.has_all_scores or self.position.has_few_queries(q, max_keys):
            return super().attend(
                Plain(), q + u, keys, visible, bias=self.position.bias(q, max_keys)
            )
        p = self.position.vectors(max_keys).to(q.dtype)
        p = torch.cat([p, ((v - u) * p).sum(-1, keepdim=True)], dim=-1)
        q = F.pad(q + u, (0, 1), value=1.0)
        outputs = []
        head_window = Window(visible.max_keys[:1], visible.shift)
        for h in range(self.heads):
            head_keys = keys.of_heads(h, 1).each(
                lambda p: PastKV(F.pad(p.k, (0, 1)), F.pad(p.v, (0, 1)))
            )
            outputs.append(
                super().attend(
                    backend, q[:, h : h + 1], head_keys, head_window, bias=None, vectors=p[h]
                )
            )
        return torch.cat(outputs, dim=1)[..., :-1]
