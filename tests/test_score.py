"""``python -m bench.score``: losses that others sent, what is refused of them, and the row beside runs that says so."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from bench import score
from bench.report.__main__ import LIMITATIONS, main
from bench.report.gather import gather
from bench.rows import GROUND
from harness.data import corpora
from tests.bench_rows import DATA, write_run
from tests.command import call
from tests.composing import CONF
from tests.report_of import all_tables, change, column

RECALL = ("data=recall", "data.bytes=20000", "data.distances=[3,5]")
TEST = corpora.load("recall", bytes=20000, distances=[3, 5]).splits["test"].numpy()
SHA256 = hashlib.sha256(TEST).hexdigest()
PAIRS = len(TEST) - 1


def scored(folder: Path, losses: np.ndarray | str, *words: str) -> dict:
    """What the command does, in this process; returns the row that it wrote."""
    file = folder / ("losses.npy" if isinstance(losses, np.ndarray) else "losses.csv")
    np.save(file, losses) if isinstance(losses, np.ndarray) else file.write_text(losses)
    given = [f"nats={file}", "name=theirs", f"sha256='{SHA256}'", f"outputs={folder / 'rows'}", *RECALL]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("score", overrides=[*given, *words])
    score.main.__wrapped__(cfg)
    (path,) = (folder / "rows").glob("*/rows.jsonl")
    return json.loads(path.read_text())


def drawn(number: int = PAIRS) -> np.ndarray:
    return np.random.default_rng(0).exponential(2.0, number)


def test_losses_become_bits_per_byte_and_a_row_that_says_claimed(tmp_path, capsys):
    row = scored(tmp_path, drawn())
    bits = drawn().sum() / math.log(2) / PAIRS
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert (row["kind"], row["claimed"], row["variant"], row["split"]) == ("claimed", True, "theirs", "test")
    assert (row["scored"], row["bytes"], row["split_sha256"]) == (PAIRS, len(TEST), SHA256)
    assert row["source"] and row["data"]["name"] == "recall" and "bench.score" in row["command"]
    assert all(row[name] is None for name in ("seed", *GROUND))  # nobody here has seen the machine
    assert f"theirs (claimed): {bits:.4f} bits per byte, {PAIRS:,} losses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "words", "bits"),
    [
        (np.full(PAIRS, 1.5, np.float32), ("unit=bits",), 1.5),
        (np.full(PAIRS, 1.5, np.float16), ("unit=nats",), 1.5 / math.log(2)),
        (np.full(PAIRS + 1, 2.0), (), 2.0 / math.log(2)),  # with the first byte
        ("\n".join(["1.0", "3.0"] * PAIRS)[: 4 * PAIRS - 1], ("unit=bits",), (2 * PAIRS - 1) / PAIRS),
        (np.full(PAIRS, 6.0), ("above_uniform=true",), 6.0 / math.log(2)),
        (np.full(PAIRS, 8.0), ("unit=bits",), 8.0),
        (np.zeros(PAIRS), (), 0.0),
    ],
    ids=["bits", "half", "first byte too", "text", "above uniform", "uniform", "zeros"],
)
def test_what_is_taken(tmp_path, losses, words, bits):
    assert scored(tmp_path, losses, *words)["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def spoilt(place: int, value: float) -> np.ndarray:
    losses = drawn()
    losses[place] = value
    return losses


@pytest.mark.parametrize(
    ("losses", "words", "message"),
    [
        (drawn(PAIRS - 1), (), r"has 998 losses; allowed are 999, one for each byte of test but the first, or 1,000"),
        (drawn(PAIRS + 2), (), "has 1,001 losses"),
        ("", (), "has 0 losses"),
        (spoilt(7, math.nan), (), "1 losses are below 0 or not finite, the first is number 7, nan"),
        (spoilt(998, math.inf), (), "number 998, inf"),
        (spoilt(0, -1e-9), (), "number 0, -1e-09"),
        (
            np.full(PAIRS, 5.6),
            (),
            r"unit=nats: a mean of 5\.6000 nats is 8\.0791 bits per byte, .* or above_uniform=true",
        ),
        (np.full(PAIRS, 8.01), ("unit=bits",), r"unit=bits: a mean of 8\.0100 bits"),
        (np.ones((PAIRS, 1)), (), r"is float64 \[999, 1\]; allowed are floats \[n\]"),
        (np.ones(PAIRS, np.int64), (), "is int64"),
        (np.array(["1.0"], object), (), "Object arrays cannot be loaded"),
        ("loss\n1.0\n", (), "could not convert string 'loss'"),
        ("1.0,2.0\n3.0,4.0\n", (), r"is float64 \[2, 2\]"),
        (
            drawn(),
            ("sha256=null",),
            rf"sha256=None: must be that of the bytes .*recall test, 1,000 bytes, has {SHA256}",
        ),
        (drawn(), ("split=valid",), r"must be that of the bytes that were scored, .*recall valid, 1,000 bytes, has"),
        (drawn(), ("data.seed=1",), "must be that of the bytes that were scored"),
        (drawn(), ("split=tset",), "split=tset: allowed are train, valid, test"),
        (drawn(), ("unit=nat",), "unit=nat: allowed are nats, bits"),
        (drawn(), ("name=' '",), "name=' ': must be one line of text"),
        (drawn(), ("data.vocabulary=32",), "data.vocabulary=32: allowed is 256"),
        (drawn(), ("nats=nowhere.npy",), r"nats=nowhere\.npy: cannot be read \(No such file"),
        (drawn(), ("nats=nowhere.txt",), r"nats=nowhere\.txt: cannot be read \(nowhere\.txt not found"),
    ],
)
def test_what_is_refused_writes_no_row(tmp_path, losses, words, message):
    with pytest.raises(ValueError, match=message):
        scored(tmp_path, losses, *words)
    assert not (tmp_path / "rows").exists()


def test_newlines_that_a_run_drops_are_no_bytes_to_score(tmp_path):
    (tmp_path / "corpus").write_bytes(b"ab\ncdef\ngh" * 100)
    kept = (b"ab\ncdef\ngh" * 100)[-50:].replace(b"\n", b"")
    words = ("data=file", f"data.path={tmp_path / 'corpus'}", "data.drop_newlines=true", "data.bytes=null")
    words += ("data.distances=null", "data.seed=null", f"sha256='{hashlib.sha256(kept).hexdigest()}'")
    assert scored(tmp_path, drawn(len(kept) - 1), *words)["bytes"] == len(kept) == 40


def test_the_command_ends_with_2_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = call("bench/score.py", "name=theirs")
    assert ended.code == 2 and ended.err == "error: nats: Missing mandatory value: nats\n" and not ended.out


def claim(tmp_path: Path, *, bits: float, **changes) -> None:
    """A row of the command, on the data of the made-up runs."""
    row = scored(tmp_path, np.full(PAIRS, bits), "unit=bits")
    (path,) = (tmp_path / "rows").glob("*/rows.jsonl")
    path.write_text(json.dumps(row | {"data": DATA} | changes) + "\n")


def run_beside(tmp_path: Path) -> None:
    folder = write_run(tmp_path, variant="mhsa", bits=2.4)
    config = {"variant": {"name": "mhsa"}, "data": {"split": [0.9, 0.05, 0.05]}}
    change(folder, config=config)


def test_a_claim_stands_beside_runs_of_the_same_bytes_and_says_so(tmp_path):
    run_beside(tmp_path)
    claim(tmp_path, bits=1.25)
    found = gather([tmp_path])
    assert not found.refused and len(found.claims) == 1 and len(found.runs) == 1
    tables = {table.name: table for table in all_tables(found)}
    shown = tables["runs-1"]
    assert column(shown, "variant") == ["mhsa", "bzip2", "xz", "gzip", "theirs (claimed)"]
    assert column(shown, "test, bits per byte")[-1] == "1.2500" and column(shown, "valid, bits per byte")[-1] == ""
    assert [note for note in shown.notes if note.startswith("Claimed: theirs. Summed by bench.score")]
    others = [cell.text for name, table in tables.items() if name != "runs-1" for row in table.rows for cell in row]
    assert not [text for text in others if "theirs" in text]  # no mean, no difference, no seed


@pytest.mark.parametrize(
    "changes",
    [
        {"data": DATA | {"sha256": "99" * 32}},
        {"shares": [0.8, 0.1, 0.1]},
        {"drop_newlines": True},
        {"split": "train"},
    ],
)
def test_a_claim_on_other_bytes_stands_beside_no_run(tmp_path, changes):
    run_beside(tmp_path)
    claim(tmp_path, bits=1.25, **changes)
    (shown,) = (table for table in all_tables(gather([tmp_path])) if table.name == "runs-1")
    assert "theirs (claimed)" not in column(shown, "variant") and not any("Claimed" in note for note in shown.notes)


def test_the_report_names_every_claim_and_its_limitations(tmp_path, capsys):
    claim(tmp_path, bits=1.25)
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    for name in ("report.md", "index.html"):
        text = (tmp_path / "report" / name).read_text().replace("\\", "")
        assert "Claimed, not measured: theirs, 1.2500 bits per byte on test of file (sha256 abababab)" in text
        assert LIMITATIONS in text and "bench.score" in text


def test_a_claim_that_was_edited_is_refused(tmp_path):
    claim(tmp_path, bits=1.25, split="all")
    (reason,) = gather([tmp_path]).refused
    assert "split is 'all'; allowed are train, valid, test" in reason
