"""One file from the network, resumed where an earlier attempt stopped.

A laptop on a train must not wait: finding the host, connecting and shaking hands share one deadline of a few
seconds, which a socket timeout alone does not give (it leaves name lookup out and counts anew for each address).
"""

import http.client
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

CONNECT_S = 3.0
READ_S = 30.0
ATTEMPTS = 5
_CHUNK_BYTES = 1 << 18


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
