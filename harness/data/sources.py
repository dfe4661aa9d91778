"""Sources of bytes: files and folders as they are or compressed, and the running Python's own source.

Everything here returns one uint8 array: mapped where the file is large and plain, else in memory. Nothing is ever a
list of numbers.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from harness.cache import cache_folder, forget_left, write_whole
from harness.data.byte_counts import order_bits

LARGE_BYTES = 64 * 2**20
"""From this size a plain file is mapped instead of read, and an unpacked one is kept in the user's cache."""

MOST_TIMES = 200
"""What is not text unpacks to more times its size; enwik8 to four."""
_CHUNK_BYTES = 1 << 24
_ZIP_END, _ZIP_END_BYTES = b"PK\5\6", 22
"""How an archive's last record begins, and its length without the comment."""
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError)

_NOT_STDLIB = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"}
_NOT_STDLIB |= {"site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"}


def digest(content: np.ndarray | bytes | bytearray) -> str:
    """SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_path(path: str) -> np.ndarray:
    """All bytes of a file, or of a folder's files one after the other: uint8 ``[n]``, n >= 1.

    ``.gz``, ``.bz2``, ``.xz`` and ``.zip`` (of one file) are unpacked. A folder is read with all that is below it, in
    the order of POSIX paths relative to it; names that begin with a dot are left out.

    Raises:
        ValueError: naming ``data.path`` and what is wrong: missing, no files, empty, truncated, unreadable.
    """
    try:
        here = Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"data.path={path!r}: there is no such user's folder; allowed is a file or a folder"
        ) from error
    try:
        if here.is_dir():
            files = _visible_files(here)
            content = np.concatenate([_read_file(file) for file in files]) if files else None
        elif here.is_file():
            content = _read_file(here)
        else:
            raise ValueError(f"data.path={path!r}: there is no such file or folder")
    except _BROKEN as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"data.path={path!r} cannot be read, truncated or damaged perhaps: {reason}") from error
    if content is None or not len(content):
        what = "the folder has no files" if content is None else "there are no bytes in it"
        raise ValueError(f"data.path={path!r}: {what}; allowed is a file or a folder with at least some bytes")
    return content


def _visible_files(folder: Path) -> list[Path]:
    """Files below ``folder``, sorted by relative POSIX path. OSError for a folder that cannot be listed."""

    def refuse(error: OSError) -> None:  # os.walk, like rglob, would skip what it may not list
        raise error

    found = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in names if not name.startswith(".")]
    for file in found:
        if not file.is_file():
            raise OSError(f"{file} is no regular file")
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _read_file(path: Path) -> np.ndarray:
    if path.suffix.lower() not in _OPENERS:
        large = path.stat().st_size >= LARGE_BYTES
        # Copy on write: torch wants writable memory, and the file must never change.
        return np.memmap(path, np.uint8, mode="c") if large else np.fromfile(path, np.uint8)
    kept = cache_folder() / "unpacked" / digest(path.read_bytes())
    forget_left(kept.parent)
    if kept.is_file():
        return np.memmap(kept, np.uint8, mode="c")
    content = unpack(path)
    if len(content) >= LARGE_BYTES:
        try:
            write_whole(kept, content)
            print(f"data: unpacked {str(path)!r} into {kept}, once", file=sys.stderr)
        except OSError as error:
            print(
                f"data: {str(path)!r} is unpacked anew in every run, the cache is not writable ({error})",
                file=sys.stderr,
            )
    return np.frombuffer(content, np.uint8)


def unpack(path: Path) -> bytearray:
    """What is in a ``.gz``, ``.bz2``, ``.xz`` or ``.zip`` file; raises what those modules raise, and OSError for a bomb."""
    content, most = bytearray(), max(LARGE_BYTES, MOST_TIMES * path.stat().st_size)
    with path.open("rb") as packed:
        for chunk in _OPENERS[path.suffix.lower()](packed):
            content += chunk
            if len(content) > most:
                raise OSError(
                    f"it unpacks to more than {MOST_TIMES} times its {path.stat().st_size:,} bytes; if that is meant, "
                    "unpack it yourself and name what comes out"
                )
    return content


def _chunks(plain: BinaryIO) -> Iterator[bytes]:
    with plain:
        while chunk := plain.read(_CHUNK_BYTES):
            yield chunk


def _streams(packed: BinaryIO, make: Callable, *, padding: bytes = b"") -> Iterator[bytes]:
    """Of compressed streams one after the other; what follows them must be one, while Python's own files drop it silently."""
    rest = packed.read(_CHUNK_BYTES)
    while rest:
        stream = make()
        while not stream.eof:
            given = (rest or packed.read(_CHUNK_BYTES)) if stream.needs_input else b""
            if stream.needs_input and not given:
                raise EOFError("it ends before its end is marked")
            rest = b"" if stream.needs_input else rest
            yield stream.decompress(given, _CHUNK_BYTES)
        rest = stream.unused_data
        while not (rest := rest.lstrip(padding)) and (more := packed.read(_CHUNK_BYTES)):
            rest = more


def _zipped(packed: BinaryIO) -> Iterator[bytes]:
    archive = zipfile.ZipFile(packed)
    packed.seek(-_ZIP_END_BYTES - len(archive.comment), os.SEEK_END)
    if not packed.read().startswith(_ZIP_END):  # Python looks for it, and passes over what follows
        raise zipfile.BadZipFile("something follows the end of the archive")
    files = [member for member in archive.infolist() if not member.is_dir()]
    if len(files) != 1:
        raise zipfile.BadZipFile(f"{len(files)} files are in the archive, allowed is one")
    return _chunks(archive.open(files[0]))


_OPENERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": lambda packed: _chunks(gzip.GzipFile(fileobj=packed)),
    ".bz2": lambda packed: _streams(packed, bz2.BZ2Decompressor),
    ".xz": lambda packed: _streams(packed, lzma.LZMADecompressor, padding=b"\0"),
    ".zip": _zipped,
}


def read_stdlib() -> np.ndarray:
    """The Python source of the running Python's standard library, sorted by POSIX path: uint8 ``[n]``.

    Left out: tests and IDLE (they would be half of it), tables that are hardly text (``encodings``, ``pydoc_data``),
    what newer Pythons dropped (``lib2to3``), and whatever an installation writes there itself. The same for one build
    of Python, another digest for another version.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = []
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder).parts
        made = parts[0].startswith(("config-", "_sysconfigdata"))
        if not made and not _NOT_STDLIB.intersection(parts):
            found.append(("/".join(parts), file))
    if not found:
        raise ValueError(f"data=stdlib: this Python has no source of its standard library in {folder}")
    return np.concatenate([np.fromfile(file, np.uint8) for _, file in sorted(found)])


def distinct_values(content: np.ndarray | bytearray) -> list[int]:
    """The byte values that occur, in order; a piece at a time, because bincount turns bytes into int64."""
    array, piece = np.frombuffer(content, np.uint8), 1 << 20
    counts = sum(np.bincount(array[at : at + piece], minlength=256) for at in range(0, len(array), piece))
    return np.flatnonzero(counts).tolist()


def compressed_bits(split: Tensor, *, train: Tensor) -> dict[str, float]:
    """Bits per byte of a split under ``gzip -9``, ``bzip2 -9`` and ``xz -9e``, and by counts of ``train``.

    Remembered by digest in the user's cache, because they need seconds for 5 MB; worked out anew where that fails.
    """
    content = split.numpy().tobytes()
    remembered = cache_folder() / "compressed" / f"{digest(content)}-{digest(train.numpy())}.json"
    with suppress(OSError, ValueError):
        return json.loads(remembered.read_bytes())
    packed = {
        "gzip": gzip.compress(content, 9, mtime=0),
        "bzip2": bz2.compress(content, 9),
        "xz": lzma.compress(content, preset=9 | lzma.PRESET_EXTREME),
    }
    bits = {name: 8 * len(small) / len(content) for name, small in packed.items()}
    bits |= order_bits(train.numpy(), split.numpy())
    with suppress(OSError):  # only speed is lost
        forget_left(remembered.parent)
        write_whole(remembered, json.dumps(bits).encode())
    return bits
