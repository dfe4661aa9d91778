"""Storage that fails: every file that a run writes, by a limit of the system, by a full disk and by files that vanish. One
message with what is needed and what is left, a status that says so, nothing half-written, and the same command goes on."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
import torch

from bench.report import __main__ as report
from bench.report import figures
from bench.rows import RowFile
from harness import cache
from harness.failures import StorageFailure
from harness.record import checkpoint
from harness.record.figures import draw_context
from harness.record.folder import FAILED, LOCK
from harness.record.rows import RECORD, SUMMARY, SUMMARY_KEYS, Record, write_summary
from harness.record.table import Drawing
from tests.bench_rows import cost_row, write_run
from tests.command import ROOT, call
from tests.forked import exit_code, run, started
from tests.runs import (
    SMALL,
    after_step,
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    rows_of,
    run_job,
    whole_run,
)
from variants.kernels import native

pytestmark = pytest.mark.attack("storage that fails at any file: full disk, limits")

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
    disk.fill(name, after=100)
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


def test_what_is_needed_is_the_whole_file(tmp_path, disk):
    content = {"weights": list(range(50_000))}
    size = checkpoint.save(tmp_path, content, step=1, keep=2).stat().st_size
    disk.fill("step-", after=1000)
    with pytest.raises(StorageFailure, match=f"step-000000002.pt.* {size:,} bytes are needed"):
        checkpoint.save(tmp_path, content, step=2, keep=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001.pt"]


def test_an_interrupt_while_a_checkpoint_is_written_is_one(tmp_path, monkeypatch):
    """torch hides it: it closes a file that is not whole, and says that."""
    calls = iter(range(3))

    def interrupted(file: FileIO, content: bytes) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(cache, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"weights": torch.zeros(1000)}, step=1, keep=1)
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_rows_of_a_verb_are_whole_or_not_there(tmp_path, disk):
    rows = RowFile(tmp_path, verb="cost", path=tmp_path / "rows.jsonl")
    rows.append(cost_row())
    before = rows.path.read_bytes()
    disk.fill("rows.jsonl", after=50)
    with pytest.raises(StorageFailure, match="bytes are needed"):
        rows.append(cost_row())
    assert rows.path.read_bytes() == before
    disk.fill(None)
    rows.append(cost_row())
    assert rows.path.read_bytes() == before * 2


def test_a_report_on_a_full_disk_ends_with_one_message(tmp_path, disk, monkeypatch, capsys):
    drawing = Drawing(name="drawn", title="", caption="", svg=b"s" * 99, png=b"p" * 99)
    monkeypatch.setattr(figures, "draw_all", lambda rows, spoilt: [drawing])
    write_run(tmp_path / "outputs")
    words = [str(tmp_path / "outputs"), "--out", str(tmp_path / "report")]
    for name in ("runs-1.md", "runs-1.csv", "drawn.png", "drawn.svg", "report.md", "index.html", "contents.txt"):
        disk.fill(name, after=10)
        assert report.main(words) == StorageFailure.exit_code
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and name in said and "bytes are needed" in said
        assert not left_behind(tmp_path)
    disk.fill(None)
    assert report.main(words) == 0


def limited(limit: int, folder: Path, answer) -> None:
    """In a process of its own: files of more bytes are refused by the system itself."""
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    told = []
    for write in (
        lambda: checkpoint.save(Path("run"), {"weights": list(range(50_000))}, step=1, keep=1),
        lambda: write_summary(Path("run"), summary=dict.fromkeys(SUMMARY_KEYS) | {"error": "e" * 2 * limit}),
        lambda: draw_context(
            [{"from_bytes": 1, "to_bytes": 2, "bits_per_byte": 1.0}], path=Path("run/context.png"), label=""
        ),
        lambda: cache.append_whole(Path("run/rows.jsonl"), b"r" * 2 * limit),
        lambda: Record(Path("run"), rows=0).append({"kind": "other", "text": "t" * 2 * limit}),
    ):
        try:
            write()
            told.append("written")
        except StorageFailure as error:
            told.append(str(error))
    answer.send(told)


def test_a_limit_of_files_sizes_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=limited, args=(4096, tmp_path, theirs))
    process.start()
    process.join()
    assert process.exitcode == 0
    for line in ours.recv():
        assert "bytes are needed, a file may have 4,096 (ulimit -f)" in line and "File too large" in line
    assert not left_behind(tmp_path)


def test_a_coded_file_is_whole_or_not_there(disk, here):
    job, _ = whole_run("variant=mhsa", "budget.steps=2", "eval.test=false")
    (here / "text").write_bytes(b"a text of some bytes")
    own = (f"run={job.folder.path}", "runtime.device=cpu", "runtime.threads=1")
    for verb, file, out in (("compress", "text", "coded"), ("decompress", "coded", "again")):
        words = (f"bench/{verb}.py", *own, f"file={file}", f"out={out}")
        disk.fill(out, after=10)
        ended = call(*words)
        assert ended.code == StorageFailure.exit_code and ended.err.startswith("error: "), ended
        assert ended.err.count("\n") == 1 and f"{out}: cannot be written (No space left on device)" in ended.err
        assert not (here / out).exists() and not left_behind(here)
        disk.fill(None)
        assert call(*words).code == 0
    assert (here / "again").read_bytes() == (here / "text").read_bytes()


def built_with_limit(limit: int, answer) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    answer.send(str(native.load("seven", 'extern "C" int seven() { return 7; }')))


@pytest.mark.cpu_kernel
def test_a_kernel_that_cannot_be_kept_is_a_reason_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(native.FOLDER, str(tmp_path / "kernels"))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=built_with_limit, args=(4096, theirs))
    process.start()
    process.join()
    assert "a C++ compiler that fails" in (told := ours.recv()), told
    assert not list((tmp_path / "kernels").iterdir())
    assert native.load("seven", 'extern "C" int seven() { return 7; }').seven() == 7


LIMITED = """
import os, resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]), resource.RLIM_INFINITY))
sys.argv[0] = os.environ["PROGRAM"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.faults
@pytest.mark.attack("storage that fails, with W&B offline")
@pytest.mark.parametrize("limit", [1000, 5000, 20_000, 60_000, 100_000, 200_000])
def test_a_limit_of_files_sizes_with_wandb(limit, here):
    (here / "program.py").write_text(LIMITED)
    given = {"LIMIT": str(limit), "PROGRAM": str(ROOT / "train.py"), "COLUMNS": "200"}
    words = (*SMALL, *FULL, "record.wandb.mode=offline")
    with started(here / "program.py", *words, out=here / "said", environment=os.environ | given) as process:
        code, said = exit_code(process), (here / "said").read_text()
    assert "Traceback" not in said and code in (0, StorageFailure.exit_code), said
    assert code == 0 or (said.count("error: ") == 1 and "ulimit -f" in said and not left_behind(here / "outputs")), said
    again = run("train.py", *words, folder=here, environment=os.environ | {"COLUMNS": "200"})
    assert again.code == 0, again


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


@pytest.mark.attack("a disk that is really full")
@pytest.mark.faults
def test_what_is_left_is_what_the_next_file_may_have(small_disk):
    with pytest.raises(StorageFailure) as told:
        cache.write_whole(small_disk / "file", bytes(2_000_000))
    left = shutil.disk_usage(small_disk).free
    assert f"2,000,000 bytes are needed, {left:,} are left on its disk" in str(told.value) and left > 1_000_000


LEFT_KIB = {"disabled": (0, 4, 16, 32, 40, 48, 64, 100, 150, 200, 250, 300, 350, 400, 500, 700)}
LEFT_KIB["offline"] = (0, 16, 40, 48, 64, 100, 200, 300, 400, 700)
NAMED = {"disabled": "a disk that is really full", "offline": "storage that fails, with W&B offline"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("wandb", "left_kib"),
    [pytest.param(w, left, marks=pytest.mark.attack(NAMED[w])) for w, some in LEFT_KIB.items() for left in some],
)
def test_a_disk_that_is_really_full(left_kib, wandb, small_disk, undisturbed_rows, monkeypatch):
    monkeypatch.chdir(small_disk)
    filling = small_disk / "filling"
    filling.write_bytes(bytes(shutil.disk_usage(small_disk).free - 1024 * left_kib))
    job = make_job(*FULL)
    try:
        assert run_job(job, wandb=wandb)["status"] == "finished"
    except StorageFailure as error:
        assert "are needed" in str(error) and "are left on its disk" in str(error)
        folder = job.folder.path
        assert not left_behind(small_disk)
        if folder.exists():
            assert json.loads((folder / SUMMARY).read_text())["status"] == "storage"
    filling.unlink()
    again = make_job(*FULL)
    if not again.earlier:
        assert run_job(again)["status"] == "finished"
    assert rows_of(again) == undisturbed_rows


@pytest.mark.attack("a run folder that is removed")
@pytest.mark.parametrize("what", ["folder", RECORD, "replaced", "outputs"])
def test_a_run_whose_folder_is_removed_ends_at_the_next_row(what):
    job = make_job(*FULL)
    folder = job.folder.path

    def remove() -> None:
        if what == RECORD:
            (folder / RECORD).unlink()
        elif what == "replaced":
            (folder / RECORD).write_bytes(
                (folder / RECORD).read_bytes() * bool((folder / RECORD).rename(folder / "moved"))
            )
        else:
            shutil.rmtree(folder if what == "folder" else folder.parent)

    after_step(job, 3, remove)
    with pytest.raises(StorageFailure, match=f"{RECORD} was removed or replaced while the run wrote to it"):
        run_job(job)
    assert job.training.spent.steps == 3
    if what in ("folder", "outputs"):
        assert not folder.exists(), "what was removed shall stay so"
    else:
        assert json.loads((folder / SUMMARY).read_text())["status"] == "storage"


@pytest.mark.attack("a run folder that is removed")
def test_best_weights_that_are_removed_are_noticed_at_the_next_save():
    job = make_job(*FULL, "eval.every=0.5")
    best = job.folder.path / "checkpoints" / "best.pt"
    found = []

    def remove() -> None:
        found.append(best.exists())
        shutil.rmtree(best.parent)

    after_step(job, 5, remove)
    with pytest.raises(StorageFailure, match="best.pt was removed: put it back"):
        run_job(job)
    assert found == [True] and job.training.spent.steps == 6


@pytest.mark.attack("files left about or renamed")
def test_a_folder_in_the_place_of_latest_is_one_message(here):
    (here / "outputs" / "latest" / "inside").mkdir(parents=True)
    job = make_job()
    with pytest.raises(ValueError, match=r"outputs=.*: cannot be written \(.*/latest: Is a directory\)"):
        job.folder.hold()
    assert [path.name for path in (here / "outputs").iterdir()] == ["latest"]


@pytest.mark.attack("files left about or renamed")
def test_what_killed_processes_left_is_removed(tmp_path):
    job = make_job()
    job.folder.path.mkdir(parents=True)
    (job.folder.path / "checkpoints").mkdir()
    for name in ("summary.json.17.tmp", "checkpoints/step-000000004.pt.17.tmp"):
        (job.folder.path / name).touch()
    job.folder.hold()
    job.folder.begin()
    assert not left_behind(job.folder.path)
    old, young, other = (tmp_path / "cache" / f"{name}.tmp" for name in ("a.json.17", "a.json.18", "mine"))
    (tmp_path / "cache").mkdir()
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    cache.write_whole(tmp_path / "cache" / "a.json", b"{}")
    assert set(left_behind(tmp_path / "cache")) == {young.name, other.name}
