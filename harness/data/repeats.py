"""Repeats: bytes that a model can copy from the past of the split but does not know from train, as
a measure of recall in real text ("AR hits" in "Zoology: Measuring and improving recall",
2312.04927, section 3)."""

import numpy as np

from harness.data.byte_counts import grams

CONTEXT = 8  # bytes
# smallest and largest distance in bytes from a byte to the one that it may repeat
DISTANCES = ((32, 512), (513, 4096))
# contexts of train that are looked up together, so that memory does not grow with train
_CHUNK = 2**22


def repeat_masks(split: np.ndarray, *, train: np.ndarray) -> dict[str, np.ndarray]:
    """Return masks, bool ``[n - 1]``, of the targets of ``split``, uint8 ``[n]``, by range of
    ``DISTANCES``, such as ``32 to 512``. A target is in a mask if the 8 bytes before it do not
    occur in ``train``, and occurred last in ``split`` at such a distance."""
    distance = distances(split, train)[1:]
    return {f"{low} to {high}": (distance >= low) & (distance <= high) for low, high in DISTANCES}


def distances(split: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return, for each byte of ``split [n]``, how many bytes earlier the 8 bytes before it occurred
    last; 0 if they did not, or if they occur in ``train``: int64 ``[n]``."""
    # context i is that of byte i + 8
    keys, contexts = np.unique(grams(split, CONTEXT)[:-1], return_inverse=True)
    known = np.zeros(len(keys), bool)
    for start in range(0, len(train) - CONTEXT + 1, _CHUNK):
        known |= np.isin(keys, grams(train[start : start + _CHUNK + CONTEXT - 1], CONTEXT))
    order = np.argsort(contexts, kind="stable")
    repeats = (contexts[order[1:]] == contexts[order[:-1]]) & ~known[contexts[order[1:]]]
    distance = np.zeros(len(split), np.int64)
    distance[order[1:] + CONTEXT] = np.where(repeats, np.diff(order), 0)
    return distance
