"""Corpora: the bytes that a run reads, cut in order into train, valid and test. A corpus's name, length and SHA-256 are
those of the bytes that were really read."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.data.recall import copies, recall_floor, recall_stream
from harness.data.skills import SKILLS, Made
from harness.data.sources import KNOWN, digest, distinct_values, read_known, read_path, read_stdlib
from harness.data.synthetic_text import synthetic_text

SPLITS = ("train", "valid", "test")
MADE = {
    "recall": Made(recall_stream, lambda part: recall_floor(len(part)), copies),
    "synthetic_text": Made(synthetic_text),
    **SKILLS,
}
NAMES = (*KNOWN, "file", "stdlib", *MADE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A corpus as a run reads it.

    Attributes:
        name: the corpus's name, or ``file:`` and the path's last part.
        sha256, n_bytes: of the whole corpus, before newlines are dropped or a vocabulary is applied.
        splits: ``train``, ``valid`` and ``test``, uint8 ``[n]`` each, in memory or mapped.
        vocabulary: V; all values are below it.
        symbols: the byte of each token id; fewer than V if the corpus has fewer.
        floor, answers: of ``Made``, for made-up corpora.
        fallback_from: the corpus in whose place this one is read, if any.
    """

    name: str
    sha256: str
    n_bytes: int
    splits: dict[str, Tensor]
    vocabulary: int
    symbols: bytes
    floor: Callable[[np.ndarray], float] | None = None
    answers: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None
    fallback_from: str | None = None

    def reported(self, split: str, *, selection_bytes: int | None, limit: int | None = None) -> Tensor:
        """The part of a split that is scored for reports, at most ``limit`` bytes; of valid, without ``choosing``."""
        whole = self.splits[split]
        return whole[: len(whole) - len(self.choosing(selection_bytes)) * (split == "valid")][:limit]

    def choosing(self, selection_bytes: int | None) -> Tensor:
        """The end of valid that selects the best weights: ``selection_bytes``, at most half of it (None: half)."""
        valid = self.splits["valid"]
        half = len(valid) // 2
        return valid[len(valid) - (half if selection_bytes is None else min(selection_bytes, half)) :]

    def answered(self, part: Tensor) -> dict[str, Tensor]:
        """Which targets of a part, uint8 ``[n]``, are answers, by label: bool ``[n - 1]``."""
        answers = self.answers(self._values(part)) if self.answers else {}
        return {label: torch.from_numpy(where[1:]) for label, where in answers.items()}

    def floor_bits(self, part: Tensor) -> float | None:
        """Fewest bits per byte on the targets of a part of a split, if known."""
        return self.floor(self._values(part)) if self.floor else None

    def _values(self, part: Tensor) -> np.ndarray:
        return np.frombuffer(self.symbols, np.uint8)[part.numpy()]

    def provenance(self) -> dict[str, str | int]:
        """The ``data`` of a row."""
        facts = {"name": self.name, "bytes": self.n_bytes, "sha256": self.sha256}
        return facts | ({"fallback_for": self.fallback_from} if self.fallback_from else {})


def load(
    name: str,
    *,
    path: str | None = None,
    sha256: str | None = None,
    fallback: str | None = None,
    vocabulary: int = 256,
    drop_newlines: bool = False,
    split: Sequence[float] = (0.9, 0.05, 0.05),
    first_bytes: int | None = None,
    bytes: int | None = None,
    distances: Sequence[int] | None = None,
    seed: int | None = None,
) -> Corpus:
    """Read a corpus by the keys of ``conf/data/*.yaml``; ValueError names the key, its value and what is allowed."""
    if name not in NAMES:
        raise ValueError(f"data.name={name!r}: allowed are {', '.join(NAMES)}")
    if path is not None and name not in (*KNOWN, "file"):
        raise ValueError(f"data.path={path!r}: allowed for data={', '.join(KNOWN)} and file; {name} reads no file")
    if name == "file" and not path:
        raise ValueError(f"data.path={path!r}: data=file needs data.path=FILE, or a folder")
    if fallback not in (None, "stdlib") or (fallback and name not in KNOWN):
        raise ValueError(f"data.fallback={fallback!r}: allowed is null, and stdlib with data={', '.join(KNOWN)}")
    if not 1 <= vocabulary <= 256:
        raise ValueError(f"data.vocabulary={vocabulary!r}: allowed is an integer from 1 to 256")
    options = {"bytes": bytes, "distances": distances, "seed": seed}
    options = {key: option for key, option in options.items() if option is not None}
    for key, option in options.items():
        users = ("recall",) if key == "distances" else (*MADE,)
        if name not in users:
            raise ValueError(f"data.{key}={option}: allowed for data={', '.join(users)} only")
    if options.get("bytes", 2) < 2:
        raise ValueError(f"data.bytes={bytes}: allowed is an integer of at least 2")
    requested, made = name, MADE.get(name)
    if distances is not None:
        made = made._replace(answers=partial(made.answers, distances=distances))
    content, name, reason = _read(name, path, fallback, options)
    if first_bytes is not None:
        if first_bytes > len(content):
            raise ValueError(f"data.first_bytes={first_bytes}: allowed is at most {len(content)}, which {name} has")
        content, name = content[:first_bytes], f"{name}, first {first_bytes:,} bytes"
    actual = digest(content)
    name = next((pinned for pinned, corpus in KNOWN.items() if corpus.sha256 == actual), name)
    if reason:
        print(
            f"data: {requested.upper()} IS NOT HERE ({reason}). READING {name.upper()} INSTEAD: "
            f"{len(content):,} bytes, sha256 {actual}; its bits per byte are not {requested}'s. "
            f"To get it: python -m harness.data {requested}, or data.path=FILE. data.fallback=null makes it an error.",
            file=sys.stderr,
        )
    if sha256 and sha256.lower() != actual:
        raise ValueError(f"data.sha256={sha256}: the SHA-256 of {name} is {actual}")
    parts = _cut(content, split)
    parts, symbols = _numbered(content, parts, vocabulary=vocabulary, drop_newlines=drop_newlines)
    return Corpus(
        name=name,
        sha256=actual,
        n_bytes=len(content),
        splits=dict(zip(SPLITS, parts, strict=True)),
        vocabulary=vocabulary,
        symbols=symbols,
        floor=made.floor_bits if made else None,
        answers=made.answers if made else None,
        fallback_from=requested if reason else None,
    )


def _read(name: str, path: str | None, fallback: str | None, options: dict) -> tuple[np.ndarray, str, OSError | None]:
    """The bytes, their name, and the error that led to ``fallback``, if any."""
    if name in MADE:
        n_bytes = [options.pop("bytes")] if "bytes" in options else []
        return MADE[name].stream(*n_bytes, **options), name, None
    if name == "stdlib":
        return read_stdlib(), name, None
    if name == "file":
        content, last = read_path(path), Path(path).expanduser().resolve().name
        return content, "file:" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in last), None
    try:
        return read_known(name, path), name, None
    except OSError as error:
        if fallback:
            return read_stdlib(), fallback, error
        raise ValueError(
            f"data={name} with data.path=null cannot be had: {error}. Allowed: data.path=FILE with a copy on disk, "
            f"python -m harness.data {name} where there is a network, or, in a single run, data.fallback=stdlib"
        ) from error


def _cut(content: np.ndarray, split: Sequence[float]) -> list[np.ndarray]:
    """Train, valid and test as views, in order, each of at least two bytes."""
    shares = [share for share in split if isinstance(share, float) and 0 < share < 1]
    if not len(shares) == len(split) == len(SPLITS) or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(
            f"data.split={split!r}: allowed are three shares for {', '.join(SPLITS)}, each above 0, that add up to 1"
        )
    valid, test = (round(len(content) * share) for share in shares[1:])
    train = len(content) - valid - test
    if min(train, valid, test) < 2:
        raise ValueError(
            f"data.split={shares} of {len(content):,} bytes leaves {train}, {valid} and {test}: each needs at least 2, "
            "so allowed is a longer corpus"
        )
    return np.split(content, [train, train + valid])


def _numbered(
    content: np.ndarray, parts: list[np.ndarray], *, vocabulary: int, drop_newlines: bool
) -> tuple[list[Tensor], bytes]:
    """The parts as numbers, and each number's byte: all 256, or for a smaller vocabulary those that occur, in order."""
    symbols, dropped = bytes(range(256)), b"\n" * drop_newlines
    if vocabulary < 256:
        symbols = bytes(value for value in distinct_values(content) if value not in dropped)
        if len(symbols) > vocabulary:
            raise ValueError(
                f"data.vocabulary={vocabulary}: the corpus has {len(symbols)} byte values, "
                f"allowed are {len(symbols)} and 256"
            )
    elif not dropped:
        return [torch.from_numpy(part) for part in parts], symbols
    table = bytearray(range(256))
    for number, value in enumerate(symbols):
        table[value] = number
    # translate needs no index of 8 bytes for each byte, as tensors would
    mapped = [bytearray(part).translate(table, dropped) for part in parts]
    if min(map(len, mapped)) < 2:
        raise ValueError("data.drop_newlines=true leaves a split with less than 2 bytes, allowed is a longer corpus")
    return [torch.frombuffer(part, dtype=torch.uint8) for part in mapped], symbols
