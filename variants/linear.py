"""Linear attention: a feature map in place of the softmax, so that all of the past fits into two sums.

    y_t = phi(q_t)^T S_t / phi(q_t)^T z_t,    S_t = sum_{j <= t} phi(k_j) v_j^T,    z_t = sum_{j <= t} phi(k_j),

phi(x) = elu(x) + 1 for each number of a head's query or key, unscaled (Katharopoulos et al. 2020, arXiv 2006.16236,
3.2 to 3.4). Training cuts a segment into chunks, which meet themselves by pairs and what is before them by the sums; a
stream carries S and z, whose size does not grow: see ``kernels/carried_sums.py``. ``model.span`` bounds nothing.

Where it departs, and what it follows:
- No epsilon in the denominator: a query without keys (the first of a stream without ``attend_self``) gives 0.
- ALiBi is a decay, and exact: a weight is multiplied by exp(-slope) for every key between, so sums decay byte by byte.
- Rotary is refused: elu acts on each number, so that products of turned vectors' features depend on both places and
  not on the distance alone. Vectors for each distance and other biases would need the keys themselves, and so would
  ``cache: hidden``: sums are made once. Absolute positions in the input, the paper's own, all mechanisms may have.
- Dropout has no weights to drop here; feed-forward blocks and embeddings have it.
- In float32 without a decay, sums stop growing where a key is below rounding, near 10^7 keys.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.context import weights_of
from variants.contract import Honours, Inspection, LayerContext, NeededFlops, State, Sublayer, SublayerOutput
from variants.kernels.carried_sums import attend, unrounded


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1, which is exp(x) below 0: added up, it would round to 0 from -17 on in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


FEATURE_MAPS = {"elu": elu, "relu": F.relu}


class CarriedSums(Sublayer):
    """Attention whose weights are products of features, read from carried sums; a subclass has the features.

    Args:
        context: heads, positions and ``attend_self`` of the run.
        d_head: head width K, or None for D / H.
        bias: whether the four projections have biases.
        zero_init: start W_o at zero, so that the sublayer starts as the identity.
        chunk: C, bytes that meet each other by pairs; it changes cost and nothing else.
    """

    honours = Honours(position={"decay"}, attend_self={True, False})
    features: int

    def __init__(self, context: LayerContext, *, d_head: int | None, bias: bool, zero_init: bool, chunk: int):
        super().__init__()
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: allowed are integers from 1")
        self.heads, self.d_head = context.heads, context.head_width(d_head)
        inner = self.heads * self.d_head
        self.query = nn.Linear(context.d_model, inner, bias=bias)
        self.key = nn.Linear(context.d_model, inner, bias=bias)
        self.value = nn.Linear(context.d_model, inner, bias=bias)
        self.output = nn.Linear(inner, context.d_model, bias=bias)
        if zero_init:
            nn.init.zeros_(self.output.weight)
        self.position = context.position(self.d_head)
        self.attend_self, self.chunk, self.period = context.attend_self, chunk, chunk

    def featured(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features ``[B, H, T, F]`` of queries and of keys ``[B, H, T, K]``, and the keys' ``log_scale`` or None.

        A query's features may have any scale, which cancels.
        """
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """``x [B, T, D]`` to ``y [B, T, D]``; the state is the sums over all that was before."""
        q, k, v = self._projected(x)
        y, state = self._means(q, k, v, state)
        return SublayerOutput(self.output(rearrange(y, "B H T K -> B T (H K)").to(v.dtype)), state)

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values ``[B, H, T, K]``."""
        linears = (self.query, self.key, self.value)
        bias = None if self.query.bias is None else torch.cat([linear.bias for linear in linears])
        parts = F.linear(x, torch.cat([linear.weight for linear in linears]), bias).chunk(3, dim=-1)
        return [rearrange(part, "B T (H K) -> B H T K", H=self.heads) for part in parts]

    def _means(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """Weighted means ``[B, H, T, K]`` of values, and the sums to carry."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        with unrounded(v.device):
            q, k, log_scale = self.featured(q.to(dtype), k.to(dtype))
            given = {"log_scale": log_scale, "slopes": self.position.slopes(dtype), "state": state}
            return attend(q, k, v.to(dtype), **given, attend_self=self.attend_self, chunk=self.chunk)

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        q, k, v = self._projected(x)
        return Inspection(weights_of(lambda values: self._means(q, k, values, None)[0], v))

    def reach(self) -> None:
        """All the way: what decays never ends."""

    def ideal_flops(self) -> int:
        """Projections, and the sums' form: 2 F K for adding a key's value, 2 F (K + 1) for reading S and z.

        It is what a byte needs however long the past is. Pairs within a chunk are another way to the same sums, quicker
        on hardware, and are not counted, nor is what is no product: features, decays, z.
        """
        linears = (self.query, self.key, self.value, self.output)
        return 2 * sum(m.weight.numel() for m in linears) + 2 * self.heads * self.features * (2 * self.d_head + 1)

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """The same for every byte; the gradient of each product has two."""
        return NeededFlops.of_products(self.ideal_flops())


class LinearAttention(CarriedSums):
    """Attention by a feature map of each number of a head's query and key.

    Args:
        feature_map: ``elu`` for elu(x) + 1, the paper's, or ``relu``, with which a query may meet no weight at all and
            gives 0.
        The others are those of ``CarriedSums``.
    """

    def __init__(
        self,
        context: LayerContext,
        *,
        feature_map: str = "elu",
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
        chunk: int = 32,
    ):
        super().__init__(context, d_head=d_head, bias=bias, zero_init=zero_init, chunk=chunk)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map={feature_map}: allowed are {', '.join(FEATURE_MAPS)}")
        self.map, self.features = FEATURE_MAPS[feature_map], self.d_head

    def featured(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None]:
        return self.map(q), self.map(k), None
