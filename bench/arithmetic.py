"""Arithmetic coding in whole numbers: symbols in, bytes out, and back.

Each symbol takes its share of the remaining interval. Shares are frequencies out of 2^24: a symbol of frequency f costs 24 -
log2(f) bits. The interval's width has at least 48 bits, so that rounding loses less than 2^-23 bits a symbol.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

BITS = 24
TOTAL = 1 << BITS  # the sum of all symbols' frequencies
ESCAPE = 1 << 12
"""Frequency of the mark before a byte that the vocabulary lacks: 12 bits, and 0.0004 for every other byte."""
_WORD = 64
_NARROW = 1 << 48  # below this width another byte is settled


class Coder(Protocol):
    """An encoder or a decoder, so that one loop serves both."""

    def code(self, ends: Sequence[int], symbol: int) -> int:
        """The next symbol: an encoder takes ``symbol``, a decoder reads it. ``ends``: int64, running sums of the frequencies of
        all symbols, each at least 1, up to ``TOTAL``."""


class Encoder:
    """Puts symbols into bytes."""

    def __init__(self):
        self._low, self._width, self._settled = 0, 1 << _WORD, bytearray()

    def code(self, ends: Sequence[int], symbol: int) -> int:
        start = int(ends[symbol - 1]) if symbol else 0
        part = self._width >> BITS
        self._low += part * start
        self._width = part * (int(ends[symbol]) - start)
        self._carry()
        while self._width < _NARROW:
            self._settled.append(self._low >> (_WORD - 8))
            self._low = (self._low << 8) & ((1 << _WORD) - 1)
            self._width <<= 8
        return symbol

    def finish(self) -> bytes:
        """The code, in the fewest bytes for a decoder that reads zeros after them."""
        for size in range(_WORD // 8 + 1):
            unit = 1 << (_WORD - 8 * size)
            number = -(-self._low // unit) * unit
            if number < self._low + self._width:
                break
        self._low = number
        self._carry()
        return bytes(self._settled) + self._low.to_bytes(_WORD // 8, "big")[:size]

    def _carry(self) -> None:
        """Add the carry beyond the word to the settled bytes."""
        if self._low >> _WORD:
            self._low &= (1 << _WORD) - 1
            place = len(self._settled) - 1
            while self._settled[place] == 255:
                self._settled[place] = 0
                place -= 1
            self._settled[place] += 1


class Decoder:
    """Gets the symbols back out of the bytes, given the same frequencies."""

    def __init__(self, settled: bytes):
        self._rest, self._width, self._above = iter(settled), 1 << _WORD, 0
        for _ in range(_WORD // 8):
            self._read()

    def code(self, ends: Sequence[int], symbol: int) -> int:
        part = self._width >> BITS
        share = min(self._above // part, TOTAL - 1)  # a larger share comes from foreign bytes alone
        symbol = int(np.searchsorted(ends, share, side="right"))
        start = int(ends[symbol - 1]) if symbol else 0
        self._above -= part * start
        self._width = part * (int(ends[symbol]) - start)
        while self._width < _NARROW:
            self._read()
            self._width <<= 8
        return symbol

    def _read(self) -> None:
        self._above = (self._above << 8) | next(self._rest, 0)


def frequencies(probabilities: Tensor, *, escape: int) -> Tensor:
    """Whole numbers, each at least 1 and ``TOTAL`` in sum, of ``probabilities`` (float64 ``[S, V]``): int64 ``[S, V + 1]``. The
    likeliest symbol gets the rest of rounding down; the last column is ``escape``, or 0."""
    free = TOTAL - escape - probabilities.shape[1]
    counts = 1 + (probabilities * free).long()
    left = TOTAL - escape - counts.sum(dim=1, keepdim=True)
    counts.scatter_add_(1, counts.argmax(dim=1, keepdim=True), left)
    return F.pad(counts, (0, 1), value=escape)
