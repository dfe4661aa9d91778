"""Corpora of the literature: where they are to be had, and what their bytes must be.

enwik8: the first 10^8 bytes of the English Wikipedia's XML dump of 2006-03-03. text8: the first 10^8 letters of fil9,
which is cleaned from a longer piece of the same dump. Both by Matt Mahoney, http://mattmahoney.net/dc/textdata.html.
No digest of text8 is known to us for sure, so its length and its letters are checked.

A download goes on where an earlier attempt stopped. A laptop on a train must not wait: finding the host, connecting and
shaking hands share one deadline of a few seconds, which a socket timeout alone does not give (it leaves name lookup out
and counts anew for each address).
"""

import http.client
import os
import re
import sys
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.cache import cache_folder, locked, storing, write_whole
from harness.data.sources import digest, distinct_values, unpack

CONNECT_S = 3.0
READ_S = 30.0
ATTEMPTS = 5
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Known:
    """A corpus that can be fetched, and what its bytes must be."""

    url: str
    n_bytes: int
    sha256: str | None = None
    alphabet: bytes | None = None
    part_of: str | None = None  # the known corpus whose first bytes these are

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
    "enwik8_4m": Known(
        url="http://mattmahoney.net/dc/enwik8.zip",
        n_bytes=4_000_000,
        sha256="9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37",
        part_of="enwik8",
    ),
    "text8": Known(
        url="http://mattmahoney.net/dc/text8.zip",
        n_bytes=100_000_000,
        alphabet=b" abcdefghijklmnopqrstuvwxyz",
    ),
}
PINNED = frozenset(name for name, known in KNOWN.items() if known.sha256)
"""Corpora whose bytes are known by their digest."""


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
        if not packed.exists():  # or it could not be unpacked, as on a full disk
            print(f"data: downloading {known.url} to {target}", file=sys.stderr)
            download(known.url, packed)
        try:
            content = unpack(packed)
            complaint = known.complaint(content)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            complaint = f"{error!r} when unpacking"
        if complaint:
            packed.unlink()
            raise OSError(f"what {known.url} sent is not {name}: {complaint}")
        write_whole(target, content)
        packed.unlink()
    return target


def download(url: str, target: Path, *, connect_s: float = CONNECT_S) -> None:
    """Fetch ``url`` into ``target``; what came so far waits in ``<target>.part``, and a later call goes on from there.

    A dropped connection is taken up again, at most five times in all. OSError (which URLError and HTTPError are) says
    why it failed; the part stays.
    """
    part = target.with_name(f"{target.name}.part")
    for _ in range(ATTEMPTS):
        if _fetch_rest(url, part, connect_s):
            os.replace(part, target)
            return
    raise OSError(f"{url}: the connection broke {ATTEMPTS} times, {part.stat().st_size:,} bytes are in {part}")


def _fetch_rest(url: str, part: Path, connect_s: float) -> bool:
    """Append what is missing to ``part``; whether it is complete now."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "attention-windtunnel"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = _opener(connect_s).open(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        # Nothing beyond what we have: either that is all, or it is the beginning of something else.
        if _content_range(error.headers) == (None, have):
            return True
        part.unlink()
        return False
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r} is no answer of a web server") from error
    with response:
        first, total = _content_range(response.headers) if response.status == 206 else (0, None)
        if first not in (0, have):
            raise OSError(f"{url}: asked for bytes from {have}, got them from {first}")
        length = response.headers.get("Content-Length")
        total = total if total is not None or length is None else first + int(length)
        with part.open("r+b" if first else "wb") as out:
            out.seek(first)
            try:
                while chunk := response.read(_CHUNK_BYTES):
                    with storing(part, needed=(total or 0) - out.tell()):
                        out.write(chunk)
            except (TimeoutError, ConnectionError, http.client.HTTPException):
                return False
    return total is None or part.stat().st_size == total


def _content_range(headers: http.client.HTTPMessage) -> tuple[int | None, int | None]:
    """First byte and total of a ``Content-Range`` header; None for what it leaves open."""
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", headers.get("Content-Range", ""))
    first, total = match.groups() if match else (None, None)
    return first and int(first), total and int(total)


def _opener(connect_s: float) -> urllib.request.OpenerDirector:
    """An opener like urllib's own (proxies, redirects) whose connections meet the deadline."""

    class Deadline:
        def connect(self) -> None:
            failed = []

            def work():
                try:
                    super(Deadline, self).connect()
                except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
                    failed.append(error)

            # A daemon: a name lookup that hangs cannot be stopped, only left behind.
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(connect_s)
            if thread.is_alive():
                raise TimeoutError(f"no connection to {self.host} within {connect_s:g} s")
            if failed:
                raise failed[0]
            self.sock.settimeout(READ_S)

    class Plain(Deadline, http.client.HTTPConnection):
        pass

    class Secure(Deadline, http.client.HTTPSConnection):
        pass

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, request):
            return self.do_open(Plain, request)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, request):
            return self.do_open(Secure, request)

    return urllib.request.build_opener(PlainHandler, SecureHandler)
