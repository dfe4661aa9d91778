"""A run of two processes trains, scores and resumes as one process does."""

import hashlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.data import corpora
from harness.device.full_tensors import full_tensors
from harness.device.processes import SINGLE, ProcessGroup, join_processes
from harness.device.torch_settings import configure_torch
from harness.loop.distribute import distribute
from harness.loop.trainer import Trainer
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests.support.rank_processes import launch
from tests.support.small_configs import plan
from tests.support.small_runs import (
    CARRY,
    DROPOUT,
    MEMORY,
    SMALL,
    SPANS,
    VARIANTS,
    after_step,
    evaluate,
    make_run,
    make_trainer,
)
from train import train

pytestmark = pytest.mark.numeric

STEPS = 4
TRAINED = (
    *SPANS,
    "variant.attention.span.loss_weight=0.001",
    *CARRY,
    "model.cache=hidden",
    "position=relative",
)
TRAINED += (
    "optim=adamw",
    "batch.accumulate=2",
    "model.head_zero_init=false",
    f"budget.steps={STEPS}",
)
SHARDED = (
    "variant=adaptive_span_memory",
    *MEMORY,
    "variant.memory.sparse=true",
    *SPANS[1:],
    "runtime.shard=full",
)
SHARDED += (
    "+variant.groups.values.optimizer={_target_:harness.optim.ClippedAdagrad,_partial_:true}",
)
RESUMED = {
    "replicated": (*SPANS, *CARRY, *DROPOUT, "eval.streams=1"),  # rank 1 has no stream to score
    "sharded, with a table": (*SHARDED, *CARRY, *DROPOUT, "eval.streams=32"),
}
FROZEN = ("objective=classify", "objective.encoder=frozen", "data=listops", "data.bytes=60000")
FROZEN += ("data.distances=null", "variant=mhsa", "optim=adamw")
RESUMED |= {f"frozen, {shard}": (*FROZEN, f"runtime.shard={shard}") for shard in ("none", "full")}
COMMON = (f"budget.steps={STEPS}", "checkpoint.every_steps=2", "eval.every=0", "eval.test=false")


def set_muon_precision(trainer: Trainer, precision: str) -> Trainer:
    """Set the precision of Muon's products, which by default depends on the CPU."""
    for group in (
        g for optimizer in trainer.optimizers.optimizers.values() for g in optimizer.param_groups
    ):
        if "precision" in group:
            group["precision"] = precision
    return trainer


def distributed_trainer(
    processes: ProcessGroup, *overrides: str, precision: str = "float32"
) -> Trainer:
    """Return a trainer with replicated or sharded parameters. Precision float64 makes runs
    comparable despite rounding."""
    plan_ = plan(*SMALL, *overrides)
    trainer = Trainer(
        plan_, corpora.load(**vars(plan_.data)), configure_torch(plan_.runtime, processes=processes)
    )
    trainer.model.to(getattr(torch, precision))
    set_muon_precision(trainer, precision)
    distribute(trainer.model, trainer.optimizers, processes, shard=plan_.runtime.shard)
    return trainer


def digest(trainer: Trainer) -> str:
    """Return SHA-256 of all parameters, gathered from all processes."""
    weights = full_tensors(trainer.model.state_dict()).values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights)).hexdigest()


def train_and_score(trainer: Trainer) -> dict:
    """Train to the end. Returns training score and parameter digest of each step, score on
    valid, and model."""
    bits, digests = [], []
    while not trainer.finished:
        trainer.step()
        digests.append(digest(trainer))
        bits.append(trainer.train_row().bits_per_byte)
    score = evaluate(trainer, trainer.corpus.splits["valid"])
    return {
        "bits": bits,
        "digests": digests,
        "nats": score.nats,
        "metrics": trainer.model.metrics(score.stats),
        "model": full_tensors(trainer.model.state_dict()),
        "streams": len(trainer.state.carried[0]),
        "spent": (trainer.state.spent.bytes, trainer.state.spent.steps, trainer.state.spent.flops),
    }


def run_to_end(make: partial, *, stop_at: int | None = None) -> tuple[int, int, str]:
    """Train to the end, or to a step in which only rank 1 receives SIGTERM. Returns exit code,
    steps and digest."""
    job, processes, code = make(), make.keywords["processes"], 0
    if stop_at and processes.rank == 1:
        after_step(job, stop_at, lambda: signal.raise_signal(signal.SIGTERM))
    try:
        train(job)
    except SystemExit as exited:
        code = exited.code
    return code, job.trainer.state.spent.steps, digest(job.trainer)


def change_folder(folder: str):
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def trained_and_resumed() -> dict:
    """Return what ``train_and_score`` and ``run_to_end`` return: of the latter one for each folder
    ``whole``, two for ``stopped``."""
    cwd, results = Path.cwd(), {}
    with join_processes() as processes:
        results["trained"] = train_and_score(
            distributed_trainer(processes, *TRAINED, precision="float64")
        )
        for name, words in RESUMED.items():
            make = partial(make_run, *words, *COMMON, processes=processes)
            for folder, stops in (("whole", [None]), ("stopped", [2, None])):
                change_folder(cwd / name / folder)
                results[name, folder] = [run_to_end(make, stop_at=step) for step in stops]
    return results


def record(folder: Path) -> list[dict]:
    """Return the rows of the record without times and commit."""
    (path,) = [path for path in folder.glob(f"outputs/*/{RECORD}") if not path.parent.is_symlink()]
    return [
        {key: value for key, value in row.items() if key not in ("clock", "commit")}
        for row in read_rows(path)
    ]


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def ranks(shared_folder) -> list[dict]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(shared_folder)
        return launch(trained_and_resumed)


def test_two_processes_train_as_one_does(ranks):
    first, second = (results["trained"] for results in ranks)
    single = train_and_score(
        distributed_trainer(SINGLE, *TRAINED, "batch.accumulate=1", precision="float64")
    )
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == STEPS
    assert first["bits"] == second["bits"] == pytest.approx(single["bits"], abs=1e-12)
    assert first["spent"] == second["spent"] == pytest.approx(single["spent"], rel=1e-3)
    torch.testing.assert_close(first["model"], single["model"], rtol=0, atol=1e-11)
    assert torch.equal(first["nats"], second["nats"]) and first["metrics"] == second["metrics"]
    torch.testing.assert_close(first["nats"], single["nats"], rtol=0, atol=2e-6)  # nats are float32
    assert first["metrics"].keys() == single["metrics"].keys()
    assert first["streams"] == second["streams"] == single["streams"] // 2


@pytest.mark.parametrize("name", RESUMED)
def test_stopped_processes_resume_bit_for_bit(ranks, shared_folder, name):
    for results in ranks:
        (whole,), (stopped, resumed) = results[name, "whole"], results[name, "stopped"]
        assert stopped[0] == 128 + signal.SIGTERM and stopped[1] < STEPS
        assert resumed == whole == ranks[0][name, "whole"][0] and whole[:2] == (0, STEPS)
    rows = record(shared_folder / name / "whole")
    assert rows == record(shared_folder / name / "stopped") and rows[0]["processes"] == 2
    assert [row["kind"] for row in rows[-2:]] == ["valid", "valid"]


def test_one_process_reads_the_checkpoint_of_two(ranks, shared_folder):
    name = "sharded, with a table"
    (folder,) = [
        path
        for path in (shared_folder / name / "whole" / "outputs").iterdir()
        if not path.is_symlink()
    ]
    trainer = make_trainer(*RESUMED[name], *COMMON)
    trainer.load_checkpoint(checkpoint.load(checkpoint.newest(folder)))
    assert (trainer.state.spent.steps, len(trainer.state.carried[0])) == (STEPS, 4)
    assert digest(trainer) == ranks[0][name, "whole"][0][2]


def test_batches_and_norms_that_cannot_be_divided_among_processes_are_refused():
    refused = {
        (
            "batch.streams=4",
            "batch.accumulate=3",
        ): "batch.accumulate=3: each of 2 processes has 2 of batch.streams=4",
        (
            *VARIANTS["product_key_memory"],
            "variant.memory.query_norm=batch",
        ): "layers.0.memory has BatchNorm1d",
    }
    for words, message in refused.items():
        with pytest.raises(ValueError, match=message):
            distributed_trainer(
                ProcessGroup(rank=1, world_size=2, local_rank=1, local_world_size=2), *words
            )
