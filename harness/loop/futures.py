"""Futures: places of a score whose later bytes are replaced, to see whether the trained model itself saw them."""

from collections import Counter
from collections.abc import Callable, Sized

import torch
from torch import Tensor

from harness.hashing import integer_hash

PLACES = 64
NOT_CAUSAL = "not causal"
MOST_NATS = 0.02
"""Mean absolute change of a pair's nats above which a row is not causal; a causal model's is its rounding."""
MOST_LUCKY_BITS = 40
"""Bits below a corpus's floor that a causal model saves with a probability of at most 2^-40, in total."""
_BATCH, _PLACE = 3, 4  # first key of the hash, so that draws are unrelated to those of streams


class Futures:
    """64 places drawn by a seed, one in each stream of some batches, which are predicted again in their shape and from their
    state, with other bytes after the place.

    Args:
        seed: None for no places.
        rows: streams, or windows, of a batch, in all processes together.
        vocabulary: V.
        first: number of the first batch in which all streams are scored.
    """

    def __init__(self, seed: int | None, batches: Sized, *, rows: int, vocabulary: int, first: int = 0):
        self.seed, self.vocabulary, self._changes = seed, vocabulary, [torch.empty(0)]
        scored = range(len(batches))[first:] or range(len(batches))
        draws = integer_hash(_BATCH, seed, range(-(-PLACES // rows))) if scored and seed is not None else ()
        self.chosen = Counter(scored[int(draw) % len(scored)] for draw in draws)

    def look(self, number: int, inputs: Tensor, mask: Tensor, nats: Tensor, again: Callable[[Tensor], tuple]) -> None:
        """Compare ``nats [L, T]`` of batch ``number`` with the first that ``again`` gives for other ``inputs``, on the CPU."""
        for turn in range(self.chosen[number]):
            draws = integer_hash(_PLACE, self.seed, number, turn, range(len(inputs)))
            scored = [row.nonzero().flatten() for row in mask[:, :-1]]  # after the last byte there is none to replace
            at = [int(one[int(draw) % len(one)]) if len(one) else -1 for one, draw in zip(scored, draws, strict=True)]
            later = torch.arange(inputs.shape[1]) > torch.tensor(at)[:, None]
            other = (inputs + self.vocabulary // 2) % self.vocabulary
            change = (again(torch.where(later, other, inputs))[0] - nats).abs()
            self._changes.append(torch.tensor([change[row, place] for row, place in enumerate(at) if place >= 0]))

    @property
    def changes(self) -> Tensor:
        """By how much each place's nats changed, ``[n]``."""
        return torch.cat(self._changes)
