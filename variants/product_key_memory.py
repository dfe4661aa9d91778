"""Product-key memory: a table of M = C*C values, from which each byte reads the few whose keys match its query best.

Per head, a query q = norm(Wq x + b) is split into halves (q1, q2). Slot (i, j) has the key (c_i, c'_j), with one
half-key from each of two sets of C. Its score is c_i.q1 + c'_j.q2, and

    y = sum over heads of   sum over slots (i, j) in top-k of   w_ij v_ij,    w = softmax over the k scores.

The top k of M sums are found exactly without computing all. With both halves sorted, the i*j - 1 pairs above and left
of pair (i, j) (counted from 1) have sums at least as large. So only pairs with i*j <= k matter (119 of 1024 at k = 32).

Lample et al. 2019, arXiv 1907.05242, section 3. Ours, and where it departs:
- LayerNorm over a whole query, with weights shared by the heads, is the default. The paper's BatchNorm computes
  statistics over future bytes and other streams; it is an option that declares these limits, and Wq then has no bias.
- Half-keys start uniform in +-1/sqrt(d_query/2), as in the authors' code, but from the run's own generator. There is no
  temperature and no 1/sqrt(d_query): a score starts with variance 2/3, and a LayerNorm's gain can learn the sharpness.
- ``activation: relu`` weighs the k slots by max(0, score). 2310.10837 finds it better on bytes, reading all slots.
"""

import math
from typing import NotRequired, TypedDict

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from variants.contract import (
    Inspection,
    LayerContext,
    NeededFlops,
    State,
    Sublayer,
    SublayerOutput,
    check_choice,
    check_numbers,
    wide,
)
from variants.kernels import product_search, table
from variants.kernels.carried_sums import unrounded

SCORES_AT_ONCE = 2**20
"""Scores a CPU computes at once: 4 MiB in float32, about the caches' size; with fewer, starting threads costs more."""


def candidate_pairs(*, top_k: int, half_keys: int) -> Tensor:
    """Return pairs of ranks, int64 ``[2, P]`` from 0, that can be among the ``top_k`` best sums of two sorted lists."""
    ranks = range(1, min(top_k, half_keys) + 1)
    return torch.tensor([(i - 1, j - 1) for i in ranks for j in ranks if i * j <= top_k]).T.contiguous()


def search(scores: Tensor, *, top_k: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Find the ``top_k`` best of all sums ``scores[0, ..., i] + scores[1, ..., j]`` of ``scores [2, ..., C]``, exactly.
    Ties go to the lower slots, unless infinity or rounding makes the sums equal.

    Args:
        pairs: ``candidate_pairs`` of the same sizes, on the same device.

    Returns: i and j, int64 ``[2, ..., top_k]``, best first, and their sums ``[..., top_k]``. No gradient.
    """
    # ``topk`` does not define which of equal scores it takes.
    best, at = scores.detach().sort(dim=-1, descending=True, stable=True)
    ranks = pairs.view(2, *(1,) * (scores.dim() - 2), -1).expand(*scores.shape[:-1], -1)  # [2, ..., P]
    i, j = halves = at.gather(-1, ranks)
    by_slot = (i * scores.shape[-1] + j).argsort(dim=-1)
    # Low-precision scores are added in float32, because another rounding could make other sums the best.
    sums = at_least_float32(best.gather(-1, ranks)).sum(0).gather(-1, by_slot)
    sums, winners = (part[..., :top_k] for part in sums.sort(dim=-1, descending=True, stable=True))
    winners = by_slot.gather(-1, winners)
    return halves.gather(-1, winners.expand(2, *winners.shape)), sums


class _Choose(torch.autograd.Function):
    """Do ``choose`` for a block of bytes at a time. Scores are not saved: their gradient follows from the sums'."""

    @staticmethod
    def forward(ctx, query: Tensor, keys: Tensor, pairs: Tensor, top_k: int, kernel: bool) -> tuple[Tensor, Tensor]:
        number, heads, half_keys = len(query), keys.shape[0] // 2, keys.shape[1]
        wide, keys_wide = at_least_float32(query), at_least_float32(keys)
        slots, sums = pairs.new_empty(number, heads, top_k), wide.new_empty(number, heads, top_k)
        for part in _blocks(query, keys):
            with unrounded(query.device):  # rounding scores to bfloat16 would choose other slots
                scores = wide[part].transpose(0, 1) @ keys_wide.mT  # [2 H, b, C]
            if kernel:
                slots[part], sums[part] = product_search.search(scores, top_k)
            else:
                by_half = rearrange(scores, "(h half) b c -> half b h c", half=2)
                (i, j), sums[part] = search(by_half, top_k=top_k, pairs=pairs)
                slots[part] = i * half_keys + j
        ctx.save_for_backward(query, keys, slots)
        ctx.mark_non_differentiable(slots)
        return slots, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, _: None, d_sums: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        query, keys, slots = ctx.saved_tensors
        half_keys, wide, keys_wide = keys.shape[1], at_least_float32(query), at_least_float32(keys)
        d_query, d_keys = torch.empty_like(query), torch.zeros_like(keys)
        for part in _blocks(query, keys):
            slot = rearrange(slots[part], "b h k -> h b k")
            at = torch.stack([slot // half_keys, slot % half_keys], 1)  # [H, 2, b, k], for scores [2 H, b, C]
            d_both = rearrange(d_sums[part], "b h k -> h 1 b k").expand_as(at)
            d_scores = d_both.new_zeros(*at.shape[:3], half_keys).scatter_add_(-1, at, d_both).flatten(0, 1)
            d_query[part] = (d_scores @ keys_wide).transpose(0, 1)
            d_keys += d_scores.mT @ wide[part].transpose(0, 1)
        return d_query, d_keys, None, None, None


def choose(query: Tensor, keys: Tensor, *, top_k: int, pairs: Tensor, kernel: bool = False) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` slots whose keys match each query best, int64 ``[n, H, top_k]``, and their scores in float32
    or better. Scores have a gradient for ``query`` and ``keys``.

    Args:
        query: ``[n, 2 H, d]``, the halves of each head side by side.
        keys: ``[2 H, C, d]``, the half-keys for each half.
        kernel: search by ``product_search``, on a CPU only.
    """
    return _Choose.apply(query, keys, pairs, top_k, kernel)


def _blocks(query: Tensor, keys: Tensor) -> list[slice]:
    """Cut the bytes into parts: on a CPU so small that their scores stay in the cache, elsewhere a single part."""
    size = max(1, SCORES_AT_ONCE // keys[..., 0].numel()) if query.device.type == "cpu" else max(1, len(query))
    return [slice(first, first + size) for first in range(0, len(query), size)]


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class SearchKeywords(TypedDict):
    """Keywords of ``ProductKeyMemory`` that configure the search."""

    half_keys: int
    top_k: int
    heads: int
    d_query: int
    query_norm: NotRequired[str]
    activation: NotRequired[str]


class ProductKeyMemory(Sublayer):
    """A table of values read by content, in place of a feed-forward block or beside it. ``query_norm: batch`` breaks
    all promises of ``LIMITS`` but ``ideal_flops`` in training mode; in evaluation mode it keeps them.

    Args:
        half_keys: C, half-keys in each of the two sets of a head; the table has C*C slots.
        top_k: slots that a head reads per byte, from 1 to ``half_keys``; from 2 with softmax, since a softmax over
            one score is constant and neither keys nor queries would learn.
        heads: memory heads, not the attention heads.
        d_query: width of a head's query, even.
        query_norm: ``layer``, ``batch`` or ``none``.
        activation: ``softmax`` or ``relu``.
        share: ``layer`` for a table per layer, ``network`` for one table of all layers with equally many slots.
        sparse: make the gradient of the values a sparse tensor.
    """

    sum_rows = staticmethod(table.sum_rows)

    def __init__(
        self,
        context: LayerContext,
        *,
        half_keys: int,
        top_k: int,
        heads: int,
        d_query: int,
        query_norm: str = "layer",
        activation: str = "softmax",
        share: str = "layer",
        sparse: bool = False,
    ):
        super().__init__()
        check_numbers(1, half_keys=half_keys, heads=heads)
        check_choice(("layer", "batch", "none"), query_norm=query_norm)
        check_choice(("softmax", "relu"), activation=activation)
        check_choice(("layer", "network"), share=share)
        fewest = 2 if activation == "softmax" else 1
        if not fewest <= top_k <= half_keys:
            sizes = f"half_keys={half_keys} and activation={activation}"
            raise ValueError(f"top_k={top_k} with {sizes}: allowed are integers from {fewest} to half_keys")
        if d_query < 2 or d_query % 2:
            raise ValueError(f"d_query={d_query}: allowed are even integers from 2")
        self.half_keys, self.top_k, self.heads, self.d_query = half_keys, top_k, heads, d_query
        self.activation, self.sparse, self.wanted_backend = activation, sparse, context.backend
        self.tables = {"values": heads * top_k}

        if query_norm == "batch":
            self.limits = frozenset({"causal_in_training", "streams_apart", "segments", "training_as_evaluation"})
        self.query = nn.Linear(context.d_model, heads * d_query, bias=query_norm != "batch")
        self.norm_width = heads * d_query if query_norm == "batch" else d_query
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.norm = norms[query_norm](self.norm_width)

        bound = (d_query / 2) ** -0.5
        self.keys = nn.Parameter(torch.empty(heads, 2, half_keys, d_query // 2).uniform_(-bound, bound))

        def make_values() -> nn.Parameter:
            return nn.Parameter(torch.randn(half_keys**2, context.d_model) * context.d_model**-0.5)

        # A plain parameter, not a linear map's weight, so that an optimizer does not apply its rule for matrices to it.
        size = ("values", half_keys, context.d_model)
        self.values = context.shared(ProductKeyMemory, size, make_values, share=share)
        self.register_buffer("pairs", candidate_pairs(top_k=top_k, half_keys=half_keys), persistent=False)

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        slots, weights = (part.flatten(1) for part in self._choose(x))  # [n, H top_k]
        y = self.sum_rows(self.values, slots, weights, sparse=self.sparse)
        return SublayerOutput(y.view_as(x), stats=self.usage(slots, weights.detach()) if collect_stats else None)

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots and their weights, ``[n, H, top_k]`` each."""
        query = self.norm(self.query(x).reshape(-1, self.norm_width))
        query = query.reshape(-1, 2 * self.heads, self.d_query // 2)
        kernel = self.backend(x.device, training=self.training) == "kernel"
        slots, sums = choose(query, self.keys.flatten(0, 1), top_k=self.top_k, pairs=self.pairs, kernel=kernel)
        return slots, sums.softmax(-1) if self.activation == "softmax" else sums.relu()

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        slots, weights = (rearrange(part, "(B T) H k -> B H T k", B=len(x)) for part in self._choose(x))
        return Inspection(entries=slots, shares=weights)

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Return ``kernel`` if a CPU has the search in C++. If requested and missing, attention sublayers say why."""
        ours = device.type == "cpu" and self.wanted_backend in ("auto", "kernel") and product_search.available() is None
        return "kernel" if ours else "plain"

    def usage(self, slots: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Return reads of each slot, int64 ``[M]``, their summed weights, float64 ``[M]``, and the number of bytes."""
        flat = slots.flatten()
        count = torch.zeros(self.values.shape[0], dtype=torch.int64, device=slots.device)
        weight = wide(torch.zeros_like(count, dtype=torch.float32))
        return {
            "usage_count": count.scatter_add(0, flat, torch.ones_like(flat)),
            "usage_weight": weight.scatter_add(0, flat, wide(weights.flatten())),
            "bytes": torch.tensor(slots.shape[0], device=slots.device),
        }

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Return the share of slots in use, in percent, and the divergence of use from uniform: ln M + sum p ln p, with
        p a slot's share of reads or of weight. The divergence by weight is left out if all weights are 0 (relu)."""
        if not stats:
            return {}
        used = 100 * (stats["usage_weight"] > 0).float().mean().item()
        shown = {"usage_percent": used, "usage_bytes": float(stats["bytes"])}
        shown |= {"kl_count_nats": nats_from_even(stats["usage_count"])}
        return shown | ({"kl_weighted_nats": nats_from_even(stats["usage_weight"])} if used else {})

    def ideal_flops(self) -> int:
        """Count queries, two searches of C half-keys and the reads; additions of pair sums are not counted."""
        d_model = self.values.shape[1]
        per_head = d_model * self.d_query + self.half_keys * self.d_query + self.top_k * d_model
        return 2 * self.heads * per_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count the backward as twice the forward. Of the half-keys it counts only those of chosen slots, once per
        slot. Norm, softmax and choice are neglected."""
        needed = NeededFlops.of_products(self.ideal_flops())
        unchosen = self.half_keys - self.top_k
        return needed._replace(backward=needed.backward - 4 * self.heads * unchosen * self.d_query)


def nats_from_even(usage: Tensor) -> float:
    """Return the Kullback-Leibler divergence in nats from uniform, 1/M, of the shares of ``usage [M]`` (sum not 0)."""
    share = wide(usage) / usage.sum()
    return torch.xlogy(share, share).sum().item() + math.log(len(usage))
