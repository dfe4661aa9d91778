"""Sources of bytes: files and folders, plain or compressed, published corpora, and Python's
standard library. Each reader returns one uint8 array, which is memory-mapped for a large plain
file. A published corpus is downloaded once into the user's cache and verified; an interrupted
download is resumed."""

import bz2
import gzip
import http.client
import lzma
import os
import re
import sysconfig
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from harness.cache import (
    cache_folder,
    digest,
    file_lock,
    raise_storage_failure,
    user_path,
    write_atomically,
)
from harness.failures import note

LARGE_BYTES = 2**26
"""A plain file of at least this size is memory-mapped. An archive may unpack to this size, or to
``MAX_EXPANSION`` times its own size if that is more."""
MAX_EXPANSION = 200  # for comparison: enwik8.zip unpacks to three times its size
FORMATS = {
    rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]": ".gz",
    rb"BZh[1-9]1AY&SY": ".bz2",
    rb"\xfd7zXZ\0": ".xz",
    # a dictionary's size, then the content's or -1
    rb"]\0\0(?!\0\0)..(\xff{8}|.{5}\0{3})": ".lzma",
    rb"PK(\x03\x04|\x05\x06)": ".zip",
    rb"(\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)": ".zst",
    rb"\x04\x22\x4d\x18": ".lz4",
    rb"\xff\x06\0\0sNaPpY": ".sz",
    rb"7z\xbc\xaf\x27\x1c": ".7z",
    rb"Rar!\x1a\x07": ".rar",
    rb"LZIP\x01": ".lz",
    rb"\x89LZO\0": ".lzo",
    rb"\x1f\x9d[\x89-\x90]": ".Z",  # its bits, 9 to 16, in block mode
}
"""Patterns of the first bytes of compressed files, which plain binary files hardly have, and the
usual suffix of each format. Only those of ``OPENERS`` are read."""
READ_ERRORS = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    RuntimeError,
)
"""Errors that are raised for files that are damaged, truncated, or of an unsupported format."""
TIMEOUT_SECONDS = 10.0
MAX_ATTEMPTS = 5
CHUNK_BYTES = 2**18
EXCLUDED_FROM_STDLIB = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "sitecustomize.py",
    "usercustomize.py",
}


@dataclass(frozen=True, kw_only=True)
class PublishedCorpus:
    """A corpus of the literature, and how to verify its bytes."""

    url: str
    n_bytes: int
    sha256: str | None = None
    # the bytes that may occur; only for text8, of which no digest is published
    alphabet: bytes | None = None
    part_of: str | None = None  # the name of the published corpus of which this is the beginning

    def mismatch(self, content: np.ndarray | bytes) -> str | None:
        """Return why ``content`` is not this corpus; None if it is."""
        if len(content) != self.n_bytes:
            return f"it has {len(content):,} bytes, not {self.n_bytes:,}"
        if self.sha256 and (actual := digest(content)) != self.sha256:
            return f"its SHA-256 is {actual}, not {self.sha256}"
        if self.alphabet and (foreign := bytes(content).translate(None, delete=self.alphabet)):
            return f"it has bytes that do not belong to it: {sorted(set(foreign))}"
        return None


ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
ENWIK8_4M_SHA256 = "9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37"
TEXT8_ALPHABET = b" abcdefghijklmnopqrstuvwxyz"
PUBLISHED = {
    "enwik8": PublishedCorpus(url=ENWIK8_URL, n_bytes=100_000_000, sha256=ENWIK8_SHA256),
    "enwik8_4m": PublishedCorpus(
        url=ENWIK8_URL, n_bytes=4_000_000, sha256=ENWIK8_4M_SHA256, part_of="enwik8"
    ),
    "text8": PublishedCorpus(
        url="http://mattmahoney.net/dc/text8.zip", n_bytes=100_000_000, alphabet=TEXT8_ALPHABET
    ),
}
PINNED = frozenset(name for name, corpus in PUBLISHED.items() if corpus.sha256)
"""Names of the published corpora whose bytes are determined by a digest."""


def read_published(name: str, path: str | None) -> np.ndarray:
    """Return the bytes of a published corpus from a file, or if ``path`` is None, from the cache or
    the author's site. ValueError names ``data.path`` if the bytes are not those of the corpus;
    OSError if it cannot be downloaded."""
    corpus = PUBLISHED[name]
    download_name = corpus.part_of or name
    remedy = "remove it, and it will be downloaded again"
    if path:
        remedy = "data=file reads any file"
    path = path or str(fetch(download_name))
    content = read_path(path)
    if corpus.part_of and len(content) == PUBLISHED[download_name].n_bytes:
        content = content[: corpus.n_bytes]
    if mismatch := corpus.mismatch(content):
        raise ValueError(f"data.path={path!r}: is not {name}: {mismatch}; {remedy}")
    return content


def read_path(path: str) -> np.ndarray:
    """Return all bytes of a file, or of all files below a folder: uint8 ``[n]``, n >= 1. Files of a
    folder are read in the order of their relative POSIX paths, without hidden ones; links to
    folders are followed. gzip, bzip2, xz and zip (of one file) are unpacked, whatever the file's
    name; other archives are refused. ValueError names ``data.path``."""
    try:
        location = user_path(path, key="data.path")
        if not location.exists():
            raise ValueError(f"data.path={path!r}: no such file or folder")
        content = _read_folder(location) if location.is_dir() else _read_file(location)
    except READ_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"data.path={path!r}: cannot be read, perhaps truncated or damaged: {reason}"
        ) from error
    if not len(content):
        raise ValueError(
            f"data.path={path!r}: is empty; must be a file or folder with at least one byte"
        )
    return content


def _read_folder(folder: Path, suffix: str = "", *, excluded: Set[str] = frozenset()) -> np.ndarray:
    """Return files below ``folder`` whose names end with ``suffix``, concatenated in the order of
    their relative POSIX paths. Files and folders that are hidden or whose name is ``excluded`` are
    left out."""
    paths = [path for path in _files_below(folder, excluded) if path.name.endswith(suffix)]
    if not paths:
        raise OSError(f"{folder} has no files")
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    return np.concatenate([_read_file(path) for path in paths])


def _files_below(
    folder: Path, excluded: Set[str], parents: tuple[os.stat_result, ...] = ()
) -> Iterator[Path]:
    """Yield the files of ``_read_folder``. OSError for a folder that cannot be listed or contains
    itself by a link."""
    status = folder.stat()
    if any(os.path.samestat(status, parent) for parent in parents):
        raise OSError(f"{folder} is a link to a folder that contains it")
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in excluded:
            continue
        if path.is_dir():
            yield from _files_below(path, excluded, (*parents, status))
        else:
            yield path


def _read_file(path: Path) -> np.ndarray:
    if not path.is_file():
        raise OSError(f"{path} is not a regular file")
    if _format_of_file(path):
        return np.frombuffer(bytearray(unpack(path)), np.uint8)
    if path.stat().st_size < LARGE_BYTES:
        return np.fromfile(path, np.uint8)
    # copy on write: torch requires writable memory, the file never changes
    return np.memmap(path, np.uint8, mode="c")


def _format_of_file(path: Path) -> str | None:
    """Return the format of a file by its first bytes or, if they are damaged, by its name; None if
    it is no archive."""
    with path.open("rb") as file:
        archive = _archive_format(file.read(tarfile.BLOCKSIZE))
    suffix = path.suffix.lower()
    return archive or (suffix if suffix in OPENERS else None)


def _archive_format(content: bytes) -> str | None:
    """Return the usual suffix of the archives that begin with these bytes (at least 512, if there
    are as many); None for other files."""
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "replace")
        return ".tar"
    return next(
        (suffix for first, suffix in FORMATS.items() if re.match(first, content, re.DOTALL)), None
    )


def unpack(path: Path) -> bytes:
    """Return the content of a compressed file. Raises one of ``READ_ERRORS`` if it is damaged or a
    decompression bomb, or if its format is not one of ``OPENERS``, or if its content is an
    archive."""
    max_bytes = max(LARGE_BYTES, MAX_EXPANSION * path.stat().st_size)
    archive = _format_of_file(path)
    if archive in OPENERS:
        with OPENERS[archive](path) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise OSError(
                f"it unpacks to more than {MAX_EXPANSION} times its size; use an unpacked file "
                "instead"
            )
        archive = _archive_format(content)
    if archive:
        raise OSError(
            f"{path} is or contains a {archive} archive; unpack it into a folder, and name that"
        )
    return content


def _open_zip(path: Path) -> BinaryIO:
    archive = zipfile.ZipFile(path)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise zipfile.BadZipFile(f"the archive has {len(members)} files; allowed is one")
    return archive.open(members[0])


OPENERS = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
    ".zip": _open_zip,
}


def read_stdlib() -> np.ndarray:
    """Return the source of the running Python's standard library, concatenated by POSIX path: uint8
    ``[n]``. Left out are tests and IDLE (half of the source), tables of encodings and help texts,
    modules that newer Pythons dropped, and files that depend on the installation."""
    folder = Path(sysconfig.get_path("stdlib"))
    installation = {
        path.name for pattern in ("config-*", "_sysconfigdata*") for path in folder.glob(pattern)
    }
    try:
        return _read_folder(folder, ".py", excluded=EXCLUDED_FROM_STDLIB | installation)
    except OSError as error:
        raise ValueError(
            "data=stdlib: this Python is installed without the source of its standard library"
        ) from error


def fetch(name: str) -> Path:
    """Return the path of ``enwik8`` or ``text8`` in the user's cache, downloaded first if it is
    missing. Of several processes, one downloads. OSError if the corpus cannot be downloaded, or if
    its bytes are not the expected ones."""
    corpus = PUBLISHED[name]
    target = cache_folder() / name
    if target.is_file():
        return target
    with file_lock(target):
        if target.is_file():
            return target
        archive = target.with_name(f"{name}.zip")
        # it exists if an earlier process could not unpack it, as on a full disk
        if not archive.exists():
            note(f"data: downloading {corpus.url} to {target}")
            download(corpus.url, archive)
        try:
            content = unpack(archive)
            mismatch = corpus.mismatch(content)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            mismatch = f"{error!r} when unpacking"
        if mismatch:
            archive.unlink()
            raise OSError(f"what {corpus.url} sent is not {name}: {mismatch}")
        write_atomically(target, content)
        archive.unlink()
    return target


def download(url: str, target: Path) -> None:
    """Download ``url`` to ``target``. The received bytes are in ``<target>.part``, from which a
    later call continues. OSError if the connection breaks ``MAX_ATTEMPTS`` times."""
    part = target.with_name(f"{target.name}.part")
    for _ in range(MAX_ATTEMPTS):
        if _fetch_rest(url, part):
            os.replace(part, target)
            return
    raise OSError(
        f"{url}: the connection broke {MAX_ATTEMPTS} times; {part.stat().st_size:,} bytes are in "
        f"{part}"
    )


def _fetch_rest(url: str, part: Path) -> bool:
    """Append the missing bytes to ``part``. Returns whether it is complete afterwards."""
    size = 0
    if part.exists():
        size = part.stat().st_size
    headers = {"User-Agent": "attention-windtunnel"}
    if size:
        headers["Range"] = f"bytes={size}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS
        )
    except urllib.error.HTTPError as error:
        if error.code != 416 or not size:
            raise
        # the server has no bytes after ours: the part is already complete, or of another file
        part.unlink()
        return False
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r} is not the response of a web server") from error
    with response:
        resumed = response.status == 206
        content_range = response.headers.get("Content-Range", "")
        if resumed and not content_range.startswith(f"bytes {size}-"):
            raise OSError(
                f"{url}: the request was for bytes from {size}, the response has {content_range}"
            )
        with part.open("ab" if resumed else "wb") as file:
            try:
                while chunk := response.read(CHUNK_BYTES):
                    with raise_storage_failure(part, needed=len(chunk) + (response.length or 0)):
                        file.write(chunk)
            except (TimeoutError, ConnectionError, http.client.HTTPException):
                return False
        # the bytes that are still to come; None if the server does not state a length
        return not response.length
