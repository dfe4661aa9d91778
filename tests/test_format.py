"""Format numbers: what was written under other names is refused by one message."""

import json
import re
import shutil
from unittest.mock import patch

import pytest
import torch

from bench.report.frame import read
from harness.record import checkpoint
from harness.record.rows import FORMAT, RECORD, SUMMARY
from tests.bench_rows import cost_row, write_rows
from tests.command import MADE, call, empty_folder, run_folders, train  # noqa: F401 - a fixture

OLDER = rf"it is of format {FORMAT - 1}, and this code reads format {FORMAT}: docs/renames\.md"


def older(folder) -> None:
    """Make a run folder what code of the format before would have left."""
    lines = (folder / RECORD).read_text().splitlines()
    first = json.loads(lines[0]) | {"format": FORMAT - 1}
    (folder / RECORD).write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    (folder / SUMMARY).write_text(json.dumps(json.loads((folder / SUMMARY).read_text()) | {"format": FORMAT - 1}))
    with patch.object(checkpoint, "FORMAT", FORMAT - 1):
        best = torch.load(folder / checkpoint.FOLDER / checkpoint.BEST, weights_only=True)
        del best["format"]
        checkpoint.save_best(folder, best)


def test_what_a_run_leaves_names_its_format(here):
    train(*MADE)
    (folder,) = run_folders(here / "outputs")
    for name in (RECORD, SUMMARY):
        assert json.loads((folder / name).read_text().splitlines()[0])["format"] == FORMAT
    for path in (folder / checkpoint.FOLDER).glob("*.pt"):
        assert torch.load(path, weights_only=True)["format"] == FORMAT


def test_a_run_folder_of_another_format_is_refused_by_one_message(here):
    train(*MADE)
    (folder,) = run_folders(here / "outputs")
    shutil.move(folder, here / "old")
    older(here / "old")
    small = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
    for ended in (
        train(*MADE, "init_from.run=old"),
        call("bench/evaluate.py", "run=old", *small),
        call("bench/cost.py", "checkpoint=old", "lengths=[16]", *small),
    ):
        assert ended.code == 2 and len(ended.err.splitlines()) == 1, ended
        assert re.search(OLDER, ended.err), ended.err
    with pytest.raises(ValueError, match=OLDER):
        checkpoint.load_best(here / "old")


def test_rows_of_another_format_are_refused_and_the_others_shown(tmp_path):
    old = cost_row() | {"format": FORMAT - 1}
    write_rows(tmp_path, [cost_row(), old, cost_row() | {"format": FORMAT + 1}])
    found = read([tmp_path])
    assert len(found.of("cost")) == 1 and len(found.refused) == 2
    assert re.search(f"line 2: {OLDER}", found.refused[0]) and f"of format {FORMAT + 1}" in found.refused[1]
