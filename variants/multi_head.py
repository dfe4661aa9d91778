"""The base class of mechanisms with H heads of width K, with projections to queries, keys and
values."""

from typing import TypedDict

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.context import last
from variants.contract import LayerContext, Metrics, State, Stats, Sublayer, check_numbers, wide
from variants.key_shift import KeyShift

EPSILON = 1e-6
"""Added to a mean or a sum of squares before the square root."""


class HeadKeywords(TypedDict, total=False):
    """Keywords that a mechanism passes to ``MultiHead``."""

    d_head: int | None
    bias: bool
    zero_init: bool
    key_shift: bool


class MultiHead(Sublayer):
    """A sublayer with linear maps of its input to queries, keys and values, and of head outputs to
    width D.

    Args:
        context: see ``LayerContext``.
        d_head: head width K, or None for D / H.
        bias: whether the projections have biases.
        kv_heads: G, key-value heads, each read by H / G query heads (2305.13245; G = 1 is
            1911.02150); None for H.
        zero_init: start W_o at zero, so that the sublayer adds nothing at first.
        key_shift: whether each key is mixed with the key before it (``key_shift.py``)."""

    maps: tuple[str, ...] = ("query", "key", "value")
    """Names of the linear maps of the input."""
    scaled: bool = True
    """Whether queries are divided by sqrt(K)."""

    def __init__(
        self,
        context: LayerContext,
        *,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = True,
        kv_heads: int | None = None,
        key_shift: bool = False,
    ):
        super().__init__()
        self.both = context.direction == "both"
        if self.both:
            if key_shift:
                raise ValueError("key_shift=true: with objective.direction=both allowed is false")
            # the later bytes of a segment are seen, those after it are not
            self.limits = self.limits | {"segments"}
        check_numbers(1, d_head=d_head, null="null for D / H")
        if kv_heads is not None and (kv_heads < 1 or context.heads % kv_heads):
            raise ValueError(
                f"kv_heads={kv_heads}: must divide model.heads={context.heads}; null for "
                "model.heads"
            )
        if d_head is None and context.d_model % context.heads:
            raise ValueError(
                f"model.heads={context.heads} must divide model.d_model={context.d_model}"
            )
        self.heads = context.heads
        self.d_head = d_head or context.d_model // context.heads
        self.kv_heads = kv_heads or self.heads
        for name in self.maps:
            heads = self.kv_heads if name in ("key", "value") else self.heads
            setattr(self, name, nn.Linear(context.d_model, heads * self.d_head, bias=bias))
        self.output = nn.Linear(self.heads * self.d_head, context.d_model, bias=bias)
        if zero_init:
            nn.init.zeros_(self.output.weight)
        self.key_shift = KeyShift(self.kv_heads, self.d_head) if key_shift else None
        self.key_past = int(key_shift)  # bytes before a key on which it depends
        self.shift = 1
        if context.attend_self:
            self.shift = 0
        self.cache = context.cache
        self.dropout = context.dropout
        self.dropout_seed = context.dropout_seed
        self.wanted_backend = context.backend

    def project(self, x: Tensor, *names: str) -> list[Tensor]:
        """Project ``x`` by each map to ``[B, H, T, K]``, with one matrix product."""
        widths = [getattr(self, name).out_features for name in names]
        return [self.split(part) for part in self.project_flat(x, *names).split(widths, dim=-1)]

    def project_flat(self, x: Tensor, *names: str, heads: slice | None = None) -> Tensor:
        """Compute ``project``, with the outputs of the n maps concatenated, ``[B, T, n H K]``; only
        of ``heads``, if they are given."""

        def concatenate(parameter: str) -> Tensor | None:
            parts = []
            for name in names:
                part = getattr(getattr(self, name), parameter)
                if part is None:
                    return None
                if heads is not None:
                    part = part.unflatten(0, (-1, self.d_head))[heads].flatten(0, 1)
                parts.append(part * self.d_head**-0.5 if self.scaled and name == "query" else part)
            return torch.cat(parts)

        return F.linear(x, concatenate("weight"), concatenate("bias"))

    def split_state(self, state: State) -> tuple[State, Tensor | None]:
        """Return a state without the last unmixed key that ``join_state`` added, and this key or
        None."""
        if self.key_shift is None or state is None or self.cache == "hidden":
            return state, None
        return state

    @staticmethod
    def join_state(state: State, last_key: Tensor | None) -> State:
        if last_key is None:
            return state
        return (state, last_key)

    def shift_keys(
        self, k: Tensor, before: Tensor | None, name: str = "key_shift"
    ) -> tuple[Tensor, Tensor | None]:
        """Mix keys by the ``KeyShift`` called ``name``. Return them and the last unmixed key, if
        a state needs it."""
        shift = getattr(self, name)
        if shift is None:
            return k, None
        return shift(k, before), last(1, k.dim() - 2, None, k) if self.cache == "kv" else None

    def shift_rows(
        self, rows: Tensor, before: Tensor | None, name: str = "key_shift", *, first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Do the same for ``rows [B, T, m]``, whose keys ``[B, T, G K]`` are the columns
        from ``first`` on."""
        if getattr(self, name) is None:
            return rows, None
        columns = (first, first + self.kv_heads * self.d_head)
        left, k, right = rows.tensor_split(columns, dim=-1)
        k, last_key = self.shift_keys(k, before, name)
        return torch.cat([left, k, right], dim=-1), last_key

    def split(self, x: Tensor) -> Tensor:
        """Split ``[B, T, H K]`` into heads, ``[B, H, T, K]``."""
        return rearrange(x, "B T (H K) -> B H T K", K=self.d_head)

    def join(self, y: Tensor) -> Tensor:
        """Map head outputs ``[B, H, T, K]`` to ``[B, T, D]``."""
        return self.output(rearrange(y, "B H T K -> B T (H K)"))

    def matrix_sizes(self) -> int:
        """Return the total size of the projections' matrices, which is their multiply-adds per
        byte."""
        return sum(getattr(self, name).weight.numel() for name in (*self.maps, "output"))

    def check_span(self, span: int) -> None:
        """Raise ValueError for a span for which the position scheme has no positions."""
        if span < 1 or span > self.position.longest:
            raise ValueError(
                f"eval.span={span}: allowed are 1 to {self.position.longest} with these positions"
            )


def start_of(x: Tensor, start: Tensor | None) -> Tensor:
    """Return stream positions ``[B]`` of the first bytes of ``x [B, T, D]``: zeros if ``start``
    is None."""
    if start is None:
        return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return start


def head_stats(q: Tensor, **terms: Tensor) -> Stats:
    """Return statistics: the number of bytes of ``q [B, H, T, K]``, and sums ``[H]`` of each of
    ``terms [B, H, T]``."""
    sums = {name: wide(x).sum(dim=(0, 2)) for name, x in terms.items()}
    # a scalar of the CPU would split a GPU's graph
    n_bytes = torch.full((), q.shape[0] * q.shape[2], device=q.device)
    return {"bytes": wide(n_bytes)} | sums


def head_means(stats: Stats, *names: str) -> Metrics:
    """Return means ``[H]`` over bytes of the sums ``names`` of ``head_stats``, without those
    that ``stats`` lack."""
    return {name: stats[name] / stats["bytes"] for name in names if name in stats}
