"""Arithmetic coding in integers, from symbols to bytes and back.

Each symbol takes its share of the remaining interval. Shares are frequencies out of 2^24: a symbol of frequency f costs
24 - log2(f) bits. The interval's width has at least 48 bits, so that rounding loses less than 2^-23 bits a symbol.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

BITS = 24
TOTAL = 1 << BITS  # the sum of all symbols' frequencies
ESCAPE = 1 << 12
"""Frequency of the mark before a byte that the vocabulary lacks. It costs 12 bits, and every other byte 0.0004 bits."""
_WORD = 64
_NARROW = 1 << 48  # below this width another byte of code is fixed


class Coder(Protocol):
    """An encoder or a decoder, so that one loop serves both."""

    def code(self, ends: Sequence[int], symbol: int) -> int:
        """Code one symbol and return it: an encoder writes ``symbol``, a decoder ignores it and reads one. ``ends``:
        int64, running sums of all symbols' frequencies, each at least 1, up to ``TOTAL``."""


class Encoder:
    """Encodes symbols as bytes."""

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
        """The code in the fewest bytes; the decoder reads zeros after them."""
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
    """Decodes symbols from bytes, given the same frequencies."""

    def __init__(self, settled: bytes):
        self._rest, self._width, self._above = iter(settled), 1 << _WORD, 0
        for _ in range(_WORD // 8):
            self._read()

    def code(self, ends: Sequence[int], symbol: int) -> int:
        part = self._width >> BITS
        share = min(self._above // part, TOTAL - 1)  # only foreign bytes give a larger share
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
    """Integer frequencies, int64 ``[S, V + 1]``, for ``probabilities`` (float64 ``[S, V]``): at least 1, with sum
    ``TOTAL``. The likeliest symbol gets what rounding down leaves. The last column is ``escape``, which may be 0."""
    free = TOTAL - escape - probabilities.shape[1]
    counts = 1 + (probabilities * free).long()
    left = TOTAL - escape - counts.sum(dim=1, keepdim=True)
    counts.scatter_add_(1, counts.argmax(dim=1, keepdim=True), left)
    return F.pad(counts, (0, 1), value=escape)
