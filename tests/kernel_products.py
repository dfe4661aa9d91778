"""What the CPU's kernel executes, by hand: blocks of rows, each with chunks of the keys between its farthest and its nearest."""

from typing import NamedTuple

import torch

from variants.kernels.window_cpu import geometry

CHUNK = 256


def up(x: int, to: int) -> int:
    return -(-x // to) * to


class Chunk(NamedTuple):
    """First key from the start of the past, keys that are there, whole vectors of them, and how far the first key is from
    the nearest of the block's first row."""

    at: int
    real: int
    wide: int
    far: int = 0


def met(rows: int, past: int, max_keys: int, shift: int = 0) -> list[Chunk]:
    """What the blocks of rows meet; vectors begin at the first key that any row of the segment sees."""
    block, streams = geometry(torch.float32)
    first_seen, found = max(0, past - shift - max_keys + 1), []
    for first in range(0, rows, block):
        last = min(first + block, rows) - 1
        near = past + last - shift + 1  # behind the nearest key of the last row
        far = max(first_seen, past + first - shift - max_keys + 1)
        begin = far - (far - first_seen) % streams
        for at in range(begin, near, CHUNK):
            real = min(CHUNK, near - at)
            found.append(Chunk(at, real, up(real, streams), past + first - shift - at))
    return found


def always(rows: int, number: int) -> list[Chunk]:
    """The same of persistent vectors."""
    block, streams = geometry(torch.float32)
    sizes = [min(CHUNK, number - at) for at in range(0, number, CHUNK)]
    return [Chunk(0, real, up(real, streams)) for real in sizes] * (up(rows, block) // block)


def by_distance(chunk: Chunk, distances: int) -> int:
    """Places in the table of vectors, in whole vectors: a row of a block begins one place before the row above it.

    The table runs against the distances, with 64 places before it.
    """
    block, streams = geometry(torch.float32)
    first = distances - 1 - chunk.far + 64 - (block - 1)
    return up(first % streams + block - 1 + chunk.wide, streams)


def forward(chunks: list[Chunk], width: int, *, distances: int | None = None) -> int:
    """Scores and values; with vectors for so many distances, scores by distance too."""
    block, streams = geometry(torch.float32)
    total = sum(c.wide * width + c.real * up(width, streams) for c in chunks)
    if distances is not None:
        total += sum(by_distance(c, distances) * width for c in chunks)
    return 2 * block * total


def backward(chunks: list[Chunk], width: int, *, wanted: int = 0, distances: int | None = None) -> int:
    """Scores and rewards, gradients of queries, and of keys and values from key number ``wanted`` on."""
    block, streams = geometry(torch.float32)
    whole, total = up(width, streams), 0
    for c in chunks:
        own = max(0, c.wide - max(0, wanted - c.at) // block * block)
        total += 2 * c.wide * width + c.real * whole + 2 * own * whole
        if distances is not None:
            total += by_distance(c, distances) * width + 2 * up(c.wide + block - 1, block) * whole
    return 2 * block * total
