"""Product-key memory: a table of M = C*C values, of which each byte reads the few with the largest
query-key scores.

Per head, a query q = norm(Wq x + b) is split into halves (q1, q2). Slot (i, j) has the key (c_i,
c'_j), with one half-key from each of two sets of C. Its score is c_i.q1 + c'_j.q2, and

    y = sum over heads, and the top k slots (i, j) of each, of w_ij v_ij,
    w = softmax over the k scores.

The search is exact and computes few of the M sums. Let the scores of each half be sorted, with
ranks from 1. All of the i*j - 1 other pairs with ranks up to i and j have sums at least as large as
the pair (i, j). So only pairs with i*j <= k can be in the top k (119 of 1024 at k = 32).

Lample et al. 2019, arXiv 1907.05242, section 3. Departures from the paper:
- The default is LayerNorm over a whole query, with weights shared by the heads. The paper's
  BatchNorm computes statistics over future bytes and other streams; it is an option that declares
  these limits, and Wq then has no bias.
- Initial half-keys are uniform in +-1/sqrt(d_query/2), as in the authors' code, but from the run's
  generator. There is no temperature and no 1/sqrt(d_query): initial scores have variance 2/3, and
  the gain of LayerNorm can scale them.
- ``activation: relu`` weights the k slots by max(0, score). 2310.10837 reports better results with
  it on bytes, but reads all slots."""

import math
from typing import NotRequired, TypedDict

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from variants.contract import (
    Inspection,
    LayerContext,
    Metrics,
    NeededFlops,
    State,
    Stats,
    Sublayer,
    SublayerOutput,
    check_choice,
    check_numbers,
    wide,
)
from variants.kernels import product_search, table
from variants.kernels.carried_sums import without_autocast

SCORES_AT_ONCE = 2**20
"""Scores that a CPU computes at a time: 4 MiB in float32, about the size of a cache. With fewer,
the start of threads takes a larger share of the time."""


def candidate_pairs(*, top_k: int, half_keys: int) -> Tensor:
    """Return the pairs of ranks, from 0, whose sums can be in the top k of two sorted lists,
    int64 ``[2, P]``."""
    ranks = range(1, min(top_k, half_keys) + 1)
    return torch.tensor(
        [(i - 1, j - 1) for i in ranks for j in ranks if i * j <= top_k]
    ).T.contiguous()


def search(scores: Tensor, *, top_k: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest of all sums ``scores[0, ..., i] + scores[1, ..., j]``, exactly.
    Of equal sums, the sums of lower slots are returned, unless sums are infinite or equal only
    after rounding.

    Args:
        scores: ``[2, ..., C]``.
        pairs: ``candidate_pairs`` for these sizes, on the device of ``scores``.

    Returns: i and j, int64 ``[2, ..., top_k]``, in descending order of their sums, and the sums
        ``[..., top_k]``, without a gradient."""
    # ``topk`` does not define which of equal scores it returns.
    sorted_scores, indices = scores.detach().sort(dim=-1, descending=True, stable=True)
    # [2, ..., P]
    ranks = pairs.view(2, *(1,) * (scores.dim() - 2), -1).expand(*scores.shape[:-1], -1)
    i, j = halves = indices.gather(-1, ranks)
    by_slot = (i * scores.shape[-1] + j).argsort(dim=-1)
    # Scores of low precision are added in float32, because rounded sums could have another order.
    sums = at_least_float32(sorted_scores.gather(-1, ranks)).sum(0).gather(-1, by_slot)
    sums, top = (part[..., :top_k] for part in sums.sort(dim=-1, descending=True, stable=True))
    top = by_slot.gather(-1, top)
    return halves.gather(-1, top.expand(2, *top.shape)), sums


class SelectSlots(torch.autograd.Function):
    """Selection of the ``top_k`` slots of largest score, a block of bytes at a time. The backward
    pass needs slots, not scores."""

    @staticmethod
    def forward(
        ctx, query: Tensor, keys: Tensor, pairs: Tensor, top_k: int, kernel: bool
    ) -> tuple[Tensor, Tensor]:
        """Return slots, int64 ``[n, H, top_k]``, and their scores in float32 or wider.

        Args:
            query: half-queries of n bytes, ``[n, 2 H, d]``; the two halves of a head are
                neighbours.
            keys: ``[2 H, C, d]``, the half-keys for each half.
            pairs: ``candidate_pairs`` for these sizes.
            kernel: whether to search by ``product_search``, on a CPU only."""
        shape = (len(query), keys.shape[0] // 2, top_k)
        half_keys = keys.shape[1]
        exact_query = at_least_float32(query)
        exact_keys = at_least_float32(keys)
        slots = pairs.new_empty(shape)
        sums = exact_query.new_empty(shape)
        for part in _blocks(query, keys):
            # with scores in bfloat16, other slots would be selected
            with without_autocast(query.device):
                scores = exact_query[part].transpose(0, 1) @ exact_keys.mT  # [2 H, b, C]
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
        half_keys = keys.shape[1]
        exact_query = at_least_float32(query)
        exact_keys = at_least_float32(keys)
        d_query = torch.empty_like(query)
        d_keys = torch.zeros_like(keys)
        for part in _blocks(query, keys):
            slot = rearrange(slots[part], "b h k -> h b k")
            halves = torch.stack([slot // half_keys, slot % half_keys], 1)  # [H, 2, b, k]
            d_halves = rearrange(d_sums[part], "b h k -> h 1 b k").expand_as(halves)
            d_scores = d_halves.new_zeros(*halves.shape[:3], half_keys).scatter_add_(
                -1, halves, d_halves
            )
            d_scores = d_scores.flatten(0, 1)  # [2 H, b, C]
            d_query[part] = (d_scores @ exact_keys).transpose(0, 1)
            d_keys += d_scores.mT @ exact_query[part].transpose(0, 1)
        return d_query, d_keys, None, None, None


def _blocks(query: Tensor, keys: Tensor) -> list[slice]:
    """Cut the bytes into blocks: on a CPU, blocks with ``SCORES_AT_ONCE`` scores; on other
    devices, a single block."""
    if query.device.type == "cpu":
        size = max(1, SCORES_AT_ONCE // keys[..., 0].numel())
    else:
        size = max(1, len(query))
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
    """A table of values that are read by content, in place of a feed-forward block or in addition
    to it.

    Args:
        half_keys: C, half-keys in each of the two sets of a head; the table has C*C slots.
        top_k: slots that a head reads per byte, from 1 to ``half_keys``; from 2 with softmax,
            because a softmax over one score is constant and gives no gradient to keys and queries.
        heads: heads of the memory, which need not equal the attention heads.
        d_query: width of a head's query, even.
        query_norm: ``layer``, ``batch`` or ``none``. ``batch`` declares four ``limits``, because
            the statistics of a batch in training include future bytes and other streams.
        activation: ``softmax`` or ``relu``.
        share: ``layer`` for a table per layer, ``network`` for one table for all layers with the
            same number of slots.
        sparse: whether the gradient of the table is a sparse tensor."""

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
        fewest = 1
        if activation == "softmax":
            fewest = 2
        if not fewest <= top_k <= half_keys:
            sizes = f"half_keys={half_keys} and activation={activation}"
            raise ValueError(
                f"top_k={top_k} with {sizes}: allowed are integers from {fewest} to half_keys"
            )
        if d_query < 2 or d_query % 2:
            raise ValueError(f"d_query={d_query}: allowed are even integers from 2")
        self.half_keys = half_keys
        self.top_k = top_k
        self.heads = heads
        self.d_query = d_query
        self.activation = activation
        self.sparse = sparse
        self.wanted_backend = context.backend
        self.tables = {"values": heads * top_k}

        if query_norm == "batch":
            self.limits = frozenset(
                {"causal_in_training", "streams_apart", "segments", "training_as_evaluation"}
            )
        self.query = nn.Linear(context.d_model, heads * d_query, bias=query_norm != "batch")
        self.norm_width = heads * d_query if query_norm == "batch" else d_query
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.norm = norms[query_norm](self.norm_width)

        bound = (d_query / 2) ** -0.5
        self.keys = nn.Parameter(
            torch.empty(heads, 2, half_keys, d_query // 2).uniform_(-bound, bound)
        )

        def make_values() -> nn.Parameter:
            return nn.Parameter(torch.randn(half_keys**2, context.d_model) * context.d_model**-0.5)

        # A parameter, not the weight of an nn.Linear, so that an optimizer does not apply its rule
        # for matrices to it.
        size = ("values", half_keys, context.d_model)
        self.values = context.shared(ProductKeyMemory, size, make_values, share=share)
        self.register_buffer(
            "pairs", candidate_pairs(top_k=top_k, half_keys=half_keys), persistent=False
        )

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        slots, weights = (part.flatten(1) for part in self._select_slots(x))  # [n, H top_k]
        y = table.sum_rows(self.values, slots, weights, sparse=self.sparse)
        return SublayerOutput(
            y.view_as(x), stats=self.usage(slots, weights.detach()) if collect_stats else None
        )

    def _select_slots(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots and their weights, ``[n, H, top_k]`` each."""
        query = self.norm(self.query(x).reshape(-1, self.norm_width))
        query = query.reshape(-1, 2 * self.heads, self.d_query // 2)
        kernel = self.searches_by_kernel(x.device)
        slots, sums = SelectSlots.apply(
            query, self.keys.flatten(0, 1), self.pairs, self.top_k, kernel
        )
        return slots, sums.softmax(-1) if self.activation == "softmax" else sums.relu()

    @torch.no_grad()
    def inspect(self, x: Tensor) -> Inspection:
        slots, weights = (
            rearrange(part, "(B T) H k -> B H T k", B=len(x)) for part in self._select_slots(x)
        )
        return Inspection(entries=slots, shares=weights)

    def searches_by_kernel(self, device: torch.device) -> bool:
        """Return whether the search is the one in C++, for a CPU; otherwise it is in plain
        PyTorch."""
        return self.wanted_backend in ("auto", "kernel") and product_search.obstacle(device) is None

    def backend(self, device: torch.device, *, training: bool) -> str:
        if self.searches_by_kernel(device):
            return "kernel"
        return "plain"

    def usage(self, slots: Tensor, weights: Tensor) -> Stats:
        """Return reads of each slot, int64 ``[M]``, sums of their weights, float64 ``[M]``, and
        the number of bytes."""
        flat = slots.flatten()
        count = torch.zeros(self.values.shape[0], dtype=torch.int64, device=slots.device)
        weight = wide(torch.zeros_like(count, dtype=torch.float32))
        return {
            "usage_count": count.scatter_add(0, flat, torch.ones_like(flat)),
            "usage_weight": weight.scatter_add(0, flat, wide(weights.flatten())),
            "bytes": torch.tensor(slots.shape[0], device=slots.device),
        }

    def metrics(self, stats: Stats) -> Metrics:
        """Return the percentage of slots with a positive weight, the number of bytes, and two
        divergences from uniform, ln M + sum p ln p. p is a slot's share of the reads, or of the
        weights unless all are 0 (relu)."""
        if not stats:
            return {}
        percent = 100 * (stats["usage_weight"] > 0).float().mean().item()
        metrics = {"usage_percent": percent, "usage_bytes": float(stats["bytes"])}
        metrics["kl_count_nats"] = divergence_from_uniform(stats["usage_count"])
        if percent:
            metrics["kl_weighted_nats"] = divergence_from_uniform(stats["usage_weight"])
        return metrics

    def ideal_flops(self) -> int:
        """Count the products of queries, of scores of the 2 C half-keys, and of reads."""
        d_model = self.values.shape[1]
        per_head = d_model * self.d_query + self.half_keys * self.d_query + self.top_k * d_model
        return 2 * self.heads * per_head

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count products only. In the backward pass, only half-keys of selected slots count,
        once for each slot."""
        needed = NeededFlops.of_products(self.ideal_flops())
        unused = self.half_keys - self.top_k
        return needed._replace(backward=needed.backward - 4 * self.heads * unused * self.d_query)


def divergence_from_uniform(usage: Tensor) -> float:
    """Return the Kullback-Leibler divergence in nats of the shares of ``usage [M]`` from 1/M;
    the sum must not be 0."""
    share = wide(usage) / usage.sum()
    return torch.xlogy(share, share).sum().item() + math.log(len(usage))
