"""``python -m bench.compress`` and ``bench.decompress``: a file is restored, or refused under
other conditions."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from bench import compress, decompress
from bench.compress import CONDITIONS, MAGIC, pack, stream_lengths, unpack
from harness.data import corpora
from harness.record import checkpoint
from tests.support.command_line import call
from tests.support.small_configs import CPU, compose_config
from tests.support.small_runs import whole_run

TEXT = b"One byte of each stream at a time, and the decoder does as the encoder did. " * 30
LAST = (
    r"(\d+\.\d{4}) bits per byte by the file, (\d+\.\d{4}) by the score of the same streams: "
    r"([+-]\d+\.\d\d) %\n$"
)
"""The last line that ``bench.compress`` prints."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a finished run with a vocabulary of the 32 letters of its corpus."""
    words = ("budget.steps=6", "data.vocabulary=32", "model.head_zero_init=false")
    return whole_run(*words, f"outputs={tmp_path_factory.mktemp('runs')}")[0].folder.path


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory) -> Path:
    """The folder of a run of another seed with a vocabulary of all bytes."""
    words = ("budget.steps=2", "seed=1")
    return whole_run(*words, f"outputs={tmp_path_factory.mktemp('others')}")[0].folder.path


def run_command(module, *words: str):
    """Run a command of bench in this process."""
    module.main.__wrapped__(
        compose_config(*CPU, *words, name=module.__name__.removeprefix("bench."))
    )


def encode(run: Path, folder: Path, content: bytes, *words: str) -> Path:
    """Compress a file with this content. Returns the path of the compressed file."""
    (folder / "plain").write_bytes(content)
    run_command(
        compress, f"run={run}", f"file={folder / 'plain'}", f"out={folder / 'code'}", *words
    )
    return folder / "code"


def decode(run: Path, packed: Path, *words: str) -> bytes:
    out = packed.with_name("back")
    run_command(decompress, f"run={run}", f"file={packed}", f"out={out}", *words)
    return out.read_bytes()


def assert_refused(match: str, run: Path, packed: Path, *words: str):
    """Assert that decoding is refused with a message and writes no file."""
    before = sorted(packed.parent.iterdir())
    with pytest.raises(ValueError, match=match):
        decode(run, packed, *words)
    assert sorted(packed.parent.iterdir()) == before


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"aA" * 500, TEXT], ids=["empty", "one", "letters", "others"]
)
@pytest.mark.parametrize("fixture", ["run", "byte_run"])
def test_a_compressed_file_is_restored_and_its_size_is_printed(
    request, tmp_path, fixture, content, capsys
):
    folder = request.getfixturevalue(fixture)
    packed = encode(folder, tmp_path, content, "streams=40")
    printed = capsys.readouterr().out
    assert decode(folder, packed) == content
    assert f"{len(content):,} bytes, in " in printed
    assert f"{len(content):,} bytes in, {packed.stat().st_size:,} bytes out" in printed
    if len(content) < 2:
        assert printed.endswith("no byte was predicted, so there is no score to compare with\n")
        return
    by_file, by_score, difference = map(float, re.search(LAST, printed).groups())
    assert by_file == pytest.approx(8 * packed.stat().st_size / len(content), abs=1e-4)
    assert difference == pytest.approx(100 * (by_file / by_score - 1), abs=0.02)


def test_the_payload_of_a_split_is_as_long_as_its_score_predicts(run, tmp_path, capsys):
    run_command(compress, f"run={run}", "split=test", f"out={tmp_path / 'code'}", "streams=20")
    printed = capsys.readouterr().out
    split = corpora.load("recall", bytes=20000, distances=[3, 5]).splits["test"].numpy().tobytes()
    assert decode(run, tmp_path / "code") == split and "; 0 escaped" in printed
    _, payload = unpack((tmp_path / "code").read_bytes(), key="file")
    predicted, bits = len(split) - 20, float(re.search(LAST, printed)[2])
    # 8 bits for each first byte
    assert 8 * len(payload) == pytest.approx(bits * predicted + 8 * 20, rel=0.005)


def test_the_default_number_of_streams_bounds_their_length(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compress, "STREAM_BYTES", 64)
    packed = encode(run, tmp_path, b"a" * 129)
    assert unpack(packed.read_bytes(), key="file")[0]["streams"] == 3
    assert "3 streams of at most 43 bytes" in capsys.readouterr().out


def test_a_header_is_short_and_has_all_conditions(run, tmp_path, monkeypatch):
    variables = {"GOMP_SPINCOUNT": "10000"}  # variables of the machine would make the header longer
    monkeypatch.setattr("harness.device.machine.environment", lambda: variables)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")  # other versions may have longer names
    packed = encode(run, tmp_path, TEXT, "streams=40").read_bytes()
    header, payload = unpack(packed, key="file")
    assert packed.startswith(MAGIC) and len(packed) - len(payload) < 150
    expected = {"bytes": len(TEXT), "streams": 40, "threads": 1}
    expected |= {"precision": "float32", "device_kind": "cpu"}
    assert {name: header[name] for name in expected} == expected
    assert header["torch"] == torch.__version__ and len(header["sha256"]) == 64
    assert max(stream_lengths(len(TEXT), 40)) == math.ceil(len(TEXT) / 40)


@pytest.fixture(scope="module")
def packed_text(run, tmp_path_factory) -> bytes:
    return encode(run, tmp_path_factory.mktemp("text"), TEXT, "streams=200").read_bytes()


@pytest.fixture
def packed(packed_text, tmp_path) -> Path:
    (tmp_path / "code").write_bytes(packed_text)
    return tmp_path / "code"


@pytest.mark.parametrize(
    "words, message",
    [
        (("runtime.threads=2",), r"differ from the encoder's: threads \(then 1, now 2\);"),
        (
            ("runtime.precision=bfloat16",),
            r"differ from the encoder's: precision \(then float32, now bfloat16\)",
        ),
        (("runtime.backend=plain",), r"backend \(then .*, now plain\)"),
    ],
)
def test_decoding_with_other_settings_is_refused(run, packed, words, message):
    assert_refused(message, run, packed, *words)


def test_decoding_with_other_weights_is_refused(run, byte_run, packed, tmp_path):
    assert_refused(r"differ from the encoder's: weights \(", byte_run, packed)
    copied = shutil.copytree(run, tmp_path / "copied")
    assert decode(copied, packed) == TEXT
    packed.with_name("back").unlink()
    best = checkpoint.load_best(copied)
    best["model"]["head.weight"][0, 0] += 1e-6
    checkpoint.save_best(copied, best)
    assert_refused(r"differ from the encoder's: weights \(", copied, packed)
    (copied / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("span: 16", "span: 15")
    )
    checkpoint.save_best(copied, checkpoint.load_best(run))
    # their digest includes the configuration
    assert_refused(r"differ from the encoder's: weights \(", copied, packed)


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_differing_condition_is_refused_by_its_name(run, packed, name):
    header, payload = unpack(packed.read_bytes(), key="file")
    packed.write_bytes(pack(header | {name: "another"}, payload))
    assert_refused(rf"differ from the encoder's: {name} \(then another, now ", run, packed)


def test_a_damaged_file_is_refused(run, packed):
    intact = packed.read_bytes()
    end = len(intact) - len(unpack(intact, key="file")[1])
    for content in (b"", intact[:3], b"PK\3\4" + intact[4:], TEXT):
        packed.write_bytes(content)
        assert_refused("is not of the format AWT1", run, packed)
    for content in (intact[:5], intact[:20], intact[:end], intact[:-1], intact + b"\0"):
        packed.write_bytes(content)
        assert_refused("is damaged or cut off", run, packed)
    for at in (4, 5, 7, end // 2, end - 1, end, (end + len(intact)) // 2, len(intact) - 1):
        packed.write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
        assert_refused("is damaged or cut off", run, packed)


def test_a_file_that_decodes_to_other_bytes_is_not_written(run, packed):
    header, payload = unpack(packed.read_bytes(), key="file")
    # a valid checksum
    packed.write_bytes(pack(header, payload[:50] + bytes([payload[50] ^ 1]) + payload[51:]))
    assert_refused("the SHA-256 of the decoded bytes is not that of the encoded", run, packed)
    out = packed.with_name("back")
    out.write_bytes(b"an older file")
    assert_refused("the SHA-256 of the decoded bytes is not that", run, packed)
    assert out.read_bytes() == b"an older file"


@pytest.mark.parametrize(
    "words, message",
    [
        ((), r"file=None split=None: exactly one of them must be set"),
        (("file=plain", "split=test"), r"file=plain split=test: exactly one of them"),
        (("file=nowhere",), r"file=nowhere: cannot be read \(No such file"),
        (("split=tset",), r"split=tset: allowed are train, valid, test"),
        (("file=plain", "streams=0"), r"streams=0: must be greater than 0"),
        (("file=plain", "streams=few"), r"streams=few: must be an integer or null"),
        (("file=plain", "out=plain"), r"out=plain: is the file that is read"),
        (("file=plain", "out=."), r"out=\.: cannot be written \(\. is a folder"),
        (("file=plain", "out=plain/code"), r"out=plain/code: cannot be written .*plain is a file"),
        (
            ("file=plain", "runtime.deterministic=false"),
            r"runtime\.deterministic=false: allowed is true",
        ),
    ],
)
def test_a_mistake_is_refused_and_writes_no_file(run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("plain").write_bytes(b"ab")
    with pytest.raises(ValueError, match=message):
        run_command(compress, f"run={run}", "out=code", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_both_commands_end_with_exit_code_2_after_a_mistake(run, packed, monkeypatch):
    monkeypatch.chdir(packed.parent)
    for script in ("compress", "decompress"):
        outcome = call(f"bench/{script}.py", f"run={run}", "file=nowhere", "out=b", *CPU)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert outcome.err.startswith("error: file=nowhere: cannot be read"), outcome
