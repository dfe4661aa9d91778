"""ListOps (1804.06028): nested lists of digits with an operator each, and as their class the digit
that they evaluate to.

    [MAX 2 9 [MIN 4 7 ] 0 ]                                        9

MIN and MAX are the smallest and the largest element, MED the median (of an even number, the mean of
the two in the middle, rounded down), SM the sum modulo 10. As in the paper, a list has 2 to 5
elements, of which each is a list with a probability of 1 / 4, down to a depth of 10. Of the lists
so drawn, those of 100 to 500 bytes are kept."""

import statistics
from collections.abc import Iterator
from itertools import count

from harness.hashing import integer_hash

SHORTEST = 100
LONGEST = 500
DEPTH = 10
ELEMENTS = 4  # numbers of elements of a list, from 2 on
LISTS = 4  # one of so many elements is a list


OPERATORS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda elements: int(statistics.median(elements)),
    "SM": lambda elements: sum(elements) % 10,
}


def listops(bytes: int = 4_000_000, *, seed: int = 0) -> tuple[list[bytes], list[str]]:
    """Return texts of n ``bytes`` in all, or a little more, and their classes."""
    draws = _draws(seed)
    texts = []
    labels = []
    while bytes > 0:
        text, value = _draw_list(draws, depth=1)
        if SHORTEST <= len(text) <= LONGEST:
            texts.append(text.encode())
            labels.append(str(value))
            bytes -= len(text) + 1
    return texts, labels


def _draws(seed: int) -> Iterator[int]:
    """Yield independent uniform integers, without end."""
    for block in count():
        yield from integer_hash(seed, block, range(2**16)).tolist()


def _draw_list(draws: Iterator[int], *, depth: int) -> tuple[str, int]:
    """Return the text and the value of a list."""
    name = [*OPERATORS][next(draws) % len(OPERATORS)]
    parts = []
    values = []
    for _ in range(2 + next(draws) % ELEMENTS):
        if depth < DEPTH and next(draws) % LISTS == 0:
            text, value = _draw_list(draws, depth=depth + 1)
        else:
            value = next(draws) % 10
            text = str(value)
        parts.append(text)
        values.append(value)
    return f"[{name} {' '.join(parts)} ]", OPERATORS[name](values)
