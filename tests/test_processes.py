"""Several processes of one run: they train, score and resume as one would."""

import copy
import hashlib
import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.data import corpora
from harness.data.streams import share
from harness.device import runtime
from harness.device.processes import SINGLE, ProcessGroup, joined
from harness.device.runtime import Runtime
from harness.device.units import gathered
from harness.loop.run import Run
from harness.loop.scoring import score_stream, score_windows
from harness.loop.trainer import Trainer
from harness.record import checkpoint
from harness.record.rows import RECORD, read_rows
from tests.composing import plan
from tests.many import launch
from tests.pretended_device import pretend
from tests.runs import (
    CARRY,
    DROPOUT,
    MOVING,
    SMALL,
    SPARSE,
    VARIANTS,
    after_step,
    elsewhere,
    make_job,
    make_run,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    run_job,
    stop,
)
from train import train

pytestmark = pytest.mark.numeric

STEPS = 30
DIVIDED = {
    "mhsa, accumulated": ("variant=mhsa", *CARRY, "batch.accumulate=2"),
    "moving spans": (
        *(*MOVING, "variant.attention.span.loss_weight=0.001", *CARRY, "model.cache=hidden", "position=relative"),
        "optim=adamw",
    ),
    "sparse memory": SPARSE,
}
LEARNS = ("model.head_zero_init=false", f"budget.steps={STEPS}")


def in_float64(run: Trainer) -> Trainer:
    """The run, exact enough to compare: in float32 optimizers follow rounding, which every CPU does in its own way."""
    return in_precision(run, "float64")


def in_precision(run: Trainer, name: str) -> Trainer:
    """The run without bfloat16, which Muon has where the processor multiplies it in AMX tiles."""
    run.model.to(getattr(torch, name))
    return with_muon_in(run, name)


def with_muon_in(run: Trainer, name: str) -> Trainer:
    for group in (g for optimizer in run.optimizers.optimizers.values() for g in optimizer.param_groups):
        if "precision" in group:
            group["precision"] = name
    return run


def divided_run(processes: ProcessGroup, *overrides: str, precision: str = "float32") -> Trainer:
    plan_ = plan(*SMALL, *overrides)
    run = Trainer(plan_, corpora.load(**plan_.data), runtime.start(plan_.runtime, processes=processes))
    in_precision(run, precision).spread()
    return run


def digest(run: Trainer) -> str:
    """Of the whole parameters; all processes call it."""
    weights = gathered(run.model.state_dict()).values()
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
        "model": gathered(run.model.state_dict()),
        "state": len(run.state[0]) if run.state else None,
        "spent": (run.spent.bytes, run.spent.steps, run.spent.flops),
    }


def train_all() -> dict[str, dict]:
    with joined() as processes:
        make = partial(divided_run, processes, *LEARNS, precision="float64")
        return {name: trained(make(*given)) for name, given in DIVIDED.items()}


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict]]:
    return launch(train_all)


@pytest.mark.parametrize("name", DIVIDED)
def test_two_processes_train_as_one(two, name):
    first, second = (found[name] for found in two)
    one = trained(in_float64(make_run(*DIVIDED[name], *LEARNS, "batch.accumulate=1")))
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == STEPS
    assert first["bits"] == second["bits"] == pytest.approx(one["bits"], abs=1e-12)
    assert one["bits"][-1] < one["bits"][0] - 0.05
    assert first["spent"] == second["spent"] == pytest.approx(one["spent"], rel=1e-3)
    for key, tensor in one["model"].items():
        torch.testing.assert_close(
            first["model"][key], tensor, rtol=0, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert torch.equal(first["nats"], second["nats"])
    assert first["nats"].mean().item() == pytest.approx(one["nats"].mean().item(), abs=1e-8)
    assert first["metrics"] == second["metrics"] and first["metrics"].keys() == one["metrics"].keys()
    if one["state"]:
        assert first["state"] == second["state"] == one["state"] // 2


# Scoring, gradients and what processes tell each other, by three of them

OF_THREE = (*VARIANTS["product_key_memory"], "batch.streams=6", "model.head_zero_init=false")


def parts_of_three() -> dict:
    with joined() as processes:
        run = divided_run(processes, *OF_THREE, precision="float64")
        split = run.corpus.splits["valid"][:200]
        scored = partial(score_stream, run.model, split, runtime=run.runtime, segment=7, collect_stats=True)
        found = {"scores": {streams: tuple(scored(streams=streams)) for streams in (1, 7)}}
        found["windows"] = score_windows(run.model, run.corpus.splits["valid"], runtime=run.runtime, batch=1).nats
        found["draws"] = torch.rand(2).tolist()
        found["gathered"] = [
            processes.gather(torch.full((processes.rank, 2), processes.rank, dtype=dtype))
            for dtype in (torch.bfloat16, torch.bool)
        ]
        parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(3)]
        if processes.rank != 1:
            parameters[0].grad = torch.full((3, 2), 3.0)
            rows = torch.tensor([[0, processes.rank]])
            parameters[1].grad = torch.sparse_coo_tensor(rows, torch.ones(2, 2), (3, 2))
        processes.average_gradients_(parameters)
        found["gradients"] = [p.grad if p.grad is None else p.grad.to_dense() for p in parameters]
        found["sparse"] = parameters[1].grad.is_sparse, parameters[1].grad.is_coalesced()
        found["streams"] = run.stream.batch(0, part=processes.shard)[0]
        return found


def test_three_processes_divide_and_sum(here):
    ranks = launch(parts_of_three, number=3)
    alone = in_float64(make_run(*OF_THREE))
    split, first = alone.corpus.splits["valid"][:200], ranks[0]
    for streams in (1, 7):
        same = {"runtime": alone.runtime, "streams": streams, "segment": 7, "collect_stats": True}
        expected = score_stream(alone.model, split, **same)
        nats, seen, _ = first["scores"][streams]
        torch.testing.assert_close(nats, expected.nats, rtol=0, atol=2e-6)  # nats are kept in float32
        for name, own in expected.stats.items():
            torch.testing.assert_close(seen[name], own)
        assert all(torch.equal(nats, other["scores"][streams][0]) for other in ranks)
    windows = score_windows(alone.model, alone.corpus.splits["valid"], runtime=alone.runtime, batch=1).nats
    torch.testing.assert_close(first["windows"], windows, rtol=0, atol=2e-6)
    assert len({tuple(found["draws"]) for found in ranks}) == 3
    for tensors in first["gathered"]:
        assert torch.equal(torch.cat(tensors), torch.tensor([[1, 1], [2, 2], [2, 2]]).to(tensors[0].dtype))
    dense, rows, nothing = first["gradients"]
    assert dense.tolist() == [[2, 2]] * 3 and nothing is None and first["sparse"] == (True, True)
    torch.testing.assert_close(rows, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1 / 3, 1 / 3]]))
    for other in ranks[1:]:
        assert all(map(torch.equal, first["gradients"][:2], other["gradients"][:2]))
    assert torch.equal(torch.cat([found["streams"] for found in ranks]), alone.stream.batch(0)[0])


@pytest.mark.parametrize(("number", "parts"), [(7, 3), (2, 3), (6, 2), (0, 2), (5, 1)])
def test_shares_are_everything_in_order(number, parts):
    shares = [list(range(number))[share(number, (which, parts))] for which in range(parts)]
    assert [thing for own in shares for thing in own] == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# Runs: written by one, stopped and resumed


def exact_job(*overrides: str, processes: ProcessGroup = SINGLE) -> Run:
    """A run in float64, also where torch has divided the parameters by the time that it is prepared."""
    torch.set_default_dtype(torch.float64)
    try:
        job = make_job(*overrides, processes=processes)
    finally:
        torch.set_default_dtype(torch.float32)
    with_muon_in(job.trainer, "float64")
    return job


def divided_job(
    *overrides: str, stop_at: int | None = None, signalled: int = 1, exact: bool = False
) -> tuple[int, int, str]:
    """A run to its end, or to a step in which one process alone receives SIGTERM; ``exact`` means in float64."""

    def receive() -> None:
        signal.raise_signal(signal.SIGTERM)

    with joined() as processes:
        job, code = (exact_job if exact else make_job)(*overrides, processes=processes), 0
        if stop_at and processes.rank == signalled:
            after_step(job, stop_at, receive)
        try:
            train(job)
        except SystemExit as ended:
            code = ended.code
        return code, job.trainer.spent.steps, digest(job.trainer)


RESUMED = {
    "replicated": (*MOVING, *CARRY, *DROPOUT),
    "sharded": (*MOVING, *CARRY, *DROPOUT, "runtime.shard=full"),
    "sharded, with a table": (*SPARSE, *CARRY, *DROPOUT, "runtime.shard=full"),
}
COMMON = ("batch.streams=6", "budget.steps=9", "checkpoint.every_steps=4", "eval.streams=2", "eval.windows=true")


def record() -> list[dict]:
    (path,) = [path for path in Path("outputs").glob(f"*/{RECORD}") if not path.parent.is_symlink()]
    rows = [{key: value for key, value in row.items() if key not in ("clock", "commit")} for row in read_rows(path)]
    return rows


@pytest.mark.parametrize("name", RESUMED)
def test_processes_that_were_stopped_go_on_bit_for_bit(here, monkeypatch, name):
    """Two processes, or three, of which one has nothing to score."""
    number, words = (2 if name == "replicated" else 3), (*RESUMED[name], *COMMON)
    whole = launch(divided_job, *words, number=number)
    rows = record()
    assert [code for code, *_ in whole] == [0] * number and len({bits for *_, bits in whole}) == 1
    assert rows[0]["processes"] == number and [row["kind"] for row in rows[-2:]] == ["valid", "test"]
    summary = json.loads(next(Path("outputs").glob("[!l]*/summary.json")).read_text())
    assert summary["processes"] == number and summary["bytes_seen"] == 9 * 6 * 16
    elsewhere(here, monkeypatch)
    ended = launch(partial(divided_job, stop_at=5), *words, number=number)
    assert {code for code, *_ in ended} == {128 + signal.SIGTERM}
    assert len({steps for _, steps, _ in ended}) == 1 and ended[0][1] < 9
    assert len(list(Path("outputs").glob("[!l]*/checkpoints/step-*.pt"))) == 2
    assert launch(divided_job, *words, number=number) == whole and record() == rows


def test_two_processes_are_resumed_by_one_and_one_by_two(here, monkeypatch):
    given = ("variant=mhsa", *CARRY, "position=relative", "budget.steps=8", "model.head_zero_init=false")
    run_job(exact_job(*given))
    expected = [row["bits_per_byte"] for row in record()[1:]]
    for name, first in (("two-one", 2), ("one-two", 1)):
        (here / name).mkdir()
        monkeypatch.chdir(here / name)
        if first == 2:
            codes = launch(partial(divided_job, stop_at=5, exact=True), *given)
            assert {code for code, *_ in codes} == {128 + signal.SIGTERM}
        else:
            stop(exact_job(*given), step=5)
        content = checkpoint.load(make_job(*given).folder.checkpoint)
        assert len(content["state"][0]) == 4 and len(content["random_others"]) == first - 1
        if first == 2:
            run_job(exact_job(*given))
        else:
            assert [code for code, *_ in launch(partial(divided_job, exact=True), *given)] == [0, 0]
        assert [row["bits_per_byte"] for row in record()[1:]] == pytest.approx(expected, abs=1e-12)


# Values


def test_what_cannot_be_divided_is_refused():
    refused = {
        ("batch.streams=4", "batch.accumulate=3"): "batch.accumulate=3: each of 2 processes has 2 of batch.streams=4",
        ("batch.streams=5",): "batch.streams=5: 2 processes .* multiples of 2",
        (*VARIANTS["product_key_memory"], "variant.memory.query_norm=batch"): "layers.0.memory has BatchNorm1d",
    }
    for words, message in refused.items():
        with pytest.raises(ValueError, match=message):
            divided_run(ProcessGroup(rank=1, world_size=2, local_rank=1, local_world_size=2), *words)


def test_alone_nothing_is_done():
    run = make_run()
    before = copy.deepcopy(run.model.state_dict())
    SINGLE.copy_first_(run.model)
    SINGLE.average_gradients_(run.model.parameters())
    assert (
        SINGLE.gather_values(3) == [3]
        and SINGLE.on_main(lambda: 4) == 4
        and SINGLE.all_gather_numbers([1, 2]) == [[1, 2]]
    )
    assert all(map(torch.equal, before.values(), run.model.state_dict().values()))
    with pytest.raises(OSError, match="gone"), SINGLE.fail_together():
        raise OSError("gone")
    assert Runtime(device=torch.device("cpu"), precision="float32", compile=False).processes is SINGLE


def test_gpus_are_one_for_each_process(monkeypatch):
    chosen = pretend(monkeypatch, "cuda", devices=2)
    second = ProcessGroup(rank=3, world_size=4, local_rank=1, local_world_size=2)
    for name in ("auto", "cuda"):
        settings = plan(f"runtime.device={name}", "runtime.precision=float32", "runtime.compile=false").runtime
        assert runtime.start(settings, processes=second).device == torch.device("cuda:1")
    assert chosen == [1, 1]
    assert runtime.start(plan("runtime.device=cpu").runtime, processes=second).device.type == "cpu"
    with pytest.raises(ValueError, match="runtime.device=cuda:1 with 4 processes"):
        runtime.start(plan("runtime.device=cuda:1").runtime, processes=second)
    with pytest.raises(ValueError, match="3 processes and 2 CUDA devices"):
        runtime.start(plan().runtime, processes=ProcessGroup(rank=0, world_size=3, local_rank=0, local_world_size=3))
