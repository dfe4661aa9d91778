"""Local attention: the stream is cut into blocks of M bytes, and a query sees the keys of its own block up to itself.

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax over j of (q_t . k_j + position) / sqrt(K),   M floor(t / M) <= j <= t

Liu et al. 2018 (1801.10198, 4.2.4): blocks of 256, attention in each by itself. Blocks are counted from where a stream
began and not from where a segment begins, so segments do not matter: what is carried is the open block and how many bytes
it has. A byte costs (M + 1) / 2 pairs of a query and a key in the mean, and nothing is seen that is M or more bytes back.

Blocks are independent, so they are streams of their own to the backends of attention, which compute a triangle of each:

- no state: every stream is at phase 0, and blocks are cut from the segment as it lies;
- a state on a CPU: streams of one phase take the rest of their open block and then whole ones, and no pair too many;
- a state where only the device knows phases: rows are moved to their blocks by index;
- few bytes after that: there most of a block would be empty, and each query looks back as far as its block began.

It honours every position scheme (of distances inside a block), both caches, and ``attend_self: false``, where the first
query of a block sees nothing and gives 0. Ours: no gradient goes to what earlier segments had of the open block.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from variants import backends
from variants.attention import Attention
from variants.attention_parts import FixedSpan
from variants.context import VisibleKeys
from variants.contract import LayerContext, State, SublayerOutput
from variants.kernels.window import PastKV, Window

ROWS_AT_ONCE = 128
"""Queries of a block that plain PyTorch takes at once: it then skips most of what is above the diagonal."""
HALF_A_KEY = 0.5
"""A ramp that lies between two keys: a hard edge, which may be another for every query."""


class LocalAttention(Attention):
    """Causal multi-head attention inside blocks.

    Args:
        context: heads, cache, positions and dropout of the run; its span is the longest block.
        block: M, bytes of a block, from 1 (2 where a position does not see itself) to S; None for S / 4.
        d_head, bias, zero_init: as ``Attention`` has them.
    """

    keyword = "block"
    """What M is called where it is configured."""

    def __init__(
        self,
        context: LayerContext,
        *,
        block: int | None,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
    ):
        fewest = 1 if context.attend_self else 2
        size = _quarter(context.span, fewest) if block is None else block
        if not fewest <= size <= context.span:
            raise ValueError(
                f"{self.keyword}={size}: allowed are integers from {fewest} to model.span={context.span}, or null for a quarter"
            )

        def inside(_: LayerContext) -> FixedSpan:
            return FixedSpan(replace(context, span=size))

        super().__init__(context, d_head=d_head, bias=bias, zero_init=zero_init, span=inside)
        self.fewest, self.follows_span = fewest, block is None
        self.honours = replace(self.honours, span=True if self.follows_span else None)

    @property
    def block(self) -> int:
        """M: what a head looks back over is never longer."""
        return self.span.span

    @property
    def period(self) -> int:
        return self.block

    def reach(self) -> int:
        return self.block - 1

    def forward(
        self, x: Tensor, state: State = None, start: Tensor | None = None, *, collect_stats: bool = False
    ) -> SublayerOutput:
        """``x [B, T, D]`` to ``y [B, T, D]``. A state is bytes in the open block, int64 ``[B]``, and the last M - 1 keys
        and values of the stream, ``[B, H, M - 1, K]`` each, or its inputs ``[B, M - 1, D]``; zeros where it is shorter."""
        if start is None:
            start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        q, k, v = self._project(x, self.query, self.key, self.value)
        q, k = self.position.rotate(q, start), self.position.rotate(k, start)
        own = [x] if self.cache == "hidden" else [k, v]
        if state is None:
            count, old = torch.zeros_like(start), [None] * len(own)
            y = self._in_blocks(q, k, v)
        else:
            # A state of other blocks stands where it would if one of these had begun with the open one.
            count = state[0] % self.block
            old = [self._fitted(part).to(new.dtype) for part, new in zip(state[1:], own, strict=True)]
            past = self._again(*old, start, self.block - 1, None)[1:] if self.cache == "hidden" else old
            keys, values = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
            few = 2 * x.shape[1] <= self.block
            unknown = self._each_looks_back if few else self._realigned
            y = (self._by_phase if self._go_by_phase(count, x.shape[1]) else unknown)(q, keys, values, count)
        kept = (self._last(*pair) for pair in zip(old, own, strict=True))
        return SublayerOutput(self.output(y), ((count + x.shape[1]) % self.block, *kept))

    def _fitted(self, rows: Tensor) -> Tensor:
        """The last M - 1 of ``rows [.., P, width]``, after zeros where there are fewer."""
        missing = self.block - 1 - rows.shape[-2]
        return F.pad(rows, (0, 0, missing, 0)) if missing else rows

    def _last(self, old: Tensor | None, new: Tensor) -> Tensor:
        """The last M - 1 rows of ``old``, which has as many, and ``new``: a copy, so that it keeps nothing else in memory."""
        new = new.detach()[..., max(0, new.shape[-2] - (self.block - 1)) :, :]
        missing = self.block - 1 - new.shape[-2]
        if old is None:
            return F.pad(new, (0, 0, missing, 0))
        return torch.cat([old[..., self.block - 1 - missing :, :], new], dim=-2)

    def _from_the_start(self, x: Tensor, q: Tensor, own: list[Tensor], *rest: object) -> Tensor:
        return rearrange(self._in_blocks(q, *own), "B T (H K) -> B H T K", H=self.heads)

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the heads give ``[B, T, H K]`` where the segment begins with a block."""
        (streams, _, length, _), size = q.shape, self.block
        if length > size:
            rest = -length % size
            padded = (F.pad(part, (0, 0, 0, rest)) if rest else part for part in (q, k, v))
            q, k, v = (rearrange(part, "B H (n M) K -> (B n) H M K", M=size) for part in padded)
        y = self._inside(q, k, v)
        return rearrange(y, "(B n) H M K -> B (n M) (H K)", B=streams)[:, :length]

    @staticmethod
    def _go_by_phase(count: Tensor, length: int) -> bool:
        """Whether phases can be read without waiting for a device, and are not too many for a few bytes."""
        if count.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(count, FakeTensor):
            return False
        return length > ROWS_AT_ONCE or len(count.unique()) == 1

    def _by_phase(self, q: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        """The same where the segment begins after ``count [B]`` bytes of a block, with M - 1 rows before it in ``keys`` and
        ``values [B, H, M - 1 + T, K]``."""
        phases, behind, found, order = count.tolist(), self.block - 1, [], []
        for phase in sorted(set(phases)):
            alike = [i for i, own in enumerate(phases) if own == phase]
            own_q, own_k, own_v = (x if len(alike) == len(count) else x[alike] for x in (q, keys, values))
            rest = min(q.shape[2], self.block - phase)
            open_block = slice(behind - phase, behind + rest)
            y = self._inside(own_q[:, :, :rest], own_k[:, :, open_block], own_v[:, :, open_block])
            y = rearrange(y, "B H T K -> B T (H K)")
            if rest < q.shape[2]:
                later = self._in_blocks(own_q[:, :, rest:], own_k[:, :, behind + rest :], own_v[:, :, behind + rest :])
                y = torch.cat([y, later], dim=1)
            found.append(y)
            order += alike
        return found[0] if len(found) == 1 else torch.cat(found)[torch.tensor(order).argsort()]

    def _realigned(self, q: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        """As ``_by_phase``.

        Rows beyond either end are copies of others: they stand after all that is asked for, or are queries of the past.
        """
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
        own = torch.arange(streams, device=q.device) * (blocks * size) + count
        return F.embedding(own[:, None] + torch.arange(length, device=q.device), y)

    def _each_looks_back(self, q: Tensor, keys: Tensor, values: Tensor, count: Tensor) -> Tensor:
        """As ``_by_phase``, by a window of M keys that for each query ends where its block began."""
        length = q.shape[2]
        phase = (count[:, None] + torch.arange(length, device=q.device)) % self.block
        farthest = (phase - self.shift).to(torch.promote_types(q.dtype, torch.float32))
        edges = farthest[:, None].expand(-1, self.heads, -1)
        visible = Window((self.block,) * self.heads, self.shift, edges, HALF_A_KEY)
        at_once = length <= ROWS_AT_ONCE or self.backend(q.device, training=self.training) == "plain"
        y = self._of_window("plain" if at_once else "chunked", q, keys, values, visible)
        return rearrange(y, "B H T K -> B T (H K)")

    def _inside(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the heads give ``[N, H, T, K]`` for the last T bytes of N blocks, each of which is seen from its start and
        alone: ``k`` and ``v [N, H, P + T, K]``."""
        backend, rows = self.backend(q.device, training=self.training), q.shape[2]
        size, before, parts = ROWS_AT_ONCE if backend == "plain" else rows, k.shape[2] - rows, []
        for begin in range(0, rows, size):
            end = min(begin + size, rows)
            seen = before + end
            visible = Window((seen,) * self.heads, self.shift)
            parts.append(self._of_window(backend, q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], visible))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _of_window(self, backend: str, q: Tensor, k: Tensor, v: Tensor, visible: Window) -> Tensor:
        on_cpu = (backend, q.device.type) == ("kernel", "cpu")
        past = k.shape[2] - q.shape[2] if on_cpu else 0  # the others read keys as one
        old = [PastKV(tuple(range(self.heads)), k[:, :, :past], v[:, :, :past])] if past else []
        k, v = k[:, :, past:], v[:, :, past:]
        keys = VisibleKeys(k, v, old, []) if on_cpu else VisibleKeys.joined(k, v, old)
        traced = backend == "plain" or backends.is_operation(backend, q.device)
        return (self._attend if traced else self._attend_outside_the_graph)(backend, q, keys, visible, None)

    _attend_outside_the_graph = torch.compiler.disable(Attention._attend)

    def trim(self, state: State) -> State:
        return state  # always of one size

    def set_span(self, span: int) -> None:
        if self.follows_span:
            super().set_span(_quarter(span, self.fewest))
        elif span < self.block:
            raise ValueError(f"eval.span={span}: allowed are integers from {self.block}, the bytes of a block")

    def ideal_flops(self) -> int:
        """As ``Attention`` has it, for the mean over a block's bytes, which see 1 to M keys, or one fewer."""
        return round(self._forward_flops((self.block + 1) / 2 - self.shift))

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        begun = carried % self.block

        def of_first(number: int) -> int:  # pairs that so many bytes make where a stream begins
            whole, rest = divmod(number, self.block)
            return sum(times * (n * (n + 1) // 2 - n * self.shift) for times, n in ((whole, self.block), (1, rest)))

        past = begun * min(segment, self.block - begun)
        own = of_first(begun + segment) - of_first(begun) - past
        return own * self.heads, past * self.heads, begun * self.heads


def _quarter(span: int, fewest: int) -> int:
    return max(fewest, span // 4)
