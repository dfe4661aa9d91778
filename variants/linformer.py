"""Linformer, as far as causality lets it: finished blocks of the past are summarised by learned projections.

    s_j = sum_i E_i k_{jr+i},   u_j = sum_i F_i v_{jr+i}                 of the bytes i = 0 .. r-1 of block j
    y_t = W_o concat_h(softmax([q_t . k_i ; q_t . s_j] / sqrt(K)) [v_i ; u_j])

over the w nearest keys i, exactly, and the summaries of blocks j, in one softmax: w + S/r keys a query instead of S. In
the paper (2006.04768, section 4) E and F are k x n and mix a whole sequence, so every row holds the future and no mask
takes it out. Here a row spans a block, the same for every block; and the window is ours, without which the open block
would be invisible.

- A summary is visible to queries after its block, if its first byte is outside the query's window, and if all its bytes
  are among the S that a query may see. Keys are summarised unrotated, and placed as if they stood at their block's last
  byte.
- ``top_k`` reads only the best summaries, by an index q'_t . W mean_i k_i of its own, one for all heads. What is chosen
  has its index score added to its attention scores, which is how the index learns.
- A block is summarised when it is about to leave the window, from what the window has of it, so that the weights learn.
- ``compressor: softmax``, and ``top_k`` with it, are compressed attention of 2025-26 (2502.11089, 3.3, DeepSeek-V4) in
  small.
"""

from dataclasses import replace
from functools import partial
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
from variants.window_and_summaries import Far, Near, by_kernel, in_bands


class Carried(NamedTuple):
    """The state; all but numbers are padded in front, so that streams of any age stand in one batch.

    Attributes:
        past: keys and values, unrotated, ``[B, P, 2 H K]``, or inputs ``[B, P, D]``, of the window and the open block.
        summaries: keys, in their positions, values, and keys of the index: ``[B, N, 2 H K (+ I)]``.
        number: bytes of the open block, places of the past that are no padding, finished blocks to N + lag: int64 ``[B, 3]``.
    """

    past: Tensor
    summaries: Tensor
    number: Tensor


class Rows(NamedTuple):
    """Keys and values, unrotated, of a segment ``[B, T, 2 H K]`` and of its past ``[B, P, 2 H K]`` or None; stream
    position of the first byte ``[B]``; and the state's numbers, ``[1, 3]`` where a stream begins."""

    own: Tensor
    past: Tensor | None
    start: Tensor
    number: Tensor


class Linformer(MultiHead, OnKernels):
    """Causal attention over an exact window and summaries of finished blocks.

    Args:
        ratio: r, bytes of a block, from 1; summarised into one key and one value.
        window: w, keys that are met exactly, from 1 to below ``model.span``; None for S / 4.
        compressor, share: as ``Compressor`` has them.
        top_k: summaries that a query reads, from 1; None for all.
        d_index: width I of the index that chooses them, from 1.
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
            self.index_query = nn.Linear(context.d_model, d_index, bias=False)
            self.index_key = nn.Linear(self.inner, d_index, bias=False)
        sizes = {"ratio": ratio, "heads": self.heads, "d_head": self.d_head}
        self.compressor = Compressor(context, kind=compressor, share=share, **sizes)
        self.position = context.position(self.d_head)

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        start = start_of(x, start)
        carried = None if state is None else Carried(*state)
        rows = self._rows(x, carried, start)
        summaries = self._summaries(rows, carried)
        (q,) = self.project(x, "query")
        q, near, far = self.position.rotate(q, start), self._near(rows), self._far(x, rows, summaries)
        y = self._attend(q, near, far)
        stats = self._stats(q, near, far) if collect_stats else None
        return SublayerOutput(self.join(y), self._carry(x, rows, summaries, carried), stats=stats)

    def _rows(self, x: Tensor, carried: Carried | None, start: Tensor) -> Rows:
        own = self.project_flat(x, "key", "value")
        if carried is None:
            return Rows(own, None, start, start.new_zeros(1, 3))
        if self.cache == "kv":
            return Rows(own, carried.past.to(own.dtype), start, carried.number)
        return Rows(own, self.project_flat(carried.past.to(x.dtype), "key", "value"), start, carried.number)

    def _summaries(self, rows: Rows, carried: Carried | None) -> Tensor:
        """Carried summaries, padded to all that can be visible, then those of ceil(T / r) blocks, from the one ``lag``
        before the open one on, of which the last may be unfinished: ``[B, N + M, 2 H K (+ I)]``."""
        own, past, start, number = rows
        ratio, phase = self.blocks.ratio, number[:, 0]
        blocks = -(-own.shape[1] // ratio)
        if past is None:
            every = F.pad(own, (0, 0, self.blocks.lag * ratio, blocks * ratio - own.shape[1]))[:, : blocks * ratio]
        else:
            every = torch.cat([_last(past, self.blocks.unsummarised), own], dim=1)
            every = _from(every, ratio - 1 - phase, blocks * ratio)
        both = every.unflatten(1, (blocks, ratio))
        k, v = self.compressor(both).chunk(2, dim=-1)
        after = torch.arange(1, blocks + 1, device=own.device) - self.blocks.lag
        last = (start - phase)[:, None] + ratio * after - 1  # [B, M]
        k = rearrange(k, "B M (H K) -> (B M) H 1 K", H=self.heads)
        k = rearrange(self.position.rotate(k, last.flatten()), "(B M) H 1 K -> B M (H K)", M=blocks)
        index = [self.index_key(both[..., : self.inner].mean(dim=2))] if self.d_index else []
        made = torch.cat([k, v, *index], dim=-1)
        if carried is None:
            return F.pad(made, (0, 0, self.blocks.most, 0))
        return torch.cat([_last(carried.summaries.to(made.dtype), self.blocks.most), made], dim=1)

    def _near(self, rows: Rows) -> Near:
        own, past, start, number = rows

        def placed(part: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            k, v = part.chunk(2, dim=-1)
            return self.position.rotate(self.split(k), at), self.split(v)

        if past is None:
            return Near(*placed(own, start), None, None, number[:, 1])
        old = _last(past, min(self.blocks.behind, past.shape[1]))
        return Near(*placed(own, start), *placed(old, start - old.shape[1]), number[:, 1])

    def _far(self, x: Tensor, rows: Rows, summaries: Tensor) -> Far:
        """Summaries that chunks of queries meet; of ``top_k``, those are visible that each has chosen."""
        blocks, (chunks, size) = self.blocks, self.blocks.chunks(x.shape[1])
        first = size * torch.arange(chunks, device=x.device)[:, None]  # [n, 1]
        at = first // blocks.ratio + blocks.met(size, x.device)  # [n, G]
        met = summaries[:, at.clamp(max=summaries.shape[1] - 1)]  # [B, n, G, 2 H K (+ I)]
        key, value, index = met.split([self.inner, self.inner, self.d_index], dim=-1)
        phase, found = rows.number[:, 0, None, None, None], rows.number[:, 2, None, None, None]
        most, t = blocks.most + blocks.lag, (first + torch.arange(size, device=x.device))[:, :, None]
        back = phase + t + blocks.ratio * (most - at[:, None])  # bytes to the block's first
        seen = (back >= blocks.nearest) & (back < blocks.span + blocks.shift) & (at[:, None] >= most - found)
        k, v = (rearrange(part, "B n G (H K) -> B n H G K", H=self.heads) for part in (key, value))
        far = Far(k, v, seen, back - (blocks.ratio - 1) - blocks.shift)
        if not self.d_index or not at.numel():
            return far
        index = blocks.chunked(self.index_query(x)) @ index.mT * self.d_index**-0.5  # [B, n, Q, G]
        seen = seen.expand(len(x), -1, -1, -1)
        best = highest(index.detach().masked_fill(~seen, -torch.inf), blocks.chosen(index.shape[-1]))
        return far._replace(visible=seen & best, added=index)

    def _attend(self, q: Tensor, near: Near, far: Far) -> Tensor:
        """What the heads give, ``[B, H, T, K]``."""
        same = {"blocks": self.blocks, "position": self.position}
        if self.backend(q.device, training=self.training) == "kernel":
            return by_kernel(q, near, far, **same)
        attend = partial(in_bands, dropout=self.dropout if self.training else 0.0, **same)
        if far.added is not None and torch.is_grad_enabled():
            # Its blocks are short and its summaries many: scores are made again for the backward pass, not kept for it.
            attend = partial(checkpoint.checkpoint, attend, use_reentrant=False)
        return attend(q, near, far)

    def able(self, device: torch.device) -> tuple[str, ...]:
        return ("kernel", "plain") if device.type == "cpu" else ("plain",)

    @torch.no_grad()
    def _stats(self, q: Tensor, near: Near, far: Far) -> dict[str, Tensor]:
        """The share of attention that summaries have: values of one for them, and of nothing for the window."""
        old_v = None if near.old_v is None else torch.zeros_like(near.old_v)
        near = near._replace(v=torch.zeros_like(near.v), old_v=old_v)
        return head_stats(q, summary_mass=self._attend(q, near, far._replace(v=torch.ones_like(far.v)))[..., 0])

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """``summary_mass [H]``: the mean share of attention that summaries have."""
        return head_means(stats, "summary_mass")

    @torch.no_grad()
    def _carry(self, x: Tensor, rows: Rows, summaries: Tensor, carried: Carried | None) -> State:
        length, most, kept = x.shape[1], self.blocks.most, self.blocks.kept
        past = rows.own if self.cache == "kv" else x
        if carried is not None:
            past = torch.cat([carried.past.to(past.dtype), past[:, -max(1, kept) :]], dim=1)
        phase, old, found = rows.number.expand(len(x), -1).unbind(-1)
        done = (phase + length) // self.blocks.ratio
        found = (found + done).clamp(max=most + self.blocks.lag)
        number = [(phase + length) % self.blocks.ratio, (old + length).clamp(max=kept), found]
        return tuple(Carried(_last(past, kept).clone(), _from(summaries, done, most), torch.stack(number, -1)))

    def reach(self) -> int:
        return self.blocks.reach

    def set_span(self, span: int) -> None:
        self.check_span(span)
        self.blocks = replace(self.blocks, span=span)

    def ideal_flops(self) -> int:
        """Projections, weights over a block, scores and weighted values of the window and of summaries, the mean over
        phases."""
        return round(self._forward_flops(self.blocks.near, *self.blocks.seen_warm()))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """By the pairs of a query and what it reads; a warm stream is charged the mean over the phases that it may be
        at.

        What came before has no gradient in ``cache: kv``, and summaries made before have none in any; those made now
        have one if something learns by it. Of ``top_k`` summaries those made in the segment are taken to be read first.
        """
        ratio, (own, past) = self.blocks.ratio, pairs(segment, carried, self.blocks.near, shift=self.blocks.shift)
        if carried < self.blocks.span + ratio:
            seen = [self.blocks.seen(carried + t) for t in range(segment)]
            sight, read = sum(seen), sum(map(self.blocks.chosen, seen))
        else:
            sight, read = (segment * mean for mean in self.blocks.seen_warm())
        learns = self.cache == "hidden" or any(True for _ in self.compressor.parameters())
        first = [min(carried, carried % ratio + older * self.blocks.lag * ratio) for older in (True, learns)]
        indexed, fresh = ([self.blocks.seen(before + t) for t in range(segment)] for before in first)
        learned, read_fresh = sum(indexed), sum(map(self.blocks.chosen, fresh))
        forward = self._forward_flops((own + past) / segment, sight / segment, read / segment)
        needed = NeededFlops.of_products(forward)
        fixed = self.heads * 4 * self.d_head * max(0, read - read_fresh) + 2 * self.d_index * max(0, sight - learned)
        if self.cache == "kv":
            fixed += self.heads * 4 * self.d_head * past
            return needed._replace(backward=needed.backward - fixed / segment)
        inputs = min(carried, self.blocks.behind)
        projected = 2 * inputs * (self.key.weight.numel() + self.value.weight.numel()) / segment
        return NeededFlops(needed.forward + projected, needed.backward + projected - fixed / segment)

    def _forward_flops(self, near: float, sight: float, read: float) -> float:
        """Per byte, of queries with ``near`` keys of the window, ``sight`` summaries to choose from, and ``read`` of
        them."""
        per_head = 4 * (near + read) * self.d_head + self.position.ideal_flops(near + read)
        matrices = sum(m.weight.numel() for m in self.children() if isinstance(m, nn.Linear))
        matrices -= (1 - 1 / self.blocks.ratio) * self.index_key.weight.numel() if self.d_index else 0  # once a block
        return 2 * matrices + self.compressor.ideal_flops() + self.heads * per_head + 2 * sight * self.d_index


def _last(x: Tensor, number: int) -> Tensor:
    """The last ``number`` rows of ``x [B, L, n]``, zeros before them where there are not so many."""
    return F.pad(x, (0, 0, number - x.shape[1], 0))


def _from(x: Tensor, first: Tensor, number: int) -> Tensor:
    """``number`` rows of ``x [B, L, n]`` from the place ``first [B]`` of each stream on; beyond the end, the last
    again."""
    at = (first[:, None] + torch.arange(number, device=x.device)).clamp(max=x.shape[1] - 1)  # [B, number]
    at = at + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, at.shape)
