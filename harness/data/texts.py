"""Labelled texts, and the order in which training and evaluation read them. As in ``streams``, the
order depends only on the texts, the sizes, the seed and the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.data.streams import UNSHARDED, Batches, Rows, Segment, Shard, row_batches

MULTIPLE = 64
"""Padded lengths are multiples of so many bytes."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts in the ``content`` of a split, uint8 ``[n]``. Text i has ``lengths[i]`` bytes from
    ``starts[i]`` on, and the class ``labels[i]``: int64 ``[N]`` each."""

    content: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor

    @classmethod
    def of(cls, texts: Sequence[bytes], labels: Sequence[int]) -> "Texts":
        """Return texts whose content has a newline after each."""
        content = np.frombuffer(b"\n".join([*texts, b""]), np.uint8).copy()
        lengths = torch.tensor([*map(len, texts)])
        ends = torch.cumsum(lengths + 1, 0)
        return cls(torch.from_numpy(content), ends - lengths - 1, lengths, torch.tensor(labels))

    def __len__(self) -> int:
        """Return the number of bytes of all texts, with the newlines after them."""
        return int((self.lengths + 1).sum())

    @property
    def number(self) -> int:
        return len(self.labels)

    def select(self, rows: Tensor | slice) -> "Texts":
        """Return some of the texts, of the same content."""
        return Texts(self.content, self.starts[rows], self.lengths[rows], self.labels[rows])

    def within(self, part: Tensor) -> "Texts":
        """Return the texts that lie in ``part``, a view of the content; at least one."""
        first = part.storage_offset()
        begin = min(int((self.starts < first).sum()), self.number - 1)
        end = first + len(part)
        # a text that is cut still ends where the next one begins
        n_fitting = int((self.starts[1:] <= end).sum()) + (len(self.content) <= end)
        return self.select(slice(begin, max(n_fitting, begin + 1)))

    def cut(self, longest: int) -> "Texts":
        """Return the texts, of which at most ``longest`` bytes are read."""
        return replace(self, lengths=self.lengths.clamp(max=longest))

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bytes of some texts ``[B, T]``, zeros after each, their classes ``[B, 1]`` and
        their lengths ``[B]``, int32. T is the longest length rounded up."""
        lengths = self.lengths[rows]
        columns = torch.arange(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE)
        positions = (self.starts[rows][:, None] + columns) % len(self.content)
        inputs = self.content[positions] * (columns < lengths[:, None])
        return inputs.int(), self.labels[rows][:, None].int(), lengths.int()


class TextBatches(Rows):
    """Training batches: each step reads B (``streams``) ``texts`` of at most T bytes
    (``segment``)."""

    def __init__(self, texts: Texts, **layout: int):
        super().__init__(texts.number, **layout)
        self.texts = texts

    def size(self, step: int) -> tuple[int, int]:
        """Return the mean over the bytes of a step of the length of their text, rounded, because
        attention compares each byte with all of its text; and the number of these bytes."""
        lengths = self.texts.lengths[self.rows(step)]
        n_bytes = int(lengths.sum())
        return round(int((lengths**2).sum()) / n_bytes), n_bytes

    def batch(self, step: int, *, shard: Shard = UNSHARDED) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``Texts.padded`` returns of a shard's texts in a step, counted from 0."""
        return self.texts.padded(self.rows(step, shard))


def scored_texts(texts: Texts, **layout) -> Batches:
    """Return the ``row_batches`` of all texts in a ``layout``, with one scored prediction each."""

    def read(rows: Tensor) -> Segment:
        inputs, targets, lengths = texts.padded(rows)
        return inputs, targets, targets >= 0, lengths

    return row_batches(texts.number, read=read, **layout)
