"""Pipes, links, folders and invalid files among the outputs are skipped with a message each,
without waiting."""

import os
from pathlib import Path

import pytest

from bench.tables.frame import Rows
from harness.record.rows import RECORD, SUMMARY, read_accepted_rows
from tests.support.bench_rows import write_run

DEEP = "[" * 200_000
CONTENTS = {
    "nested": '{"status": "finished", "x": ' + DEEP,
    "not UTF-8": b"\xff\x00garbage{",
    "huge": '{"status": "finished", "x": "' + "x" * 17_000_000 + '"}',
}


def put(path: Path, kind: str):
    """Put a pipe, a link, a folder or a file with invalid content at ``path``."""
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
        path.write_bytes(
            CONTENTS[kind] if isinstance(CONTENTS[kind], bytes) else CONTENTS[kind].encode()
        )


KINDS = ("pipe", "zeros", "folder", "loop", *CONTENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_file_is_refused_at_once_with_a_short_reason(kind, tmp_path):
    put(tmp_path / SUMMARY, kind)
    for first_line in (False, True):
        rows, (reason,) = read_accepted_rows(tmp_path / SUMMARY, first_line=first_line)
        assert not rows and "\n" not in reason and len(reason) < 200
        assert ("no regular file" in reason) == (kind in ("pipe", "zeros")), reason
    assert read_accepted_rows(tmp_path / "nothing") == ([], [])


def test_a_report_waits_for_no_pipe_and_names_the_files_that_it_skips(tmp_path):
    write_run(tmp_path / "good")
    for kind in ("pipe", "zeros", "folder", "loop"):
        for name in (RECORD, SUMMARY, "rows.jsonl", "evaluations.jsonl"):
            folder = write_run(tmp_path / kind / name)
            put(folder / name, kind)
    rows = Rows([tmp_path])
    assert "run" in {*rows.frame["kind"]}
    messages = "\n".join(rows.omitted)
    for name in (RECORD, SUMMARY, "rows.jsonl"):
        assert f"{tmp_path / 'pipe' / name}" in messages
    assert f"{tmp_path / 'zeros'}" in messages, "one of the links to /dev/zero must be named"
