"""Arithmetic coding in integers, from symbols to bytes and back.

Each symbol narrows an interval to a part in proportion to the symbol's frequency. The frequencies
of all symbols sum to 2^24, so a symbol of frequency f costs 24 - log2(f) bits. The interval's
width, before a symbol narrows it, is at least 2^48, so that rounding costs less than 2^-23 bits
a symbol."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

BITS = 24
TOTAL = 1 << BITS  # the sum of all symbols' frequencies
# frequency of the escape symbol, which precedes a byte that the vocabulary lacks: 12 bits
ESCAPE = 1 << 12
_WORD = 64  # bits of the interval's start
# a narrower interval is widened by 8 bits, and its start's highest byte is written
_MIN_WIDTH = 1 << 48


class Encoder:
    """Encodes symbols as bytes."""

    def __init__(self):
        # start and width of the interval, without the bytes in _settled
        self._low = 0
        self._width = 1 << _WORD
        self._settled = bytearray()  # bytes that only a carry can still change

    def code(self, ends: Sequence[int], symbol: int) -> int:
        """Write a symbol, and return it. ``ends`` are the cumulative frequencies, int64: entry i is
        the sum for symbols 0 to i, and the last entry is ``TOTAL``."""
        start = 0
        if symbol:
            start = int(ends[symbol - 1])
        unit = self._width >> BITS
        self._low += unit * start
        self._width = unit * (int(ends[symbol]) - start)
        self._carry()
        while self._width < _MIN_WIDTH:
            self._settled.append(self._low >> (_WORD - 8))
            self._low = (self._low << 8) & ((1 << _WORD) - 1)
            self._width <<= 8
        return symbol

    def finish(self) -> bytes:
        """Return the shortest code that, followed by the zeros that the decoder reads beyond its
        end, lies in the interval."""
        for size in range(_WORD // 8 + 1):
            unit = 1 << (_WORD - 8 * size)
            rounded = -(-self._low // unit) * unit
            if rounded < self._low + self._width:
                break
        self._low = rounded
        self._carry()
        return bytes(self._settled) + self._low.to_bytes(_WORD // 8, "big")[:size]

    def _carry(self) -> None:
        """Add a carry out of the word to the settled bytes."""
        if self._low >> _WORD:
            self._low &= (1 << _WORD) - 1
            index = len(self._settled) - 1
            while self._settled[index] == 255:
                self._settled[index] = 0
                index -= 1
            self._settled[index] += 1


class Decoder:
    """Decodes symbols from an encoder's bytes, with the frequencies that the encoder used."""

    def __init__(self, code: bytes):
        self._bytes = iter(code)
        self._width = 1 << _WORD
        self._offset = 0  # the code as a number, minus the interval's start
        for _ in range(_WORD // 8):
            self._read()

    def code(self, ends: Sequence[int], symbol: int) -> int:
        """Read a symbol, and return it. The argument ``symbol`` is ignored, so that one loop can
        use either coder."""
        unit = self._width >> BITS
        # the quotient is larger only for bytes that no encoder wrote
        target = min(self._offset // unit, TOTAL - 1)
        symbol = int(np.searchsorted(ends, target, side="right"))
        start = 0
        if symbol:
            start = int(ends[symbol - 1])
        self._offset -= unit * start
        self._width = unit * (int(ends[symbol]) - start)
        while self._width < _MIN_WIDTH:
            self._read()
            self._width <<= 8
        return symbol

    def _read(self) -> None:
        self._offset = (self._offset << 8) | next(self._bytes, 0)


def frequencies(probabilities: Tensor, *, escape: int) -> Tensor:
    """Return integer frequencies, int64 ``[S, V + 1]``, of ``probabilities``, float64 ``[S, V]``.
    Each is at least 1, except the last column, ``escape``, which may be 0. A row sums to ``TOTAL``:
    its largest frequency gets the remainder."""
    available = TOTAL - escape - probabilities.shape[1]
    counts = 1 + (probabilities * available).long()
    remainder = TOTAL - escape - counts.sum(dim=1, keepdim=True)
    counts.scatter_add_(1, counts.argmax(dim=1, keepdim=True), remainder)
    return F.pad(counts, (0, 1), value=escape)
