"""A file coded by a model's own probabilities: what its bits per byte claim, made into bytes, and undone.

The bytes are cut into streams that run side by side, and the model is given one byte of each at a time. One loop serves who
encodes and who decodes, so that both make the very same forward passes, of the same shapes in the same order, and get the
same probabilities, bit for bit, on the same machine. A longer segment would be quicker to encode, but a decoder has not
got it, and sums over another shape are rounded otherwise. All streams go into one code, so a stream costs no bytes of its
own but its first, for which there is no prediction: 8 bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arithmetic import BITS, TOTAL, Coder, Decoder, Encoder
from harness.data.streams import score_streams
from harness.device.runtime import Runtime
from harness.model import LanguageModel

ESCAPE = 1 << 12
"""Frequency of what stands before a byte that the vocabulary lacks: it costs 12 bits, and all others 0.0004."""
RAW = np.arange(1, 257) << (BITS - 8)
"""All bytes alike, 8 bits each."""


@dataclass(frozen=True, kw_only=True)
class Coded:
    """What was coded.

    Attributes:
        content: the code of a file, or the file of a code.
        predicted: bytes that the model predicted, all but the first of each stream.
        nats: what they cost by the model's own probabilities, before these became frequencies.
        escaped: how many of them the vocabulary lacks; each counts as the 20 bits that it costs.
    """

    content: bytes
    predicted: int
    nats: float
    escaped: int

    @property
    def bits_per_byte(self) -> float | None:
        """The score under this cut; None where no byte was predicted."""
        return self.nats / math.log(2) / self.predicted if self.predicted else None


@dataclass(frozen=True, kw_only=True)
class ModelCoder:
    """A model that codes.

    Attributes:
        symbols: the byte of each number of its vocabulary; numbers beyond have none.
        advance: told how many more bytes are done.
    """

    model: LanguageModel
    symbols: bytes
    runtime: Runtime
    advance: Callable[[int], object] = lambda more: None

    def encode(self, content: bytes, *, streams: int) -> Coded:
        """The code of ``content`` in so many streams, or one a byte if there are fewer.

        Raises:
            ValueError: the model's probabilities are not finite.
        """
        coder, lengths = Encoder(), stream_lengths(len(content), streams)
        told = self._code(coder, _columns(content, lengths), lengths)
        return Coded(content=coder.finish(), **told)

    def decode(self, code: bytes, *, n_bytes: int, streams: int) -> Coded:
        """The ``n_bytes`` bytes that ``code`` is the code of; others where the probabilities are not the encoder's."""
        lengths = stream_lengths(n_bytes, streams)
        columns = _columns(bytes(n_bytes), lengths)
        told = self._code(Decoder(code), columns, lengths)
        found = (columns[:length, stream].tobytes() for stream, length in enumerate(lengths))
        return Coded(content=b"".join(found), **told)

    @torch.no_grad()
    def _code(self, coder: Coder, columns: np.ndarray, lengths: list[int]) -> dict:
        """Code ``columns`` (uint8 ``[L, S]``, of which ``lengths`` count) in place; returns the rest of ``Coded``."""
        self.model.eval()
        lacking = self.model.embedding.num_embeddings  # the number of every byte that the vocabulary lacks
        number_of = np.full(256, lacking)
        number_of[np.frombuffer(self.symbols, np.uint8)] = np.arange(len(self.symbols))
        byte_of, escape = self.symbols.ljust(lacking, b"\0"), ESCAPE if len(self.symbols) < 256 else 0
        state, nats, escaped = None, 0.0, 0
        for place, here in enumerate(columns):
            present = np.array(lengths) > place
            if place == 0:
                here[:] = [coder.code(RAW, byte) for byte in here.tolist()]
            else:
                before = number_of[columns[place - 1]]
                before[before == lacking] = 0  # the model does not know it: it reads its first symbol there
                state, log_probabilities = self._predict(before, state)
                ends = frequencies(log_probabilities.exp(), escape=escape).cumsum(dim=1).numpy()
                for stream in np.flatnonzero(present).tolist():
                    byte = int(here[stream])
                    number = coder.code(ends[stream], int(number_of[byte]))
                    here[stream] = byte_of[number] if number < lacking else coder.code(RAW, byte)
                numbers = number_of[here]
                known = present & (numbers < lacking)
                nats -= float(log_probabilities.numpy()[known, numbers[known]].sum())
                escaped += int((present & ~known).sum())
            self.advance(int(present.sum()))
        nats += escaped * math.log(256 * TOTAL / ESCAPE)
        return {"predicted": sum(lengths) - len(lengths), "nats": nats, "escaped": escaped}

    def _predict(self, before: np.ndarray, state: object) -> tuple[object, Tensor]:
        """The state after one more symbol of each stream, int64 ``[S]``, and log-probabilities of the next ``[S, V]``."""
        with self.runtime.autocast():
            out = self.model(torch.from_numpy(before)[:, None].to(self.runtime.device), state)
        found = out.logits[:, 0].cpu().double().log_softmax(dim=1)
        if not found.isfinite().all():
            raise ValueError("run: its weights give no probabilities, logits are not finite; allowed is another run")
        return out.state, found


def frequencies(probabilities: Tensor, *, escape: int) -> Tensor:
    """Whole numbers with the sum ``TOTAL`` for ``probabilities`` (float64 ``[S, V]``), each at least 1: int64 ``[S, V + 1]``.

    What rounding down leaves is the likeliest symbol's. The last column is ``escape``, which may be 0.
    """
    free = TOTAL - escape - probabilities.shape[1]
    found = 1 + (probabilities * free).long()
    left = TOTAL - escape - found.sum(dim=1, keepdim=True)
    found.scatter_add_(1, found.argmax(dim=1, keepdim=True), left)
    return F.pad(found, (0, 1), value=escape)


def stream_lengths(n_bytes: int, streams: int) -> list[int]:
    """Bytes of each stream, differing by at most one; no stream is empty."""
    return [end - first for first, end in score_streams(n_bytes, min(streams, n_bytes))] if n_bytes else []


def _columns(content: bytes, lengths: list[int]) -> np.ndarray:
    """Streams beside each other, uint8 ``[L, S]``; those that are shorter end in a zero that is not theirs."""
    found, first = np.zeros((max(lengths, default=0), len(lengths)), np.uint8), 0
    for stream, length in enumerate(lengths):
        found[:length, stream] = np.frombuffer(content, np.uint8, length, first)
        first += length
    return found
