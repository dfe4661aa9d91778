"""Attention over a window by matrix products of blocks that fit a cache: no score matrix in memory.

    s_tx = q_t . (k_x + p_x) + b_x,   a_tx = m_x exp(s_tx) / total_t                       (1905.07799, 2.1 and 2.2)

where column x is the x-th key from the nearest. A few streams and rows are taken at a time, with all heads that see equally
many keys. A block of rows meets n + rows - 1 keys; column x of row t lies on a diagonal of that block, so the columns are a
strided view of it, and no key is copied. Backward recomputes the block from the log-sum-exp.

Learned vectors p per distance must go this way, because ``fused.py``'s kernel takes only constants beside the scores. Short
windows with a soft mask should: here the gradient of a span comes with the rest.

Columns are held in reverse, the farthest first, which is the order of the keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.window import Window, soft_mask

BLOCK = 2**18
"""Scores of a block: a megabyte in float32."""
ROWS = 64
"""Rows of a block, half of that for the shortest windows: a block has rows - 1 keys that some row does not see."""


class _Bands:
    """The blocks of one call: which streams, heads, rows and keys, and what is added to their scores.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k: keys ``[B, H, L, K]``, padded so that every row has ``window.columns`` before it.
        missing: so many first keys are padding.
        added: what is added to scores.
    """

    def __init__(self, q: Tensor, k: Tensor, window: Window, missing: int, added: "Added"):
        self.q, self.k, self.window, self.missing, self.added = q, k, window, missing, added
        self.island = torch.promote_types(q.dtype, torch.float32)
        self.turned = None if added.vectors is None else added.vectors.detach().flip(0).to(self.island)
        self.bias = None if added.bias is None else added.bias.flip(-1)
        self.log_mask = None
        if window.z is not None:
            self.log_mask = soft_mask(window.z.detach(), window.ramp, max(window.columns)).log().flip(-1)
        self._zeros: dict[tuple[int, ...], Tensor] = {}

    def __iter__(self) -> Iterator[tuple]:
        """``(index of queries, index of keys, columns n, heads)``; every index is over streams, heads and bytes."""
        streams, _, rows, _ = self.q.shape
        for columns in sorted(self.added.widths(self.window)):
            heads = [h for h, n in enumerate(self.window.columns) if n == columns]
            part = slice(heads[0], heads[-1] + 1) if heads[-1] - heads[0] + 1 == len(heads) else heads
            size = ROWS if columns > ROWS else ROWS // 2
            together = max(1, BLOCK // (len(heads) * size * (columns + size)))
            for begin in range(0, rows, size):
                end = min(begin + size, rows)
                nearest = self.k.shape[2] - rows - self.window.shift + begin
                keys = slice(nearest - columns + 1, nearest + end - begin)
                for first in range(0, streams, together):
                    some = slice(first, first + together)
                    yield (some, part, slice(begin, end)), (some, part, keys), columns, heads

    def blocks(self, *parts: Tensor) -> list[Tensor]:
        """``[streams, heads, rows, K]`` as ``[blocks, rows, K]``, in float32 or wider."""
        return [part.flatten(0, 1).to(self.island) for part in parts]

    def scores(self, q: Tensor, k: Tensor, columns: int, heads: list[int]) -> Tensor:
        """``[blocks, rows, n]`` of queries ``[blocks, rows, K]`` and their keys, without the soft mask."""
        found = band(q @ k.mT, columns)
        if self.turned is not None:
            found = (q @ self.turned[-columns:].T).add_(found)
        if self.bias is not None:
            by_head = found.unflatten(0, (-1, len(heads)))
            found = (by_head + self.bias[heads, None, -columns:].to(self.island)).flatten(0, 1)
        return found

    def masked(self, scores: Tensor, columns: int, heads: list[int], first_key: int) -> Tensor:
        """With log m added, and without what is not there."""
        if self.log_mask is not None:
            by_head = scores.unflatten(0, (-1, len(heads)))
            scores = (by_head + self.log_mask[heads, None, -columns:].to(self.island)).flatten(0, 1)
        if first_key < self.missing:
            rows = torch.arange(scores.shape[1], device=scores.device)[:, None]
            key = first_key + rows + torch.arange(columns, device=scores.device)
            scores = scores.masked_fill(key < self.missing, -torch.inf)
        return scores

    def empty_block(self, scores: Tensor) -> Tensor:
        """``[blocks, rows, keys]``, zero beside its band; the same for blocks of one shape, so its band must be written."""
        blocks, rows, columns = scores.shape
        shape = (blocks, rows, columns + rows - 1)
        if shape not in self._zeros:
            self._zeros[shape] = torch.zeros(shape, dtype=self.island, device=scores.device)
        return self._zeros[shape]


class Added(NamedTuple):
    """What is added to scores, and which heads are computed here.

    Attributes:
        bias: constant ``[H, n]`` over columns, or None.
        vectors: p ``[n, K]`` for columns 0 .. n - 1, n the largest of ``window.columns``, shared by heads; or None.
        most_columns: heads that see more keys are left out; None for none.
    """

    bias: Tensor | None = None
    vectors: Tensor | None = None
    most_columns: int | None = None

    def widths(self, window: Window) -> set[int]:
        """Numbers of columns that are computed here."""
        return {n for n in window.columns if self.most_columns is None or n <= self.most_columns}


def band(block: Tensor, columns: int) -> Tensor:
    """Keys t .. t + n - 1 of row t, ``[blocks, rows, n]``: a strided view of the contiguous block, no copy."""
    outer, rows, one = block.stride()
    return block.as_strided((block.shape[0], block.shape[1], columns), (outer, rows + one, one))


def forward_(y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, window: Window, added: Added) -> None:
    """Write what the heads give into ``y [B, H, T, K]`` and the log-sum-exp of their scores into ``lse [B, H, T]``, -inf
    where nothing is seen.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, the last T of them the segment's own.
        window: what a query may see; z is None or ``[H]``.
    """
    k, v, missing = _padded(q, k, v, window)
    bands = _Bands(q, k, window, missing, added)
    for at, keys, columns, heads in bands:
        own, keys_here, values_here = bands.blocks(q[at], k[keys], v[keys])
        shape = q[at].shape
        scores = bands.scores(own, keys_here, columns, heads)
        scores = bands.masked(scores, columns, heads, keys[2].start)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        block = bands.empty_block(scores)
        weights = band(block, columns)
        torch.exp(scores - top, out=weights)
        total = weights.sum(-1, keepdim=True)
        lse[at] = (top + total.log()).view(shape[:3])
        y[at] = (block @ values_here / total.masked_fill(total == 0, 1)).view(shape).to(y.dtype)


class Gradients(NamedTuple):
    """To be added to: of q, k, v ``[B, H, ., K]``, of the vectors, and of z ``[H]``; None for what there is not."""

    q: Tensor
    k: Tensor
    v: Tensor
    vectors: Tensor | None
    z: Tensor | None


def backward_(
    d: Gradients, g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, window: Window, added: Added
) -> None:
    """Add to the gradients, given g, the gradient of y.

    Args:
        y, lse: joint output and log-sum-exp, with whatever else shares the softmax; lse is inf where nothing is seen.
    """
    k, v, missing = _padded(q, k, v, window)
    bands = _Bands(q, k, window, missing, added)
    dk, dv = (F.pad(x, (0, 0, missing, 0)) if missing else x for x in (d.k, d.v))
    delta = (g * y).sum(-1, dtype=bands.island)
    spans = None if d.z is None else _Spans(window.z.detach(), window, bands.island)
    for at, keys, columns, heads in bands:
        own, up, keys_here, values_here = bands.blocks(q[at], g[at], k[keys], v[keys])
        shape = q[at].shape
        scores = bands.scores(own, keys_here, columns, heads) - lse[at].reshape(-1, shape[2], 1)
        reward = band(up @ values_here.mT, columns) - delta[at].reshape(-1, shape[2], 1)
        block = bands.empty_block(scores)
        weights = band(block, columns)
        torch.exp(bands.masked(scores, columns, heads, keys[2].start), out=weights)
        dv[keys] += (block.mT @ up).unflatten(0, shape[:2]).to(dv.dtype)
        moved = reward * weights
        weights.copy_(moved)
        if spans is not None:
            spans.add(scores, reward, moved, heads, missing - keys[2].start)
        dq = block @ keys_here
        if d.vectors is not None:
            dq += moved @ bands.turned[-columns:]
            d.vectors[:columns] += (moved.flatten(0, 1).T @ own.flatten(0, 1)).flip(0).to(d.vectors.dtype)
        d.q[at] += dq.view(shape).to(d.q.dtype)
        dk[keys] += (block.mT @ own).unflatten(0, shape[:2]).to(dk.dtype)
    if spans is not None:
        d.z.add_(spans.total)
    if missing:
        d.k.copy_(dk[:, :, missing:])
        d.v.copy_(dv[:, :, missing:])


def _padded(q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor, int]:
    """Keys and values with so many zeros before them that every row has a full band."""
    missing = max(0, window.past() - (k.shape[2] - q.shape[2]))
    return (F.pad(k, (0, 0, missing, 0)), F.pad(v, (0, 0, missing, 0)), missing) if missing else (k, v, 0)


class _Spans:
    """Collects dL/dz of each head: the sum over z <= x <= z + R of exp(s - lse) (g . v - g . y) / R; see ``fused.py``.

    That is the gradient of the scores over R m, column by column; only where m is 0, at x = z + R, it must be had apart.

    Args:
        z: spans ``[H]``.
    """

    def __init__(self, z: Tensor, window: Window, dtype: torch.dtype):
        columns = torch.arange(max(window.columns), device=z.device)
        far = z[:, None] + window.ramp  # rounded as in soft_mask, so that both agree on which side of a kink z is
        mask = soft_mask(z, window.ramp, len(columns)).to(dtype)
        on_ramp = (columns >= far.ceil() - window.ramp) & (mask > 0)
        self._share = torch.where(on_ramp, 1 / (window.ramp * mask), 0)
        self._end = torch.where(far == far.floor(), far, -1)[:, 0].long()  # the column of weight 0, where there is one
        self._ramp = window.ramp
        self.total = torch.zeros(len(z), dtype=dtype, device=z.device)

    def add(self, scores: Tensor, reward: Tensor, moved: Tensor, heads: list[int], hidden: int) -> None:
        """One block, ``[blocks, rows, n]`` each, with columns in reverse.

        Args:
            scores: less the log-sum-exp, without the soft mask.
            reward: g . v - g . y.
            moved: the gradient of the scores.
            hidden: so many first keys of row 0 are not there, one fewer in every row after.
        """
        n = scores.shape[-1]
        by_column = moved.unflatten(0, (-1, len(heads))).sum(dim=(0, 2))
        self.total[heads] += (by_column * self._share[heads, :n].flip(-1)).sum(-1)
        end = self._end[heads]
        place = (n - 1 - end).clamp(0, n - 1)
        at = place[None, :, None, None].expand(len(scores) // len(heads), -1, scores.shape[1], 1)
        weight, own = (x.unflatten(0, (-1, len(heads))).gather(-1, at)[..., 0] for x in (scores, reward))
        rows = torch.arange(scores.shape[1], device=scores.device)
        there = ((end >= 0) & (end < n))[:, None] & (rows + place[:, None] >= hidden)
        self.total[heads] += (weight.exp() * own).masked_fill(~there, 0).sum(dim=(0, 2)) / self._ramp
