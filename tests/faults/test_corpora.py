"""Odd files of data: what follows a compressed stream, bombs, names with escape codes, users that are not there."""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from harness.cache import cache_folder
from harness.data import sources
from tests.caches import own_cache

TEXT = b"some text that is read as bytes, " * 40
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", content)
    return out.getvalue()


def put(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("suffix", [*PACK, ".zip"])
@pytest.mark.parametrize("garbage", [b"x", b"garbage " * 9, TEXT])
def test_what_follows_a_compressed_stream_is_refused(suffix, garbage, tmp_path):
    path = put(tmp_path, f"data{suffix}", (PACK | {".zip": zipped})[suffix](TEXT) + garbage)
    with pytest.raises(ValueError, match="data.path=.* cannot be read, truncated or damaged perhaps"):
        sources.read_path(path)


@pytest.mark.parametrize("suffix", PACK)
def test_streams_one_after_the_other_are_read_and_cut_ones_refused(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)
    packed = PACK[suffix](TEXT) + PACK[suffix](b"more")
    assert bytes(sources.read_path(put(tmp_path, f"data{suffix}", packed))) == TEXT + b"more"
    if suffix == ".xz":
        assert bytes(sources.read_path(put(tmp_path, "padded.xz", packed + bytes(8)))) == TEXT + b"more"
    for kept in (1, 20, len(packed) - 1):
        with pytest.raises(ValueError, match="cannot be read"):
            sources.read_path(put(tmp_path, f"cut{suffix}", packed[:kept]))


@pytest.mark.parametrize("suffix", [*PACK, ".zip"])
def test_a_bomb_is_refused_before_it_is_unpacked_and_leaves_nothing(suffix, tmp_path, monkeypatch):
    own_cache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(sources, "LARGE_BYTES", 10_000)
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 10_000)
    path = put(tmp_path, f"bomb{suffix}", (PACK | {".zip": zipped})[suffix](bytes(3_000_000)))
    with pytest.raises(
        ValueError, match=f"more than {sources.MOST_TIMES} times its .* bytes; if that is meant, unpack it"
    ):
        sources.read_path(path)
    assert not [*cache_folder().rglob("*.tmp")] and not [*(cache_folder() / "unpacked").glob("*")]
