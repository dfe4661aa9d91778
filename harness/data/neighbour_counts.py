"""Baselines for hidden bytes: predictions by the counts of a byte and its visible neighbours in the
train split, with the smoothing of ``byte_counts``.

    p(b) = (n(b) + d / V) / (n + d)
    p(b | l) = (n(l b) + d(l) p(b)) / (n(l) + d(l))        and p(b | r) alike
    p(b | l, r) = (n(l b r) + d(l, r) (p(b | l) + p(b | r)) / 2) / (n(l, r) + d(l, r))

n(..) is a count in train, d(..) the number of different bytes at the place of b, V the size of the
vocabulary. A neighbour that is hidden, or beyond the window, is unknown: then the bytes that are
visible predict. Where a context does not occur in train, the terms without it do."""

import numpy as np
from torch import Tensor

from harness.data.byte_counts import MAX_TRAIN_BYTES


def neighbour_bits(
    train: Tensor, windows: Tensor, selected: Tensor, *, vocabulary: int
) -> dict[str, float]:
    """Return bits per selected byte of ``windows [N, T]`` given their left, right, or both
    neighbours; empty if ``train [n]`` is too short or too long."""
    if not 3 <= len(train) <= MAX_TRAIN_BYTES:
        return {}
    size = vocabulary
    tokens = np.pad(windows.numpy().astype(np.int64), ((0, 0), (1, 1)))
    is_known = np.pad(~selected.numpy(), ((0, 0), (1, 1)))
    rows, columns = np.nonzero(selected.numpy())
    left, byte, right = (tokens[rows, columns + shift] for shift in range(3))
    left_known, right_known = (is_known[rows, columns + shift] for shift in (0, 2))
    ids = train.numpy().astype(np.int64)

    def smoothed(context: np.ndarray, counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Mix the ``counts [contexts, V]`` of a byte in its context with ``lower``."""
        n_context = counts.sum(1)[context]
        n_different = (counts > 0).sum(1)[context]
        mixed = (counts[context, byte] + n_different * lower) / np.maximum(
            n_context + n_different, 1
        )
        return np.where(n_context > 0, mixed, lower)

    def table(context: np.ndarray, followers: np.ndarray, contexts: int) -> np.ndarray:
        counts = np.bincount(context * size + followers, minlength=contexts * size)
        return counts.reshape(contexts, size)

    nothing = np.zeros_like(byte)
    alone = smoothed(nothing, table(np.zeros_like(ids), ids, 1), np.full(len(byte), 1 / size))
    by_left = smoothed(left, table(ids[:-1], ids[1:], size), alone)
    by_left = np.where(left_known, by_left, alone)
    by_right = smoothed(right, table(ids[1:], ids[:-1], size), alone)
    by_right = np.where(right_known, by_right, alone)
    between = table(ids[:-2] * size + ids[2:], ids[1:-1], size * size)
    by_both = smoothed(left * size + right, between, (by_left + by_right) / 2)
    one = np.where(left_known, by_left, by_right)  # p(b) if neither is known
    by_both = np.where(left_known & right_known, by_both, one)
    predictions = {"left": by_left, "right": by_right, "both": by_both}
    return {name: float(-np.log2(p).mean()) for name, p in predictions.items()}
