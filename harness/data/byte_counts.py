"""Byte counts: what predicts a split from counts of training bytes alone, a floor under every model.

    p_k(b | c) = (n(c b) + d(c) p_{k-1}(b | c')) / (n(c) + d(c))        Witten and Bell, 1991

n counts in train, d(c) is the number of different bytes that followed the context c of k bytes, c' is c without its oldest
byte, and p_{-1} = 1/256. A context that train does not have, or that begins before the split, leaves p_{k-1} as it is.
Counted once on train and not adapted to what is scored.
"""

import numpy as np

ORDERS = (2, 3, 5)
LARGEST_TRAIN = 2**24
"""Bytes of train from which counting would take minutes: no score then."""


def grams(content: np.ndarray, length: int) -> np.ndarray:
    """Each run of ``length`` bytes, at most 8, as one number, the newest byte lowest: uint64 ``[n - length + 1]``."""
    count = max(0, len(content) - length + 1)
    numbers = np.zeros(count, np.uint64)
    for place in range(length):
        numbers = (numbers << np.uint64(8)) | content[place : place + count]
    return numbers


def counts_of(values: np.ndarray, sorted_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The count of each value, 0 where it is no key."""
    place = np.searchsorted(sorted_keys, values).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == values, counts[place], 0)


def order_bits(train: np.ndarray, content: np.ndarray) -> dict[str, float]:
    """Bits per byte of ``content`` by order, ``{"order-2": 3.2}``; both uint8 ``[n]``."""
    if not max(ORDERS) < len(train) <= LARGEST_TRAIN:
        return {}
    probability, bits = np.full(len(content), 1 / 256), {}
    for order in range(max(ORDERS) + 1):
        keys, counts = np.unique(grams(train, order + 1), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        totals, different = np.add.reduceat(counts, first), np.diff(first, append=len(keys))
        scored = grams(content, order + 1)
        context = scored >> np.uint64(8)
        seen, kinds = counts_of(context, contexts, totals), counts_of(context, contexts, different)
        lower = probability[order:]
        mixed = (counts_of(scored, keys, counts) + kinds * lower) / np.maximum(seen + kinds, 1)
        probability[order:] = np.where(seen, mixed, lower)
        if order in ORDERS:
            bits[f"order-{order}"] = float(-np.log2(probability).mean())
    return bits
