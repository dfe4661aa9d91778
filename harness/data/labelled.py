"""Labelled texts of the user: a CSV file with the columns ``text`` and ``label``, or a JSONL file
with an object of these keys in each line, in UTF-8."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import PurePath

from harness.data.sources import read_path

KEYS = ("text", "label")
SUFFIXES = (".csv", ".jsonl")


def read_labelled(path: str) -> tuple[list[bytes], list[str]]:
    """Return the texts of a file, which may be compressed, and their labels. ValueError names file,
    line and key."""
    suffixes = [suffix for suffix in PurePath(path).suffixes if suffix.lower() in SUFFIXES]
    if not suffixes:
        raise ValueError(f"data.path={path!r}: allowed are files of {', '.join(SUFFIXES)}")
    content = read_path(path).tobytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"data.path={path!r}: line {line} is not UTF-8") from error
    records = _csv_records if suffixes[-1].lower() == ".csv" else _json_records
    texts = []
    labels = []
    for line, record in records(text, path):
        for key in KEYS:
            entry = record.get(key)
            if not isinstance(entry, str | int) or entry == "":
                raise ValueError(
                    f"data.path={path!r}: line {line}: {key}={entry!r}: must be a text that is not "
                    "empty"
                )
        texts.append(str(record["text"]).encode())
        labels.append(str(record["label"]))
    if len(set(labels)) < 2:
        raise ValueError(
            f"data.path={path!r}: its {len(labels)} lines have the labels "
            f"{sorted(set(labels))}; at least two different ones are needed"
        )
    return texts, labels


def _csv_records(text: str, path: str) -> Iterator[tuple[int, dict]]:
    """Yield the number of the last line of each record, and its fields by column."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        missing = set(KEYS) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"data.path={path!r}: line 1: has the columns "
                f"{', '.join(reader.fieldnames or ())}; needed are {' and '.join(KEYS)}"
            )
        for record in reader:
            yield reader.line_num, record
    except csv.Error as error:
        raise ValueError(f"data.path={path!r}: line {reader.reader.line_num}: {error}") from error


def _json_records(text: str, path: str) -> Iterator[tuple[int, dict]]:
    """Yield the number of each line that is not empty, and its object."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data.path={path!r}: line {number}: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"data.path={path!r}: line {number}: must be an object")
        yield number, record
