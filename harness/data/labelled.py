"""Labelled texts of the user: a CSV file with the columns ``text`` and ``label``, or a JSONL file
with an object of these keys in each line, in UTF-8."""

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import partial

from harness.data.sources import read_path

READERS = {
    ".csv": partial(csv.DictReader, strict=True),
    ".jsonl": lambda lines: map(json.loads, filter(str.strip, lines)),
}


def read_labelled(path: str) -> tuple[list[bytes], list[str]]:
    """Return the texts of a file, which may be compressed, and their labels. ValueError names file,
    line and key."""
    read = next((READERS[suffix] for suffix in READERS if suffix in path.lower()), None)
    if read is None:
        raise ValueError(f"data.path={path!r}: allowed are files of {', '.join(READERS)}")
    content = read_path(path).tobytes().removeprefix(BOM_UTF8)
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in content.splitlines(keepends=True):
            number += 1
            yield line.decode()

    columns: dict[str, list[bytes]] = {"text": [], "label": []}
    try:
        for record in read(lines()):
            for key, column in columns.items():
                entry = record.get(key)
                if not isinstance(entry, str | int) or entry == "":
                    raise ValueError(f"{key}={entry!r}: needed are a text and a label")
                column.append(str(entry).encode())
            if None in record:
                raise ValueError(
                    f"{record[None]}: more fields than columns; quote a text with commas"
                )
    except (ValueError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"data.path={path!r}: line {number}: {error}") from error
    labels = [label.decode() for label in columns["label"]]
    classes = sorted(set(labels))
    if len(classes) < 2:
        raise ValueError(
            f"data.path={path!r}: its labels are {classes}; at least two different ones are needed"
        )
    return columns["text"], labels
