"""Local attention: the stream is cut into blocks of M bytes, and a query sees the keys of its block
up to itself.

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax_j((q_t . k_j + position) / sqrt(K)),
    M floor(t / M) <= j <= t

1801.10198, 4.2.4 has blocks of 256, with attention inside each. Blocks begin at the stream's first
byte, so outputs do not depend on segment boundaries. The last block of a stream is open until it is
complete. The state is the last M - 1 keys and values, without a gradient, and the phase of the
stream: the number of bytes in the open block.

Backends get the independent blocks as separate streams. If the phases can be read on the host,
streams of equal phase are computed in one batch: first the remaining bytes of the open block, then
whole blocks. If the phases are only on the device, rows are moved to their blocks by index."""

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants.attention import ALL, Attention, Segment
from variants.attention_span import AttentionSpan
from variants.context import VisibleKeys
from variants.contract import LayerContext, State, SublayerOutput
from variants.kernels.window import PastKV, Window
from variants.multi_head import HeadKeywords, start_of

ROWS_AT_ONCE = 128
"""Queries of a block that plain PyTorch computes at a time, to skip most scores above the
diagonal."""


class LocalAttention(Attention):
    """Causal multi-head attention inside blocks.

    Args:
        block: M, bytes of a block, from 1 (from 2 without ``attend_self``) to S; None for S / 4.
        heads: keywords of ``MultiHead``."""

    honours = replace(Attention.honours, direction={"causal"})
    traces_plain = True
    keyword = "block"
    """Name of M in the configuration."""

    def __init__(self, context: LayerContext, *, block: int | None, **heads: Unpack[HeadKeywords]):
        least = 2
        if context.attend_self:
            least = 1
        size = max(least, context.span // 4) if block is None else block
        if not least <= size <= context.span:
            allowed = f"integers from {least} to model.span={context.span}, or null for a quarter"
            raise ValueError(f"{self.keyword}={size}: allowed are {allowed}")
        block_context = replace(context, span=size)
        super().__init__(context, **heads, span=lambda _: AttentionSpan(block_context))
        self.follows_span = block is None
        self.honours = replace(self.honours, span=True if self.follows_span else None)

    @property
    def block(self) -> int:
        """M, which is the span of every head."""
        return self.span.span

    @property
    def period(self) -> int:
        return self.block

    def reach(self) -> int:
        return self.block - 1 + self.key_past

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        """Map one segment. The state is the number of bytes in the open block, int64 ``[B]``, and
        the last M - 1 keys and values of the stream, ``[B, H, M - 1, K]`` each, or inputs ``[B, M -
        1, D]``, padded with zeros in front."""
        state, before = self.key_before(state, x)
        segment = self.project_qkv(x, start_of(x, start), before)
        length = x.shape[1]
        new = [x] if self.cache == "hidden" else [segment.k, segment.v]
        if state is None:
            phase = torch.zeros_like(segment.start)
            old = [part[..., :0, :] for part in new]
            y = self._attend_from_block_start(*segment[1:4])  # q, k, v
        else:
            # After a change of the block size, the first byte of the open block begins a block of
            # the new size.
            phase = state[0] % self.block
            old = [
                self._last_rows(part).to(rows.dtype)
                for part, rows in zip(state[1:], new, strict=True)
            ]
            past = old
            if self.cache == "hidden":
                past = self.reproject_past(*old, segment, self.block - 1, ALL)[:2]
            keys, values = (torch.cat(pair, dim=2) for pair in zip(past, segment[2:4], strict=True))
            attend = self._attend_by_phase if is_on_host(phase) else self._attend_by_index
            y = attend(segment.q, keys, values, phase)
        rows = (torch.cat(pair, dim=-2).detach() for pair in zip(old, new, strict=True))
        state = ((phase + length) % self.block, *map(self._last_rows, rows))
        return SublayerOutput(self.output(y), self.join_state(state, segment.last_key))

    def _last_rows(self, rows: Tensor) -> Tensor:
        """Return a copy of the last M - 1 rows of ``rows [.., P, width]``, padded with zeros in
        front. If they are inputs and keys are shifted, return M rows."""
        n_rows = self.block - 1 + (self.key_past if self.cache == "hidden" else 0)
        return F.pad(rows, (0, 0, n_rows - rows.shape[-2], 0))

    def _attend_without_past(self, segment: Segment) -> Tensor:
        return self.split(self._attend_from_block_start(*segment[1:4]))

    def _attend_from_block_start(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return head outputs ``[B, T, H K]`` of a segment that begins with a block."""
        (streams, _, length, _), size = q.shape, self.block
        if length > size:
            padded = (F.pad(part, (0, 0, 0, -length % size)) for part in (q, k, v))
            q, k, v = (rearrange(part, "B H (n M) K -> (B n) H M K", M=size) for part in padded)
        y = self._attend_blocks(q, k, v)
        return rearrange(y, "(B n) H M K -> B (n M) (H K)", B=streams)[:, :length]

    def _attend_by_phase(self, q: Tensor, keys: Tensor, values: Tensor, phases: Tensor) -> Tensor:
        """Return head outputs ``[B, T, H K]``, with phases ``[B]`` on the host. ``keys`` and
        ``values`` have M - 1 past rows, then those of the segment."""
        phases = phases.tolist()
        past = self.block - 1
        outputs = []
        order = []
        for phase in sorted(set(phases)):
            streams = [b for b in range(len(phases)) if phases[b] == phase]
            group_q, *kv = (
                x if len(streams) == len(phases) else x[streams] for x in (q, keys, values)
            )
            remaining = min(q.shape[2], self.block - phase)
            open_block = [
                group_q[:, :, :remaining],
                *(x[:, :, past - phase : past + remaining] for x in kv),
            ]
            y = rearrange(self._attend_blocks(*open_block), "B H T K -> B T (H K)")
            if remaining < q.shape[2]:
                later = [group_q[:, :, remaining:], *(x[:, :, past + remaining :] for x in kv)]
                y = torch.cat([y, self._attend_from_block_start(*later)], dim=1)
            outputs.append(y)
            order += streams
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)[torch.tensor(order).argsort()]

    def _attend_by_index(self, q: Tensor, keys: Tensor, values: Tensor, phases: Tensor) -> Tensor:
        """Compute ``_attend_by_phase`` with phases on the device. Indices beyond either end are
        clamped; the outputs of these rows are not used."""
        (streams, heads, length, _), size = q.shape, self.block
        blocks = -(-(size - 1 + length) // size)
        offset = torch.arange(blocks * size, device=q.device).view(blocks, 1, size)
        stream = torch.arange(streams * heads, device=q.device).view(streams, 1, heads, 1)
        phase = phases.view(-1, 1, 1, 1)

        # [B, H, L, K] -> [B n, H, M, K], from row ``first`` on
        def cut(x: Tensor, first: Tensor) -> Tensor:
            rows = (first + offset).clamp(0, x.shape[2] - 1) + stream * x.shape[2]
            return F.embedding(rows.flatten(0, 1), x.flatten(0, 2))

        first_key = size - 1 - phase
        y = self._attend_blocks(cut(q, -phase), cut(keys, first_key), cut(values, first_key))
        y = rearrange(y, "(B n) H M K -> (B n M) (H K)", B=streams)
        first = torch.arange(streams, device=q.device) * (blocks * size) + phases
        return F.embedding(first[:, None] + torch.arange(length, device=q.device), y)

    def _attend_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return head outputs ``[N, H, T, K]`` of the last T bytes of N blocks, with keys ``[N,
        H, P + T, K]``."""
        backend = self.chosen_backend(q.device)
        rows = q.shape[2]
        attend = self.attend if self.is_traced(q.device) else self._attend_uncompiled
        size = ROWS_AT_ONCE if backend.has_all_scores else rows
        block_past = k.shape[2] - rows
        outputs = []
        for begin in range(0, rows, size):
            end = block_past + min(begin + size, rows)
            n_past = 0
            if backend.reads_parts:
                n_past = block_past + begin
            old = []
            if n_past:
                old = [PastKV(k[:, :, :n_past], v[:, :, :n_past])]
            keys = VisibleKeys(k[:, :, n_past:end], v[:, :, n_past:end], old)
            visible = Window((end,) * self.heads, self.shift)
            outputs.append(attend(backend, q[:, :, begin : begin + size], keys, visible))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=2)

    _attend_uncompiled = torch.compiler.disable(Attention.attend)

    def trim(self, state: State) -> State:
        return state  # the size of the state is constant

    def set_span(self, span: int) -> None:
        if self.follows_span:
            super().set_span(max(1 + self.shift, span // 4))
        elif span < self.block:
            raise ValueError(
                f"eval.span={span}: allowed are integers from {self.block}, the bytes of a block"
            )

    def ideal_flops(self) -> int:
        """Count as in ``Attention``, with the mean over a block of 1 to M keys, or of 0 to M - 1
        without ``attend_self``."""
        return round(self._forward_flops((self.block + 1) / 2 - self.shift))

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int, int]:
        phase = carried % self.block

        def pairs(length: int) -> int:  # of the first ``length`` bytes of a stream
            blocks, remaining = divmod(length, self.block)
            return sum(
                n * (m * (m + 1) // 2 - m * self.shift)
                for n, m in ((blocks, self.block), (1, remaining))
            )

        past = phase * min(segment, self.block - phase)
        in_segment = pairs(phase + segment) - pairs(phase) - past
        counts = (in_segment, past, min(carried, phase + self.key_past), phase)
        return tuple(self.heads * n for n in counts)


def is_on_host(x: Tensor) -> bool:
    """Return whether the elements of a tensor can be read without waiting for a device."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(x, FakeTensor)
    )
