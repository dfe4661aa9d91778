"""Corpora: the bytes that a run reads, cut in order into train, valid and test. The name, length
and SHA-256 of a corpus describe the bytes that were read, also where a fallback corpus was read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.cache import digest, user_path
from harness.data import associative_recall
from harness.data.labelled import read_labelled
from harness.data.listops import listops
from harness.data.recall import copies, recall_floor, recall_stream
from harness.data.repeats import repeat_masks
from harness.data.skills import SKILLS, GeneratedCorpus
from harness.data.sources import PUBLISHED, read_path, read_published, read_stdlib
from harness.data.streams import permutation
from harness.data.synthetic_text import synthetic_text
from harness.data.texts import Texts
from harness.failures import note

SPLITS = ("train", "valid", "test")
GENERATED = {
    "recall": GeneratedCorpus(recall_stream, lambda part, **_: recall_floor(len(part)), copies),
    "associative_recall": GeneratedCorpus(
        stream=associative_recall.associative_recall,
        floor_bits=associative_recall.floor_bits,
        answers=associative_recall.answers,
    ),
    "synthetic_text": GeneratedCorpus(synthetic_text),
    **SKILLS,
}
LABELLED = ("listops", "labelled")
NAMES = (*PUBLISHED, "file", "stdlib", *GENERATED, *LABELLED)
ONLY_OF = {"distances": ("recall",), "sequence": ("associative_recall",)}
"""The corpora that have an option which not all generated corpora have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A corpus as a run reads it."""

    name: str  # the corpus's name, or ``file:`` and the last part of a path
    sha256: str  # of the whole corpus, before newlines are dropped or a vocabulary is applied
    n_bytes: int  # length of the bytes that ``sha256`` covers
    # token ids of train, valid and test, uint8 ``[n]`` each, in memory or memory-mapped
    splits: dict[str, Tensor]
    vocabulary: int  # V; all token ids are below it
    # the byte of each token id; fewer than V if the corpus has fewer different bytes
    symbols: bytes
    generated: GeneratedCorpus
    options: dict  # keyword arguments of its functions ``floor_bits`` and ``answers``
    sequence: int | None = None  # T, if every T bytes are an independent sequence; all are targets
    # the name of the configured corpus, if this one was read instead of it
    fallback_for: str | None = None
    texts: dict[str, Texts] | None = None  # of each split, if the corpus has labels
    classes: tuple[str, ...] = ()  # and these labels

    def scored_part(
        self, split: str, *, selection_bytes: int | None, limit: int | None = None
    ) -> Tensor:
        """Return the bytes of a split that are scored for a report: the first ``limit`` or all,
        without ``selection_part``."""
        tokens = self.splits[split]
        if split == "valid":
            tokens = tokens[: len(tokens) - len(self.selection_part(selection_bytes))]
        if limit is not None:
            tokens = tokens[: self._whole(limit)]
        return tokens

    def selection_part(self, selection_bytes: int | None) -> Tensor:
        """Return the last ``selection_bytes`` of valid, at most half of it (None: half), which
        select the best weights."""
        valid = self.splits["valid"]
        half = len(valid) // 2
        n_bytes = half if selection_bytes is None else min(selection_bytes, half)
        return valid[len(valid) - self._whole(n_bytes) :]

    def _whole(self, n_bytes: int) -> int:
        """Return ``n_bytes`` rounded down to whole sequences."""
        return n_bytes - n_bytes % (self.sequence or 1)

    def answer_masks(self, part: Tensor) -> dict[str, Tensor]:
        """Return for each label, which targets of a part, uint8 ``[n]``, are answers of this kind:
        bool ``[n - 1]``, or ``[n]`` for whole sequences."""
        if not self.generated.answers:
            return {}
        answers = self.generated.answers(self._bytes(part), **self.options)
        first_target = 0 if self.sequence else 1
        return {label: torch.from_numpy(mask[first_target:]) for label, mask in answers.items()}

    def repeat_masks(self, part: Tensor) -> dict[str, Tensor]:
        """Return ``harness.data.repeats.repeat_masks`` of a part's targets; none for a corpus that
        has ``answers``."""
        if self.generated.answers:
            return {}
        masks = repeat_masks(part.numpy(), train=self.splits["train"].numpy())
        return {label: torch.from_numpy(mask) for label, mask in masks.items()}

    def floor_bits(self, part: Tensor) -> float | None:
        """Return the lowest expected bits per byte of a causal model on the targets of a part; None
        if unknown."""
        floor = self.generated.floor_bits
        if floor:
            return floor(self._bytes(part), **self.options)
        return None

    def _bytes(self, part: Tensor) -> np.ndarray:
        """Return the bytes of token ids."""
        return np.frombuffer(self.symbols, np.uint8)[part.numpy()]

    def provenance(self) -> dict[str, str | int]:
        """Return the ``data`` of a row: name, length and digest of the corpus, and the corpus that
        it stands in for."""
        provenance = {"name": self.name, "bytes": self.n_bytes, "sha256": self.sha256}
        if self.fallback_for:
            provenance["fallback_for"] = self.fallback_for
        return provenance


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
    sequence: int | None = None,
    seed: int | None = None,
) -> Corpus:
    """Read a corpus by the keys of ``conf/data/*.yaml``, each of which ``DataSettings`` validates;
    ValueError names the key, its value and what is allowed."""
    if name not in NAMES:
        raise ValueError(f"data.name={name!r}: allowed are {', '.join(NAMES)}")
    if path is not None and name not in (*PUBLISHED, "file", "labelled"):
        raise ValueError(
            f"data.path={path!r}: only allowed with data={', '.join(PUBLISHED)}, file or labelled, "
            f"not {name}"
        )
    needed = {"file": "FILE, a file or folder", "labelled": "FILE.csv or .jsonl"}
    if name in needed and not path:
        raise ValueError(f"data.path={path!r}: data={name} requires data.path={needed[name]}")
    if fallback and name not in PUBLISHED:
        raise ValueError(
            f"data.fallback={fallback!r}: allowed are null, and stdlib with "
            f"data={', '.join(PUBLISHED)}"
        )
    options = {"bytes": bytes, "distances": distances, "sequence": sequence, "seed": seed}
    options = {key: option for key, option in options.items() if option is not None}
    for key, option in options.items():
        supported = ONLY_OF.get(key, (*GENERATED, "listops"))
        if name not in supported:
            raise ValueError(f"data.{key}={option}: only allowed with data={', '.join(supported)}")
    if name in LABELLED:
        if (vocabulary, drop_newlines, first_bytes) != (256, False, None):
            raise ValueError(
                f"data={name}: allowed are data.vocabulary=256, data.drop_newlines=false and "
                "data.first_bytes=null"
            )
        return _load_texts(name, path, options, split=split, sha256=sha256)
    configured_name = name
    content, name, error = _read(name, path, fallback, options)
    if first_bytes is not None:
        if first_bytes > len(content):
            raise ValueError(
                f"data.first_bytes={first_bytes}: allowed are at most the {len(content)} bytes of "
                f"{name}"
            )
        content = content[:first_bytes]
        name = f"{name}, first {first_bytes:,} bytes"
    content_sha256 = digest(content)
    name = next(
        (published for published, corpus in PUBLISHED.items() if corpus.sha256 == content_sha256),
        name,
    )
    if error:
        note(
            f"data: {configured_name.upper()} CANNOT BE DOWNLOADED ({error}). READING "
            f"{name.upper()} INSTEAD: {len(content):,} bytes, sha256 {content_sha256}; bits per "
            f"byte are not comparable with those of {configured_name}. To download "
            f"{configured_name}, run python -m harness.data {configured_name}; to read a copy, "
            "set data.path=FILE; to get an error instead of this corpus, set data.fallback=null."
        )
    _check_digest(name, content_sha256, expected=sha256)
    parts = _cut(content, split, sequence=sequence or 1)
    parts, symbols = _to_token_ids(
        content, parts, vocabulary=vocabulary, drop_newlines=drop_newlines
    )
    return Corpus(
        name=name,
        sha256=content_sha256,
        n_bytes=len(content),
        splits=dict(zip(SPLITS, parts, strict=True)),
        vocabulary=vocabulary,
        symbols=symbols,
        generated=GENERATED.get(configured_name, GeneratedCorpus()),
        options={key: options[key] for key in ONLY_OF if key in options},
        sequence=sequence,
        fallback_for=configured_name if error else None,
    )


def _load_texts(
    name: str, path: str | None, options: dict, *, split: Sequence[float], sha256: str | None
) -> Corpus:
    """Return a corpus of labelled texts. Those of a file are shuffled, because files are often
    sorted by label."""
    if name == "listops":
        texts, labels = listops(**options)
        order = np.arange(len(texts))
    else:
        texts, labels = read_labelled(path)
        order = permutation(0, 0, len(texts))
        name = _file_name(path)
    classes = tuple(sorted(set(labels)))
    sha256_of_all = digest(b"\n".join(f"{labels[i]}\t".encode() + texts[i] for i in order))
    _check_digest(name, sha256_of_all, expected=sha256)
    parts = {}
    for split_name, part in zip(SPLITS, _cut(order, split, sequence=1, unit="texts"), strict=True):
        indices = [classes.index(labels[i]) for i in part]
        parts[split_name] = Texts.of([texts[i] for i in part], indices)
    splits = {split_name: part.content for split_name, part in parts.items()}
    return Corpus(
        name=name,
        sha256=sha256_of_all,
        n_bytes=sum(map(len, splits.values())),
        splits=splits,
        vocabulary=256,
        symbols=bytes(range(256)),
        generated=GeneratedCorpus(),
        options={},
        texts=parts,
        classes=classes,
    )


def _check_digest(name: str, actual: str, *, expected: str | None) -> None:
    """Raise ValueError if the digest of a corpus is not ``data.sha256``."""
    if expected and expected.lower() != actual:
        raise ValueError(f"data.sha256={expected}: the SHA-256 of {name} is {actual}")


def _file_name(path: str) -> str:
    """Return the name of a corpus that is read from a path of the user."""
    file_name = user_path(path, key="data.path").resolve().name
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in file_name)
    return f"file:{printable}"


def _read(
    name: str, path: str | None, fallback: str | None, options: dict
) -> tuple[np.ndarray, str, OSError | None]:
    """Return the bytes, the corpus's name, and if ``fallback`` was read, the error that made it
    necessary."""
    if name in GENERATED:
        return GENERATED[name].stream(**options), name, None
    if name == "stdlib":
        return read_stdlib(), name, None
    if name == "file":
        return read_path(path), _file_name(path), None
    try:
        return read_published(name, path), name, None
    except OSError as error:
        if fallback:
            return read_stdlib(), fallback, error
        raise ValueError(
            f"data={name}: cannot be downloaded ({error}); set data.path=FILE to read a copy, run "
            f"python -m harness.data {name} where there is a network, or, in a single run, set "
            "data.fallback=stdlib"
        ) from error


def _cut(
    content: np.ndarray, split: Sequence[float], *, sequence: int, unit: str = "bytes"
) -> list[np.ndarray]:
    """Train, valid and test as views of ``content``, in order, each of at least two sequences, of
    one byte or more."""
    if abs(sum(split) - 1) > 1e-9:
        raise ValueError(
            f"data.split={[*split]}: must be fractions above 0 for {', '.join(SPLITS)}, with a sum "
            "of 1"
        )
    valid, test = (sequence * round(len(content) // sequence * share) for share in split[1:])
    train = len(content) - valid - test
    if min(train, valid, test) < 2 * sequence:
        raise ValueError(
            f"data.split={[*split]}: cuts {len(content):,} {unit} into {train}, {valid} and "
            f"{test}, but each split needs at least {2 * sequence}; use a longer corpus"
        )
    return np.split(content, [train, train + valid])


def _to_token_ids(
    content: np.ndarray, parts: list[np.ndarray], *, vocabulary: int, drop_newlines: bool
) -> tuple[list[Tensor], bytes]:
    """Return the parts as token ids, and the byte of each token id. With a vocabulary of 256, a
    token id is the byte itself; with a smaller one, token ids number the different bytes of the
    corpus in order."""
    symbols = bytes(range(256))
    dropped = b""
    if drop_newlines:
        dropped = b"\n"
    if vocabulary < 256:
        symbols = bytes(byte for byte in np.unique(content).tolist() if byte not in dropped)
        if len(symbols) > vocabulary:
            raise ValueError(
                f"data.vocabulary={vocabulary}: the corpus has {len(symbols)} different bytes; "
                f"allowed are {len(symbols)} to 256"
            )
    elif not dropped:
        return [torch.from_numpy(part) for part in parts], symbols
    token_ids = bytes.maketrans(symbols, bytes(range(len(symbols))))
    # bytearray.translate needs no index tensor, which would take 8 bytes for each byte.
    translated = [bytearray(part).translate(token_ids, dropped) for part in parts]
    if min(map(len, translated)) < 2:
        raise ValueError(
            "data.drop_newlines=true: leaves a split with fewer than 2 bytes; use a longer corpus"
        )
    return [torch.frombuffer(part, dtype=torch.uint8) for part in translated], symbols
