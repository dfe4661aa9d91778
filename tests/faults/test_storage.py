"""Storage that fails: every file that a run writes, by a limit of the system, by a full disk and by files that vanish. One
message with what is needed and what is left, a status that says so, nothing half-written, and the same command goes on."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from harness import cache
from harness.failures import StorageFailure
from harness.record.folder import FAILED, LOCK
from harness.record.rows import RECORD, SUMMARY
from tests.runs import (
    after_step,
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    rows_of,
    run_job,
    whole_run,
)

FULL = ("record.every_steps=1", "checkpoint.every_steps=2", "budget.steps=8", "eval.test=false")
FILES = (LOCK, "config.yaml", RECORD, SUMMARY, "best.pt", "step-")


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".tmp", ".part"))]


class Disk:
    """Refuses to write to files whose path has a word, once ``after`` bytes are in them."""

    def __init__(self, monkeypatch):
        self._word, self._room, self._write = None, 0, cache.write_all
        for module in ("cache", "record.rows", "record.folder"):
            monkeypatch.setattr(f"harness.{module}.write_all", self._write_all)

    def fill(self, word: str | None, *, after: int = 0) -> None:
        self._word, self._room = word, after

    def _write_all(self, file: FileIO, content: bytes) -> None:
        if self._word is None or self._word not in Path(file.name).name:
            self._write(file, content)
            return
        taken = content[: self._room]
        self._write(file, taken)
        self._room -= len(taken)
        if len(taken) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(name="disk")
def failing_disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed_rows(tmp_path_factory) -> list[dict]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("undisturbed"))
        return rows_of(whole_run(*FULL)[0])


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_at_any_file_is_one_message_and_the_same_command_goes_on(name, disk, undisturbed_rows, capsys):
    job = make_job(*FULL)
    disk.fill(name, after=10)
    with pytest.raises(
        StorageFailure, match=r"No space left on device\): [\d,]+ bytes are needed, [\d,]+ are left"
    ) as told:
        run_job(job)
    assert name in str(told.value) and "\n" not in str(told.value)
    folder = job.folder.path
    assert not left_behind(folder)
    if name == LOCK:
        assert not folder.exists(), "nothing was begun"
    elif name != SUMMARY:  # where the status itself cannot be written
        found = json.loads((folder / SUMMARY).read_text())
        assert found["status"] == "storage" and "bytes are needed" in found["error"]
        assert "No space left" in (folder / FAILED).read_text()
    disk.fill(None)
    again = make_job(*FULL)
    assert run_job(again)["status"] == "finished"
    assert rows_of(again) == undisturbed_rows
    assert not left_behind(folder) and not (folder / FAILED).exists()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of a megabyte."""
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))
    mounted = shutil.which("mount") and os.geteuid() == 0
    code = (
        mounted
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode
    )
    if not mounted or code:
        folder.rmdir()
        pytest.skip("only the superuser mounts a small disk")
    yield folder
    os.chdir("/")
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.mark.faults
@pytest.mark.parametrize("wandb", ["disabled", "offline"])
@pytest.mark.parametrize("left_kib", [0, 16, 64, 150, 300])
def test_a_disk_that_is_really_full(left_kib, wandb, small_disk, undisturbed_rows, monkeypatch):
    monkeypatch.chdir(small_disk)
    filling = small_disk / "filling"
    filling.write_bytes(bytes(shutil.disk_usage(small_disk).free - 1024 * left_kib))
    job = make_job(*FULL)
    try:
        assert run_job(job, wandb=wandb)["status"] == "finished"
    except StorageFailure as error:
        assert "are needed" in str(error) and "are left on its disk" in str(error)
        assert not left_behind(small_disk)
    filling.unlink()
    again = make_job(*FULL)
    if not again.earlier:
        assert run_job(again)["status"] == "finished"
    assert rows_of(again) == undisturbed_rows


@pytest.mark.parametrize("what", ["folder", "replaced"])
def test_a_run_whose_folder_is_removed_ends_at_the_next_row(what):
    job = make_job(*FULL)
    folder = job.folder.path

    def remove() -> None:
        if what == "folder":
            shutil.rmtree(folder)
        else:
            content = (folder / RECORD).rename(folder / "moved").read_bytes()
            (folder / RECORD).write_bytes(content)

    after_step(job, 3, remove)
    with pytest.raises(StorageFailure, match=f"{RECORD} was removed or replaced while the run wrote to it"):
        run_job(job)
    assert job.trainer.spent.steps == 3
    if what == "folder":
        assert not folder.exists(), "what was removed shall stay so"
    else:
        assert json.loads((folder / SUMMARY).read_text())["status"] == "storage"
