"""Reformer: attention among keys of the same bucket, found by locality-sensitive hashing (2001.04451, section 2).

Queries and keys are shared: k_j = q_j / rms(q_j). In every round r each vector falls into one of 2b buckets,

    h_r(q) = argmax([q R_r; -q R_r])         R_r [K, b] Gaussian, drawn once and kept with the model
    P_i    = union over rounds of the last w keys before i that are in i's bucket and in i's window
    o_i    = sum_{j in P_i} exp(q_i . k_j / sqrt(K) - z_i) v_j

Keys are sorted by bucket and position. A chunk of w in that order attends to itself and to the chunk before it. A key
found in several rounds counts only in the first; this equals the paper's division by the number of rounds that find it.
A query attends to itself only if it finds no other key: with ``attend_self`` it then gives its own value, without it 0.
Where we depart, and why:
- The paper's chunks leak the future: a later byte shifts ranks in the sorted order, and so the boundaries of chunks.
  Here each query sees the last w keys of its bucket, so neither later bytes nor boundaries of segments matter.
- Rotations are drawn per model, not per batch, as a carried key's hash must stay the same. Vectors are hashed before
  rotary positions, multiplied after. If rounding flips a hash, that byte's output changes by more than rounding.
- Keys have length sqrt(K) before the division by sqrt(K), as in published code: scores of unit keys are too small.
- There are no reversible layers or chunked feed-forwards, which save memory and change no output. Vectors per distance
  and biases that depend on the query are refused, because they need numbers for all T S pairs.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor
from torch.utils import checkpoint

from variants.context import last, weights_of
from variants.contract import Honours, Inspection, LayerContext, NeededFlops, State, SublayerOutput, check_numbers
from variants.kernels import dropout as dropout_counters
from variants.kernels.window import pairs
from variants.multi_head import HeadKeywords, MultiHead, head_means, head_stats, start_of

EPSILON = 1e-6
"""Added to the mean square of a query before the square root."""
LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Used as the largest score of a query that sees no key: far below any score, and finite."""


class Reformer(MultiHead):
    """Causal attention by locality-sensitive hashing, over the last S positions.

    Args:
        buckets: 2b, even. None: 2 round(S / (2 w)), >= 2; each has w keys of a full window; ``set_span`` keeps it.
        rounds: number of hashing rounds.
        bucket_keys: w, the most keys of its bucket that a query sees in a round.
        The others are those of ``MultiHead``.
    """

    honours = Honours(position={"rotate", "decay"}, cache={"kv", "hidden"}, attend_self={True, False}, span=True)
    maps, scaled = ("query", "value"), False

    def __init__(
        self,
        context: LayerContext,
        *,
        buckets: int | None,
        rounds: int,
        bucket_keys: int,
        **heads: Unpack[HeadKeywords],
    ):
        check_numbers(1, rounds=rounds, bucket_keys=bucket_keys)
        super().__init__(context, **heads)
        buckets = max(2, 2 * round(context.span / bucket_keys / 2)) if buckets is None else buckets
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets={buckets}: allowed are even integers from 2, or null")
        self.rounds, self.buckets, self.bucket_keys, self.span = rounds, buckets, bucket_keys, context.span
        self.position = context.position(self.d_head)
        if self.position.constant_bias:
            self.honours = replace(self.honours, position=self.honours.position | {"bias"})
        self.register_buffer("rotations", torch.randn(self.heads, rounds, self.d_head, buckets // 2))

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """State: keys beside values ``[B, H, P, 2K]`` and hashes ``[B, H, R, P]``, or past inputs ``[B, P, D]``."""
        length, start = x.shape[1], start_of(x, start)
        if self.cache == "hidden":
            state = x if state is None else torch.cat([state.to(x.dtype), x], dim=1)
            keys, sizes, hashes = self._encode(state, start - (state.shape[1] - length))
            sizes, state = sizes[:, :, -length:], state.detach()
        else:
            keys, sizes, hashes = self._encode(x, start)
            if state is not None:
                keys, hashes = torch.cat([state[0].to(keys.dtype), keys], 2), torch.cat([state[1], hashes], 3)
            state = keys.detach(), hashes
        y, met = self._attend(keys, sizes, hashes)
        stats = head_stats(y, keys=met, alone=met == 0) if collect_stats else None
        return SublayerOutput(self.join(y), self.trim(state), stats=stats)

    def _attend(self, keys: Tensor, sizes: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
        limits = {"bucket_keys": self.bucket_keys, "farthest": self.reach(), "shift": self.shift}
        bias, dropout = self.position.bias(keys, self.span), self.dropout if self.training else 0.0
        return lsh_attention(keys, sizes, hashes, bias=bias, dropout=dropout, **limits)

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        both, *others = self._encode(x, start_of(x, None))
        k, v = both.chunk(2, dim=-1)
        return Inspection(weights_of(lambda values: self._attend(torch.cat([k, values], dim=-1), *others)[0], v))

    def _encode(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys beside values ``[B, H, n, 2K]``, key-to-query factors ``[B, H, n]``, hashes ``[B, H, R, n]``."""
        shared, v = self.project(x, "query", "value")
        exact = shared.to(torch.promote_types(shared.dtype, torch.float32))
        sizes = (exact.square().mean(-1) + EPSILON).sqrt()
        keys = self.position.rotate((exact * sizes.reciprocal()[..., None]).to(v.dtype), start)
        return torch.cat([keys, v], dim=-1), sizes * self.d_head**-0.5, self._hash(exact.detach())

    def _hash(self, shared: Tensor) -> Tensor:
        """Return the bucket of each vector of ``shared [B, H, n, K]`` in every round, int32 ``[B, H, R, n]``."""
        matrices = rearrange(self.rotations.to(shared.dtype), "H R K b -> H K (R b)")
        with torch.autocast(shared.device.type, enabled=False):  # bfloat16 has many ties
            turned = rearrange(shared @ matrices, "B H n (R b) -> B H R n b", R=self.rounds)
        return torch.cat([turned, -turned], dim=-1).argmax(-1).to(torch.int32)

    def trim(self, state: State) -> State:
        if state is None or torch.compiler.is_compiling():
            return state
        if self.cache == "hidden":
            return last(self.reach(), 1, None, state)
        return tuple(last(self.reach(), dim, None, x) for x, dim in zip(state, (2, 3), strict=True))

    def reach(self) -> int:
        return self.span - 1 + self.shift

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.span = span

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Return means per head: distinct keys that a query sees, and the share of queries that see no other key."""
        return head_means(stats, "keys", "alone")

    def ideal_flops(self) -> int:
        """Count projections, hashes, and scores and weighted values of every round, for evenly filled buckets."""
        return round(self._forward_flops(self._met(1, 2 * self.span)[1]))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count a key that two rounds find in both. Hashes have no gradient. With ``cache: kv`` past keys and values
        have none either; with ``hidden`` they are projected again, with gradients for the weights."""
        new, past = self._met(segment, carried)
        forward, hashing = self._forward_flops(new + past), 2 * self.rotations.numel()
        backward = 2 * (forward - hashing)
        if self.cache == "kv":
            return NeededFlops(forward, backward - 4 * self.heads * self.d_head * past)
        inputs, again = min(carried, self.reach()) / segment, 4 * self.query.weight.numel()
        return NeededFlops(forward + inputs * (again + hashing), backward + inputs * again)

    def _met(self, segment: int, carried: int) -> tuple[float, float]:
        """Return pairs per byte and head over all rounds, with keys of the segment and past keys, for even buckets."""
        window = min(self.reach(), self.bucket_keys * self.buckets)
        return tuple(self.rounds * n / self.buckets / segment for n in pairs(segment, carried, window, shift=1))

    def _forward_flops(self, keys: float) -> float:
        return 2 * (self.matrix_sizes() + self.rotations.numel()) + 4 * self.heads * self.d_head * keys


def lsh_attention(
    keys: Tensor,
    sizes: Tensor,
    hashes: Tensor,
    *,
    bucket_keys: int,
    farthest: int,
    bias: Tensor | None = None,
    shift: int = 0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of L positions to keys before them that share a bucket.

    Args:
        keys: keys beside values ``[B, H, L, 2K]``.
        sizes: ``[B, H, T]``, factors that turn the last T keys into scaled queries.
        hashes: whole numbers ``[B, H, R, L]``, the bucket of each key in each round.
        bucket_keys: w. In a round a query sees the w nearest keys before it in its bucket, up to distance ``farthest``.
        bias: added to scores, ``[H, S]``: column x for distance x + ``shift``.
        shift: 0 if a query that sees no key gives its own value, 1 if it gives 0.
        dropout: rate on normalised weights; by counters, because the order of a bucket depends on later bytes.

    Returns: ``[B, H, T, K]``, and how many keys each query saw, ``[B, H, T]``.
    """
    total, width, length = keys.shape[2], keys.shape[3] // 2, sizes.shape[2]
    exact = torch.promote_types(keys.dtype, torch.float32)
    order = hashes.argsort(dim=-1, stable=True)  # [B, H, R, L]: positions, sorted by bucket, then position
    rank = order.argsort(dim=-1)
    # Numbers in a bucket are consecutive, those of two buckets differ by more than w: a sees b if 0 < a - b <= w.
    numbers = (rank + hashes * bucket_keys).int()
    sizes = F.pad(sizes * LOG2_E, (total - length, 0))  # scores are in base 2: exp2 of -inf is faster than exp
    if dropout:
        streams, heads, queries = (torch.arange(n, device=keys.device) for n in (*keys.shape[:2], total))
        rows = dropout_counters.rows(
            dropout_counters.draw_seed(keys.device), streams=streams, heads=heads, queries=queries
        )

    def of_round(r: int, keys: Tensor, sizes: Tensor) -> Tensor:
        """Return for P_i of round r: sum_j 2^(s_ij - top_i) [v_j, 1], top_i, number of j: ``[B, H, T, K + 3]``."""
        i, j = _chunks(order[:, :, r].int(), bucket_keys)  # positions [B, H, n, w] and [B, H, n, 2w]
        distance = i[..., :, None] - j[..., None, :]  # [B, H, n, w, 2w]
        visible = (j < total)[..., None, :] & (distance <= farthest) & meets(r, i, j)
        for earlier in range(r):  # a key counts in the first round that finds it
            visible &= ~meets(earlier, i, j)
        k, v = _take(keys, j).split(width, dim=-1)
        q = _take(keys, i)[..., :width] * _take(sizes, i)[..., None].to(keys.dtype)
        scores = (q @ k.mT).to(exact)
        if bias is not None:
            column = (distance - shift).clamp_(0, bias.shape[1] - 1).flatten(2).long()
            by_head = repeat(bias.to(exact) * LOG2_E, "H S -> B H S", B=len(column))
            scores = scores + by_head.gather(2, column).view_as(scores)
        scores.masked_fill_(~visible, -torch.inf)
        top = scores.detach().amax(-1, keepdim=True).clamp_(min=LOWEST)
        weights = (scores - top).exp2_()
        mass = weights.sum(-1, keepdim=True)
        if dropout:
            stay = dropout_counters.keep(_take(rows, i), distance.long(), dropout)
            weights = weights * stay / (1 - dropout)
        sums = (weights.to(keys.dtype) @ v).to(exact), mass, top, visible.sum(-1, keepdim=True)
        return _take(torch.cat(sums, dim=-1).flatten(2, 3), rank[:, :, r, total - length :])

    def meets(r: int, i: Tensor, j: Tensor) -> Tensor:
        """Whether round r puts j into P_i, ``[B, H, n, w, 2w]``."""
        number = numbers[:, :, r]
        gap = _take(number, i)[..., :, None] - _take(number, j)[..., None, :]
        return (gap > 0) & (gap <= bucket_keys)

    if torch.is_grad_enabled():
        # Rounds copy each key for two chunks of queries and mask each pair; the backward pass recomputes both.
        of_round = partial(checkpoint.checkpoint, of_round, use_reentrant=False, preserve_rng_state=False)
    rounds = torch.stack([of_round(r, keys, sizes) for r in range(hashes.shape[2])])
    values, mass, top, met = rounds.split([width, 1, 1, 1], dim=-1)
    scale = torch.exp2(top.detach() - top.detach().amax(0))
    met = met.detach().sum(0)
    y = (values * scale).sum(0) / (mass * scale).sum(0).masked_fill(met == 0, 1)
    if not shift:
        y = y + F.dropout((met == 0).to(exact), dropout) * keys[:, :, total - length :, width:]
    return y.to(keys.dtype), met.squeeze(-1)


def _chunks(order: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cut sorted positions ``[B, H, L]`` into n chunks of ``width``, ``[B, H, n, w]``; also return each chunk with the
    one before it in front, ``[B, H, n, 2w]``. Position L means no key."""
    padded = F.pad(order, (width, -order.shape[-1] % width), value=order.shape[-1]).unflatten(2, (-1, width))
    return padded[:, :, 1:], torch.cat([padded[:, :, :-1], padded[:, :, 1:]], dim=3)


def _take(x: Tensor, at: Tensor) -> Tensor:
    """Return ``x[b, h, at[b, h, ..]]``, ``[B, H, .., m]`` from ``x [B, H, n, m]``; larger indices read the last row."""
    streams, heads, number = x.shape[:3]
    first = torch.arange(streams * heads, device=x.device).view(streams, heads, *[1] * (at.dim() - 2)) * number
    flat = (first + at.clamp(max=number - 1)).flatten()
    return x.flatten(0, 2).index_select(0, flat).view(*at.shape, *x.shape[3:])
