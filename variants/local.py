"""Local attention: the stream is cut into blocks of M bytes, and a query sees the keys of its own block up to itself.

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax_j((q_t . k_j + position) / sqrt(K)),   M floor(t / M) <= j <= t

1801.10198, 4.2.4 has blocks of 256, with attention inside each. Blocks are counted from the stream's beginning, not the
segment's, so segment boundaries do not matter. The state is the open block and its number of bytes, without a gradient.

Backends get the independent blocks as separate streams. If the host knows the phase of each stream (the bytes in its
open block), streams of equal phase are computed together: first the rest of the open block, then whole blocks, without
needless pairs. If only the device knows the phases, rows are moved to their blocks by index.
"""

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants import backends
from variants.attention import Attention, AttentionSpan, Segment
from variants.context import VisibleKeys
from variants.contract import LayerContext, State, SublayerOutput
from variants.kernels.window import PastKV, Window
from variants.multi_head import HeadKeywords, start_of

ROWS_AT_ONCE = 128
"""Queries of a block that plain PyTorch computes at once; most scores above the diagonal are thus skipped."""


class LocalAttention(Attention):
    """Causal multi-head attention inside blocks.

    Args:
        block: M, bytes of a block, from 1 (2 where a position does not see itself) to S; None for S / 4.
        The others are those of ``Attention``.
    """

    keyword = "block"
    """Name of M in the configuration."""

    def __init__(self, context: LayerContext, *, block: int | None, **heads: Unpack[HeadKeywords]):
        fewest = 1 if context.attend_self else 2
        size = max(fewest, context.span // 4) if block is None else block
        if not fewest <= size <= context.span:
            allowed = f"integers from {fewest} to model.span={context.span}, or null for a quarter"
            raise ValueError(f"{self.keyword}={size}: allowed are {allowed}")
        inside = replace(context, span=size)
        super().__init__(context, **heads, span=lambda _: AttentionSpan(inside))
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
        return self.block - 1

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """The state is the number of bytes in the open block, int64 ``[B]``, and the last M - 1 keys and values of the
        stream, ``[B, H, M - 1, K]`` each, or inputs ``[B, M - 1, D]``; zeros pad shorter streams."""
        segment, length = self.project_qkv(x, start_of(x, start)), x.shape[1]
        to_carry = [x] if self.cache == "hidden" else [segment.k, segment.v]
        if state is None:
            count, old = torch.zeros_like(segment.start), [part[..., :0, :] for part in to_carry]
            y = self._in_blocks(*segment[1:4])
        else:
            # A state of another block size is read as if a block of this size began with its open block.
            count = state[0] % self.block
            old = [self._last_rows(part).to(new.dtype) for part, new in zip(state[1:], to_carry, strict=True)]
            past = self.reproject_past(*old, segment, None, None)[1:3] if self.cache == "hidden" else old
            keys, values = (torch.cat(pair, dim=2) for pair in zip(past, segment[2:4], strict=True))
            y = (self._by_phase if host_knows(count) else self._realigned)(segment.q, keys, values, count)
        rows = (torch.cat(pair, dim=-2).detach() for pair in zip(old, to_carry, strict=True))
        return SublayerOutput(self.output(y), ((count + length) % self.block, *map(self._last_rows, rows)))

    def _last_rows(self, rows: Tensor) -> Tensor:
        """Return a copy of the last M - 1 of ``rows [.., P, width]``, after zeros if there are fewer."""
        return F.pad(rows, (0, 0, self.block - 1 - rows.shape[-2], 0))

    def _from_the_start(self, segment: Segment) -> Tensor:
        return self.split(self._in_blocks(*segment[1:4]))

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return head outputs ``[B, T, H K]`` of a segment that begins with a block."""
        (streams, _, length, _), size = q.shape, self.block
        if length > size:
            padded = (F.pad(part, (0, 0, 0, -length % size)) for part in (q, k, v))
            q, k, v = (rearrange(part, "B H (n M) K -> (B n) H M K", M=size) for part in padded)
        y = self._inside(q, k, v)
        return rearrange(y, "(B n) H M K -> B (n M) (H K)", B=streams)[:, :length]

    def _by_phase(self, q: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        """Return head outputs ``count [B]`` bytes into a block; M - 1 rows of ``keys`` and ``values`` are past rows."""
        phases, first, outputs, order = count.tolist(), self.block - 1, [], []
        for phase in sorted(set(phases)):
            alike = [b for b in range(len(phases)) if phases[b] == phase]
            some = [x if len(alike) == len(count) else x[alike] for x in (q, keys, values)]
            rest = min(q.shape[2], self.block - phase)
            before = [some[0][:, :, :rest], *(x[:, :, first - phase : first + rest] for x in some[1:])]
            y = rearrange(self._inside(*before), "B H T K -> B T (H K)")
            if rest < q.shape[2]:
                later = [some[0][:, :, rest:], *(x[:, :, first + rest :] for x in some[1:])]
                y = torch.cat([y, self._in_blocks(*later)], dim=1)
            outputs.append(y)
            order += alike
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)[torch.tensor(order).argsort()]

    def _realigned(self, q: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        """Do the same as ``_by_phase``, by index. Rows beyond either end repeat others; their results are not used."""
        (streams, heads, length, _), size = q.shape, self.block
        blocks = -(-(size - 1 + length) // size)
        place = torch.arange(blocks * size, device=q.device).view(blocks, 1, size)
        stream = torch.arange(streams * heads, device=q.device).view(streams, 1, heads, 1)
        begun = count.view(-1, 1, 1, 1)

        def moved(x: Tensor, first: Tensor) -> Tensor:  # [B, H, L, K] -> [B n, H, M, K], cut from row `first` on
            rows = (first + place).clamp(0, x.shape[2] - 1) + stream * x.shape[2]
            return F.embedding(rows.flatten(0, 1), x.flatten(0, 2))

        of_keys = size - 1 - begun
        y = self._inside(moved(q, -begun), moved(keys, of_keys), moved(values, of_keys))
        y = rearrange(y, "(B n) H M K -> (B n M) (H K)", B=streams)
        first = torch.arange(streams, device=q.device) * (blocks * size) + count
        return F.embedding(first[:, None] + torch.arange(length, device=q.device), y)

    def _inside(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return head outputs ``[N, H, T, K]`` of N blocks' last T bytes, given all their keys ``[N, H, P + T, K]``."""
        backend, rows = self.backend(q.device, training=self.training), q.shape[2]
        on_cpu = (backend, q.device.type) == ("kernel", "cpu")
        traced = backend == "plain" or backends.is_operation(backend, q.device)
        attend = self._in_positions if traced else self._in_positions_outside_the_graph
        size, before, outputs = ROWS_AT_ONCE if backend == "plain" else rows, k.shape[2] - rows, []
        for begin in range(0, rows, size):
            end = before + min(begin + size, rows)
            past = before + begin if on_cpu else 0  # other backends read all keys as one tensor
            old = [PastKV(tuple(range(self.heads)), k[:, :, :past], v[:, :, :past])] if past else []
            later = k[:, :, past:end], v[:, :, past:end]
            keys = VisibleKeys(*later, old)
            visible = Window((end,) * self.heads, self.shift)
            outputs.append(attend(backend, q[:, :, begin : begin + size], keys, visible, None))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    _in_positions_outside_the_graph = torch.compiler.disable(Attention._in_positions)

    def trim(self, state: State) -> State:
        return state  # its size is constant

    def set_span(self, span: int) -> None:
        if self.follows_span:
            super().set_span(max(1 + self.shift, span // 4))
        elif span < self.block:
            raise ValueError(f"eval.span={span}: allowed are integers from {self.block}, the bytes of a block")

    def ideal_flops(self) -> int:
        """Count as ``Attention``, averaged over a block's bytes: 1 to M keys, one fewer without ``attend_self``."""
        return round(self._forward_flops((self.block + 1) / 2 - self.shift))

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        begun = carried % self.block

        def of_first(number: int) -> int:  # pairs of the first bytes of a stream
            whole, rest = divmod(number, self.block)
            return sum(times * (n * (n + 1) // 2 - n * self.shift) for times, n in ((whole, self.block), (1, rest)))

        past = begun * min(segment, self.block - begun)
        new = of_first(begun + segment) - of_first(begun) - past
        return new * self.heads, past * self.heads, begun * self.heads


def host_knows(x: Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)
