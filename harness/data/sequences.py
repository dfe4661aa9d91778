"""Sequences: the order in which training and evaluation read a corpus of independent sequences of T
bytes, which ``data.sequence`` states. A model reads a newline and a sequence without its last byte,
from an empty state. Its targets are all T bytes, so that a split of n bytes has n pairs. As in
``streams``, the order depends only on the split, the sizes, the seed and the step."""

import torch
from torch import Tensor

from harness.data.streams import UNSHARDED, Batches, Rows, Segment, Shard, row_batches

NEWLINE = ord("\n")


class Sequences(Rows):
    """Training batches: each step reads B (``streams``) whole sequences of T bytes (``segment``) of
    ``split``, uint8 ``[n T]``."""

    def __init__(self, split: Tensor, *, segment: int, **layout: int):
        self.sequences = split.view(-1, segment)
        super().__init__(len(self.sequences), segment=segment, **layout)

    def batch(self, step: int, *, shard: Shard = UNSHARDED) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, counted from 0, for a shard's sequences: int64 ``[B,
        T]`` each."""
        return _pairs(self.sequences[self.rows(step, shard)])


def scored_sequences(split: Tensor, *, sequence: int, **layout) -> Batches:
    """Return the ``row_batches`` of all sequences of ``split [n T]`` in a ``layout``."""
    sequences = split.view(-1, sequence)

    def read(rows: Tensor) -> Segment:
        inputs, targets = _pairs(sequences[rows])
        return inputs, targets, targets >= 0

    return row_batches(len(sequences), read=read, **layout)


def sample_sequences(split: Tensor, *, sequence: int, n_bytes: int) -> Tensor:
    """Return whole sequences, spread evenly over ``split [n]``: at most ``n_bytes``, but at least
    one."""
    sequences = split.unfold(0, sequence, sequence)
    return sequences[spread(n_bytes // sequence, len(sequences))].flatten()


def spread(n_sampled: int, n_rows: int) -> Tensor:
    """Return which rows a sample of ``n_sampled`` of ``n_rows`` rows has, at least one, spread
    evenly: int64 ``[n]``."""
    n_sampled = max(1, min(n_sampled, n_rows))
    return torch.arange(n_sampled) * n_rows // n_sampled


def _pairs(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of sequences, uint8 ``[B, T]``: int64 ``[B, T]`` each."""
    targets = sequences.long()
    return torch.nn.functional.pad(targets[:, :-1], (1, 0), value=NEWLINE), targets
