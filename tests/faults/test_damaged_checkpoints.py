"""A run is never resumed silently from a checkpoint or record that is damaged, cut off, or of
another run."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from harness.record import checkpoint
from harness.record.rows import RECORD
from harness.trained import read_run
from tests.support.small_runs import (
    crash,
    make_run,
    rows_of,
    run_to_end,
    temporary_cwd,  # noqa: F401 - a fixture
    whole_run,
)

WORDS = ("variant=mhsa", "budget.steps=13", "checkpoint.every_steps=3", "eval.test=false")
NEWEST, PREVIOUS, BEST = (
    f"checkpoints/{name}.pt" for name in ("step-000000009", "step-000000006", "best")
)


@pytest.fixture(scope="module")
def crashed_outputs(tmp_path_factory) -> Path:
    """The output folder of a run whose process died in its eleventh step."""
    outputs = tmp_path_factory.mktemp("crashed")
    crash(make_run(*WORDS, f"outputs={outputs}"), step=11)
    (outputs / "latest").unlink()
    return outputs


@pytest.fixture(scope="module")
def undisturbed_rows(tmp_path_factory) -> list[dict]:
    """The rows, except the provenance, of the same run trained to its end."""
    return rows_of(whole_run(*WORDS, f"outputs={tmp_path_factory.mktemp('undisturbed')}")[0])[1:]


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory) -> Path:
    """The folder of a run with another seed."""
    run, _ = whole_run(
        *WORDS, "seed=5", "budget.steps=4", f"outputs={tmp_path_factory.mktemp('other')}"
    )
    return run.folder.path


@pytest.fixture
def crashed(crashed_outputs, cwd) -> Path:
    """A copy of the crashed run's folder, below ``outputs`` of the current folder."""
    shutil.copytree(crashed_outputs, "outputs")
    (folder,) = Path("outputs").iterdir()
    return folder.absolute()


def flip_middle_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_with_digest(path: Path, archive: bytes):
    """Write an archive with a matching digest, as an attacker can."""
    path.write_bytes(archive[:-2] + checkpoint._ending(archive))


def flip_one_bit(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def cut_off(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


@pytest.mark.parametrize("damage, tries", [(flip_one_bit, 60), (cut_off, 20)])
def test_a_file_with_changed_or_missing_bytes_is_refused(crashed, damage, tries):
    path, draw = crashed / NEWEST, random.Random(0)
    intact = path.read_bytes()
    for _ in range(tries):
        path.write_bytes(damage(intact, draw))
        with pytest.raises(checkpoint.Damaged, match=r"step-000000009\.pt is damaged"):
            checkpoint.load(path)


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path):
    for content in (["a list"], "text", {"format": 3, "identity": 7}, torch.zeros(3)):
        path = tmp_path / "step-000000009.pt"
        torch.save(content, path)
        with pytest.raises(checkpoint.Damaged, match="is damaged or cut off"):
            checkpoint.load(path)
        write_with_digest(path, path.read_bytes())
        with pytest.raises(checkpoint.Damaged, match="is no checkpoint of a run"):
            checkpoint.load(path)
    with pytest.raises(checkpoint.Damaged, match=r"absent\.pt cannot be read \(No such file"):
        checkpoint.load(tmp_path / "absent.pt")


# Resuming a run


@pytest.mark.parametrize("damage", ["flipped bit", "broken link"])
def test_a_run_resumes_from_the_last_good_checkpoint_with_one_warning(
    crashed, undisturbed_rows, capsys, damage
):
    if damage == "flipped bit":
        flip_middle_bit(crashed / NEWEST)
    else:
        (crashed / NEWEST).unlink()
        (crashed / NEWEST).symlink_to("gone")
    os.mkfifo(crashed / "checkpoints" / "step-000000010.pt")  # reading a pipe would wait forever
    run = make_run(*WORDS)
    capsys.readouterr()
    run_to_end(run)
    printed = capsys.readouterr()
    assert "resuming at 384 bytes" in printed.out  # six steps of 64 bytes
    warnings = [line for line in printed.err.splitlines() if line.startswith("WARNING")]
    reason = "cannot be read" if damage == "broken link" else "is damaged"
    assert len(warnings) == 1 and f"step-000000009.pt {reason}" in warnings[0]
    assert "step-000000006.pt, the one before, is loaded" in warnings[0]
    assert rows_of(run)[1:] == undisturbed_rows
    checkpoints = checkpoint._checkpoints(crashed)
    assert len(checkpoints) == 2 and [checkpoint.load(path) for path in checkpoints]


def assert_refused(message: str):
    """Assert that the run is not resumed and takes no step."""
    run = make_run(*WORDS)
    with pytest.raises(ValueError, match=message):
        run_to_end(run)
    assert run._steps_of_command == 0


def test_without_a_good_checkpoint_resuming_is_refused_until_forced(crashed, undisturbed_rows):
    before = (crashed / RECORD).read_bytes()
    for name in (NEWEST, PREVIOUS):
        flip_middle_bit(crashed / name)
    for _ in range(2):
        assert_refused(
            r"step-000000009\.pt is damaged.*step-000000006\.pt is damaged.*allowed is force=true"
        )
    assert (crashed / RECORD).read_bytes() == before
    assert rows_of(whole_run(*WORDS, "force=true")[0])[1:] == undisturbed_rows


@pytest.mark.parametrize("name", [NEWEST, BEST])
def test_a_checkpoint_of_another_seed_is_refused(crashed, other_seed, name):
    shutil.copy(
        checkpoint.newest(other_seed) if name == NEWEST else other_seed / BEST, crashed / name
    )
    assert_refused(
        f"{Path(name).name} is of another run: seed was 5, is 0; config was [0-9a-f]+, is"
    )


def test_damaged_best_weights_are_refused_by_training_and_by_bench_commands(crashed):
    flip_middle_bit(crashed / BEST)
    assert_refused(r"best\.pt is damaged.*force=true")
    with pytest.raises(ValueError, match=r"best\.pt is damaged"):
        read_run(crashed, key="run")


@pytest.mark.parametrize("damage", ["garbage", "a number", "cut"])
def test_a_damaged_record_is_refused_before_training(crashed, damage):
    record = crashed / RECORD
    lines = record.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["bits_per_byte"] += 1e-3
    lines[2] = json.dumps(row).encode() + b"\n" if damage == "a number" else b"\xff\x00garbage{\n"
    lines = lines[:3] if damage == "cut" else lines
    record.write_bytes(b"".join(lines))
    assert_refused(
        r"record\.jsonl: its first \d+ rows, of \d+, are not those of the checkpoint.*force=true"
    )
    assert record.read_bytes() == b"".join(lines), "the refused record must stay as it is"


def test_a_crashed_run_resumes_after_a_torn_line_and_temporary_files_are_removed(
    crashed, undisturbed_rows, cwd
):
    with (crashed / RECORD).open("ab") as record:
        record.write(b'{"kind": "tra')
    leftovers = [crashed / f"{name}.4711.tmp" for name in ("summary.json", NEWEST, BEST)] + [
        crashed / "latest.tmp"
    ]
    for path in leftovers[:-1]:
        path.write_bytes(b"a part")
    leftovers[-1].symlink_to("gone")
    assert rows_of(whole_run(*WORDS)[0])[1:] == undisturbed_rows
    assert not any(path.is_symlink() or path.exists() for path in leftovers)
    assert (cwd / "outputs" / "latest").resolve() == crashed
    assert sorted(path.name for path in Path("outputs").iterdir()) == sorted(
        ["latest", crashed.name]
    )
