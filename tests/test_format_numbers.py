"""Rows and checkpoints of another format number are refused with one message."""

import json
import re
import shutil
from unittest.mock import patch

import pytest
import torch

from bench.report.frame import read_folders
from harness.record import checkpoint
from harness.record.rows import FORMAT, RECORD, SUMMARY
from tests.bench_rows import cost_row, write_rows
from tests.command_line import GENERATED, call, empty_folder, run_folders, train  # noqa: F401 - a fixture

OLDER = rf"it is of format {FORMAT - 1}, and this code reads format {FORMAT}"


def test_runs_write_their_format_and_runs_of_another_format_are_refused(cwd):
    train(*GENERATED)
    (folder,) = run_folders(cwd / "outputs")
    *lines, summary = (folder / RECORD).read_text().splitlines() + [(folder / SUMMARY).read_text()]
    assert json.loads(lines[0])["format"] == json.loads(summary)["format"] == FORMAT
    contents = [torch.load(path, weights_only=True) for path in (folder / checkpoint.FOLDER).glob("*.pt")]
    assert len(contents) == 2 and all(content["format"] == FORMAT for content in contents)
    old = shutil.move(folder, cwd / "old")
    lines[0] = json.dumps(json.loads(lines[0]) | {"format": FORMAT - 1})
    (old / RECORD).write_text("\n".join(lines) + "\n")
    with patch.object(checkpoint, "FORMAT", FORMAT - 1):
        best = torch.load(old / "checkpoints/best.pt", weights_only=True)
        del best["format"]
        checkpoint.save_best(old, best)
    small = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    for outcome in (train(*GENERATED, "init_from.run=old"), call("bench/evaluate.py", "run=old", *small)):
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1, outcome
        assert re.search(OLDER, outcome.err), outcome.err
    with pytest.raises(ValueError, match=OLDER):
        checkpoint.load_best(old)


def test_a_report_refuses_rows_of_another_format_and_shows_the_rest(tmp_path):
    write_rows(tmp_path, [cost_row(), cost_row() | {"format": FORMAT - 1}, cost_row() | {"format": FORMAT + 1}])
    rows = read_folders([tmp_path])
    assert len(rows.of("cost")) == 1 and len(rows.refused) == 2
    assert re.search(f"line 2: {OLDER}", rows.refused[0]) and f"of format {FORMAT + 1}" in rows.refused[1]
