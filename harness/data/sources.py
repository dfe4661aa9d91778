"""Sources of bytes: files and folders, plain or compressed, corpora of the literature, and Python's source.

Each reader returns one uint8 array, mapped for large plain files, else in memory. Corpora of the literature are
downloaded once into the user's cache, resume after an interruption, and are checked.
"""

import bz2
import gzip
import hashlib
import http.client
import lzma
import os
import sys
import sysconfig
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from harness.cache import cache_folder, locked, storing, write_whole

LARGE_BYTES = 2**26
"""A larger plain file is mapped; an archive unpacks to at most as much, or ``MOST_TIMES`` its size if that is more."""
MOST_TIMES = 200
"""enwik8 unpacks to four times its size."""
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError)
"""Errors of reading a damaged or impossible file."""
ANSWER_S, ATTEMPTS, CHUNK_BYTES = 10.0, 5, 2**18
NOT_STDLIB = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"}
NOT_STDLIB |= {"site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}


@dataclass(frozen=True, kw_only=True)
class Known:
    """A corpus of the literature, and what its bytes must be."""

    url: str
    n_bytes: int
    sha256: str | None = None
    alphabet: bytes | None = None  # of text8, whose digest nobody publishes
    part_of: str | None = None  # the known corpus whose first bytes these are

    def complaint(self, content: np.ndarray | bytes) -> str | None:
        """Why ``content`` is not this corpus, or None."""
        if len(content) != self.n_bytes:
            return f"it has {len(content):,} bytes, not {self.n_bytes:,}"
        if self.sha256 and (actual := digest(content)) != self.sha256:
            return f"its SHA-256 is {actual}, not {self.sha256}"
        if self.alphabet and (others := set(distinct_values(content)) - set(self.alphabet)):
            return f"it has byte values that do not belong to it: {sorted(others)}"
        return None


ENWIK8 = "http://mattmahoney.net/dc/enwik8.zip"
WHOLE = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
BEGIN = "9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37"
LETTERS = b" abcdefghijklmnopqrstuvwxyz"
KNOWN = {
    "enwik8": Known(url=ENWIK8, n_bytes=100_000_000, sha256=WHOLE),
    "enwik8_4m": Known(url=ENWIK8, n_bytes=4_000_000, sha256=BEGIN, part_of="enwik8"),
    "text8": Known(url="http://mattmahoney.net/dc/text8.zip", n_bytes=100_000_000, alphabet=LETTERS),
}
PINNED = frozenset(name for name, corpus in KNOWN.items() if corpus.sha256)
"""Corpora with a known digest."""


def digest(content: np.ndarray | bytes) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def distinct_values(content: np.ndarray | bytes) -> list[int]:
    """The byte values that occur, in order."""
    return np.unique(np.frombuffer(content, np.uint8)).tolist()


def read_known(name: str, path: str | None) -> np.ndarray:
    """The bytes of a known corpus from a file, or from the cache or its author's site (``path`` None). ValueError
    naming ``data.path`` for other bytes, OSError where it cannot be downloaded."""
    corpus, whole = KNOWN[name], KNOWN[name].part_of or name
    remedy = "data=file reads any file" if path else "remove it, and it will be downloaded again"
    path = path or str(fetch(whole))
    content = read_path(path)
    if corpus.part_of and len(content) == KNOWN[whole].n_bytes:
        content = content[: corpus.n_bytes]
    if complaint := corpus.complaint(content):
        raise ValueError(f"data.path={path!r} is not {name}: {complaint}; {remedy}")
    return content


def read_path(path: str) -> np.ndarray:
    """All bytes of a file, or of all files below a folder, hidden ones left out, by relative POSIX path: uint8 ``[n]``,
    n >= 1. ``.gz``, ``.bz2``, ``.xz`` and ``.zip`` (of one file) are unpacked. ValueError naming ``data.path``."""
    try:
        place = Path(path).expanduser()
        if not place.exists():
            raise ValueError(f"data.path={path!r}: there is no such file or folder")
        content = _joined(place) if place.is_dir() else _read_file(place)
    except BROKEN as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"data.path={path!r} cannot be read, truncated or damaged perhaps: {reason}") from error
    if not len(content):
        raise ValueError(f"data.path={path!r}: there are no bytes in it; allowed is a file or a folder with some")
    return content


def _joined(folder: Path, suffix: str = "", *, left_out: Set[str] = frozenset()) -> np.ndarray:
    """Files below ``folder`` one after the other, by relative POSIX path, without hidden and ``left_out`` ones."""
    names = []
    for path, folders, files in os.walk(folder):
        folders[:], files = (
            [name for name in some if not name.startswith(".") and name not in left_out] for some in (folders, files)
        )
        names += [Path(path, name).relative_to(folder) for name in files if name.endswith(suffix)]
    if not names:
        raise OSError(f"{folder} has no files")
    return np.concatenate([_read_file(folder / name) for name in sorted(names, key=Path.as_posix)])


def _read_file(path: Path) -> np.ndarray:
    if not path.is_file():
        raise OSError(f"{path} is no regular file")
    if path.suffix.lower() in OPENERS:
        return np.frombuffer(bytearray(unpack(path)), np.uint8)
    large = path.stat().st_size >= LARGE_BYTES
    # Copy on write: torch wants writable memory, and the file must never change.
    return np.memmap(path, np.uint8, mode="c") if large else np.fromfile(path, np.uint8)


def unpack(path: Path) -> bytes:
    """The content of a compressed file; one of ``BROKEN`` for a damaged file or a bomb."""
    most = max(LARGE_BYTES, MOST_TIMES * path.stat().st_size)
    with OPENERS[path.suffix.lower()](path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it unpacks to more than {MOST_TIMES} times its size; allowed is an unpacked file")
    return content


def _open_zip(path: Path) -> BinaryIO:
    archive = zipfile.ZipFile(path)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise zipfile.BadZipFile(f"{len(members)} files are in the archive, allowed is one")
    return archive.open(members[0])


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zip": _open_zip}


def read_stdlib() -> np.ndarray:
    """The source of the running Python's standard library, by POSIX path: uint8 ``[n]``; without tests and IDLE (half
    of it), tables, modules that newer Pythons dropped, and files of an installation."""
    folder = Path(sysconfig.get_path("stdlib"))
    installed = {path.name for name in ("config-*", "_sysconfigdata*") for path in folder.glob(name)}
    try:
        return _joined(folder, ".py", left_out=NOT_STDLIB | installed)
    except OSError as error:
        raise ValueError("data=stdlib: this Python has no source of its standard library") from error


def fetch(name: str) -> Path:
    """Path of ``enwik8`` or ``text8`` in the user's cache, downloaded once by parallel jobs, checked; else OSError."""
    corpus, target = KNOWN[name], cache_folder() / name
    if target.is_file():
        return target
    with locked(target):
        if target.is_file():
            return target
        packed = target.with_name(f"{name}.zip")
        if not packed.exists():  # an earlier try may have failed to unpack it, as on a full disk
            print(f"data: downloading {corpus.url} to {target}", file=sys.stderr)
            download(corpus.url, packed)
        try:
            content = unpack(packed)
            complaint = corpus.complaint(content)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            complaint = f"{error!r} when unpacking"
        if complaint:
            packed.unlink()
            raise OSError(f"what {corpus.url} sent is not {name}: {complaint}")
        write_whole(target, content)
        packed.unlink()
    return target


def download(url: str, target: Path) -> None:
    """Download ``url`` to ``target`` by ``<target>.part``, from which a later call goes on. Connections may drop five
    times; then OSError, and the part stays."""
    part = target.with_name(f"{target.name}.part")
    for _ in range(ATTEMPTS):
        if _fetch_rest(url, part):
            os.replace(part, target)
            return
    raise OSError(f"{url}: the connection broke {ATTEMPTS} times, {part.stat().st_size:,} bytes are in {part}")


def _fetch_rest(url: str, part: Path) -> bool:
    """Append the missing bytes to ``part``; whether it is complete then."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "attention-windtunnel"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        part.unlink()  # nothing is left to send: the part is whole, or of another file
        return False
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r} is no answer of a web server") from error
    with response:
        resumed, begins = response.status == 206, response.headers.get("Content-Range", "")
        if resumed and not begins.startswith(f"bytes {have}-"):
            raise OSError(f"{url}: asked for bytes from {have}, got {begins}")
        with part.open("ab" if resumed else "wb") as out:
            try:
                while chunk := response.read(CHUNK_BYTES):
                    with storing(part, needed=len(chunk) + (response.length or 0)):
                        out.write(chunk)
            except (TimeoutError, ConnectionError, http.client.HTTPException):
                return False
        return not response.length  # bytes still to come; None where the server does not say
