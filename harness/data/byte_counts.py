"""Byte counts, which predict a split by counts of training bytes alone, and compressors: baselines of every model.

    p_k(b | c) = (n(c b) + d(c) p_{k-1}(b | c')) / (n(c) + d(c))        Witten and Bell, 1991

n counts in train, d(c) counts the different bytes after the context c of k bytes, c' is c without its oldest byte, and
p_{-1} = 1/256. For a context not in train, or begun before the split, p_k is p_{k-1}. Scoring adapts no counts.
"""

import bz2
import gzip
import json
import lzma
from contextlib import suppress

import numpy as np
from torch import Tensor

from harness.cache import cache_folder, write_whole
from harness.data.sources import digest

ORDERS = (2, 3, 5)
LARGEST_TRAIN = 2**24
"""Bytes of train: from more, counting takes minutes, and there is no score."""


def compressed_bits(split: Tensor, *, train: Tensor) -> dict[str, float]:
    """Bits per byte of a split under ``gzip -9``, ``bzip2 -9`` and ``xz -9e``, and by counts of ``train``; kept in the
    user's cache, because 5 MB take seconds."""
    content = split.numpy().tobytes()
    remembered = cache_folder() / "compressed" / f"{digest(content)}-{digest(train.numpy())}.json"
    with suppress(OSError, ValueError):
        return json.loads(remembered.read_bytes())
    packed = {
        "gzip": gzip.compress(content, 9, mtime=0),
        "bzip2": bz2.compress(content, 9),
        "xz": lzma.compress(content, preset=9 | lzma.PRESET_EXTREME),
    }
    bits = {name: 8 * len(small) / len(content) for name, small in packed.items()}
    bits |= order_bits(train.numpy(), split.numpy())
    with suppress(OSError):  # only speed is lost
        write_whole(remembered, json.dumps(bits).encode())
    return bits


def order_bits(train: np.ndarray, content: np.ndarray) -> dict[str, float]:
    """Bits per byte of ``content`` by order, ``{"order-2": 3.2}``; both uint8 ``[n]``."""
    if not max(ORDERS) < len(train) <= LARGEST_TRAIN:
        return {}
    probability, bits = np.full(len(content), 1 / 256), {}
    for order in range(max(ORDERS) + 1):
        keys, counts = np.unique(_grams(train, order + 1), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        totals, different = np.add.reduceat(counts, first), np.diff(first, append=len(keys))
        scored = _grams(content, order + 1)
        context = scored >> np.uint64(8)
        seen, kinds = _counts_of(context, contexts, totals), _counts_of(context, contexts, different)
        lower = probability[order:]
        mixed = (_counts_of(scored, keys, counts) + kinds * lower) / np.maximum(seen + kinds, 1)
        probability[order:] = np.where(seen, mixed, lower)
        if order in ORDERS:
            bits[f"order-{order}"] = float(-np.log2(probability).mean())
    return bits


def _grams(content: np.ndarray, length: int) -> np.ndarray:
    """Each run of ``length`` bytes, at most 8, as one number, the newest byte lowest: uint64 ``[n - length + 1]``."""
    count = max(0, len(content) - length + 1)
    numbers = np.zeros(count, np.uint64)
    for place in range(length):
        numbers = (numbers << np.uint64(8)) | content[place : place + count]
    return numbers


def _counts_of(values: np.ndarray, sorted_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The count of each value, 0 where it is no key."""
    place = np.searchsorted(sorted_keys, values).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == values, counts[place], 0)
