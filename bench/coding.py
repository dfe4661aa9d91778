"""A file coded by a model's own probabilities: what its bits per byte claim, made into bytes, and undone.

The bytes are cut into streams that run side by side, and the model is given one byte of each at a time. One loop serves who
encodes and who decodes, so that both make the very same forward passes, of the same shapes in the same order, and get the
same probabilities, bit for bit, on the same machine. A longer segment would be quicker to encode, but a decoder has not
got it, and sums over another shape are rounded otherwise. All streams go into one code, so a stream costs no bytes of its
own but its first, for which there is no prediction: 8 bits.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

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
"""All bytes alike."""
RAW_BITS = 8


class Coded(NamedTuple):
    """What was coded.

    Attributes:
        content: the code of a file, or the file of a code.
        predicted: bytes that the model predicted, all but the first of each stream.
        nats: what they cost by the model's own probabilities, before these became frequencies.
        escaped: how many of them the vocabulary lacks; such a byte counts as the 20 bits that it costs.
    """

    content: bytes
    predicted: int
    nats: float
    escaped: int

    @property
    def bits_per_byte(self) -> float | None:
        """The score under this cut; None where no byte was predicted."""
        return self.nats / math.log(2) / self.predicted if self.predicted else None


def encode(model: LanguageModel, content: bytes, *, symbols: bytes, streams: int, runtime: Runtime) -> Coded:
    """The code of ``content``.

    Args:
        symbols: the byte of each number of the model's vocabulary.
        streams: at most; there are no more than bytes.

    Raises:
        ValueError: the model's probabilities are not numbers.
    """
    coder, lengths = Encoder(), stream_lengths(len(content), streams)
    cut = np.zeros((len(lengths), max(lengths, default=0)), np.uint8)
    for own, part in zip(cut, _parts(content, lengths), strict=True):
        own[: len(part)] = np.frombuffer(part, np.uint8)
    told = _code(coder, model, cut, np.array(lengths), symbols=symbols, runtime=runtime)
    return Coded(coder.finish(), *told)


def decode(model: LanguageModel, code: bytes, *, n_bytes: int, symbols: bytes, streams: int, runtime: Runtime) -> Coded:
    """The ``n_bytes`` bytes that ``code`` is the code of; others where the probabilities are not those of the encoder."""
    lengths = stream_lengths(n_bytes, streams)
    cut = np.zeros((len(lengths), max(lengths, default=0)), np.uint8)
    told = _code(Decoder(code), model, cut, np.array(lengths), symbols=symbols, runtime=runtime)
    return Coded(b"".join(own[:length].tobytes() for own, length in zip(cut, lengths, strict=True)), *told)


def stream_lengths(n_bytes: int, streams: int) -> list[int]:
    """Bytes of each stream, differing by at most one; no stream is empty."""
    return [end - first for first, end in score_streams(n_bytes, min(streams, n_bytes))] if n_bytes else []


def frequencies(probabilities: Tensor, *, escape: int) -> Tensor:
    """Whole numbers with the sum ``TOTAL`` for ``probabilities`` (float64 ``[S, V]``), each at least 1: int64 ``[S, V + 1]``.

    What rounding down leaves is the likeliest symbol's. The last column is ``escape``, which may be 0.
    """
    free = TOTAL - escape - probabilities.shape[1]
    found = 1 + (probabilities * free).long()
    left = TOTAL - escape - found.sum(dim=1, keepdim=True)
    found.scatter_add_(1, found.argmax(dim=1, keepdim=True), left)
    return F.pad(found, (0, 1), value=escape)


def _parts(content: bytes, lengths: list[int]) -> Iterator[bytes]:
    first = 0
    for length in lengths:
        yield content[first : first + length]
        first += length


@torch.no_grad()
def _code(
    coder: Coder, model: LanguageModel, content: np.ndarray, lengths: np.ndarray, *, symbols: bytes, runtime: Runtime
) -> tuple[int, float, int]:
    """Code ``content`` (uint8 ``[S, L]``, of which ``lengths [S]`` count) in place: predicted, nats and escaped of `Coded`."""
    model.eval()
    lacking = model.embedding.num_embeddings  # the number of all bytes that the vocabulary lacks
    number_of = np.full(256, lacking)
    number_of[np.frombuffer(symbols, np.uint8)] = np.arange(len(symbols))
    byte_of, escape = symbols.ljust(lacking, b"\0"), ESCAPE if len(symbols) < 256 else 0
    state, nats, escaped = None, 0.0, 0
    for place in range(content.shape[1]):
        here, present = content[:, place], lengths > place
        if place == 0:
            here[:] = [coder.code(RAW, byte) for byte in here.tolist()]
            continue
        before = number_of[content[:, place - 1]]
        tokens = torch.from_numpy(
            np.where(before < lacking, before, 0)
        )  # what the model does not know stands as its first
        with runtime.autocast():
            out = model(tokens[:, None].to(runtime.device), state)
        state = out.state
        log_probabilities = out.logits[:, 0].cpu().double().log_softmax(dim=1)
        if not log_probabilities.isfinite().all():
            raise ValueError(
                "run: its weights give no probabilities (logits are not finite); allowed is a run that learned"
            )
        ends = frequencies(log_probabilities.exp(), escape=escape).cumsum(dim=1).numpy()
        for stream in np.flatnonzero(present).tolist():
            byte = int(here[stream])
            number = coder.code(ends[stream], int(number_of[byte]))
            here[stream] = byte_of[number] if number < lacking else coder.code(RAW, byte)
        numbers = number_of[here]
        known = present & (numbers < lacking)
        nats -= log_probabilities.numpy()[known, numbers[known]].sum()
        escaped += int((present & ~known).sum())
    predicted = int(lengths.sum()) - len(lengths)
    return predicted, float(nats) + escaped * math.log(256 * TOTAL / ESCAPE), escaped
