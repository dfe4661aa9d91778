"""A full disk while a run writes any of its files: one error message, no partial file, and the
run can be resumed."""

import errno
import json
import os
from io import FileIO
from pathlib import Path

import pytest

from harness import cache
from harness.failures import StorageFailure
from harness.record.folder import LOCK
from harness.record.rows import RECORD, SUMMARY
from tests.support.small_runs import (
    make_run,
    rows_of,
    run_to_end,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)

WORDS = ("record.every_steps=1", "checkpoint.every_steps=2", "budget.steps=8", "eval.test=false")
FILES = (LOCK, RECORD, SUMMARY, "step-")


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".part"))]


class Disk:
    """A disk on which files with a word in their name can receive only a limited number of
    bytes, set by ``fill``."""

    def __init__(self, monkeypatch):
        self._word, self._free_bytes, self._write = None, 0, cache.write_all
        for module in ("cache", "record.folder"):
            monkeypatch.setattr(f"harness.{module}.write_all", self._write_all)

    def fill(self, word: str | None, *, after: int = 0):
        self._word, self._free_bytes = word, after

    def _write_all(self, file: FileIO, content: bytes):
        if self._word is None or self._word not in Path(file.name).name:
            self._write(file, content)
            return
        accepted = content[: self._free_bytes]
        self._write(file, accepted)
        self._free_bytes -= len(accepted)
        if len(accepted) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def undisturbed_rows(tmp_path_factory) -> list[dict]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("undisturbed"))
        return rows_of(whole_run(*WORDS)[0])


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_one_error_message_and_the_same_command_resumes(
    name, undisturbed_rows, monkeypatch
):
    run, disk = make_run(*WORDS), Disk(monkeypatch)
    disk.fill(name, after=10)
    with pytest.raises(
        StorageFailure,
        match=r"No space left on device\): [\d,]+ bytes are needed, [\d,]+ are free on its disk",
    ) as caught:
        run_to_end(run)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    folder = run.folder.path
    assert not temporary_files(folder)
    if name == LOCK:
        assert not folder.exists(), "a run that cannot be locked must leave no folder"
    elif name != SUMMARY:  # without space for the summary there is no status
        summary = json.loads((folder / SUMMARY).read_text())
        assert summary["status"] == "storage" and "bytes are needed" in summary["error"]
    disk.fill(None)
    resumed = make_run(*WORDS)
    assert run_to_end(resumed)["status"] == "finished"
    assert rows_of(resumed) == undisturbed_rows
    assert not temporary_files(folder)
