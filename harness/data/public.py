"""Corpora of the literature: where they are to be had, and what their bytes must be.

enwik8: the first 10^8 bytes of the English Wikipedia's XML dump of 2006-03-03. text8: the first 10^8 letters of fil9,
which is cleaned from a longer piece of the same dump. Both by Matt Mahoney, http://mattmahoney.net/dc/textdata.html.
No digest of text8 is known to us for sure, so its length and its letters are checked.
"""

import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.cache import cache_folder, locked, write_whole
from harness.data.download import download
from harness.data.sources import digest, distinct_values, unpack


@dataclass(frozen=True, kw_only=True)
class Known:
    """A corpus that can be fetched, and what its bytes must be."""

    url: str
    n_bytes: int
    sha256: str | None = None
    alphabet: bytes | None = None

    def complaint(self, content: np.ndarray | bytearray) -> str | None:
        """What shows that ``content`` is not this corpus, or None."""
        if len(content) != self.n_bytes:
            return f"it has {len(content):,} bytes, not {self.n_bytes:,}"
        if self.sha256 and (found := digest(content)) != self.sha256:
            return f"its SHA-256 is {found}, not {self.sha256}"
        if self.alphabet and (others := set(distinct_values(content)) - set(self.alphabet)):
            return f"it has byte values that do not belong to it: {sorted(others)}"
        return None


KNOWN = {
    "enwik8": Known(
        url="http://mattmahoney.net/dc/enwik8.zip",
        n_bytes=100_000_000,
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    ),
    "text8": Known(
        url="http://mattmahoney.net/dc/text8.zip",
        n_bytes=100_000_000,
        alphabet=b" abcdefghijklmnopqrstuvwxyz",
    ),
}


def fetch(name: str) -> Path:
    """Where ``enwik8`` or ``text8`` lies in the user's cache; downloaded and checked if it is not there.

    Parallel jobs download once. OSError says why it cannot be had.
    """
    known, target = KNOWN[name], cache_folder() / name
    if target.is_file():
        return target
    with locked(target):
        if target.is_file():
            return target
        packed = target.with_name(f"{name}.zip")
        print(f"data: downloading {known.url} to {target}", file=sys.stderr)
        download(known.url, packed)
        try:
            content = unpack(packed)
            complaint = known.complaint(content)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            complaint = f"{error!r} when unpacking"
        packed.unlink()
        if complaint:
            raise OSError(f"what {known.url} sent is not {name}: {complaint}")
        write_whole(target, content)
    return target
