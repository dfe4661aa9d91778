"""Repeats: bytes that a model can copy from the past of the split but does not know from train, as a measure of recall
in real text ("AR hits" in "Zoology: Measuring and improving recall", 2312.04927, section 3)."""

import numpy as np

from harness.data.byte_counts import grams

CONTEXT = 8  # bytes
DISTANCES = ((32, 512), (513, 4096))  # smallest and largest distance in bytes from a byte to the one that it may repeat
_CHUNK = 2**22  # contexts of train that are looked up together, so that memory does not grow with train


def repeat_masks(split: np.ndarray, *, train: np.ndarray) -> dict[str, np.ndarray]:
    """Return masks, bool ``[n - 1]``, of the targets of ``split``, uint8 ``[n]``, by range of ``DISTANCES``, such as
    ``32 to 512``. A target is in a mask if the 8 bytes before it do not occur in ``train``, and occurred last in
    ``split`` at such a distance."""
    distance = _distances(split)
    candidates = np.flatnonzero((distance >= DISTANCES[0][0]) & (distance <= DISTANCES[-1][1]))
    contexts = grams(split, CONTEXT)[candidates - CONTEXT]
    distance[candidates[_occur(contexts, train)]] = 0
    return {f"{low} to {high}": (distance[1:] >= low) & (distance[1:] <= high) for low, high in DISTANCES}


def _distances(split: np.ndarray) -> np.ndarray:
    """Return, for each byte of ``split [n]``, how many bytes earlier the 8 bytes before it occurred last; 0 if they did
    not: int64 ``[n]``."""
    contexts = grams(split, CONTEXT)[:-1]  # context i is that of byte i + 8
    order = np.argsort(contexts, kind="stable")
    repeats = contexts[order[1:]] == contexts[order[:-1]]
    distance = np.zeros(len(split), np.int64)
    distance[order[1:] + CONTEXT] = np.where(repeats, np.diff(order), 0)
    return distance


def _occur(contexts: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return whether each of ``contexts``, uint64 ``[m]``, occurs in ``train``: bool ``[m]``."""
    keys, index = np.unique(contexts, return_inverse=True)
    occurs = np.zeros(len(keys), bool)
    for start in range(0, len(train) if len(keys) else 0, _CHUNK):
        found = grams(train[start : start + _CHUNK + CONTEXT - 1], CONTEXT)
        position = np.searchsorted(keys, found).clip(max=len(keys) - 1)
        occurs[position[keys[position] == found]] = True
    return occurs[index]
