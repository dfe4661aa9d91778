"""Three processes with replicated or sharded parameters: averaged gradients, whole tables,
scores."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.device.full_tensors import full_tensors
from harness.device.processes import SINGLE, ProcessGroup, join_processes
from harness.device.runtime import Runtime
from harness.loop.distribute import distribute, unsharded_parameters
from harness.loop.step import train_step
from harness.objective.scoring import score_stream, score_windows
from harness.optim import Muon
from harness.optim.budget import Schedule
from harness.optim.optimizers import Optimizers
from harness.optim.parameter_groups import assign
from tests.harness.test_distributed_training import distributed_trainer
from tests.support.promises import model_of
from tests.support.rank_processes import launch
from tests.support.small_runs import VARIANTS
from variants.contract import LayerContext, Sublayer, SublayerOutput

pytestmark = pytest.mark.numeric

STEPS = 4


class OneProcessSublayer(Sublayer):
    """A sublayer with a parameter of each type that FSDP does not take.

    ``gain`` is a vector, which is also read outside of the forward pass, ``shared`` belongs to all
    layers, ``columns`` is not contiguous, and ``table`` has sparse gradients."""

    tables = {"table": 1}

    def __init__(self, context: LayerContext):
        super().__init__()
        width = context.d_model
        self.inner, self.outer = (
            nn.Linear(width, 3 * width + 1, bias=False),
            nn.Linear(3 * width + 1, width),
        )
        self.gain = nn.Parameter(torch.full((width,), 0.2))
        self.columns = nn.Parameter(torch.randn(width, width).T / width)
        self.shared = context.shared(
            nn.Linear, "matrix", lambda: nn.Linear(width, width, bias=False)
        )
        self.table = nn.Parameter(torch.randn(16, width))

    def project_(self):
        assert type(self.gain) is nn.Parameter
        with torch.no_grad():
            self.gain.clamp_(-0.1, 0.1)

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {"norm": self.gain.norm(), "shared": self.shared.weight.norm()}

    def ideal_flops(self) -> int:
        return int((self.gain != 0).sum()) + 2 * self.inner.weight.numel()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = self.outer(self.inner(x).relu()) + self.gain * (x @ self.columns) + self.shared(x)
        return SublayerOutput(
            y + F.embedding(torch.arange(x.shape[1], device=x.device) % 5, self.table, sparse=True)
        )


def sublayer_steps(processes: ProcessGroup, shard: str) -> dict:
    """Train ``OneProcessSublayer`` with Muon, AdamW, clipping and accumulation."""
    torch.manual_seed(0)
    model = model_of(OneProcessSublayer)().double()
    groups = assign(
        model,
        default=partial(torch.optim.AdamW, fused=True),
        matrices={"optimizer": partial(Muon, weight_decay=0.1)},
        groups={
            "tables": {"match": "*.table", "optimizer": torch.optim.SparseAdam},
            "head": {"match": "head*", "clip": 0.01},
        },
    )
    optimizers = Optimizers(groups, lr=0.01, schedule=Schedule(), clip=0.1)
    for part in optimizers.optimizers["matrices"].param_groups:
        part["precision"] = "float64"
    runtime = Runtime(
        device=torch.device("cpu"), precision="float32", compile=False, processes=processes
    )
    distribute(model, optimizers, processes, shard=shard)
    tokens = torch.randint(31, (6, 12), generator=torch.Generator().manual_seed(1))
    streams = tokens.chunk(processes.world_size)[processes.rank]
    for _ in range(STEPS):
        inputs, targets = streams[:, :-1], streams[:, 1:]
        train_step(model, optimizers, runtime, inputs, targets, None, fraction=0.5, accumulate=2)
    distributed = optimizers.distributed
    parameters = distributed.local_parameters if distributed else [*model.parameters()]
    with distributed.unsharded() if distributed else nullcontext():
        unsharded = all(type(p) is nn.Parameter for p in model.parameters())
    return {
        "metrics": model.metrics({}),
        "flops": model.ideal_flops(),
        "sharded": sum(isinstance(p, DTensor) for p in parameters),
        "bytes": sum(p.nbytes for p in parameters),
        "model": full_tensors(model.state_dict()),
        "unsharded": unsharded,
        "state": full_tensors(optimizers.state_dict())["groups"],
    }


def scores(processes: ProcessGroup) -> dict:
    """Return scores of 1 stream, of 7 streams and of windows, and the random numbers and streams of
    each process."""
    run = distributed_trainer(
        processes, *VARIANTS["product_key_memory"], "batch.streams=6", precision="float64"
    )
    split = run.corpus.splits["valid"][:200]
    by_streams = partial(
        score_stream, run.model, split, runtime=run.runtime, segment=7, collect_stats=True
    )
    return {
        "nats": [by_streams(streams=streams).nats for streams in (1, 7)],
        "stats": by_streams(streams=7).stats,
        "windows": score_windows(
            run.model, run.corpus.splits["valid"], runtime=run.runtime, batch=1
        ).nats,
        "draws": torch.rand(2).tolist(),
        "streams": run.stream.batch(0, shard=processes.shard)[0],
    }


def averaged_gradients(processes: ProcessGroup) -> list[Tensor | None]:
    """Return averages of a dense and a sparse gradient that rank 1 lacks, and of a gradient that
    all ranks lack."""
    parameters = [nn.Parameter(torch.zeros(3, 2)) for _ in range(3)]
    if processes.rank != 1:
        parameters[0].grad = torch.full((3, 2), 3.0)
        rows = torch.tensor([[0, processes.rank]])
        parameters[1].grad = torch.sparse_coo_tensor(rows, torch.ones(2, 2), (3, 2))
    processes.average_gradients_(parameters)
    assert parameters[1].grad.is_sparse and parameters[1].grad.is_coalesced()
    return [p.grad if p.grad is None else p.grad.to_dense() for p in parameters]


def all_steps() -> dict:
    with join_processes() as processes:
        results = {shard: sublayer_steps(processes, shard) for shard in ("none", "full")}
        return results | {"scores": scores(processes), "averaged": averaged_gradients(processes)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("three"))
        return launch(all_steps, world_size=3)


def assert_same_training(results: dict, expected: dict, *, within: float):
    assert results["flops"] == expected["flops"]
    assert results["metrics"] == pytest.approx(expected["metrics"], abs=within)
    torch.testing.assert_close(results["model"], expected["model"], rtol=0, atol=within)
    for name, group in expected["state"].items():
        torch.testing.assert_close(
            results["state"][name]["state"], group["state"], rtol=0, atol=within
        )


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_mechanism_written_for_one_process_trains_as_in_one_process(ranks, shard):
    single, (first, second, third) = sublayer_steps(SINGLE, shard), (rank[shard] for rank in ranks)
    for results in (first, third):
        assert results["unsharded"] and not results["sharded"]
        assert_same_training(results, single, within=1e-6)
    assert all(map(torch.equal, first["model"].values(), second["model"].values()))
    share = first["bytes"] / single["bytes"]
    assert share == 1 if shard == "none" else share < 0.7


def test_three_processes_score_as_one_and_have_different_random_numbers_and_streams(ranks):
    first, single = ranks[0]["scores"], scores(SINGLE)
    for key in ("nats", "windows", "stats"):
        # nats are float32
        torch.testing.assert_close(first[key], single[key], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(ranks[2]["scores"][key], first[key], rtol=0, atol=0)
    assert len({tuple(rank["scores"]["draws"]) for rank in ranks}) == 3
    assert torch.equal(torch.cat([rank["scores"]["streams"] for rank in ranks]), single["streams"])


def test_gradients_are_averaged_even_if_a_process_has_none(ranks):
    for dense, rows, nothing in (rank["averaged"] for rank in ranks):
        assert dense.tolist() == [[2, 2]] * 3 and nothing is None
        torch.testing.assert_close(rows, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1 / 3, 1 / 3]]))


def test_fsdp_takes_contiguous_matrices_of_one_unit_outside_of_tables():
    model = model_of(OneProcessSublayer)()
    unsharded = unsharded_parameters(model)
    sharded = {name for name, parameter in model.named_parameters() if parameter not in unsharded}
    inside = {
        f"layers.{i}.part0.sublayer.{name}.weight" for i in (0, 1) for name in ("inner", "outer")
    }
    assert sharded == inside | {"embedding.weight", "head.weight"}
