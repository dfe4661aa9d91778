"""Keys of both sides: the query at position t sees those at |t - j| = n x, x = 0 .. w - 1.

Windows of both sides are those of 2004.05150, section 3.1, whose w counts the keys of both sides.
The soft mask of 1905.07799 and ALiBi's penalty take the distance on either side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.attention import Visible


def both_sides(
    length: int, *, windows: Sequence[int], dilations: Sequence[int] | None = None
) -> Visible:
    """Return the visible keys of each head in a segment of ``length`` bytes without a past, for
    windows w and dilations n (1 by default) of each head."""
    steps = dilations or [1] * len(windows)

    def visible(head: int, query_index: int) -> list[tuple[int, int]]:
        keys = []
        for index in range(length):
            distance = abs(query_index - index)
            if distance % steps[head] == 0 and distance // steps[head] < windows[head]:
                keys.append((distance, index))
        return keys

    return visible


def padding(valid: Sequence[int], *, length: int) -> Tensor:
    """Return which bytes are padding, ``[B, length]``: those after the first ``valid``."""
    return torch.tensor([[index >= n for index in range(length)] for n in valid])
