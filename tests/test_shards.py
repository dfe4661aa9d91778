"""Checkpoints of divided runs: each process writes its rows, any number reads them, and nothing in them is executed."""

import os
import pickle
import random
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.cache import sha256_of
from harness.device.processes import joined
from harness.failures import ProcessLost
from harness.record import checkpoint, shards
from tests.many import Dead, launch
from tests.runs import CARRY, DROPOUT, make_job, own_folder, restored, run_job  # noqa: F401 - fixtures
from tests.test_processes import divided_job, exact_job, record
from train import train

pytestmark = pytest.mark.numeric

GIVEN = (
    "variant=mhsa",
    *CARRY,
    "batch.streams=6",
    "budget.steps=9",
    "model.head_zero_init=false",
    "runtime.shard=full",
)
GIVEN += ("checkpoint.every_steps=2", "position=relative", "optim=adamw")


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Where a run of three processes was stopped after its fifth step."""
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        patched.setenv("WANDB_MODE", "disabled")
        ended = launch(partial(divided_job, stop_at=4, exact=True), *GIVEN, number=3)
    assert {code for code, *_ in ended} == {128 + signal.SIGTERM}
    return place


@pytest.fixture
def run(stopped, here) -> Path:
    """A copy of its run folder's checkpoints, in the current folder."""
    shutil.copytree(stopped, here, symlinks=True, dirs_exist_ok=True)
    (folder,) = [path for path in (here / "outputs").iterdir() if not path.is_symlink()]
    return folder / checkpoint.FOLDER


def test_one_process_goes_on_from_the_rows_of_three(run, monkeypatch, tmp_path):
    names = sorted(path.name for path in run.glob("step-*"))
    assert [name[:17] for name in names] == [f"step-{step:09d}.pt" for step in (4, 4, 5, 5)], names
    newest = run / names[3]
    parts = sorted(newest.iterdir())
    assert [path.name for path in parts] == [f"__{rank}_0.distcp" for rank in range(3)], "and no metadata of torch's"
    content = checkpoint.load(run / names[2])
    numbers = sum(torch.Size(own["shape"]).numel() for own in content[shards.KEY]["tensors"].values())
    assert all(8 * numbers / 3 < path.stat().st_size < 8 * numbers for path in parts)
    run_job(exact_job(*GIVEN))
    found = [row["bits_per_byte"] for row in record()[1:]]
    assert not list(run.glob("*.shards")), "it is whole in the one process, and one file again"
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    run_job(exact_job(*GIVEN))
    assert found == pytest.approx([row["bits_per_byte"] for row in record()[1:]], abs=1e-12)


class Attack:
    def __reduce__(self):
        return open, ("attacked", "w")


def resign(path: Path, content: dict) -> None:
    checkpoint._write(path, content)


@pytest.mark.parametrize("how", ["bit", "gone", "pickle", "outside", "pieces"])
def test_shards_that_are_not_as_they_were_written_are_refused(run, capsys, how):
    """Also by whoever can make digests that fit; the one before is taken, or the run ends in one message."""
    *_, index, folder = sorted(run.glob("step-*"))
    shard, content = folder / "__1_0.distcp", checkpoint.load(index)
    known = content[shards.KEY] | {"folder": folder.name}
    tensor = next(iter(known["tensors"].values()))
    (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    if how == "bit":
        found = bytearray(shard.read_bytes())
        found[len(found) // 2] ^= 1
        shard.write_bytes(found)
    elif how == "gone":
        shard.unlink()
    elif how == "pickle":
        torch.save(Attack(), shard)
        known["sha256"][shard.name] = sha256_of(shard)
        for piece in (piece for own in known["tensors"].values() for piece in own["pieces"] if piece[2] == shard.name):
            piece[3:] = 0, shard.stat().st_size
    elif how == "outside":
        tensor["pieces"][0][2] = "../../config.yaml"
        known["sha256"]["../../config.yaml"] = sha256_of(run.parent / "config.yaml")
    else:
        tensor["pieces"] = [[[0], [1 << 40], shard.name, 0, 1]]
    if how not in ("bit", "gone"):
        resign(index, content | {shards.KEY: known})
    if how not in ("pickle", "pieces"):
        found = checkpoint.load_newest(run.parent, {})
        assert found["spent"]["steps"] == 4 and "step-000000004.pt, the one before, is taken" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="step-000000005.*shards are not those of a run"):
            shards.put_back(
                checkpoint.load_newest(run.parent, {}), lambda shape, dtype: torch.empty(shape, dtype=dtype)
            )
    assert not Path("attacked").exists()


# Kills

KILLED = ("variant=mhsa", *CARRY, *DROPOUT, "budget.steps=40", "runtime.shard=full", "checkpoint.every_steps=1")


def killed(seconds: float, whom: tuple[int, ...]) -> str | None:
    """A run, of which some processes are killed so long after they began to train; its digest, if it came to its end."""
    with joined() as processes:
        job = make_job(*KILLED, processes=processes)
        if processes.rank in whom:
            timer = threading.Timer(seconds, partial(os.kill, os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        try:
            if job.earlier is None:
                train(job)
        except ProcessLost:
            os._exit(1)  # as the command does
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "finished"


@pytest.mark.faults
def test_killed_at_thirty_moments_a_run_goes_on_bit_for_bit(here, monkeypatch):
    """One process or all, most of them while a checkpoint is written; and the end is that of a run that nobody killed."""
    chance, kills, finished = random.Random(0), 0, 0
    assert launch(killed, 0.0, ()) == ["finished"] * 2
    expected = record()
    while kills < 30 or not finished:
        (here / f"again{finished}").mkdir(exist_ok=True)
        monkeypatch.chdir(here / f"again{finished}")
        whom = () if kills >= 30 else chance.choice([(0,), (1,), (0, 1)])
        ended = launch(killed, chance.uniform(0.0, 1.5), whom)
        assert all(one == "finished" or isinstance(one, Dead) for one in ended), ended
        if ended == ["finished"] * 2:
            assert record() == expected
            finished += 1
        else:
            kills += 1
    print(f"{kills} kills, {finished} runs came to their end bit for bit")
