"""Baselines for hidden bytes: predictions by the counts of a byte and its visible neighbours in the
train split, with the smoothing of ``byte_counts``.

    p(b) = (n(b) + d / V) / (n + d)
    p(b | l) = (n(l b) + d(l) p(b)) / (n(l) + d(l))        and p(b | r) alike
    p(b | l, r) = (n(l b r) + d(l, r) (p(b | l) + p(b | r)) / 2) / (n(l, r) + d(l, r))

n(..) is a count in train, d(..) the number of different bytes at the place of b, V the size of the
vocabulary. A neighbour that is hidden, or beyond the window, is unknown: then the bytes that are
visible predict. Where a context does not occur in train, the terms without it do."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.byte_counts import MAX_TRAIN_BYTES


def neighbour_bits(
    train: Tensor, inputs: Tensor, tokens: Tensor, selected: Tensor, *, vocabulary: int
) -> dict[str, float]:
    """Return bits per selected byte of ``tokens [N, T]`` given their left, right, or both
    neighbours in ``inputs``, where selected bytes have the id ``vocabulary``; empty if ``train
    [n]`` is too short or too long."""
    if not 3 <= len(train) <= MAX_TRAIN_BYTES:
        return {}
    size = vocabulary
    ids = train.long()
    # the id of hidden bytes, which does not occur in train, also stands for those beyond the window
    visible = F.pad(inputs.long(), (1, 1), value=size)
    byte = tokens[selected]
    left = visible[:, :-2][selected]
    right = visible[:, 2:][selected]

    def smoothed(context, contexts, followers, lower: Tensor) -> Tensor:
        """Return the probabilities of ``byte`` after ``context``, counted in the ``followers`` of
        ``contexts``, and mixed with ``lower``."""
        minlength = int(context.max() + 1) * size
        counts = torch.bincount(contexts * size + followers, minlength=minlength).view(-1, size)
        n = counts.sum(1)[context]
        d = counts.count_nonzero(1)[context]
        return torch.where(n > 0, (counts[context, byte] + d * lower) / (n + d), lower)

    uniform = torch.tensor(1 / size, dtype=torch.float64)
    alone = smoothed(torch.zeros_like(byte), torch.zeros_like(ids), ids, uniform)
    by_left = smoothed(left, ids[:-1], ids[1:], alone)
    by_right = smoothed(right, ids[1:], ids[:-1], alone)
    contexts = ids[:-2] * (size + 1) + ids[2:]
    mean = (by_left + by_right) / 2
    by_both = smoothed(left * (size + 1) + right, contexts, ids[1:-1], mean)
    by_both = torch.where(left == size, by_right, by_both)
    by_both = torch.where(right == size, by_left, by_both)
    predictions = {"left": by_left, "right": by_right, "both": by_both}
    return {name: -p.log2().mean().item() for name, p in predictions.items()}
