"""Arithmetic coding in whole numbers: symbols in, bytes out, and back.

Each symbol takes its share of what those before it left of the interval from 0 to 1. Shares are frequencies out of 2^24, so
that a symbol of frequency f costs 24 - log2(f) bits. With at least 48 bits of the interval's width in hand, rounding loses
less than 2^-23 bits a symbol.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

BITS = 24
TOTAL = 1 << BITS
"""The sum of all symbols' frequencies."""
_WORD = 64
_NARROW = 1 << 48
"""Below this width another byte is settled."""


class Coder(Protocol):
    """Who encodes and who decodes, so that one loop can serve both."""

    def code(self, ends: Sequence[int], symbol: int) -> int:
        """The next symbol: ``symbol`` where it is encoded, what was encoded there where it is decoded.

        Args:
            ends: int64, running sums of the frequencies of all symbols, each at least 1; the last is ``TOTAL``.
        """


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
        """Everything encoded so far, in the fewest bytes that a decoder, which reads zeros after them, needs."""
        for kept in range(_WORD // 8 + 1):
            unit = 1 << (_WORD - 8 * kept)
            number = -(-self._low // unit) * unit
            if number < self._low + self._width:
                break
        self._low = number
        self._carry()
        return bytes(self._settled) + self._low.to_bytes(_WORD // 8, "big")[:kept]

    def _carry(self) -> None:
        """What has grown beyond the word is added to the settled bytes."""
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
        share = min(self._above // part, TOTAL - 1)  # beyond the last share only where the bytes are somebody else's
        found = int(np.searchsorted(ends, share, side="right"))
        start = int(ends[found - 1]) if found else 0
        self._above -= part * start
        self._width = part * (int(ends[found]) - start)
        while self._width < _NARROW:
            self._read()
            self._width <<= 8
        return found

    def _read(self) -> None:
        self._above = (self._above << 8) | next(self._rest, 0)
