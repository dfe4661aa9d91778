"""Causal Linformer: learned projections summarise finished blocks of the past.

    s_j = sum_i E_i k_{jr+i},   u_j = sum_i F_i v_{jr+i}                 over bytes i = 0 .. r-1 of block j
    y_t = W_o concat_h(softmax([q_t . k_i ; q_t . s_j] / sqrt(K)) [v_i ; u_j])

One softmax covers the w nearest keys i exactly, and summaries of blocks j: w + S/r keys per query instead of S. In the
paper (2006.04768, 4) E and F are k x n and mix a whole sequence, so every row has the future, beyond any mask. Here a
row covers one block, with the same weights for each. The window is ours: without it the open block is hidden.

- A query sees the summary of a finished block if the block's first byte is outside the window and all its bytes are
  among the S that it may see. Keys are summarised unrotated; a summary has the position of its block's last byte.
- With ``top_k`` a query reads only the best summaries, by an index score a_t . C mean_i k_i / sqrt(I), the same for all
  heads. As in DeepSeek-V3.2 (2512.02556, 2.1) the index learns from a loss alone, KL(p_t || softmax of index scores)
  over all visible summaries: p_t is the mean over heads of attention weights on them alone. Its inputs and p_t are
  detached, and the loss has no weight, as nothing else moves the index. There the score sums ReLUs over index heads.
- A block is summarised when about to leave the window, from its keys and values there, so the compressor learns.
- ``compressor: softmax`` with ``top_k`` is a small compressed attention of 2025-26 (2502.11089, 3.3, DeepSeek-V4).
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils import checkpoint

from variants.backends import OnKernels
from variants.blocks import Blocks, highest
from variants.compressor import Compressor
from variants.contract import WAYS, Honours, LayerContext, NeededFlops, State, SublayerOutput, check_numbers
from variants.kernels.window import pairs
from variants.multi_head import MultiHead, head_means, head_stats, start_of
from variants.window_and_summaries import Far, Near, by_kernel, far_weights, in_bands


class Carried(NamedTuple):
    """The state. Keys, values and inputs are padded in front, so that streams of any age fit into one batch.

    Attributes:
        past: unrotated keys and values ``[B, P, 2 H K]``, or inputs ``[B, P, D]``, of the window and the open block.
        summaries: keys after position encoding, values and index keys, ``[B, N, 2 H K (+ I)]``.
        phase: bytes of the open block, int64 ``[B]``. This and those below are ``[1]`` when all streams begin.
        past_bytes: bytes of the past that are not padding, int64 ``[B]``.
        finished: number of finished blocks, at most N + lag, int64 ``[B]``.
    """

    past: Tensor
    summaries: Tensor
    phase: Tensor
    past_bytes: Tensor
    finished: Tensor


class Linformer(MultiHead, OnKernels):
    """Causal attention over an exact window and summaries of finished blocks.

    Args:
        ratio: r, bytes of a block, from 1; a block becomes one key and one value.
        window: w, keys that are read exactly, from 1 to below ``model.span``; None for S / 4.
        compressor, share: see ``Compressor``.
        top_k: summaries that a query reads, from 1; None for all.
        d_index: I, width of the index that ranks summaries, from 1.
        The others are those of ``MultiHead``.
    """

    honours = Honours(position=frozenset(WAYS), cache={"kv", "hidden"}, attend_self={True, False}, span=True)

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
        zero_init: bool = False,
    ):
        check_numbers(1, ratio=ratio, window=window, top_k=top_k, d_index=d_index)
        super().__init__(context, d_head=d_head, zero_init=zero_init)
        window = max(1, context.span // 4) if window is None else window
        if context.span <= max(window, ratio - self.shift):
            least = f"above window={window} and ratio={ratio}"
            raise ValueError(f"model.span={context.span}: must be {least}, or no summary is ever seen")
        self.blocks, self.period = Blocks(ratio, window, context.span, self.shift, top_k), ratio
        self.inner, self.d_index = self.heads * self.d_head, d_index if top_k else 0
        if top_k:
            self.limits = frozenset({"likelihood"})
            self.index_query = nn.Linear(context.d_model, d_index, bias=False)
            self.index_key = nn.Linear(self.inner, d_index, bias=False)
        sizes = {"ratio": ratio, "heads": self.heads, "d_head": self.d_head}
        self.compressor = Compressor(context, kind=compressor, share=share, **sizes)
        self.position = context.position(self.d_head)

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        start, carried = start_of(x, start), self._nothing(x) if state is None else Carried(*state)
        (q,), segment = self.project(x, "query"), self.project_flat(x, "key", "value")
        past = carried.past.to(segment.dtype)
        if self.cache == "hidden":
            past = self.project_flat(carried.past.to(x.dtype), "key", "value")
        summaries = self._summaries(segment, past, start, carried)
        q, near = self.position.rotate(q, start), self._near(segment, past, start, carried)
        far, index = self._far(x.shape[1], summaries, carried)
        loss = None
        if self.d_index:
            scores = self.blocks.chunked(self.index_query(x.detach())) @ index.mT * self.d_index**-0.5  # [B, n, Q, G]
            loss = self._loss(q, far, scores) if self.training else None
            far = self._chosen(far, scores.detach())
        y = self._attend(q, near, far)
        stats = self._stats(q, near, far) if collect_stats else None
        state = self._carry(x if self.cache == "hidden" else segment, summaries, carried)
        return SublayerOutput(self.join(y), state, loss, stats)

    def _nothing(self, x: Tensor) -> Carried:
        width = x.shape[-1] if self.cache == "hidden" else 2 * self.inner
        past, summaries = x.new_zeros(len(x), 0, width), x.new_zeros(len(x), 0, 2 * self.inner + self.d_index)
        return Carried(past, summaries, *torch.zeros(3, 1, dtype=torch.int64, device=x.device))

    def _summaries(self, segment: Tensor, past: Tensor, start: Tensor, carried: Carried) -> Tensor:
        """Return s_j and u_j, ``[B, N + M, 2 H K (+ I)]``: the carried ones, padded to N, then those of M = ceil(T / r)
        blocks, from ``lag`` blocks before the open one on; the last of them may be unfinished."""
        ratio, phase, blocks = self.blocks.ratio, carried.phase, -(-segment.shape[1] // self.blocks.ratio)
        rows = torch.cat([_last(past, self.blocks.unsummarised), segment], dim=1)
        rows = _from(rows, (ratio - 1 - phase).expand(len(rows)), blocks * ratio).unflatten(1, (blocks, ratio))
        s, u = self.compressor(rows).chunk(2, dim=-1)
        after = torch.arange(1, blocks + 1, device=segment.device) - self.blocks.lag
        last = (start - phase)[:, None] + ratio * after - 1  # position of a block's last byte, [B, M]
        s = rearrange(s, "B M (H K) -> (B M) H 1 K", H=self.heads)
        s = rearrange(self.position.rotate(s, last.flatten()), "(B M) H 1 K -> B M (H K)", M=blocks)
        index = [self.index_key(rows[..., : self.inner].mean(dim=2).detach())] if self.d_index else []
        new = torch.cat([s, u, *index], dim=-1)
        return torch.cat([_last(carried.summaries.to(new.dtype), self.blocks.most), new], dim=1)

    def _near(self, segment: Tensor, past: Tensor, start: Tensor, carried: Carried) -> Near:
        """Return keys, after position encoding, and values that windows may include."""
        past = _last(past, min(self.blocks.behind, past.shape[1]))
        placed = []
        for rows, at in ((segment, start), (past, start - past.shape[1])):
            k, v = rows.chunk(2, dim=-1)
            placed += [self.position.rotate(self.split(k), at), self.split(v)]
        return Near(*placed, carried.past_bytes)

    def _far(self, length: int, summaries: Tensor, carried: Carried) -> tuple[Far, Tensor]:
        """Return summaries that chunks of queries may see, and their index keys ``[B, n, G, I]``."""
        blocks, (chunks, size), device = self.blocks, self.blocks.chunks(length), summaries.device
        first = size * torch.arange(chunks, device=device)[:, None]  # [n, 1]
        j = first // blocks.ratio + blocks.met(size, device)  # [n, G], counted from the first carried one
        met = summaries[:, j.clamp(max=summaries.shape[1] - 1)]  # [B, n, G, 2 H K (+ I)]
        s, u, index = met.split([self.inner, self.inner, self.d_index], dim=-1)
        k, v = (rearrange(part, "B n G (H K) -> B n H G K", H=self.heads) for part in (s, u))
        phase, finished = carried.phase[:, None, None, None], carried.finished[:, None, None, None]
        most, t = blocks.most + blocks.lag, (first + torch.arange(size, device=device))[:, :, None]
        back = phase + t + blocks.ratio * (most - j[:, None])  # distance from query to the block's first byte
        visible = (back >= blocks.nearest) & (back < blocks.span + blocks.shift) & (j[:, None] >= most - finished)
        return Far(k, v, visible, back - (blocks.ratio - 1) - blocks.shift), index

    def _chosen(self, far: Far, scores: Tensor) -> Far:
        """Return ``far`` in which a query sees only the summaries with its best index scores ``[B, n, Q, G]``."""
        visible = far.visible.expand_as(scores)
        best = highest(scores.masked_fill(~visible, -torch.inf), self.blocks.chosen(scores.shape[-1]))
        return far._replace(visible=visible & best)

    def _loss(self, q: Tensor, far: Far, scores: Tensor) -> Tensor:
        """Return KL(p || softmax of index scores ``[B, n, Q, G]``), the mean over bytes; 0 where no summary is seen."""
        p = far_weights(q, far, blocks=self.blocks, position=self.position).mean(dim=2)
        scores = scores.to(p.dtype).masked_fill(~far.visible, torch.finfo(p.dtype).min)
        kl = F.kl_div(scores.log_softmax(dim=-1).masked_fill(~far.visible, 0), p, reduction="none")
        return kl.sum(dim=-1).flatten(1)[:, : q.shape[2]].sum() / q[:, 0, :, 0].numel()

    def _attend(self, q: Tensor, near: Near, far: Far) -> Tensor:
        """Return head outputs ``[B, H, T, K]``."""
        same = {"blocks": self.blocks, "position": self.position}
        if self.backend(q.device, training=self.training) == "kernel":
            return by_kernel(q, near, far, **same)
        same |= {"dropout": self.dropout if self.training else 0.0}
        if self.d_index and torch.is_grad_enabled():
            # With ``top_k`` blocks are short and summaries many, so the backward pass recomputes scores.
            return checkpoint.checkpoint(in_bands, q, near, far, use_reentrant=False, **same)
        return in_bands(q, near, far, **same)

    def able(self, device: torch.device) -> tuple[str, ...]:
        return ("kernel", "plain") if device.type == "cpu" else ("plain",)

    @torch.no_grad()
    def _stats(self, q: Tensor, near: Near, far: Far) -> dict[str, Tensor]:
        """Measure the attention mass on summaries, with values of 1 on summaries and of 0 in the window."""
        near = near._replace(v=torch.zeros_like(near.v), old_v=torch.zeros_like(near.old_v))
        return head_stats(q, summary_mass=self._attend(q, near, far._replace(v=torch.ones_like(far.v)))[..., 0])

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Return ``summary_mass [H]``, the mean attention mass on summaries."""
        return head_means(stats, "summary_mass")

    @torch.no_grad()
    def _carry(self, rows: Tensor, summaries: Tensor, carried: Carried) -> State:
        """Return the next state; ``rows`` are the segment's keys and values, or its inputs."""
        (streams, length, _), blocks = rows.shape, self.blocks
        read = carried.phase.expand(streams) + length  # bytes since the open block began
        past = torch.cat([carried.past.to(rows.dtype), rows[:, -max(1, blocks.past) :]], dim=1)
        return tuple(
            Carried(
                past=_last(past, blocks.past).clone(),
                summaries=_from(summaries, read // blocks.ratio, blocks.most),
                phase=read % blocks.ratio,
                past_bytes=(carried.past_bytes.expand(streams) + length).clamp(max=blocks.past),
                finished=(carried.finished + read // blocks.ratio).clamp(max=blocks.most + blocks.lag),
            )
        )

    def reach(self) -> int:
        return self.blocks.reach

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.blocks = replace(self.blocks, span=span)

    def ideal_flops(self) -> int:
        """Count projections, the compressor, and scores and values of window and summaries, averaged over phases."""
        return round(self._forward_flops(self.blocks.near, *self.blocks.seen_warm()))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count pairs of a query and a key or summary that it reads; in a warm stream, their mean over phases.

        With ``cache: kv`` the past has no gradient; summaries made before the segment never have one, new ones if it
        reaches a parameter. With ``top_k``, queries are assumed to choose the summaries made in the segment first. Its
        loss reads scores of unchosen summaries, too, without a gradient; the index has none by its inputs.
        """
        ratio = self.blocks.ratio
        new, past = pairs(segment, carried, self.blocks.near, shift=self.blocks.shift)
        if carried < self.blocks.span + ratio:
            seen = [self.blocks.seen(carried + t) for t in range(segment)]
            sight, read = sum(seen), sum(map(self.blocks.chosen, seen))
        else:
            sight, read = (segment * mean for mean in self.blocks.seen_warm())
        learns = self.cache == "hidden" or any(True for _ in self.compressor.parameters())
        first = [min(carried, carried % ratio + older * self.blocks.lag * ratio) for older in (True, learns)]
        indexed, fresh = ([self.blocks.seen(before + t) for t in range(segment)] for before in first)
        learned, read_fresh = sum(indexed), sum(map(self.blocks.chosen, fresh))
        forward = self._forward_flops((new + past) / segment, sight / segment, read / segment)
        unread = (sight - read) / segment
        target = self.heads * (2 * unread * self.d_head + self.position.ideal_flops(unread))
        needed = NeededFlops(forward + target, 2 * forward - 2 * self._index_matrices())
        fixed = self.heads * 4 * self.d_head * max(0, read - read_fresh) + 2 * self.d_index * max(0, sight - learned)
        if self.cache == "kv":
            fixed += self.heads * 4 * self.d_head * past
            return needed._replace(backward=needed.backward - fixed / segment)
        inputs = min(carried, self.blocks.behind)
        projected = 2 * inputs * (self.key.weight.numel() + self.value.weight.numel()) / segment
        return NeededFlops(needed.forward + projected, needed.backward + projected - fixed / segment)

    def _forward_flops(self, near: float, sight: float, read: float) -> float:
        """Return FLOPs per byte for ``near`` window keys and ``sight`` visible summaries, ``read`` of them read."""
        per_head = 4 * (near + read) * self.d_head + self.position.ideal_flops(near + read)
        matrices = self.matrix_sizes() + self._index_matrices()
        return 2 * matrices + self.compressor.ideal_flops() + self.heads * per_head + 2 * sight * self.d_index

    def _index_matrices(self) -> float:
        """Return multiply-adds per byte of the index's projections: of a query, and once a block of a key."""
        return self.d_index and self.index_query.weight.numel() + self.index_key.weight.numel() / self.blocks.ratio


def _last(x: Tensor, number: int) -> Tensor:
    """Return the last ``number`` rows of ``x [B, L, n]``, after zeros if there are fewer."""
    return F.pad(x, (0, 0, number - x.shape[1], 0))


def _from(x: Tensor, first: Tensor, number: int) -> Tensor:
    """Return ``number`` rows of ``x [B, L, n]`` from ``first [B]`` on; beyond the end the last row repeats."""
    at = (first[:, None] + torch.arange(number, device=x.device)).clamp(max=x.shape[1] - 1)  # [B, number]
    at = at + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, at.shape)
