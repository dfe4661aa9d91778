"""Baselines for bits per byte: compressors, and predictions by the counts of byte sequences in the
train split.

    p_k(b | c) = (n(c b) + d(c) p_{k-1}(b | c')) / (n(c) + d(c))        Witten and Bell, 1991

n(x) is the count of the sequence x in train, and d(c) the number of different bytes that follow the
context c of k bytes. c' is c without its oldest byte, and p_{-1} = 1/256. If c does not occur in
train, or begins before the split, p_k is p_{k-1}. The counts do not change while a split is
scored."""

import bz2
import gzip
import json
import lzma
from contextlib import suppress

import numpy as np
from torch import Tensor

from harness.cache import cache_folder, digest, write_atomically

ORDERS = (2, 3, 5)
MAX_TRAIN_BYTES = 2**24  # a longer train split is not counted, because that takes minutes


def compressed_bits(split: Tensor, *, train: Tensor) -> dict[str, float]:
    """Return bits per byte of a split under ``gzip -9``, ``bzip2 -9`` and ``xz -9e``, and by counts
    of ``train``. They are stored in the user's cache, because computing them for 5 MB takes
    seconds."""
    content = split.numpy().tobytes()
    name = f"{digest(content)}-{digest(train.numpy())}.json"
    with suppress(OSError, ValueError):
        return json.loads((cache_folder() / "compressed" / name).read_bytes())
    compressed = {"gzip": gzip.compress(content, 9, mtime=0), "bzip2": bz2.compress(content, 9)}
    compressed["xz"] = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    bits = {name: 8 * len(archive) / len(content) for name, archive in compressed.items()}
    bits |= order_bits(train.numpy(), split.numpy())
    with suppress(OSError):  # without a cache they are computed again
        write_atomically(cache_folder() / "compressed" / name, json.dumps(bits).encode())
    return bits


def order_bits(train: np.ndarray, content: np.ndarray) -> dict[str, float]:
    """Return bits per byte of ``content`` for each of ``ORDERS``, as ``{"order-2": 3.2}``; empty if
    ``train`` is too short or too long. Both arrays are uint8 ``[n]``."""
    if not max(ORDERS) < len(train) <= MAX_TRAIN_BYTES:
        return {}
    probability = np.full(len(content), 1 / 256)
    bits = {}
    for order in range(max(ORDERS) + 1):
        scored = grams(content, order + 1)
        probability[order:] = smoothed(grams(train, order + 1), scored, probability[order:])
        if order in ORDERS:
            bits[f"order-{order}"] = float(-np.log2(probability).mean())
    return bits


def smoothed(train: np.ndarray, scored: np.ndarray, lower: np.ndarray | float) -> np.ndarray:
    """Return p(b | c), by counts in ``train [n]`` and mixed with ``lower``, for each of ``scored
    [m]``. Both have keys ``c << 8 | b`` of a context c and a byte b."""
    keys, counts = np.unique(train, return_counts=True)
    contexts, first = np.unique(keys >> 8, return_index=True)
    n = look_up(scored >> 8, contexts, np.add.reduceat(counts, first))
    n_followers = look_up(scored >> 8, contexts, np.diff(first, append=len(keys)))
    mixed = (look_up(scored, keys, counts) + n_followers * lower) / np.maximum(n + n_followers, 1)
    return np.where(n, mixed, lower)


def grams(content: np.ndarray, length: int) -> np.ndarray:
    """Return every sequence of ``length`` (at most 8) bytes as one big-endian integer: uint64 ``[n
    - length + 1]``."""
    n_grams = max(0, len(content) - length + 1)
    grams = np.zeros(n_grams, np.uint64)
    for offset in range(length):
        grams = (grams << np.uint64(8)) | content[offset : offset + n_grams]
    return grams


def look_up(queries: np.ndarray, sorted_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the count of the key that equals each query, and 0 for a query that equals no key."""
    index = np.searchsorted(sorted_keys, queries).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[index] == queries, counts[index], 0)
