"""Storage that lies: a checkpoint or record that is damaged, cut off, or of another run is never resumed in silence."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from bench.planning import read_run
from harness.record import checkpoint
from harness.record.rows import RECORD
from tests.small_runs import crash, make_job, rows_of, run_job, temporary_cwd, whole_run  # noqa: F401 - a fixture

GIVEN = ("variant=mhsa", "budget.steps=13", "checkpoint.every_steps=3", "eval.test=false")
NEWEST, BEFORE, BEST = (f"checkpoints/{name}.pt" for name in ("step-000000009", "step-000000006", "best"))


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Outputs of a run whose process died in its eleventh step, and the rows, less provenance, of the same run
    undisturbed."""
    outputs, whole = tmp_path_factory.mktemp("died"), tmp_path_factory.mktemp("whole")
    crash(make_job(*GIVEN, f"outputs={outputs}"), step=11)
    (outputs / "latest").unlink()
    return outputs, rows_of(whole_run(*GIVEN, f"outputs={whole}")[0])[1:]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The folder of a run that another seed began."""
    job, _ = whole_run(*GIVEN, "seed=5", "budget.steps=4", f"outputs={tmp_path_factory.mktemp('other')}")
    return job.folder.path


@pytest.fixture
def died(once, here) -> Path:
    """The folder of the run that died, below ``outputs``."""
    shutil.copytree(once[0], "outputs")
    (folder,) = Path("outputs").iterdir()
    return folder.absolute()


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> bytes:
    """A small checkpoint's bytes, of every kind of value that a run's has."""
    weights = {f"layers.{i}.weight": torch.randn(16, 32) for i in range(8)}
    rest = {
        "state": (torch.zeros(2, 3), None),
        "rows": 7,
        "best_bits": 2.5,
        "random": {"python": random.Random(0).getstate()},
    }
    return checkpoint.save(tmp_path_factory.mktemp("raw"), {"model": weights} | rest, step=9, keep=1).read_bytes()


def flipped(path: Path, *, at: float = 0.5) -> None:
    """Flip a bit of a file, at a fraction of it."""
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


def resigned(path: Path, archive: bytes) -> None:
    """Write an archive with the digest that fits, as a stranger may."""
    path.write_bytes(archive[:-2] + checkpoint._ending(archive))


# What is done to a file: (content, a source of chance) -> content


def one_bit(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def cut_off(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


CHANGED = {one_bit: 60, cut_off: 20}


@pytest.mark.parametrize(("change", "tries"), CHANGED.items())
def test_a_changed_file_is_refused(raw, tmp_path, change, tries):
    path, chance = tmp_path / "step-000000009.pt", random.Random(0)
    for _ in range(tries):
        path.write_bytes(change(raw, chance))
        with pytest.raises(checkpoint.Damaged, match=r"step-000000009\.pt is damaged"):
            checkpoint.load(path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for content in (["a list"], "text", {"format": 3, "identity": 7}, torch.zeros(3)):
        path = tmp_path / "step-000000009.pt"
        torch.save(content, path)
        with pytest.raises(checkpoint.Damaged, match="it has no digest"):
            checkpoint.load(path)
        resigned(path, path.read_bytes())
        with pytest.raises(checkpoint.Damaged, match="is no checkpoint of a run"):
            checkpoint.load(path)
    with pytest.raises(checkpoint.Damaged, match=r"absent\.pt cannot be read \(No such file"):
        checkpoint.load(tmp_path / "absent.pt")


# A run that goes on


@pytest.mark.parametrize("damage", ["bit", "gone"])
def test_the_last_good_one_is_gone_on_from_with_one_warning(died, once, capsys, damage):
    if damage == "bit":
        flipped(died / NEWEST)
    else:
        (died / NEWEST).unlink()
        (died / NEWEST).symlink_to("gone")
    os.mkfifo(died / "checkpoints" / "step-000000010.pt")  # nobody waits for it
    job = make_job(*GIVEN)
    capsys.readouterr()
    run_job(job)
    printed = capsys.readouterr()
    assert "resuming at 384 bytes" in printed.out  # six steps
    named = [line for line in printed.err.splitlines() if line.startswith("WARNING")]
    reason = "cannot be read" if damage == "gone" else "is damaged"
    assert len(named) == 1 and f"step-000000009.pt {reason}" in named[0]
    assert "step-000000006.pt, the one before, is taken" in named[0]
    assert rows_of(job)[1:] == once[1]
    checkpoints = checkpoint._all(died)
    assert len(checkpoints) == 2 and [checkpoint.load(path) for path in checkpoints]


def refused(message: str) -> None:
    """The run is not resumed, and makes no step."""
    job = make_job(*GIVEN)
    with pytest.raises(ValueError, match=message):
        run_job(job)
    assert job.trainer.stream.steps_per_turn and job._steps_here == 0


def test_without_a_good_one_it_is_refused_until_forced(died, once):
    before = (died / RECORD).read_bytes()
    for name in (NEWEST, BEFORE):
        flipped(died / name)
    for _ in range(2):
        refused(r"step-000000009\.pt is damaged.*step-000000006\.pt is damaged.*allowed is force=true")
    assert (died / RECORD).read_bytes() == before
    assert rows_of(whole_run(*GIVEN, "force=true")[0])[1:] == once[1]


@pytest.mark.parametrize("name", [NEWEST, BEST])
def test_another_seeds_is_refused(died, other, name):
    shutil.copy(checkpoint.newest(other) if name == NEWEST else other / BEST, died / name)
    refused(f"{Path(name).name} is of another run: seed was 5, is 0; config was [0-9a-f]+, is")


def test_damaged_best_weights_are_found_before_training_and_scored_nowhere(died):
    flipped(died / BEST)
    refused(r"best\.pt is damaged.*force=true")
    with pytest.raises(ValueError, match=r"best\.pt is damaged"):
        read_run(died, key="run")


@pytest.mark.parametrize("damage", ["garbage", "a number"])
def test_a_damaged_record_is_found_before_training(died, damage):
    record = died / RECORD
    lines = record.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["bits_per_byte"] += 1e-3
    lines[2] = json.dumps(row).encode() + b"\n" if damage == "a number" else b"\xff\x00garbage{\n"
    record.write_bytes(b"".join(lines))
    refused(r"record\.jsonl: its first \d+ rows are not those that the checkpoint had seen.*force=true")
    assert record.read_bytes() == b"".join(lines), "what is left of it is lost"


# What lies about


def test_what_a_killed_process_was_writing_goes(died, here):
    left = [died / f"{name}.4711.tmp" for name in ("summary.json", NEWEST, BEST)] + [died / "latest.tmp"]
    for path in left[:-1]:
        path.write_bytes(b"a part")
    left[-1].symlink_to("gone")
    whole_run(*GIVEN)
    assert not any(path.is_symlink() or path.exists() for path in left)
    assert (here / "outputs" / "latest").resolve() == died
    assert sorted(path.name for path in Path("outputs").iterdir()) == sorted(["latest", died.name])
