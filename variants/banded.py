"""Attention over a window with a learned vector per distance, without a score matrix in memory (1905.07799, 2.1 and 2.2).

    s_tx = q_t . (k_x + p_x),   a_tx = m_x exp(s_tx) / total_t

where column x is the x-th key from the nearest. ``fused.py``'s kernel takes only constants beside the scores, so here the
products are taken block by block: a few streams and rows at a time, small enough for a cache, and all heads that see
equally many keys. A block of rows meets n + rows - 1 keys; column x of row t lies on a diagonal of that block, so the
columns are a strided view of it, and no key is copied. Backward recomputes the block from the log-sum-exp.

Columns are held in reverse, the farthest first, which is the order of the keys.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.window import Window, soft_mask

BLOCK = 2**18
"""Scores of a block: a megabyte in float32."""
ROWS = 64


class _Bands:
    """The blocks of one call: which streams, heads, rows and keys, and what is added to their scores.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k: keys ``[B, H, L, K]``, padded so that every row has ``window.columns`` before it.
        missing: so many first keys are padding.
        vectors: p ``[n, K]``, shared by heads.
    """

    def __init__(self, q: Tensor, k: Tensor, window: Window, vectors: Tensor, missing: int):
        self.q, self.k, self.window, self.missing = q, k, window, missing
        self.island = torch.promote_types(q.dtype, torch.float32)
        self.turned = vectors.detach().flip(0).to(q.dtype)
        self.log_mask = None
        if window.z is not None:
            self.log_mask = soft_mask(window.z.detach(), window.ramp, max(window.columns)).log().flip(-1)
        self._zeros: dict[tuple[int, ...], Tensor] = {}

    def __iter__(self) -> Iterator[tuple]:
        """``(index of queries, index of keys, columns n, heads)``; every index is over streams, heads and bytes."""
        streams, _, rows, _ = self.q.shape
        for columns in sorted(set(self.window.columns)):
            heads = [h for h, n in enumerate(self.window.columns) if n == columns]
            part = slice(heads[0], heads[-1] + 1) if heads[-1] - heads[0] + 1 == len(heads) else heads
            together = max(1, BLOCK // (len(heads) * ROWS * (columns + ROWS)))
            for begin in range(0, rows, ROWS):
                end = min(begin + ROWS, rows)
                nearest = self.k.shape[2] - rows - self.window.shift + begin
                keys = slice(nearest - columns + 1, nearest + end - begin)
                for first in range(0, streams, together):
                    some = slice(first, first + together)
                    yield (some, part, slice(begin, end)), (some, part, keys), columns, heads

    def scores(self, q: Tensor, k: Tensor, columns: int) -> Tensor:
        """``[blocks, rows, n]`` of queries ``[blocks, rows, K]`` and their keys, without the soft mask."""
        near = (q @ self.turned[-columns:].T).to(self.island)
        return near.add_(band(q @ k.mT, columns))

    def mask_(self, scores: Tensor, columns: int, heads: list[int], first_key: int) -> None:
        """Add log m, and hide what is not there."""
        if self.log_mask is not None:
            by_head = scores.unflatten(0, (-1, len(heads)))
            by_head += self.log_mask[heads, None, -columns:].to(self.island)
        if first_key < self.missing:
            rows = torch.arange(scores.shape[1], device=scores.device)[:, None]
            key = first_key + rows + torch.arange(columns, device=scores.device)
            scores.masked_fill_(key < self.missing, -torch.inf)

    def empty_block(self, scores: Tensor) -> Tensor:
        """``[blocks, rows, keys]``, zero beside its band; the same for blocks of one shape, so its band must be written."""
        blocks, rows, columns = scores.shape
        shape = (blocks, rows, columns + rows - 1)
        if shape not in self._zeros:
            self._zeros[shape] = torch.zeros(shape, dtype=self.island, device=scores.device)
        return self._zeros[shape]


def band(block: Tensor, columns: int) -> Tensor:
    """Keys t .. t + n - 1 of row t, ``[blocks, rows, n]``: a strided view of the contiguous block, no copy."""
    outer, rows, one = block.stride()
    return block.as_strided((block.shape[0], block.shape[1], columns), (outer, rows + one, one))


def forward(q: Tensor, k: Tensor, v: Tensor, window: Window, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """What the heads give ``[B, H, T, K]`` and the log-sum-exp of their scores ``[B, H, T]``, -inf where nothing is seen.

    Args:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, the last T of them the segment's own.
        window: what a query may see; z is None or ``[H]``.
        vectors: p ``[n, K]`` for columns 0 .. n - 1, n the largest of ``window.columns``.
    """
    k, v, missing = _padded(q, k, v, window)
    bands = _Bands(q, k, window, vectors, missing)
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=bands.island, device=q.device)
    for at, keys, columns, heads in bands:
        own, shape = q[at].flatten(0, 1), q[at].shape
        scores = bands.scores(own, k[keys].flatten(0, 1), columns)
        bands.mask_(scores, columns, heads, keys[2].start)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        block = bands.empty_block(scores)
        weights = band(block, columns)
        torch.exp(scores.sub_(top), out=weights)
        total = weights.sum(-1, keepdim=True)
        lse[at] = (top + total.log()).view(shape[:3])
        part = block.to(v.dtype) @ v[keys].flatten(0, 1)
        y[at] = (part / total.masked_fill(total == 0, 1).to(part.dtype)).view(shape)
    return y, lse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, window: Window, vectors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, vectors and z, given g, the gradient of y.

    Args:
        y, lse: joint output and log-sum-exp, with whatever else shares the softmax; lse is inf where nothing is seen.
    """
    length = k.shape[2]
    k, v, missing = _padded(q, k, v, window)
    bands = _Bands(q, k, window, vectors, missing)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dvectors = torch.zeros(vectors.shape, dtype=bands.island, device=q.device).flip(0)
    dz = None if window.z is None else torch.zeros(len(window.columns), dtype=bands.island, device=q.device)
    delta = (g * y).sum(-1, dtype=bands.island)
    for at, keys, columns, heads in bands:
        own, up, shape = q[at].flatten(0, 1), g[at].flatten(0, 1), q[at].shape
        keys_here, values_here = k[keys].flatten(0, 1), v[keys].flatten(0, 1)
        scores = bands.scores(own, keys_here, columns).sub_(lse[at].reshape(-1, shape[2], 1))
        reward = band(up @ values_here.mT, columns) - delta[at].reshape(-1, shape[2], 1)
        if dz is not None:
            _add_span_gradient(dz, scores, reward, window, columns, heads, missing - keys[2].start)
        bands.mask_(scores, columns, heads, keys[2].start)
        block = bands.empty_block(scores)
        weights = band(block, columns)
        torch.exp(scores, out=weights)
        dv[keys] += (block.to(up.dtype).mT @ up).unflatten(0, shape[:2])
        moved = reward.mul_(weights)
        weights.copy_(moved)
        light = moved.to(q.dtype)
        dq[at] = (block.to(q.dtype) @ keys_here + light @ bands.turned[-columns:]).view(shape)
        dk[keys] += (block.to(q.dtype).mT @ own).unflatten(0, shape[:2])
        dvectors[-columns:] += light.flatten(0, 1).T @ own.flatten(0, 1)
    return dq, dk[:, :, -length:], dv[:, :, -length:], dvectors.flip(0).to(vectors.dtype), dz


def _padded(q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor, int]:
    """Keys and values with so many zeros before them that every row has a full band."""
    missing = max(0, window.past() - (k.shape[2] - q.shape[2]))
    return (F.pad(k, (0, 0, missing, 0)), F.pad(v, (0, 0, missing, 0)), missing) if missing else (k, v, 0)


def _add_span_gradient(
    dz: Tensor, scores: Tensor, reward: Tensor, window: Window, columns: int, heads: list[int], hidden: int
) -> None:
    """dL/dz of each head: sum over z <= x <= z + R of exp(s - lse) (g . v - g . y) / R; see ``fused.py``.

    Args:
        scores: less the log-sum-exp, without the soft mask.
        hidden: so many first keys of row 0 are not there, one fewer in every row after.
    """
    far = window.z.detach() + window.ramp  # rounded as in soft_mask, so that both agree on which side of a kink z is
    for place, head in enumerate(heads):
        nearest = int(far[head].ceil()) - window.ramp
        farthest = min(int(far[head].floor()), columns - 1)
        ramp = slice(columns - 1 - farthest, columns - nearest)  # columns are held in reverse
        part = scores[place :: len(heads), :, ramp].exp() * reward[place :: len(heads), :, ramp]
        if hidden > 0:
            rows = torch.arange(part.shape[1], device=part.device)[:, None]
            key = rows + torch.arange(ramp.start, columns - nearest, device=part.device)
            part = part.masked_fill(key < hidden, 0)
        dz[head] += part.sum() / window.ramp
