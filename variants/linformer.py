"""Causal Linformer: learned projections summarise finished blocks of the past.

    s_j = sum_i E_i k_{jr+i},   u_j = sum_i F_i v_{jr+i}   over bytes i = 0 .. r-1 of block j
    y_t = W_o concat_h(softmax([q_t . k_m ; q_t . s_j] / sqrt(K)) [v_m ; u_j])

One softmax has the w nearest keys k_m and the summaries s_j of blocks: at most w + S/r keys per
query, not S. In the paper (2006.04768, 4) a summary mixes the whole sequence, so it depends on
future bytes, which no mask hides. Here a summary covers one block, with the same weights in every
block. The paper has no window; without it, queries would not see the open block, which is not
finished.

- A query sees the summary of a finished block if the block's first byte is outside the window, and
  all of its bytes are among the query's S positions. Keys are summarised unrotated; a summary has
  the position of its block's last byte.
- With ``top_k`` a query reads only the summaries of largest index score (A x_t) . (C mean_i k_i) /
  sqrt(I), the same for all heads. As in DeepSeek-V3.2 (2512.02556, 2.1), only KL(p_t || softmax of
  index scores) over all visible summaries trains the index. p_t is the mean over heads of the
  attention weights among these summaries. p_t and the inputs of the index are detached. The loss
  has no coefficient, because nothing else trains the index. DeepSeek-V3.2 differs in two things:
  its index score sums ReLUs over index heads, and its sparse stage of training takes the KL over
  the selected keys only.
- A block is summarised when its first byte is about to leave the window, not earlier: a carried
  summary gives the compressor no gradient.
- ``compressor: softmax`` with ``top_k`` is a small version of compressed attention of 2025-26
  (2502.11089, 3.3, DeepSeek-V4)."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils import checkpoint

from variants.backends import CpuKernel, OnKernels, Plain
from variants.blocks import Blocks, top_mask
from variants.compressor import Compressor
from variants.contract import (
    WAYS,
    Honours,
    LayerContext,
    Metrics,
    NeededFlops,
    State,
    Stats,
    SublayerOutput,
    check_numbers,
)
from variants.kernels.window import count_pairs, replaced
from variants.multi_head import MultiHead, head_means, head_stats, start_of
from variants.window_and_summaries import (
    Summaries,
    WindowKeys,
    by_bands,
    by_kernel,
    summary_weights,
)


class Carried(NamedTuple):
    """The state. Rows are padded in front, so that streams of any length fit into one batch. The
    last three tensors are ``[1]`` before the first segment."""

    # unrotated keys and values [B, P, 2 H K] or inputs [B, P, D], of the window and the open block
    past: Tensor
    summaries: Tensor  # keys after position encoding, values and index keys, [B, N, 2 H K (+ I)]
    phase: Tensor  # bytes of the open block, int64 [B]
    past_bytes: Tensor  # bytes of the past that are not padding, int64 [B]
    finished: Tensor  # number of finished blocks, capped at N + lag (blocks.py), int64 [B]


class Linformer(MultiHead, OnKernels):
    """Causal attention over an exact window and summaries of finished blocks.

    Args:
        ratio: r, bytes of a block, from 1; a summary is one key and one value.
        window: w, keys of the window, from 1 to ``model.span`` - 1; None for S / 4.
        compressor, share: see ``Compressor``.
        top_k: summaries that a query reads, from 1; None for all.
        d_index: I, width of the index that ranks summaries, from 1.
        d_head, zero_init, key_shift: see ``MultiHead``."""

    honours = Honours(
        position=frozenset(WAYS), cache={"kv", "hidden"}, attend_self={True, False}, span=True
    )
    runs_on = (CpuKernel, Plain)

    def __init__(
        self,
        context: LayerContext,
        *,
        ratio: int = 16,
        window: int | None = None,
        compressor: str = "linear",
        share: str = "none",
        top_k: int | None = None,
        d_index: int = 32,
        d_head: int | None = None,
        zero_init: bool = True,
        key_shift: bool = False,
    ):
        check_numbers(1, ratio=ratio, window=window, top_k=top_k, d_index=d_index)
        super().__init__(context, d_head=d_head, zero_init=zero_init, key_shift=key_shift)
        window = max(1, context.span // 4) if window is None else window
        if context.span <= max(window, ratio - self.shift):
            least = f"above window={window} and ratio={ratio}{' - 1' * self.shift}"
            raise ValueError(
                f"model.span={context.span}: must be {least}, or no query sees a summary"
            )
        self.blocks = Blocks(ratio, window, context.span, self.shift, top_k)
        self.period = ratio
        self.inner = self.heads * self.d_head
        self.d_index = 0
        if top_k:
            self.d_index = d_index
        if top_k:
            self.limits = frozenset({"likelihood"})
            self.index_query = nn.Linear(context.d_model, d_index, bias=False)
            self.index_key = nn.Linear(self.inner, d_index, bias=False)
        sizes = {"ratio": ratio, "heads": self.heads, "d_head": self.d_head}
        self.compressor = Compressor(context, kind=compressor, share=share, **sizes)
        self.position = context.position(self.d_head)
        # carried inputs before those of P keys
        self.extra_rows = 0
        if self.cache == "hidden":
            self.extra_rows = self.key_past

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        start = start_of(x, start)
        state, before = self.split_state(state)
        carried = self._initial_state(x) if state is None else Carried(*state)
        (q,), segment = self.project(x, "query"), self.project_flat(x, "key", "value")
        past = carried.past.to(segment.dtype)
        if self.cache == "hidden":
            past = self.project_flat(carried.past.to(x.dtype), "key", "value")
            before = past[:, -1:, : self.inner]
            past = self.shift_rows(past, None)[0][:, self.key_past :]
        segment, last_key = self.shift_rows(segment, before)
        all_summaries = self._summarise(segment, past, start, carried)
        q = self.position.rotate(q, start)
        keys = self._window_keys(segment, past, start, carried)
        summaries, index_keys = self._chunk_summaries(x.shape[1], all_summaries, carried)
        loss = None
        if self.d_index:
            index_queries = self.blocks.chunked(self.index_query(x.detach()))
            scores = index_queries @ index_keys.mT * self.d_index**-0.5  # [B, n, Q, G]
            loss = None
            if self.training:
                loss = self._index_loss(q, summaries, scores)
            summaries = self._select_summaries(summaries, scores.detach())
        y = self._attend(q, keys, summaries)
        stats = None
        if collect_stats:
            stats = self._stats(q, keys, summaries)
        state = self._next_state(x if self.cache == "hidden" else segment, all_summaries, carried)
        return SublayerOutput(self.join(y), self.join_state(state, last_key), loss, stats)

    def _initial_state(self, x: Tensor) -> Carried:
        width = x.shape[-1] if self.cache == "hidden" else 2 * self.inner
        past = x.new_zeros(len(x), self.extra_rows, width)
        summaries = x.new_zeros(len(x), 0, 2 * self.inner + self.d_index)
        return Carried(past, summaries, *torch.zeros(3, 1, dtype=torch.int64, device=x.device))

    def _summarise(self, segment: Tensor, past: Tensor, start: Tensor, carried: Carried) -> Tensor:
        """Return s_j and u_j, ``[B, N + M, 2 H K (+ I)]``: the carried ones, padded to N, then
        those of M = ceil(T / r) blocks. The first of the M blocks is ``lag`` blocks before the
        open one, and the last may be unfinished."""
        ratio = self.blocks.ratio
        phase = carried.phase
        count = -(-segment.shape[1] // self.blocks.ratio)
        rows = torch.cat([_last_rows(past, self.blocks.unsummarised), segment], dim=1)
        rows = _rows_from(rows, (ratio - 1 - phase).expand(len(rows)), count * ratio).unflatten(
            1, (count, ratio)
        )
        s, u = self.compressor(rows).chunk(2, dim=-1)
        # of blocks, from the open one
        ends = torch.arange(1, count + 1, device=segment.device) - self.blocks.lag
        # position of a block's last byte, [B, M]
        last = (start - phase)[:, None] + ratio * ends - 1
        s = rearrange(s, "B M (H K) -> (B M) H 1 K", H=self.heads)
        s = rearrange(self.position.rotate(s, last.flatten()), "(B M) H 1 K -> B M (H K)", M=count)
        index_keys = []
        if self.d_index:
            index_keys = [self.index_key(rows[..., : self.inner].mean(dim=2).detach())]
        new = torch.cat([s, u, *index_keys], dim=-1)
        return torch.cat(
            [_last_rows(carried.summaries.to(new.dtype), self.blocks.max_visible), new], dim=1
        )

    def _window_keys(
        self, segment: Tensor, past: Tensor, start: Tensor, carried: Carried
    ) -> WindowKeys:
        """Return keys, after position encoding, and values that windows may include."""
        past = _last_rows(past, min(self.blocks.window_past, past.shape[1]))
        tensors = []
        for rows, position in ((segment, start), (past, start - past.shape[1])):
            k, v = rows.chunk(2, dim=-1)
            tensors += [self.position.rotate(self.split(k), position), self.split(v)]
        return WindowKeys(*tensors, carried.past_bytes)

    def _chunk_summaries(
        self, length: int, summaries: Tensor, carried: Carried
    ) -> tuple[Summaries, Tensor]:
        """Return G summaries for each of n chunks of Q queries, and their index keys ``[B, n, G,
        I]``."""
        blocks, (chunks, size), device = self.blocks, self.blocks.chunks(length), summaries.device
        first = size * torch.arange(chunks, device=device)[:, None]  # [n, 1]
        # [n, G]; 0 is the first carried summary
        j = first // blocks.ratio + blocks.visible_indices(size, device)
        # Not ``summaries[:, j]``: on a GPU, TorchInductor (2.11 and 2.13) never ends simplifying
        # such an index.
        step = max(1, size // blocks.ratio)
        n_visible = j.shape[1]
        missing = step * (chunks - 1) + n_visible - summaries.shape[1]
        # [B, n, G, 2 H K (+ I)]
        rows = F.pad(summaries, (0, 0, 0, missing)).unfold(1, n_visible, step).mT
        s, u, index_keys = rows.split([self.inner, self.inner, self.d_index], dim=-1)
        k, v = (rearrange(part, "B n G (H K) -> B n H G K", H=self.heads) for part in (s, u))
        phase = carried.phase[:, None, None, None]
        finished = carried.finished[:, None, None, None]
        max_finished = blocks.max_visible + blocks.lag
        t = (first + torch.arange(size, device=device))[:, :, None]
        # from the query to the block's first byte
        distance = phase + t + blocks.ratio * (max_finished - j[:, None])
        visible = (distance >= blocks.nearest) & (distance < blocks.span + blocks.shift)
        visible = visible & (j[:, None] >= max_finished - finished)
        return Summaries(k, v, visible, distance - (blocks.ratio - 1) - blocks.shift), index_keys

    def _select_summaries(self, summaries: Summaries, scores: Tensor) -> Summaries:
        """Hide the summaries that a query does not read, by index scores ``[B, n, Q, G]``."""
        visible = summaries.visible.expand_as(scores)
        top = top_mask(
            scores.masked_fill(~visible, -torch.inf), self.blocks.n_read(scores.shape[-1])
        )
        return replaced(summaries, visible=visible & top)

    def _index_loss(self, q: Tensor, summaries: Summaries, scores: Tensor) -> Tensor:
        """Return KL(p_t || softmax of index scores ``[B, n, Q, G]``), as a mean over bytes. The KL
        of a query that sees no summary is 0."""
        p = summary_weights(q, summaries, blocks=self.blocks, position=self.position).mean(dim=2)
        hidden = ~summaries.visible
        scores = scores.to(p.dtype).masked_fill(hidden, torch.finfo(p.dtype).min)
        terms = F.kl_div(scores.log_softmax(dim=-1).masked_fill(hidden, 0), p, reduction="none")
        sums = terms.sum(dim=-1).flatten(1)[:, : q.shape[2]]  # [B, T]
        return sums.sum() / sums.numel()

    def _attend(self, q: Tensor, keys: WindowKeys, summaries: Summaries) -> Tensor:
        """Return head outputs ``[B, H, T, K]``."""
        options = {"blocks": self.blocks, "position": self.position}
        if self.chosen_backend(q.device).reads_parts:
            return by_kernel(q, keys, summaries, **options)
        options |= {"dropout": self.dropout if self.training else 0.0}
        if self.d_index and torch.is_grad_enabled():
            # With ``top_k`` blocks may be short and summaries many, so the backward pass computes
            # scores again.
            return checkpoint.checkpoint(
                by_bands, q, keys, summaries, use_reentrant=False, **options
            )
        return by_bands(q, keys, summaries, **options)

    @torch.no_grad()
    def _stats(self, q: Tensor, keys: WindowKeys, summaries: Summaries) -> Stats:
        """Measure the attention mass on summaries, with values of 1 on summaries and of 0 in the
        window."""
        keys = replaced(keys, v=torch.zeros_like(keys.v), old_v=torch.zeros_like(keys.old_v))
        summaries = replaced(summaries, v=torch.ones_like(summaries.v))
        return head_stats(q, summary_mass=self._attend(q, keys, summaries)[..., 0])

    def metrics(self, stats: Stats) -> Metrics:
        """Return ``summary_mass [H]``, the mean attention mass on summaries."""
        return head_means(stats, "summary_mass")

    @torch.no_grad()
    def _next_state(self, rows: Tensor, summaries: Tensor, carried: Carried) -> State:
        """Return the next state; ``rows`` are the segment's keys and values, or its inputs."""
        (streams, length, _), blocks = rows.shape, self.blocks
        # bytes since the beginning of the open block
        block_bytes = carried.phase.expand(streams) + length
        past_rows = blocks.past + self.extra_rows
        past = torch.cat([carried.past.to(rows.dtype), rows[:, -max(1, past_rows) :]], dim=1)
        return tuple(
            Carried(
                past=_last_rows(past, past_rows).clone(),
                summaries=_rows_from(summaries, block_bytes // blocks.ratio, blocks.max_visible),
                phase=block_bytes % blocks.ratio,
                past_bytes=(carried.past_bytes.expand(streams) + length).clamp(max=blocks.past),
                finished=(carried.finished + block_bytes // blocks.ratio).clamp(
                    max=blocks.max_visible + blocks.lag
                ),
            )
        )

    def reach(self) -> int:
        return self.blocks.reach + self.key_past

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.blocks = replace(self.blocks, span=span)

    def ideal_flops(self) -> int:
        """Count projections, the compressor, and scores and values of window and summaries, as a
        mean over phases."""
        return round(self._forward_flops(self.blocks.window_keys, *self.blocks.mean_visible()))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count the keys and summaries that queries read; after a full past, count their mean over
        phases.

        With ``cache: kv`` the past has no gradient. Carried summaries have no gradient; new ones
        have one where they depend on a parameter. With ``top_k``, queries are assumed to read
        summaries of the segment first. The loss of the index adds the attention scores of unread
        summaries to the forward pass. In the backward pass, the inputs of the index have no
        gradient."""
        ratio = self.blocks.ratio
        in_segment, past = count_pairs(
            segment, carried, self.blocks.window_keys, shift=self.blocks.shift
        )
        if carried < self.blocks.span + ratio:
            counts = [self.blocks.visible_at(carried + t) for t in range(segment)]
            visible = sum(counts)
            read = sum(map(self.blocks.n_read, counts))
        else:
            visible, read = (segment * mean for mean in self.blocks.mean_visible())
        learns_from_past = self.cache == "hidden" or any(True for _ in self.compressor.parameters())
        lag_bytes = self.blocks.lag * ratio
        # Past bytes in blocks summarised now, whose index keys or values get a gradient.
        index_past = min(carried, carried % ratio + lag_bytes)
        value_past = min(carried, carried % ratio + learns_from_past * lag_bytes)
        index_pairs = sum(self.blocks.visible_at(index_past + t) for t in range(segment))
        value_pairs = sum(
            self.blocks.n_read(self.blocks.visible_at(value_past + t)) for t in range(segment)
        )
        forward = self._forward_flops(
            (in_segment + past) / segment, visible / segment, read / segment
        )
        unread = (visible - read) / segment
        target_flops = self.heads * (2 * unread * self.d_head + self.position.ideal_flops(unread))
        needed = NeededFlops(forward + target_flops, 2 * forward - 2 * self._index_sizes())
        unneeded = self.heads * 4 * self.d_head * max(0, read - value_pairs)
        unneeded += 2 * self.d_index * max(0, visible - index_pairs)
        if self.cache == "kv":
            unneeded += self.heads * 4 * self.d_head * past
            return needed._replace(backward=needed.backward - unneeded / segment)
        inputs = max(min(carried, self.blocks.window_past), index_past)
        key_inputs = min(carried, inputs + self.key_past)
        products = key_inputs * self.key.weight.numel() + inputs * self.value.weight.numel()
        reprojection = 2 * products / segment
        return NeededFlops(
            needed.forward + reprojection, needed.backward + reprojection - unneeded / segment
        )

    def _forward_flops(self, window_keys: float, visible: float, read: float) -> float:
        """Return FLOPs per byte if a query sees ``window_keys`` keys and reads ``read`` of
        ``visible`` summaries."""
        per_head = 4 * (window_keys + read) * self.d_head + self.position.ideal_flops(
            window_keys + read
        )
        matrices = self.matrix_sizes() + self._index_sizes()
        return (
            2 * matrices
            + self.compressor.ideal_flops()
            + self.heads * per_head
            + 2 * visible * self.d_index
        )

    def _index_sizes(self) -> float:
        """Return multiply-adds per byte of the index's projections: one query per byte, and one
        key per block."""
        if not self.d_index:
            return 0
        return self.index_query.weight.numel() + self.index_key.weight.numel() / self.blocks.ratio


def _last_rows(x: Tensor, n: int) -> Tensor:
    """Return the last n rows of ``x [B, L, m]``, padded with zeros in front."""
    return F.pad(x, (0, 0, n - x.shape[1], 0))


def _rows_from(x: Tensor, first: Tensor, n: int) -> Tensor:
    """Return n rows of ``x [B, L, m]`` from ``first [B]`` on; beyond the end the last row
    repeats."""
    index = (first[:, None] + torch.arange(n, device=x.device)).clamp(max=x.shape[1] - 1)  # [B, n]
    index = index + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)
