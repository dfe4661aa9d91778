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
    ids = train.numpy().astype(np.int64)
    # an id that does not occur in train stands for unknown bytes
    visible = np.where(selected.numpy(), size, windows.numpy().astype(np.int64))
    visible = np.pad(visible, ((0, 0), (1, 1)), constant_values=size)
    rows, columns = np.nonzero(selected.numpy())
    byte = windows.numpy()[rows, columns].astype(np.int64)
    left = visible[rows, columns]
    right = visible[rows, columns + 2]

    def smoothed(context, contexts, followers, lower: np.ndarray) -> np.ndarray:
        """Return the probabilities of ``byte`` after ``context``, counted in the ``followers`` of
        ``contexts``, and mixed with ``lower``."""
        n_contexts = int(max(context.max(), contexts.max())) + 1
        counts = np.bincount(contexts * size + followers, minlength=n_contexts * size)
        counts = counts.reshape(-1, size)
        n = counts.sum(1)[context]
        d = (counts > 0).sum(1)[context]
        return np.where(n, (counts[context, byte] + d * lower) / np.maximum(n + d, 1), lower)

    alone = smoothed(np.zeros_like(byte), np.zeros_like(ids), ids, 1 / size)
    by_left = smoothed(left, ids[:-1], ids[1:], alone)
    by_right = smoothed(right, ids[1:], ids[:-1], alone)
    contexts = ids[:-2] * (size + 1) + ids[2:]
    mean = (by_left + by_right) / 2
    by_both = smoothed(left * (size + 1) + right, contexts, ids[1:-1], mean)
    by_both = np.where(right == size, by_left, np.where(left == size, by_right, by_both))
    predictions = {"left": by_left, "right": by_right, "both": by_both}
    return {name: float(-np.log2(p).mean()) for name, p in predictions.items()}
