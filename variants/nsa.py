"""Native sparse attention: gated branches over a window, summaries of blocks, and the bytes of
selected blocks.

    y_t = W_o concat_h sum_c g_ch o_ch,   o_ch = Attention(q_th, K_c, V_c),
    g_c = sigmoid(W_c x_t + b_c)

(2502.11089, 3.2 and 3.3). Blocks have l bytes. The branches c are

- compressed: one key and value for each finished block (``compressor.py``), with the position of
  its last byte;
- selected: the bytes of ``selected`` blocks. One of them has the nearest key; the others have the
  largest attention weights in the compressed branch, summed over the query heads of a key-value
  head. The selection has no gradient;
- window: the w nearest keys, by any backend of attention.

A query sees a finished block only if all of its bytes are among the query's S keys. Branches share
queries. The window has separate keys and values; the other two branches share keys and values,
which are carried unrotated. Each segment computes summaries again, so that the compressor gets a
gradient.

Departures from the paper: there each branch has its own keys, summarised blocks overlap and are
shorter than selected ones, an MLP computes summaries and gates, and the first block and the two
nearest are always selected."""

from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.utils import checkpoint

from variants.attention import Attention
from variants.attention_span import AttentionSpan
from variants.compressor import Compressor
from variants.context import last
from variants.contract import (
    Honours,
    LayerContext,
    Metrics,
    State,
    Stats,
    SublayerOutput,
    check_numbers,
)
from variants.key_shift import KeyShift
from variants.multi_head import HeadKeywords, head_means, head_stats, start_of

BRANCHES = "compressed", "selected", "window"
QUERIES_AT_ONCE = 128
"""Queries that read summaries and blocks in one step; it changes only the cost."""


class NativeSparse(Attention):
    """Causal attention over the last S positions by three gated branches.

    Args:
        block: l, bytes of a block, from 1 to S.
        selected: blocks whose bytes a query reads, from 1.
        window: w, keys of the window branch, from 1; None for S / 4.
        compressor: see ``Compressor``.
        context, kv_heads, and keywords ``heads``: see ``MultiHead``."""

    honours = Honours(position={"rotate"}, attend_self={True, False}, span=True)

    def __init__(
        self,
        context: LayerContext,
        *,
        block: int = 16,
        selected: int = 4,
        window: int | None = None,
        compressor: str = "softmax",
        kv_heads: int | None = None,
        **heads: Unpack[HeadKeywords],
    ):
        check_numbers(1, block=block, selected=selected, window=window)
        if block > context.span:
            raise ValueError(
                f"block={block}: allowed are integers from 1 to model.span={context.span}"
            )
        self.window = max(1, context.span // 4) if window is None else window
        span = AttentionSpan(replace(context, span=min(self.window, context.span)))
        super().__init__(context, kv_heads=kv_heads, **heads, span=lambda _: span)
        self.block = self.period = block
        self.selected = selected
        self.max_keys = context.span
        bias = heads.get("bias", False)
        # keys and values of blocks
        self.far = nn.Linear(context.d_model, 2 * self.kv_heads * self.d_head, bias=bias)
        self.far_shift = KeyShift(self.kv_heads, self.d_head) if self.key_past else None
        self.branch_gates = nn.Linear(context.d_model, len(BRANCHES) * self.heads)
        sizes = {"ratio": block, "heads": self.kv_heads, "d_head": self.d_head}
        self.compressor = Compressor(context, kind=compressor, share="none", **sizes)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        """Map one segment. The state is that of the window, keys and values of blocks ``[B, P, 2 G
        K]``, and the number of bytes in the open block ``[B]``. If keys are shifted, the last
        unmixed keys of window and blocks are carried, too."""
        start = start_of(x, start)
        rows = self.far(x)
        initial = (None, rows[:, :0], torch.zeros_like(start))
        window_state, past, phase, *far_before = initial if state is None else state
        window_state, before = self.split_state(window_state)
        segment = self.project_qkv(x, start, before)
        rows, far_key = self.shift_rows(rows, far_before[0] if far_before else None, "far_shift")
        attend = self._attend_window if self.is_traced(x.device) else self._attend_window_uncompiled
        by_window, window_state, _ = attend(segment, window_state, False)
        all_rows = torch.cat([past.to(rows.dtype), rows], dim=1)
        by_blocks = self._attend_blocks(segment.q, all_rows, segment.start, phase)
        gates = rearrange(self.branch_gates(x).sigmoid(), "B T (n H) -> n B H T 1", H=self.heads)
        y = sum(gate * branch for gate, branch in zip(gates, (*by_blocks, by_window), strict=True))
        stats = None
        if collect_stats:
            stats = head_stats(y, **dict(zip(BRANCHES, gates[..., 0].detach(), strict=True)))
        window_state = self.join_state(window_state, segment.last_key)
        rows = last(self.reach() - self.key_past, 1, past, rows)
        state = (window_state, rows, (phase + x.shape[1]) % self.block)
        state = state if far_key is None else (*state, far_key)
        return SublayerOutput(self.join(y), state, stats=stats)

    def _attend_blocks(
        self, q: Tensor, rows: Tensor, start: Tensor, phase: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs of the compressed and the selected branch, ``[B, H, T, K]`` each.

        ``rows [B, P + T, 2 G K]`` are keys and values of past and segment. They are shifted so that
        the blocks of all streams align, and the first P // l blocks are before the segment. Rows
        beyond either end are hidden."""
        size = self.block
        length = q.shape[2]
        past = rows.shape[1] - length
        past_blocks = past // size
        n_blocks = past // size + (length + 2 * size - 2) // size
        offset = past + size - phase - past_blocks * size
        index = offset[:, None] + torch.arange(n_blocks * size, device=q.device)
        rows = F.pad(rows, (0, 0, size, 0))
        rows = rows.gather(
            1, index.clamp(max=rows.shape[1] - 1)[..., None].expand(-1, -1, rows.shape[2])
        )
        # stream position of the first block's first byte
        first = start - phase - past_blocks * size
        k, v = (self.split(part) for part in rows.chunk(2, dim=-1))
        blocks = torch.cat([self.position.rotate(k, first), v], dim=-1).unflatten(
            2, (n_blocks, size)
        )
        k, v = self.compressor(rows.unflatten(1, (n_blocks, size))).chunk(2, dim=-1)
        ends = first[:, None] + size * torch.arange(1, n_blocks + 1, device=q.device) - 1
        k = rearrange(k, "B n (G K) -> (B n) G 1 K", K=self.d_head)
        k = rearrange(self.position.rotate(k, ends.flatten()), "(B n) G 1 K -> B G n K", n=n_blocks)
        v = rearrange(v, "B n (G K) -> B G n K", K=self.d_head)
        outputs = []
        recomputed = partial(checkpoint.checkpoint, self._attend, use_reentrant=False)
        for begin in range(0, length, QUERIES_AT_ONCE):
            end = min(begin + QUERIES_AT_ONCE, length)
            newest = torch.arange(begin, end, device=q.device) - self.shift
            # visible blocks: low to high
            low = max(0, (begin - self.shift - self.max_keys + 1) // size + past_blocks)
            high = max(1, (end - self.shift + size - 2) // size + past_blocks + 1)
            starts = (
                size * (torch.arange(low, high, device=q.device) - past_blocks) - phase[:, None]
            )
            slices = (part[:, :, low:high] for part in (k, v, blocks))
            # Each query reads a copy of its blocks. This needs much memory, so the backward pass
            # copies them again.
            attend = recomputed if torch.is_grad_enabled() else self._attend
            outputs.append(
                attend(q[:, :, begin:end], *slices, newest=newest, starts=starts, oldest=-past)
            )
        return tuple(torch.cat(parts, dim=2) for parts in zip(*outputs, strict=True))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        *,
        newest: Tensor,
        starts: Tensor,
        oldest: int,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs ``[B, H, Q, K]`` of both branches for Q queries and n blocks.

        Args:
            q: ``[B, H, Q, K]``.
            k, v: summaries, ``[B, G, n, K]``.
            blocks: concatenated keys and values, ``[B, G, n, l, 2 K]``.
            newest: positions of the nearest keys ``[Q]``.
            starts: positions of the blocks' first bytes ``[B, n]``.
            oldest: position of the earliest byte of the state. All positions count from the
                segment's first byte."""
        drop = partial(F.dropout, p=self.dropout, training=self.training)
        size = self.block
        q = rearrange(q, "B (G h) Q K -> B G h Q K", G=k.shape[1])
        # from the nearest key to the block's first byte, [B, Q, n]
        distance = newest[:, None] - starts[:, None]
        finished = (distance >= size - 1) & (distance < self.max_keys) & (starts >= oldest)[:, None]
        weights = _softmax(einsum(q, k, "B G h Q K, B G n K -> B G h Q n"), finished[:, None, None])
        compressed = einsum(drop(weights), v, "B G h Q n, B G n K -> B G h Q K")
        importance = weights.detach().sum(2).masked_fill(~finished[:, None], -1)
        has_nearest = (distance >= 0) & (distance < size)
        importance = importance.masked_fill(has_nearest[:, None], torch.inf)
        # ties: earlier blocks first
        importance, indices = importance.sort(dim=-1, descending=True, stable=True)
        # [B, G, Q, s]
        importance = importance[..., : self.selected]
        indices = indices[..., : self.selected]
        first_of_head = torch.arange(k.shape[0] * k.shape[1], device=q.device).view(
            *k.shape[:2], 1, 1
        )
        first_of_head = blocks.shape[2] * first_of_head
        kv = F.embedding(indices + first_of_head, blocks.flatten(0, 2).flatten(1)).unflatten(
            -1, (size, -1)
        )
        positions = starts[:, None, None].expand(*indices.shape[:3], -1).gather(-1, indices)
        positions = positions[..., None] + torch.arange(size, device=q.device)  # [B, G, Q, s, l]
        newest = newest[:, None, None]
        visible = (
            (positions <= newest) & (positions > newest - self.max_keys) & (positions >= oldest)
        )
        visible = visible & (importance >= 0)[..., None]
        k, v = kv.flatten(3, 4).chunk(2, dim=-1)  # [B, G, Q, s l, K]
        weights = _softmax(
            einsum(q, k, "B G h Q K, B G Q j K -> B G h Q j"), visible.flatten(3)[:, :, None]
        )
        selected = einsum(drop(weights), v, "B G h Q j, B G Q j K -> B G h Q K")
        return compressed.flatten(1, 2), selected.flatten(1, 2)

    def reach(self) -> int:
        return self.max_keys - 1 + self.shift + self.key_past

    def set_span(self, span: int) -> None:
        super().set_span(min(span, self.window))
        self.max_keys = span

    def trim(self, state: State) -> State:
        if state is None:
            return None
        return (
            super().trim(state[0]),
            last(self.reach() - self.key_past, 1, None, state[1]),
            *state[2:],
        )

    def metrics(self, stats: Stats) -> Metrics:
        """Return the branches' mean gates: ``compressed``, ``selected`` and ``window``, ``[H]``
        each."""
        return head_means(stats, *BRANCHES)

    def inspect(self, x: Tensor) -> None:
        """Return None, because three softmaxes are not one map."""

    def matrix_sizes(self) -> int:
        return super().matrix_sizes() + self.far.weight.numel() + self.branch_gates.weight.numel()

    def ideal_flops(self) -> int:
        """Count projections, summaries, and products of the three branches, as a mean over the
        phases of a block."""
        size = self.block
        keys = 0
        for phase in range(size):  # bytes of the open block
            finished = (self.max_keys - phase) // size
            # without the block that has the nearest key
            selectable = finished if phase else finished - 1
            keys += finished + (phase or size) + size * min(self.selected - 1, selectable)
        return round(
            self._forward_flops(self.span.span + keys / size) + self.compressor.ideal_flops()
        )

    def needed_flops(self, segment: int, *, carried: int) -> None:
        """Return None, because the number of keys with a gradient depends on the selected
        blocks."""


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax of ``visible`` scores over the last dimension; zeros for a query that
    sees none."""
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0).to(scores.dtype)
