"""Passages that a page shows: of a split, of a file or of words, as many and as long as their maps leave room for."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from harness.model import LanguageModel

USUAL_BYTES = 512
MOST_WEIGHTS = 12 * 8 * USUAL_BYTES * (USUAL_BYTES + 1) // 2
"""Of all maps of a page: 12 layers of 8 heads over 512 bytes are below 9 MB even where weights are noise."""
LINE_WITHIN = 256
"""Bytes within which a passage may begin later, at a line."""


def fitting(model: LanguageModel, *, length: int | None, passages: int, device: torch.device) -> tuple[int, int]:
    """Bytes of a passage and how many passages; ValueError naming ``bytes`` where one alone has too many weights."""
    _, found = model.inspect(torch.zeros(1, 2, dtype=torch.int64, device=device))
    heads = sum(one.weights.shape[1] for one in found.values() if one.weights is not None)
    most = (math.isqrt(8 * (MOST_WEIGHTS // max(heads, 1)) + 1) - 1) // 2
    if length is not None and length > most:
        raise ValueError(f"bytes={length}: allowed are 2 to {most} with maps of {heads} heads, or null")
    length = min(length or USUAL_BYTES, most)
    return length, max(1, min(passages, MOST_WEIGHTS // max(1, heads * length * (length + 1) // 2)))


def of_split(split: Tensor, symbols: bytes, *, length: int, passages: int) -> list[tuple[str, Tensor]]:
    """Names and bytes of passages, evenly over ``split``, each from the start of a line where one is near."""
    length = min(length, len(split))
    passages = max(1, min(passages, len(split) // length))
    found = []
    for number in range(passages):
        first = number * (len(split) // passages)
        last = min(first + LINE_WITHIN, len(split) - length, (number + 1) * (len(split) // passages) - length)
        lines = [at for at in range(first, last) if symbols[split[at]] == ord("\n")] if number else []
        first = lines[0] + 1 if lines else min(first, len(split) - length)
        found.append((f"valid, from byte {first:,}", split[first : first + length]))
    return found


def of_text(tokens: Tensor, *, length: int, passages: int) -> list[tuple[str, Tensor]]:
    """Names and bytes of passages from the start of ``tokens`` on; a last one of a single byte is left out."""
    parts = [part for part in tokens.split(length)[:passages] if len(part) > 1]
    return [(f"the text, from byte {number * length:,}", part) for number, part in enumerate(parts)]


def read_text(given: str, symbols: bytes) -> tuple[str, Tensor]:
    """What it is and its tokens, uint8 ``[n]``, of the file of that name or else of the words themselves; ValueError naming
    ``text``."""
    is_file = os.path.isfile(given)
    try:
        content = Path(given).read_bytes() if is_file else given.encode("utf-8", "surrogateescape")
    except OSError as error:
        raise ValueError(f"text={given}: cannot be read ({error.strerror})") from error
    name = f"the file {Path(given).name}" if is_file else "the words that were given"
    unknown = sorted(set(content) - set(symbols))
    if unknown:
        raise ValueError(f"text: has byte {unknown[0]}, which the run's vocabulary of {len(symbols)} has not")
    if len(content) < 2:
        raise ValueError(f"text={given}: has {len(content)} bytes; allowed are at least 2, as a file or as words")
    table = bytearray(256)
    for number, value in enumerate(symbols):
        table[value] = number
    return name, torch.frombuffer(bytearray(content.translate(table)), dtype=torch.uint8)
