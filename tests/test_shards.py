"""Checkpoints of divided runs: each process writes its rows, any number reads them, and nothing in them is executed."""

import os
import pickle
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.cache import sha256_of
from harness.device.processes import joined
from harness.record import checkpoint, shards
from tests.many import launch
from tests.runs import CARRY, DROPOUT, make_job, own_folder, restored, run_job, stop  # noqa: F401 - fixtures
from tests.test_processes import ended, exact_job, inside, record

pytestmark = pytest.mark.numeric

WORDS = ("variant=mhsa", *CARRY, "budget.steps=8", "model.head_zero_init=false", "runtime.shard=full")
WORDS += ("checkpoint.every_steps=2", "position=relative", "optim=adamw")


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


def stopped_and_taken_up() -> list[tuple]:
    """A run of two processes that is stopped after its fifth step, and the end of another that one process has
    begun."""
    here = Path.cwd()
    with joined() as processes:
        make = partial(exact_job, *WORDS, processes=processes)
        inside(here / "of two")
        first = ended(make, stop_at=4)
        inside(here / "of one")
        return [first, ended(make)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folders of a run that is whole, of one that two processes left at its fifth step, and of one that they took
    up."""
    place = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WANDB_MODE", "disabled")
        patched.chdir(place)
        inside(place / "alone")
        run_job(exact_job(*WORDS))
        inside(place / "of one")
        stop(exact_job(*WORDS), step=4)
        os.chdir(place)
        for first, second in launch(stopped_and_taken_up):
            assert first[0] == 128 + signal.SIGTERM and second[:2] == (0, 8)
    return place


@pytest.fixture
def run(place, here) -> Path:
    """A copy of the checkpoints that two processes left, in the current folder."""
    shutil.copytree(place / "of two", here, symlinks=True, dirs_exist_ok=True)
    (folder,) = [path for path in (here / "outputs").iterdir() if not path.is_symlink()]
    return folder / checkpoint.FOLDER


def bits(folder: Path) -> list[float]:
    return [row["bits_per_byte"] for row in record(folder)[1:]]


def test_another_number_of_processes_goes_on(run, place, here):
    names = sorted(path.name for path in run.glob("step-*"))
    assert [name[:17] for name in names] == [f"step-{step:09d}.pt" for step in (4, 4, 5, 5)], names
    parts = sorted((run / names[3]).iterdir())
    assert [path.name for path in parts] == [f"__{rank}_0.distcp" for rank in range(2)], "and no metadata of torch's"
    content = checkpoint.load(run / names[2])
    assert len(content["state"][0]) == 4 and len(content["random_others"]) == 1
    numbers = sum(torch.Size(tensor["shape"]).numel() for tensor in content[shards.KEY]["tensors"].values())
    assert all(8 * numbers / 2 < path.stat().st_size < 8 * numbers for path in parts)
    run_job(exact_job(*WORDS))
    assert not list(run.glob("*.shards")), "it is whole in the one process, and one file again"
    assert bits(here) == pytest.approx(bits(place / "alone"), abs=1e-12)
    assert bits(place / "of one") == pytest.approx(bits(place / "alone"), abs=1e-12)


class Attack:
    def __reduce__(self):
        return open, ("attacked", "w")


@pytest.mark.parametrize("how", ["bit", "pickle", "outside", "pieces"])
def test_shards_that_are_not_as_they_were_written_are_refused(run, capsys, how):
    """Also by whoever can make digests that fit; the one before is taken, or the run ends in one message."""
    *_, index, folder = sorted(run.glob("step-*"))
    shard, content = folder / "__1_0.distcp", checkpoint.load(index)
    named = content[shards.KEY] | {"folder": folder.name}
    tensor = next(iter(named["tensors"].values()))
    (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    if how == "bit":
        flipped = bytearray(shard.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        shard.write_bytes(flipped)
    elif how == "pickle":
        torch.save(Attack(), shard)
        named["sha256"][shard.name] = sha256_of(shard)
        for piece in (piece for one in named["tensors"].values() for piece in one["pieces"] if piece[2] == shard.name):
            piece[3:] = 0, shard.stat().st_size
    elif how == "outside":
        tensor["pieces"][0][2] = "../../config.yaml"
        named["sha256"]["../../config.yaml"] = sha256_of(run.parent / "config.yaml")
    else:
        tensor["pieces"] = [[[0], [1 << 40], shard.name, 0, 1]]
    if how != "bit":
        checkpoint._write(index, content | {shards.KEY: named})
    if how not in ("pickle", "pieces"):
        assert checkpoint.load_newest(run.parent, {})["spent"]["steps"] == 4
        assert "step-000000004.pt, the one before, is taken" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="step-000000005.*shards are not those of a run"):
            shards.put_back(
                checkpoint.load_newest(run.parent, {}), lambda shape, dtype: torch.empty(shape, dtype=dtype)
            )
    assert not Path("attacked").exists()
