"""Corpora: their bytes, digests, names and compressed sizes, and the errors for files that
cannot be read."""

import bz2
import gzip
import hashlib
import inspect
import io
import lzma
import os
import sysconfig
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from harness.data import byte_counts, corpora, sources
from harness.data.byte_counts import compressed_bits, order_bits
from harness.data.corpora import NAMES, PUBLISHED, load
from harness.data.sources import PublishedCorpus
from tests.support.small_configs import CONF

TEXT = b"".join(b"line %d of a small corpus\n" % n for n in range(400))
SHA256 = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attention-windtunnel"


def all_bytes(corpus) -> bytes:
    return b"".join(corpus.splits[name].numpy().tobytes() for name in ("train", "valid", "test"))


def write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def zipped(*files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, content in enumerate(files):
            archive.writestr(str(number), content)
    return out.getvalue()


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zip": zipped}


def test_data_files_have_exactly_the_keys_of_load():
    for name in NAMES:
        node = OmegaConf.to_container(OmegaConf.load(CONF / "data" / f"{name}.yaml"))
        assert list(node) == list(inspect.signature(load).parameters)
        assert node["name"] == name
        assert node["fallback"] == ("stdlib" if name == "enwik8" else None)


def test_a_plain_file_is_read_split_and_never_changed(tmp_path, monkeypatch):
    path = write(tmp_path, "small.txt", TEXT)
    corpus = load("file", path=path)
    assert all_bytes(corpus) == TEXT
    assert corpus.provenance() == {"name": "file:small.txt", "bytes": len(TEXT), "sha256": SHA256}
    assert (corpus.vocabulary, corpus.fallback_for) == (256, None)
    monkeypatch.setattr(sources, "LARGE_BYTES", 1000)
    load("file", path=path).splits["train"][0] = 0  # writes to a private copy of the mapped page
    assert Path(path).read_bytes() == TEXT
    path = write(tmp_path, "thousand", bytes(range(250)) * 4)
    assert [len(s) for s in load("file", path=path).splits.values()] == [900, 50, 50]
    assert [len(s) for s in load("file", path=path, split=[0.5, 0.3, 0.2]).splits.values()] == [
        500,
        300,
        200,
    ]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path):
    folder = tmp_path / "corpus"
    # "a-b" sorts before "a/z" as a string: "-" is below "/".
    for name, text in {
        "b": b"4" * 90,
        "a/z": b"3" * 90,
        "a-b": b"1" * 90,
        "a.zip": zipped(b"2" * 90),
    }.items():
        write(folder, name, text)
    write(folder, ".git/object", b"x")
    assert (
        all_bytes(load("file", path=str(folder))) == b"1" * 90 + b"2" * 90 + b"3" * 90 + b"4" * 90
    )
    (folder / "c").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"data\.path=.*not a regular file"):
        load("file", path=str(folder))


@pytest.mark.parametrize("suffix, pack", PACKERS.items())
def test_a_compressed_file_is_unpacked_and_refused_if_damaged_or_too_large(
    tmp_path, monkeypatch, suffix, pack
):
    packed = pack(TEXT)
    assert all_bytes(load("file", path=write(tmp_path, f"small.{suffix}", packed))) == TEXT
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
    for damaged in (packed[:-40], flipped):
        with pytest.raises(
            ValueError, match=r"data\.path=.* cannot be read, perhaps truncated or damaged"
        ):
            load("file", path=write(tmp_path, f"damaged.{suffix}", damaged))
    monkeypatch.setattr(sources, "LARGE_BYTES", 10_000)
    bomb = write(tmp_path, f"bomb.{suffix}", pack(bytes(3_000_000)))
    with pytest.raises(ValueError, match="more than 200 times its size; use an unpacked file"):
        load("file", path=bomb)


def tarred(content: bytes, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        member = tarfile.TarInfo("c.txt")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


HEADERS = [("zst", b"\x28\xb5\x2f\xfd"), ("zst", b"\x50\x2a\x4d\x18"), ("lz4", b"\x04\x22\x4d\x18")]
HEADERS += [("sz", b"\xff\6\0\0sNaPpY"), ("7z", b"7z\xbc\xaf\x27\x1c"), ("rar", b"Rar!\x1a\7")]
HEADERS += [("lz", b"LZIP\1"), ("lzo", b"\x89LZO\0"), ("Z", b"\x1f\x9d\x90")]


@pytest.mark.parametrize(
    "pack", [*PACKERS.values(), partial(lzma.compress, format=lzma.FORMAT_ALONE)]
)
def test_a_compressed_file_is_unpacked_whatever_its_name_is(tmp_path, pack):
    assert all_bytes(load("file", path=write(tmp_path, "corpus.txt", pack(TEXT)))) == TEXT
    assert all_bytes(load("file", path=str(tmp_path))) == TEXT
    for archived in (tarred(TEXT), pack(TEXT)):  # an archive in an archive
        with pytest.raises(ValueError, match=r"data\.path=.*is or contains a \..* archive"):
            load("file", path=write(tmp_path, "more.gz", pack(archived)))


@pytest.mark.parametrize(
    "suffix, content",
    [
        *((f"tar.{mode}", tarred(TEXT, f"w:{mode}")) for mode in ("", "gz", "bz2", "xz")),
        ("tar", tarred(TEXT)[:257] + bytes(255) + tarred(TEXT)[512:]),  # of 1979
        *((suffix, first + TEXT) for suffix, first in HEADERS),
    ],
)
def test_archives_that_cannot_be_read_are_refused(tmp_path, suffix, content):
    if suffix == "tar":
        header = bytearray(content[:512])
        header[148:156] = b" " * 8
        content = content[:148] + b"%06o\0 " % sum(header) + content[156:]
    with pytest.raises(ValueError, match=r"data\.path=.* archive; unpack it into a folder"):
        load("file", path=write(tmp_path, f"corpus.{suffix}", content))


@pytest.mark.parametrize(
    "first", [b"\x1f\x9d\x08", b"\x1f\x8b\x08\xe0", b"]\0\0\0\0\0\0\0", b"]\0\0 a"]
)
def test_a_plain_file_may_begin_like_an_archive(tmp_path, first):
    assert all_bytes(load("file", path=write(tmp_path, "plain", first + TEXT))) == first + TEXT


def test_links_to_folders_are_followed(tmp_path):
    write(tmp_path, "corpus/b/text", b"2" * 90)
    write(tmp_path, "elsewhere/deep/text", b"1" * 90)
    for name in ("a", "c"):
        (tmp_path / "corpus" / name).symlink_to("../elsewhere")
    assert (
        all_bytes(load("file", path=str(tmp_path / "corpus"))) == b"1" * 90 + b"2" * 90 + b"1" * 90
    )
    (tmp_path / "elsewhere" / "deep" / "loop").symlink_to("../../corpus")
    with pytest.raises(ValueError, match=r"data\.path=.*is a link to a folder that contains it"):
        load("file", path=str(tmp_path / "corpus"))


def test_a_folder_that_cannot_be_listed_is_no_shorter_corpus(tmp_path, monkeypatch):
    write(tmp_path, "corpus/text", b"1" * 90)
    write(tmp_path, "corpus/private/text", b"2" * 90)
    list_folder = os.scandir

    def refuse(path):
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", lambda path: [entry.name for entry in refuse(path)])
    with pytest.raises(ValueError, match=r"data\.path=.*Permission denied"):
        load("file", path=str(tmp_path / "corpus"))


def test_paths_without_a_readable_corpus_are_refused_with_a_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    refused = {
        str(tmp_path / "nowhere"): "no such file or folder",
        str(tmp_path / "empty"): "no files",
        write(tmp_path, "empty.zip", zipped(b"")): "is empty",
        write(tmp_path, "two.zip", zipped(TEXT, TEXT)): "the archive has 2 files",
        "~nobody-at-all/x": "cannot be read",
    }
    for path, reason in refused.items():
        with pytest.raises(ValueError, match=reason) as error:
            load("file", path=path)
        assert "data.path=" in str(error.value) and path[-200:] in str(error.value)


@pytest.mark.parametrize(
    "key, keywords",
    [
        ("data.name", {"name": "enwik9"}),
        ("data.path", {"name": "file"}),
        ("data.fallback", {"name": "stdlib", "fallback": "stdlib"}),
        ("data.vocabulary", {"name": "recall", "vocabulary": 31}),
        ("data.split", {"name": "recall", "split": [0.9, 0.1, 0.1]}),
        ("data.split", {"name": "recall", "bytes": 10, "distances": [1]}),
        ("data.seed", {"name": "stdlib", "seed": 0}),
        ("data.distances", {"name": "synthetic_text", "distances": [3]}),
        ("data.sequence", {"name": "recall", "sequence": 16}),
        ("data.distances", {"name": "recall", "distances": [1000], "bytes": 1000}),
    ],
)
def test_invalid_values_are_refused_by_key(key, keywords):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        load(**keywords)


def test_a_file_in_place_of_a_known_corpus_must_have_its_bytes(tmp_path, monkeypatch):
    path = write(tmp_path, "small", TEXT)
    assert load("file", path=path, sha256=SHA256.upper()).sha256 == SHA256
    with pytest.raises(ValueError, match=rf"data\.sha256={'0' * 64}.*{SHA256}"):
        load("file", path=path, sha256="0" * 64)
    assert PUBLISHED["enwik8"].n_bytes == 100_000_000
    monkeypatch.setitem(
        PUBLISHED,
        "enwik8",
        PublishedCorpus(url="http://127.0.0.1:9/", n_bytes=len(TEXT), sha256=SHA256),
    )
    corpus = load("enwik8", path=write(tmp_path, "copy.zip", zipped(TEXT)), fallback="stdlib")
    assert (corpus.name, corpus.fallback_for, corpus.n_bytes) == ("enwik8", None, len(TEXT))
    with pytest.raises(ValueError, match=r"data\.path=.*has 9,\d+ bytes, not 10,\d+"):
        load("enwik8", path=write(tmp_path, "short", TEXT[:-1000]), fallback="stdlib")
    with pytest.raises(
        ValueError, match=rf"data\.path=.*{hashlib.sha256(TEXT[::-1]).hexdigest()}.*{SHA256}"
    ):
        load("enwik8", path=write(tmp_path, "reversed", TEXT[::-1]), fallback="stdlib")
    letters = PUBLISHED["text8"].alphabet
    monkeypatch.setitem(
        PUBLISHED,
        "text8",
        PublishedCorpus(url="http://127.0.0.1:9/", n_bytes=2700, alphabet=letters),
    )
    corpus = load("text8", path=write(tmp_path, "text8", letters * 100), vocabulary=27)
    assert all_bytes(corpus)[:27] == bytes(range(27))
    with pytest.raises(ValueError, match=r"data\.path=.*belong.*\[10\]"):
        load(
            "text8",
            path=write(tmp_path, "lines", letters * 99 + b"a line\nand another           "[:27]),
        )


def test_a_vocabulary_maps_byte_values_in_order_and_newlines_are_dropped_after_splitting(tmp_path):
    content = bytes([200, 10, 65, 10, 0, 65]) * 50
    path = write(tmp_path, "few", content)
    corpus = load("file", path=path, vocabulary=4)
    assert all_bytes(corpus) == bytes([3, 1, 2, 1, 0, 2]) * 50
    assert (corpus.vocabulary, corpus.symbols) == (4, bytes([0, 10, 65, 200]))
    dropped = load("file", path=path, vocabulary=3, drop_newlines=True)
    assert all_bytes(dropped) == bytes([2, 1, 0, 1]) * 50
    assert (dropped.n_bytes, dropped.sha256, dropped.symbols) == (
        len(content),
        corpus.sha256,
        bytes([0, 65, 200]),
    )
    with pytest.raises(ValueError, match=r"data\.vocabulary=3: the corpus has 4"):
        load("file", path=path, vocabulary=3)
    bare = write(tmp_path, "bare", b"x" * 960 + b"\n" * 40)
    with pytest.raises(ValueError, match=r"data\.drop_newlines"):
        load("file", path=bare, split=[0.9, 0.06, 0.04], drop_newlines=True)


@pytest.mark.filterwarnings("error")  # torch would warn about memory that it may not write
def test_stdlib_is_the_source_of_python_without_generated_files_and_tests():
    corpus = load("stdlib")
    text, folder = all_bytes(corpus), Path(sysconfig.get_path("stdlib"))
    assert corpus.sha256 == load("stdlib").sha256 and corpus.n_bytes > 3_000_000
    assert Path(inspect.getsourcefile(gzip)).read_bytes() in text
    excluded = [
        *folder.glob("_sysconfigdata*.py"),
        *folder.glob("config-*/*.py"),
        *folder.glob("json/test*/*.py"),
    ]
    assert excluded
    assert not any(file.read_bytes() in text for file in excluded if file.stat().st_size > 100)


def test_compressed_sizes_are_cached_by_content(tmp_path, cache, monkeypatch):
    split = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    train = split[:5000]
    bits = compressed_bits(split, train=train)
    expected = {
        "gzip": len(gzip.compress(TEXT, 9)),
        "bzip2": len(bz2.compress(TEXT, 9)),
        "xz": len(lzma.compress(TEXT, preset=9 | lzma.PRESET_EXTREME)),
    }
    counted = order_bits(train.numpy(), split.numpy())
    assert bits == pytest.approx(
        {name: 8 * n / len(TEXT) for name, n in expected.items()} | counted
    )
    (cache_file,) = (cache / "compressed").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(byte_counts.lzma, "compress", None)
        assert compressed_bits(split, train=train) == bits
        for arguments in (
            {"split": split[1:], "train": train},
            {"split": split, "train": train[1:]},
        ):
            with pytest.raises(TypeError):
                compressed_bits(**arguments)
    cache_file.write_bytes(b"{half a fi")
    assert compressed_bits(split, train=train) == bits
    monkeypatch.setenv("XDG_CACHE_HOME", write(tmp_path, "a_file_not_a_folder", b""))
    assert compressed_bits(split, train=train) == bits


def witten_bell(train: bytes, context: bytes, byte: int) -> float:
    """Return the probability of a byte after a context by Witten-Bell smoothing, with naive
    counts."""
    lower = witten_bell(train, context[1:], byte) if context else 1 / 256
    positions = [
        at for at in range(len(context), len(train)) if train[at - len(context) : at] == context
    ]
    followers = [train[at] for at in positions]
    types = len(set(followers))
    return (
        (followers.count(byte) + types * lower) / (len(followers) + types) if followers else lower
    )


@pytest.mark.parametrize(
    "train", [b"abracadabra" * 3 + bytes(range(250, 256)), bytes(np.arange(90) ** 2 % 5 + 60)]
)
def test_scores_of_byte_counts_are_those_of_witten_bell_smoothing(train):
    scored = b"abrakadabra abcd" + bytes(np.arange(40) ** 3 % 7 + 60) + b"\xff\xfe\x00"
    bits = order_bits(np.frombuffer(train, np.uint8), np.frombuffer(scored, np.uint8))
    assert list(bits) == ["order-2", "order-3", "order-5"]
    for name, score in bits.items():
        order = int(name[-1])
        chances = [
            witten_bell(train, scored[max(0, at - order) : at], byte)
            for at, byte in enumerate(scored)
        ]
        assert score == pytest.approx(-np.log2(chances).mean(), rel=1e-12)
    assert order_bits(np.frombuffer(train[:5], np.uint8), np.frombuffer(scored, np.uint8)) == {}


def test_a_corpus_that_is_the_first_bytes_of_another_is_read_from_either_file(
    tmp_path, monkeypatch, cache
):
    """The corpora here are ``long`` and ``part``, its first 1,000 bytes."""
    digest = hashlib.sha256(TEXT[:1000]).hexdigest()
    monkeypatch.setitem(
        PUBLISHED, "long", PublishedCorpus(url="nowhere", n_bytes=len(TEXT), sha256=SHA256)
    )
    monkeypatch.setitem(
        PUBLISHED,
        "part",
        PublishedCorpus(url="nowhere", n_bytes=1000, sha256=digest, part_of="long"),
    )
    monkeypatch.setattr(corpora, "NAMES", (*NAMES, "long", "part"))
    write(cache, "long", TEXT)
    part, longer = (
        write(tmp_path, f"{name}.txt", TEXT[:n]) for name, n in (("part", 1000), ("longer", None))
    )
    requests = [{"name": "part"}, {"name": "part", "path": part}, {"name": "part", "path": longer}]
    requests += [
        {"name": "file", "path": part},
        {"name": "long", "path": longer, "first_bytes": 1000},
    ]
    for keywords in requests:
        corpus = load(**keywords, split=[0.85, 0.05, 0.1])
        assert all_bytes(corpus) == TEXT[:1000]
        assert corpus.provenance() == {"name": "part", "bytes": 1000, "sha256": digest}
    with pytest.raises(ValueError, match=r"data\.path=.* is not part: it has 999 bytes, not 1,000"):
        load("part", path=write(tmp_path, "short", TEXT[:999]))
    with pytest.raises(ValueError, match=r"data\.first_bytes=1001: allowed are at most the 1000"):
        load("part", first_bytes=1001)
    assert load("long", first_bytes=500).name == "long, first 500 bytes"


def test_enwik8_4m_has_its_splits_and_its_compressed_sizes(enwik8_4m):
    node = OmegaConf.to_container(OmegaConf.load(CONF / "data" / "enwik8_4m.yaml"))
    corpus = load(**node | {"path": str(enwik8_4m)})
    assert [len(split) for split in corpus.splits.values()] == [3_400_000, 200_000, 400_000]
    bits = compressed_bits(corpus.splits["test"], train=corpus.splits["train"])
    assert {name: round(score, 3) for name, score in bits.items() if name != "gzip"} == {
        "bzip2": 2.402,
        "xz": 2.499,
        "order-2": 3.214,
        "order-3": 2.758,
        "order-5": 2.511,
    }
