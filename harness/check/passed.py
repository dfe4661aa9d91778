"""Passed checks, which the user's cache folder remembers: later processes need not repeat them."""

import json
from contextlib import suppress
from pathlib import Path

from harness.cache import cache_folder, digest, write_atomically


def marker(kind: str, *conditions: object) -> Path:
    """Return the file, below the cache folder, of a check that depends on ``conditions``."""
    return Path(kind, digest(json.dumps(conditions, sort_keys=True).encode()))


def recall(file: Path) -> str | None:
    """Return what ``remember`` has written, or None. Without a cache folder each process checks."""
    with suppress(OSError):
        return (cache_folder() / file).read_text(encoding="utf-8")


def remember(file: Path, detail: str = "") -> None:
    """Write that a check has passed."""
    with suppress(OSError):
        write_atomically(cache_folder() / file, detail.encode())
