"""A stranger's files beside one's own: skipped with one line each, never waited for, and without a trace."""

import json
import os
from pathlib import Path

import pytest

from bench.report import __main__ as report
from bench.report import figures
from bench.report.frame import read
from harness.record import rows
from harness.record.folder import RunFolder
from harness.record.rows import RECORD, SUMMARY, find_comparable, look_at
from harness.record.shapes import LONGEST_NAME
from tests.bench_rows import write_run
from tests.fixed_rows import change
from tests.runs import (
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    run_job,
    whole_run,
)

pytestmark = pytest.mark.attack("odd files of neighbours, and the report on them")

DEEP = "[" * 200_000
ODD = {
    "nested": '{"status": "finished", "x": ' + DEEP,
    "nested whole": json.dumps({"status": "finished"})[:-1] + ', "x": ' + "[" * 400 + "]" * 400 + "}",
    "no object": "[1, 2]",
    "a number": "7",
    "empty": "",
    "no text": b"\xff\x00garbage{",
    "half a line": '{"status": "fini',
    "huge": '{"status": "finished", "x": "' + "x" * 17_000_000 + '"}',
}
CHANGES = {
    "bits are text": {"valid_bits_per_byte": "1"},
    "data is a list": {"data": [1]},
    "no variant": {"variant": None},
    "a long name": {"variant": "x" * 1_000_000},
    "capped is a list": {"capped": [1]},
    "memory is text": {"memory": "much"},
    "protocol is text": {"protocol": "mine"},
    "seed is a list": {"seed": [[]]},
    "a number too large": {"bytes_per_second": 10**400},
}


def put(path: Path, kind: str) -> None:
    """Something that is no regular file, or text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.write_bytes(ODD[kind] if isinstance(ODD[kind], bytes) else ODD[kind].encode())


SHORT = ("budget.steps=2", "eval.every=0", "eval.test=false")
KINDS = ("pipe", "zeros", "folder", "loop", *ODD)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_anybodys_is_read_or_refused_at_once(kind, tmp_path):
    put(tmp_path / SUMMARY, kind)
    for first_line in (False, True):
        found, reason = look_at(tmp_path / SUMMARY, first_line=first_line)
        assert found is None and reason and "\n" not in reason and len(reason) < 200
        assert ("no regular file" in reason) == (kind in ("pipe", "zeros")), reason
    assert look_at(tmp_path / "nothing") == (None, None)


def test_a_run_ends_well_beside_odd_neighbours(capsys, here, attempt):
    """In the very folder, before it begins and at its end; all neighbours claim to be runs of the same variant and seed."""
    _, summary = whole_run(*SHORT, "seed=1")
    good = next(path for path in (here / "outputs").glob("*-s1-*"))
    outputs = here / "outputs"
    for kind in KINDS:
        for name in (SUMMARY, RECORD):
            attempt()
            put(outputs / f"mhsa-s0-{kind}-{name}" / name, kind)
    for name, changes in CHANGES.items():
        attempt()
        folder = outputs / f"mhsa-s0-{name}"
        folder.mkdir()
        (folder / SUMMARY).write_text(json.dumps(summary | {"config_hash": "other"} | changes))
        first = json.loads((good / RECORD).read_text().splitlines()[0])
        (folder / RECORD).write_text(json.dumps(first | changes) + "\n")
    capsys.readouterr()
    job = make_job(*SHORT, "seed=0")
    assert run_job(job)["status"] == "finished"
    said = capsys.readouterr().out
    skipped = [line for line in said.splitlines() if line.startswith("not compared with")]
    odd = [name for name in CHANGES if look_at(outputs / f"mhsa-s0-{name}" / RECORD, first_line=True)[1]]
    for name, number in ((SUMMARY, len(KINDS) - 1 + len(CHANGES)), (RECORD, len(KINDS) + len(odd))):
        assert sum(f"{name}'" in line for line in skipped) == number, (name, skipped)
    assert max(map(len, skipped)) < 400
    assert "Runs with the same data" in said, "the sound one is still there"
    assert make_job(*SHORT, "seed=0").earlier["valid_bits_per_byte"]


def test_a_neighbour_that_vanishes_is_no_neighbour():
    job = make_job()
    other = job.folder.path.with_name(job.folder.path.name + "x")
    other.mkdir(parents=True)
    (other / RECORD).symlink_to("gone")
    assert RunFolder(job.folder.path.parent, job.folder.identity).summary is None
    assert find_comparable(job.folder.path.parent, summary={}) == []


def test_a_report_waits_for_nobody(tmp_path):
    write_run(tmp_path / "good")
    for kind in ("pipe", "zeros", "folder", "loop"):
        for name in (RECORD, SUMMARY, "rows.jsonl", "evaluations.jsonl"):
            beside = write_run(tmp_path / kind / name)
            put(beside / name, kind)
    found = read([tmp_path])
    assert any(folder.is_relative_to(tmp_path / "good") for folder in found.of("run")["folder"])
    told = "\n".join(found.refused)
    for name in (RECORD, SUMMARY, "rows.jsonl"):
        assert f"{tmp_path / 'pipe' / name}" in told
    assert f"{tmp_path / 'zeros'}" in told, "links to one file are read once"


def test_a_record_that_is_too_large_is_refused(tmp_path, monkeypatch):
    folder = write_run(tmp_path)
    monkeypatch.setattr("bench.report.frame.LARGEST_RECORD", (folder / RECORD).stat().st_size - 1)
    found = read([tmp_path])
    assert found.frame.empty and "it has more than" in "\n".join(found.refused)


@pytest.mark.parametrize(
    "changes",
    [
        CHANGES["a long name"],
        {"variant": "x" * (LONGEST_NAME + 1)},
        {"data": {"name": "d" * 1000, "bytes": 1, "sha256": "a" * 64}},
        {"metrics of a stranger": ["x" * (rows.LONGEST_TEXT + 1)]},
    ],
)
def test_a_name_without_end_is_in_no_figure(changes, tmp_path):
    write_run(tmp_path, seed=1)
    change(write_run(tmp_path), **changes)
    found = read([tmp_path])
    assert len(found.of("run")) == 1 and any("letters" in reason for reason in found.refused)
    assert all(len(line) < 600 for line in found.refused)


def test_names_that_are_just_short_enough_are_drawn(tmp_path):
    change(write_run(tmp_path), variant="x" * LONGEST_NAME)
    (variant,) = read([tmp_path]).of("run")["variant"]
    assert len(variant) == LONGEST_NAME


def test_escape_codes_of_others_reach_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "draw_all", lambda rows, spoilt: [])
    write_run(tmp_path)
    change(write_run(tmp_path, seed=1), config={"variant": {"name": "mhsa"}, "\x1b[31mkey\x07": 1})
    odd = write_run(tmp_path / "\x1b[31mred\x07")
    (odd / SUMMARY).write_text('{"status": "failed", "error": "\\u001b[2J gone"}')
    assert report.main([str(tmp_path), "--out", str(tmp_path / "\x1b]0;title\x07")]) == 0
    told = capsys.readouterr()
    assert "gone" in told.out and not {"\x1b", "\x07"} & set(told.out + told.err)


def test_levels_and_letters_of_ours_are_far_from_the_limits():
    job = make_job()
    assert rows._excess({"config": job.plan.config}, 12) is None
