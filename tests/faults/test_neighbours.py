"""A stranger's files beside one's own: skipped with one line each, never waited for, and without a trace."""

import json
import os
from pathlib import Path

import pytest

from bench.report.frame import read
from harness.record.rows import RECORD, SUMMARY, look_at
from tests.bench_rows import write_run
from tests.runs import (
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    run_job,
    whole_run,
)

DEEP = "[" * 200_000
ODD = {
    "nested": '{"status": "finished", "x": ' + DEEP,
    "nested whole": json.dumps({"status": "finished"})[:-1] + ', "x": ' + "[" * 400 + "]" * 400 + "}",
    "no object": "[1, 2]",
    "empty": "",
    "no text": b"\xff\x00garbage{",
    "half a line": '{"status": "fini',
    "huge": '{"status": "finished", "x": "' + "x" * 17_000_000 + '"}',
}
CHANGES = {
    "bits are text": {"valid_bits_per_byte": "1"},
    "data is a list": {"data": [1]},
    "a long name": {"variant": "x" * 1_000_000},
    "capped is a list": {"capped": [1]},
    "memory is text": {"memory": "much"},
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


def test_a_run_ends_well_beside_odd_neighbours(capsys, here):
    """In the very folder, before it begins and at its end; all neighbours claim to be runs of the same variant and seed."""
    _, summary = whole_run(*SHORT, "seed=1")
    good = next(path for path in (here / "outputs").glob("*-s1-*"))
    outputs = here / "outputs"
    for kind in KINDS:
        for name in (SUMMARY, RECORD):
            put(outputs / f"mhsa-s0-{kind}-{name}" / name, kind)
    for name, changes in CHANGES.items():
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
