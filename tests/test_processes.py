"""Several processes of one run: they train, score and resume as one would."""

import hashlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.data import corpora
from harness.device import runtime
from harness.device.model_parameters import full_tensors
from harness.device.processes import SINGLE, ProcessGroup, join_processes
from harness.loop.run import Run
from harness.loop.trainer import Trainer
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests.composing import plan
from tests.many import launch
from tests.runs import CARRY, DROPOUT, MEMORY, MOVING, SMALL, VARIANTS, after_step, make_job, make_run
from train import train

pytestmark = pytest.mark.numeric

STEPS = 4
DIVIDED = (*MOVING, "variant.attention.span.loss_weight=0.001", *CARRY, "model.cache=hidden", "position=relative")
DIVIDED += ("optim=adamw", "batch.accumulate=2", "model.head_zero_init=false", f"budget.steps={STEPS}")
SHARDED = ("variant=adaptive_span_memory", *MEMORY, "variant.memory.sparse=true", *MOVING[1:], "runtime.shard=full")
SHARDED += ("+variant.groups.values.optimizer={_target_:harness.optim.ClippedAdagrad,_partial_:true}",)
RESUMED = {
    "replicated": (*MOVING, *CARRY, *DROPOUT, "eval.streams=1"),  # the second process has nothing to score
    "sharded, with a table": (*SHARDED, *CARRY, *DROPOUT, "eval.streams=32"),  # rows by Muon, AdamW; columns by Adagrad
}
COMMON = (f"budget.steps={STEPS}", "checkpoint.every_steps=2", "eval.every=0", "eval.test=false")


def with_muon_in(run: Trainer, name: str) -> Trainer:
    """The run without bfloat16, which Muon has where the processor multiplies it in AMX tiles."""
    for group in (g for optimizer in run.optimizers.optimizers.values() for g in optimizer.param_groups):
        if "precision" in group:
            group["precision"] = name
    return run


def divided_run(processes: ProcessGroup, *overrides: str, precision: str = "float32") -> Trainer:
    """Spread; in float64 exact enough to compare: in float32 optimizers follow rounding, which every CPU does in its
    own way."""
    plan_ = plan(*SMALL, *overrides)
    run = Trainer(plan_, corpora.load(**plan_.data), runtime.start(plan_.runtime, processes=processes))
    run.model.to(getattr(torch, precision))
    with_muon_in(run, precision).update.distribute(shard=run.plan.runtime.shard)
    return run


def exact_job(*overrides: str, processes: ProcessGroup = SINGLE) -> Run:
    """A job in float64, also where torch has divided the parameters by the time that it is prepared."""
    torch.set_default_dtype(torch.float64)
    try:
        job = make_job(*overrides, processes=processes)
    finally:
        torch.set_default_dtype(torch.float32)
    with_muon_in(job.trainer, "float64")
    return job


def digest(run: Trainer) -> str:
    """Of the whole parameters; all processes call it."""
    weights = full_tensors(run.model.state_dict()).values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights)).hexdigest()


def trained(run: Trainer) -> dict:
    """Bits of every step, a digest of the parameters after each, and where it all ends."""
    bits, digests = [], []
    while not run.finished:
        run.step()
        digests.append(digest(run))
        bits.append(run.train_row()["bits_per_byte"])
    score = run.evaluate(run.corpus.splits["valid"])
    return {
        "bits": bits,
        "digests": digests,
        "nats": score.nats,
        "metrics": run.model.metrics(score.stats),
        "model": full_tensors(run.model.state_dict()),
        "state": len(run.state[0]) if run.state else None,
        "spent": (run.spent.bytes, run.spent.steps, run.spent.flops),
    }


def ended(make: partial, *, stop_at: int | None = None, signalled: int = 1) -> tuple[int, int, str]:
    """Train a job to its end, or to a step in which one process alone receives SIGTERM: exit code, steps, digest."""
    job, processes, code = make(), make.keywords["processes"], 0
    if stop_at and processes.rank == signalled:
        after_step(job, stop_at, lambda: signal.raise_signal(signal.SIGTERM))
    try:
        train(job)
    except SystemExit as exited:
        code = exited.code
    return code, job.trainer.spent.steps, digest(job.trainer)


def inside(folder: str) -> None:
    """In a folder that all processes share."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def trained_and_resumed() -> dict:
    """What ``trained`` says; and how a whole run, one that was stopped, and its resumption end."""
    here, results = Path.cwd(), {}
    with join_processes() as processes:
        results["trained"] = trained(divided_run(processes, *DIVIDED, precision="float64"))
        for name, words in RESUMED.items():
            make = partial(make_job, *words, *COMMON, processes=processes)
            for folder, stops in (("whole", [None]), ("stopped", [2, None])):
                inside(here / name / folder)
                results[name, folder] = [ended(make, stop_at=step) for step in stops]
    return results


def record(folder: Path) -> list[dict]:
    """What must be the same bit for bit."""
    (path,) = [path for path in folder.glob(f"outputs/*/{RECORD}") if not path.parent.is_symlink()]
    return [{key: value for key, value in row.items() if key not in ("clock", "commit")} for row in read_rows(path)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(place) -> list[dict]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        return launch(trained_and_resumed)


def test_two_processes_train_as_one(two):
    first, second = (results["trained"] for results in two)
    one = trained(divided_run(SINGLE, *DIVIDED, "batch.accumulate=1", precision="float64"))
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == STEPS
    assert first["bits"] == second["bits"] == pytest.approx(one["bits"], abs=1e-12)
    assert first["spent"] == second["spent"] == pytest.approx(one["spent"], rel=1e-3)
    torch.testing.assert_close(first["model"], one["model"], rtol=0, atol=1e-11)
    assert torch.equal(first["nats"], second["nats"]) and first["metrics"] == second["metrics"]
    torch.testing.assert_close(first["nats"], one["nats"], rtol=0, atol=2e-6)  # nats are kept in float32
    assert first["metrics"].keys() == one["metrics"].keys()
    assert not one["state"] or first["state"] == second["state"] == one["state"] // 2


@pytest.mark.parametrize("name", RESUMED)
def test_processes_that_were_stopped_go_on_bit_for_bit(two, place, name):
    for results in two:
        (whole,), (stopped, resumed) = results[name, "whole"], results[name, "stopped"]
        assert stopped[0] == 128 + signal.SIGTERM and stopped[1] < STEPS
        assert resumed == whole == two[0][name, "whole"][0] and whole[:2] == (0, STEPS)
    rows = record(place / name / "whole")
    assert rows == record(place / name / "stopped") and rows[0]["processes"] == 2
    assert [row["kind"] for row in rows[-2:]] == ["valid", "valid"]


def test_one_process_reads_the_checkpoint_of_two(two, place):
    name = "sharded, with a table"
    (folder,) = [path for path in (place / name / "whole" / "outputs").iterdir() if not path.is_symlink()]
    run = make_run(*RESUMED[name], *COMMON)
    run.restore(checkpoint.load(checkpoint.newest(folder)))
    assert (run.spent.steps, len(run.state[0])) == (4, 4) and digest(run) == two[0][name, "whole"][0][2]


def test_what_cannot_be_divided_is_refused():
    refused = {
        ("batch.streams=4", "batch.accumulate=3"): "batch.accumulate=3: each of 2 processes has 2 of batch.streams=4",
        ("batch.streams=5",): "batch.streams=5: with 2 processes, .* multiples of 2",
        (*VARIANTS["product_key_memory"], "variant.memory.query_norm=batch"): "layers.0.memory has BatchNorm1d",
    }
    for words, message in refused.items():
        with pytest.raises(ValueError, match=message):
            divided_run(ProcessGroup(rank=1, world_size=2, local_rank=1, local_world_size=2), *words)
