"""The download of enwik8 from a local server: resuming, locking, checking, giving up, and the
fallback corpus."""

import hashlib
import io
import os
import re
import socket
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.cache import cache_folder
from harness.data import corpora
from harness.data.__main__ import main
from harness.data.sources import MAX_ATTEMPTS, PUBLISHED, PublishedCorpus, fetch

TEXT = os.urandom(30_000)
WORDS = ("data.path", "python -m harness.data enwik8", "data.fallback")


def archive(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("enwik8", content)
    return packed.getvalue()


class Server(ThreadingHTTPServer):
    """Serves ``body``, at most ``breaks_after`` bytes per response. Without ``ranges`` it
    ignores the header Range."""

    daemon_threads = True
    body = archive(TEXT)
    breaks_after: int | None = None
    ranges, delay_s = True, 0.0

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested_ranges: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/enwik8.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        range_header = self.headers["Range"]
        self.server.requested_ranges.append(range_header)
        time.sleep(self.server.delay_s)
        resumes = range_header and self.server.ranges
        first = int(re.fullmatch(r"bytes=(\d+)-", range_header)[1]) if resumes else 0
        body, total = self.server.body[first:], len(self.server.body)
        self.send_response(416 if first >= total else 206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.breaks_after])

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return cache_folder()


@pytest.fixture
def server(monkeypatch):
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        served = PublishedCorpus(
            url=running.url, n_bytes=len(TEXT), sha256=hashlib.sha256(TEXT).hexdigest()
        )
        monkeypatch.setitem(PUBLISHED, "enwik8", served)
        yield running
        running.shutdown()


def test_a_corpus_is_downloaded_once_and_checked(server, cache, capsys):
    corpus = corpora.load("enwik8")
    assert (corpus.name, corpus.n_bytes, corpus.fallback_for) == ("enwik8", len(TEXT), None)
    assert (cache / "enwik8").read_bytes() == TEXT
    assert server.url in capsys.readouterr().err
    assert main(["enwik8"]) == 0
    digest = hashlib.sha256(TEXT).hexdigest()
    assert capsys.readouterr().out == f"{cache / 'enwik8'}\n{len(TEXT):,} bytes, sha256 {digest}\n"
    assert server.requested_ranges == [None]
    assert sorted(file.name for file in cache.iterdir()) == ["enwik8", "enwik8.lock"]
    (cache / "enwik8").write_bytes(TEXT[::-1])
    with pytest.raises(ValueError, match="remove it"):
        corpora.load("enwik8", fallback="stdlib")


INTERRUPTED = {
    "an earlier attempt": (1234, {}, ["bytes=1234-"]),
    "a dropped connection": (
        0,
        {"breaks_after": 9000},
        [None, "bytes=9000-", "bytes=18000-", "bytes=27000-"],
    ),
    "no ranges": (5000, {"ranges": False}, ["bytes=5000-"]),
    "a part longer than the file": (
        len(Server.body) + 4,
        {},
        [f"bytes={len(Server.body) + 4}-", None],
    ),
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_a_download_resumes_from_the_partial_file(server, cache, case):
    size, behaviour, requested_ranges = INTERRUPTED[case]
    for name, value in behaviour.items():
        setattr(server, name, value)
    cache.mkdir()
    if size:
        content = b"x" * size if case == "no ranges" else (server.body + b"more")[:size]
        (cache / "enwik8.zip.part").write_bytes(content)
    assert fetch("enwik8").read_bytes() == TEXT
    assert server.requested_ranges == requested_ranges


def test_a_download_that_breaks_too_often_is_an_error_and_leaves_the_partial_file(server, cache):
    server.breaks_after = 100
    with pytest.raises(OSError, match=f"broke {MAX_ATTEMPTS} times"):
        fetch("enwik8")
    assert (cache / "enwik8.zip.part").stat().st_size == 100 * MAX_ATTEMPTS and not (
        cache / "enwik8"
    ).exists()


DAMAGED = Server.body[:15_000] + bytes([Server.body[15_000] ^ 255]) + Server.body[15_001:]
WRONG = {"bytes": archive(TEXT[::-1]), "no zip": b"<html>please log in</html>", "damaged": DAMAGED}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_wrong_content_is_refused_and_removed(server, cache, body):
    server.body = body
    with pytest.raises(ValueError, match="is not enwik8") as error:
        corpora.load("enwik8")
    assert all(word in str(error.value) for word in WORDS)
    assert [file.name for file in cache.iterdir()] == ["enwik8.lock"]
    server.body = archive(TEXT)
    assert corpora.load("enwik8").n_bytes == len(TEXT)


def test_parallel_jobs_download_once(server, capsys):
    server.delay_s = 0.2
    with ThreadPoolExecutor(6) as jobs:
        paths = list(jobs.map(fetch, ["enwik8"] * 6))
    assert all(path.read_bytes() == TEXT for path in paths)
    assert server.requested_ranges == [None] and "waiting" in capsys.readouterr().err


def test_an_unwritable_cache_gives_the_fallback_corpus_and_a_failed_download_a_message(
    server, monkeypatch, tmp_path, capsys
):
    """``test_cli.py`` has the fallback corpus of a failed download."""
    (tmp_path / "a_file").write_bytes(b"")
    with monkeypatch.context() as unwritable:
        unwritable.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
        assert corpora.load("enwik8", fallback="stdlib").fallback_for == "enwik8"
        assert server.requested_ranges == []
    with socket.create_server(("127.0.0.1", 0)) as free:  # a port on which no server listens
        port = free.getsockname()[1]
    monkeypatch.setitem(
        PUBLISHED,
        "enwik8",
        PublishedCorpus(url=f"http://127.0.0.1:{port}/enwik8.zip", n_bytes=len(TEXT)),
    )
    assert main([]) == 2
    message = capsys.readouterr().err
    assert "refused" in message and all(word in message for word in WORDS)
