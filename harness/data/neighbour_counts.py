"""Baselines for hidden bytes: predictions by the counts of a byte and its visible neighbours in the
train split, with the smoothing of ``byte_counts``.

    p(b) = (n(b) + d / V) / (n + d)
    p(b | l) = (n(l b) + d(l) p(b)) / (n(l) + d(l))        and p(b | r) alike
    p(b | l, r) = (n(l b r) + d(l, r) (p(b | l) + p(b | r)) / 2) / (n(l, r) + d(l, r))

n(..) is a count in train, d(..) the number of different bytes at the place of b, V the size of the
vocabulary. A neighbour that is hidden, or beyond the window, is unknown: then the bytes that are
visible predict. Where a context does not occur in train, the terms without it do."""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from harness.data.byte_counts import MAX_TRAIN_BYTES, smoothed


def neighbour_bits(
    train: Tensor, inputs: Tensor, tokens: Tensor, selected: Tensor, *, vocabulary: int
) -> dict[str, float]:
    """Return bits per selected byte of ``tokens [N, T]`` given their left, right, or both
    neighbours in ``inputs``, where selected bytes have the id ``vocabulary``; empty if ``train
    [n]`` is too short or too long."""
    if not 3 <= len(train) <= MAX_TRAIN_BYTES:
        return {}
    ids = train.numpy().astype(np.int64)
    # the id of hidden bytes, which does not occur in train, also stands for those beyond the window
    visible = F.pad(inputs.long(), (1, 1), value=vocabulary)
    left, byte, right = (x[selected].numpy() for x in (visible[:, :-2], tokens, visible[:, 2:]))
    alone = smoothed(ids, byte, 1 / vocabulary)
    by_left = smoothed(ids[:-1] << 8 | ids[1:], left << 8 | byte, alone)
    by_right = smoothed(ids[1:] << 8 | ids[:-1], right << 8 | byte, alone)
    both = left << 17 | right << 8 | byte
    mean = (by_left + by_right) / 2
    by_both = smoothed(ids[:-2] << 17 | ids[2:] << 8 | ids[1:-1], both, mean)
    by_both = np.where(left == vocabulary, by_right, by_both)
    by_both = np.where(right == vocabulary, by_left, by_both)
    predictions = {"left": by_left, "right": by_right, "both": by_both}
    return {name: float(-np.log2(p).mean()) for name, p in predictions.items()}
