"""Reformer: attention to keys of the same bucket, by locality-sensitive hashing (2001.04451,
section 2).

Queries and keys are shared: k_j = q_j / rms(q_j). In every round r each vector is in one of 2b
buckets,

    h_r(q) = argmax([q R_r; -q R_r])   R_r [K, b] Gaussian, drawn once and saved with the model
    P_i    = union over rounds of the last w keys before i that are in i's bucket and in i's window
    o_i    = sum_{j in P_i} exp(s_ij) v_j / sum_{j in P_i} exp(s_ij),   s_ij = q_i . k_j / sqrt(K)

Positions are sorted by bucket, then position, and cut into chunks of w. The queries of a chunk are
multiplied with its keys and those of the chunk before, which include the last w keys of each
query's bucket. A key that is in P_i by several rounds counts once, which equals the paper's
division by the number of such rounds. If a query sees no key, its output is its own value with
``attend_self``, and 0 without it; otherwise it does not attend to itself.

Departures from the paper:
- The paper's chunks leak the future: a later byte shifts ranks in the sorted order, and so the
  boundaries of chunks. Here each query sees the last w keys of its bucket, so outputs do not depend
  on later bytes or segment boundaries.
- Rotations are drawn per model, not per batch, because a carried key's hash must not change. With
  rotary positions, hashes come from unrotated vectors, scores from rotated ones. If rounding
  changes a hash, the byte's output changes by more than rounding.
- Keys have length sqrt(K) before the division by sqrt(K), as in published code: scores of unit keys
  are too small.
- There are no reversible layers or chunked feed-forwards, which save memory and change no output.
  Vectors per distance and biases that depend on the query are refused, because they need a term
  for each of T * S pairs."""

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
from variants.contract import (
    Honours,
    Inspection,
    LayerContext,
    Metrics,
    NeededFlops,
    State,
    Stats,
    SublayerOutput,
    check_numbers,
)
from variants.kernels import dropout as dropout_counters
from variants.kernels.window import count_pairs
from variants.multi_head import EPSILON, HeadKeywords, MultiHead, head_means, head_stats, start_of

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Takes the place of -inf as the largest score of a query that sees no key: finite, and below
any score."""


class Reformer(MultiHead):
    """Causal attention by locality-sensitive hashing, over the last S positions.

    Args:
        buckets: 2b, even; None for 2 round(S / (2 w)), at least 2, so that on average a bucket has
            w of a window's S keys. ``set_span`` does not change it.
        rounds: number of hashing rounds, R in shapes.
        bucket_keys: w, the largest number of keys of its bucket that a query sees in a round.
        heads: keywords of ``MultiHead``."""

    honours = Honours(
        position={"rotate", "decay"}, cache={"kv", "hidden"}, attend_self={True, False}, span=True
    )
    # Later bytes change the order of the sorted positions. A chunk is multiplied with two chunks of
    # keys.
    limits = frozenset({"rounding", "ideal_flops"})
    maps = ("query", "value")
    scaled = False

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
        if heads.get("key_shift"):
            raise ValueError(
                "key_shift=true: allowed is false, because queries of Reformer are its keys"
            )
        super().__init__(context, **heads)
        buckets = max(2, 2 * round(context.span / bucket_keys / 2)) if buckets is None else buckets
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets={buckets}: allowed are even integers from 2, or null")
        self.rounds = rounds
        self.buckets = buckets
        self.bucket_keys = bucket_keys
        self.span = context.span
        self.position = context.position(self.d_head)
        if self.position.constant_bias:
            self.honours = replace(self.honours, position=self.honours.position | {"bias"})
        self.register_buffer(
            "rotations", torch.randn(self.heads, rounds, self.d_head, buckets // 2)
        )

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        """Map one segment. The state is concatenated keys and values ``[B, H, P, 2K]`` and hashes
        ``[B, H, R, P]``, or past inputs ``[B, P, D]``."""
        length = x.shape[1]
        start = start_of(x, start)
        if self.cache == "hidden":
            state = x if state is None else torch.cat([state.to(x.dtype), x], dim=1)
            kv, factors, hashes = self._encode(state, start - (state.shape[1] - length))
            factors = factors[:, :, -length:]
            state = state.detach()
        else:
            kv, factors, hashes = self._encode(x, start)
            if state is not None:
                kv = torch.cat([state[0].to(kv.dtype), kv], 2)
                hashes = torch.cat([state[1], hashes], 3)
            state = kv.detach(), hashes
        y, n_keys = self.attend(kv, factors, hashes)
        stats = None
        if collect_stats:
            stats = head_stats(y, keys=n_keys, alone=n_keys == 0)
        return SublayerOutput(self.join(y), self.trim(state), stats=stats)

    def attend(self, kv: Tensor, factors: Tensor, hashes: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs ``[B, H, T, K]`` of the last T of L positions, and the number of keys that
        each query sees, ``[B, H, T]``. Counters give the dropout mask, because the order of rows
        depends on later bytes.

        Args:
            kv: concatenated keys and values ``[B, H, L, 2K]``.
            factors: ``[B, H, T]``; the last T keys times these are scaled queries.
            hashes: the bucket of each key in each round, integers ``[B, H, R, L]``."""
        bias = self.position.bias(kv, self.span)
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        bucket_keys = self.bucket_keys
        reach = self.reach()
        shift = self.shift
        total = kv.shape[2]
        width = kv.shape[3] // 2
        length = factors.shape[2]
        dtype = torch.promote_types(kv.dtype, torch.float32)
        # [B, H, R, L]: positions, sorted by bucket, then position
        order = hashes.argsort(dim=-1, stable=True)
        rank = order.argsort(dim=-1)
        # Labels in a bucket are consecutive, and those of two buckets differ by more than w. So
        # query i sees key j if 0 < labels[i] - labels[j] <= w.
        labels = (rank + hashes * bucket_keys).int()
        # scores are in base 2: exp2 of -inf is faster than exp
        factors = F.pad(factors * LOG2_E, (total - length, 0))
        if dropout:
            seed = dropout_counters.draw_seed(kv.device)
            rows = dropout_counters.row_numbers(seed, *kv.shape[:2], total)

        def attend_round(r: int, kv: Tensor, factors: Tensor) -> Tensor:
            """Return for P_i of round r: sum_j 2^(s_ij - max_i) [v_j, 1], max_i, number of j:
            ``[B, H, T, K + 3]``."""
            # positions [B, H, n, w] and [B, H, n, 2w]
            i, j = _chunks(order[:, :, r].int(), bucket_keys)
            distance = i[..., :, None] - j[..., None, :]  # [B, H, n, w, 2w]
            visible = (j < total)[..., None, :] & (distance <= reach) & in_bucket(r, i, j)
            for earlier in range(r):  # a key counts only in the first of its rounds
                visible &= ~in_bucket(earlier, i, j)
            k, v = _take(kv, j).split(width, dim=-1)
            q = _take(kv, i)[..., :width] * _take(factors, i)[..., None].to(kv.dtype)
            scores = (q @ k.mT).to(dtype)
            if bias is not None:
                column = (distance - shift).clamp_(0, bias.shape[1] - 1).flatten(2).long()
                by_head = repeat(bias.to(dtype) * LOG2_E, "H S -> B H S", B=len(column))
                scores = scores + by_head.gather(2, column).view_as(scores)
            scores.masked_fill_(~visible, -torch.inf)
            max_score = scores.detach().amax(-1, keepdim=True).clamp_(min=LOWEST)
            weights = (scores - max_score).exp2_()
            mass = weights.sum(-1, keepdim=True)
            if dropout:
                mask = dropout_counters.keep_mask(_take(rows, i), distance.long(), dropout)
                weights = weights * mask / (1 - dropout)
            sums = (
                (weights.to(kv.dtype) @ v).to(dtype),
                mass,
                max_score,
                visible.sum(-1, keepdim=True),
            )
            return _take(torch.cat(sums, dim=-1).flatten(2, 3), rank[:, :, r, total - length :])

        def in_bucket(r: int, i: Tensor, j: Tensor) -> Tensor:
            """Return whether j is one of the last w keys before i in its bucket of round r, ``[B,
            H, n, w, 2w]``."""
            label = labels[:, :, r]
            difference = _take(label, i)[..., :, None] - _take(label, j)[..., None, :]
            return (difference > 0) & (difference <= bucket_keys)

        if torch.is_grad_enabled():
            # Each round has two copies of each key and a mask of all pairs. The backward pass
            # computes both again.
            attend_round = partial(
                checkpoint.checkpoint, attend_round, use_reentrant=False, preserve_rng_state=False
            )
        rounds = torch.stack([attend_round(r, kv, factors) for r in range(hashes.shape[2])])
        values, mass, max_score, n_keys = rounds.split([width, 1, 1, 1], dim=-1)
        scale = torch.exp2(max_score.detach() - max_score.detach().amax(0))
        n_keys = n_keys.detach().sum(0)
        y = (values * scale).sum(0) / (mass * scale).sum(0).masked_fill(n_keys == 0, 1)
        if not shift:
            y = y + F.dropout((n_keys == 0).to(dtype), dropout) * kv[:, :, total - length :, width:]
        return y.to(kv.dtype), n_keys.squeeze(-1)

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        kv, *others = self._encode(x, start_of(x, None))
        k, v = kv.chunk(2, dim=-1)
        return Inspection(
            weights_of(lambda values: self.attend(torch.cat([k, values], dim=-1), *others)[0], v)
        )

    def _encode(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values ``[B, H, n, 2K]``, factors from keys to scaled queries ``[B, H,
        n]``, and hashes ``[B, H, R, n]``."""
        shared, v = self.project(x, "query", "value")
        exact = shared.to(torch.promote_types(shared.dtype, torch.float32))
        rms = (exact.square().mean(-1) + EPSILON).sqrt()
        keys = self.position.rotate((exact * rms.reciprocal()[..., None]).to(v.dtype), start)
        return torch.cat([keys, v], dim=-1), rms * self.d_head**-0.5, self._hash(exact.detach())

    def _hash(self, shared: Tensor) -> Tensor:
        """Return the bucket of each vector of ``shared [B, H, n, K]`` in every round, int32
        ``[B, H, R, n]``."""
        matrices = rearrange(self.rotations.to(shared.dtype), "H R K b -> H K (R b)")
        # in bfloat16 many products are equal
        with torch.autocast(shared.device.type, enabled=False):
            products = rearrange(shared @ matrices, "B H n (R b) -> B H R n b", R=self.rounds)
        return torch.cat([products, -products], dim=-1).argmax(-1).to(torch.int32)

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

    def metrics(self, stats: Stats) -> Metrics:
        """Return means per head: ``keys``, the number of distinct keys that a query sees, and
        ``alone``, the share of queries that see no key."""
        return head_means(stats, "keys", "alone")

    def ideal_flops(self) -> int:
        """Count projections, hashes, and scores and weighted values of every round, for buckets
        of equal size."""
        return round(self._forward_flops(self._visible_pairs(1, 2 * self.span)[1]))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count the pairs of every round, also if two rounds have the same pair. Hashes need no
        gradient. With ``cache: kv`` past keys and values need none either; with ``hidden`` they are
        projected again, with gradients of the weights."""
        in_segment, past = self._visible_pairs(segment, carried)
        forward = self._forward_flops(in_segment + past)
        hashing = 2 * self.rotations.numel()
        backward = 2 * (forward - hashing)
        if self.cache == "kv":
            return NeededFlops(forward, backward - 4 * self.heads * self.d_head * past)
        inputs = min(carried, self.reach()) / segment
        projection = 4 * self.query.weight.numel()
        return NeededFlops(
            forward + inputs * (projection + hashing), backward + inputs * projection
        )

    def _visible_pairs(self, segment: int, carried: int) -> tuple[float, float]:
        """Return pairs per byte and head over all rounds, with keys of the segment and with past
        keys, for buckets of equal size."""
        window = min(self.reach(), self.bucket_keys * self.buckets)
        return tuple(
            self.rounds * n / self.buckets / segment
            for n in count_pairs(segment, carried, window, shift=1)
        )

    def _forward_flops(self, keys: float) -> float:
        return (
            2 * (self.matrix_sizes() + self.rotations.numel()) + 4 * self.heads * self.d_head * keys
        )


def _chunks(order: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cut sorted positions ``[B, H, L]`` into n chunks of ``width``, ``[B, H, n, w]``; also return
    each chunk with the previous one before it, ``[B, H, n, 2w]``. Position L means no key."""
    padded = F.pad(order, (width, -order.shape[-1] % width), value=order.shape[-1]).unflatten(
        2, (-1, width)
    )
    return padded[:, :, 1:], torch.cat([padded[:, :, :-1], padded[:, :, 1:]], dim=3)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[b, h, index[b, h, ..]]``, ``[B, H, .., m]`` from ``x [B, H, n, m]``; an index from
    n on reads the last row."""
    streams, heads, n = x.shape[:3]
    first = (
        torch.arange(streams * heads, device=x.device).view(
            streams, heads, *[1] * (index.dim() - 2)
        )
        * n
    )
    flat = (first + index.clamp(max=n - 1)).flatten()
    return x.flatten(0, 2).index_select(0, flat).view(*index.shape, *x.shape[3:])
