"""Units: torch averages their gradients while the backward pass goes on, divided among processes or not, and what a mechanism
looks at elsewhere stays a plain tensor."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.device.processes import SINGLE, ProcessGroup, joined
from harness.device.runtime import Runtime
from harness.device.units import gathered
from harness.loop.kept_whole import kept_whole
from harness.loop.update import Update
from harness.optim import Muon
from harness.optim.budget import Schedule
from harness.optim.optimizers import Optimizers, assign
from tests.command import ROOT
from tests.many import launch
from tests.patience import PATIENCE_SECONDS
from tests.promises import model_of
from tests.runs import VARIANTS, make_run, own_folder, restored  # noqa: F401 - fixtures
from variants.contract import LayerContext, Sublayer, SublayerOutput

pytestmark = pytest.mark.numeric


class Outsider(Sublayer):
    """It knows nothing of processes: a matrix is looked at in three places outside of its forward pass, one is shared by all
    layers, one belongs to nobody, and a table has sparse gradients."""

    def __init__(self, context: LayerContext):
        super().__init__()
        width = context.d_model
        self.inner, self.outer = nn.Linear(width, 3 * width + 1, bias=False), nn.Linear(3 * width + 1, width)
        self.looked_at, self.forgotten = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.shared = context.shared(nn.Linear, "matrix", lambda: nn.Linear(width, width, bias=False))
        self.table = nn.Parameter(torch.randn(16, width))

    def project_(self) -> None:
        assert type(self.looked_at.weight) is nn.Parameter
        with torch.no_grad():
            self.looked_at.weight.clamp_(-0.1, 0.1)

    def metrics(self, stats: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {"norm": self.looked_at.weight.norm(), "shared": self.shared.weight.norm()}

    def ideal_flops(self) -> int:
        return 2 * int((self.looked_at.weight != 0).sum()) + 2 * self.inner.weight.numel()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        y = self.outer(self.inner(x).relu()) + self.looked_at(x) + self.shared(x)
        return SublayerOutput(y + F.embedding(torch.arange(x.shape[1], device=x.device) % 5, self.table, sparse=True))


def test_what_cannot_be_in_a_unit_is_found():
    model = model_of(Outsider)()
    before, random = {name: p.clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    whole = kept_whole(model)
    units = {name for name, parameter in model.named_parameters() if parameter not in whole}
    own = {f"layers.{i}.part0.sublayer.{name}.weight" for i in (0, 1) for name in ("inner", "outer")}
    assert units == own | {"embedding.weight", "head.weight"}
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    assert torch.equal(random, torch.get_rng_state())


def outsiders_steps(processes: ProcessGroup, shard: str) -> dict:
    torch.manual_seed(0)
    model = model_of(Outsider)().double()
    matrices = {"optimizer": partial(Muon, weight_decay=0.1)}
    groups = assign(
        model,
        default=partial(torch.optim.AdamW, fused=True),
        matrices=matrices,
        groups={
            "tables": {"match": "*.table", "optimizer": torch.optim.SparseAdam},
            "head": {"match": "head*", "clip": 0.01},
        },
    )
    optimizers = Optimizers(groups, lr=0.01, schedule=Schedule(), clip=0.1)
    for part in optimizers.optimizers["matrices"].param_groups:
        part["precision"] = "float64"
    runtime = Runtime(device=torch.device("cpu"), precision="float32", compile=False, processes=processes)
    update = Update(model, optimizers, runtime, accumulate=2)
    update.spread(shard=shard)
    tokens = torch.randint(31, (6, 12), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(processes.world_size)[processes.rank]
    for _ in range(6):
        update(own[:, :-1], own[:, 1:], None, fraction=0.5)
    model, units = update.model, update.units
    found = {"metrics": model.metrics({}), "flops": model.ideal_flops()}
    found |= {"divided": sum(type(p) is not nn.Parameter or isinstance(p, DTensor) for p in units.parameters)}
    found |= {"bytes": sum(p.nbytes for p in units.parameters), "gathered": gathered(model.state_dict())}
    with units.gathered():
        found["plain"] = all(type(p) is nn.Parameter for p in model.parameters())
    return found | {"state": gathered(update.optimizers.state_dict())["groups"]}


def three_ways() -> dict[str, dict]:
    with joined() as processes:
        return {shard: outsiders_steps(processes, shard) for shard in ("none", "full")}


def test_an_outsiders_mechanism_trains_as_in_one_process():
    """Muon, AdamW, clips of all and of a group, an update split in parts, and rows that three processes cannot share alike."""
    one, ranks = outsiders_steps(SINGLE, "full"), launch(three_ways, number=3)
    for shard in ("none", "full"):
        for found in (ranks[0][shard], ranks[2][shard]):
            assert found["plain"] and not found["divided"] and found["flops"] == one["flops"]
            assert found["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
            for name, tensor in one["gathered"].items():
                torch.testing.assert_close(found["gathered"][name], tensor, rtol=0, atol=1e-6)
            for name, group in one["state"].items():
                torch.testing.assert_close(found["state"][name]["state"], group["state"], rtol=0, atol=1e-6)
        assert all(map(torch.equal, *(r[shard]["gathered"].values() for r in (ranks[0], ranks[1]))))
    assert ranks[0]["none"]["bytes"] == one["bytes"]
    assert ranks[0]["full"]["bytes"] < 0.7 * one["bytes"]


def test_a_run_of_one_process_does_without_the_engines(tmp_path):
    """They take most of a second to import."""
    engines = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"}
    code = f"import sys, harness.loop.prepare; assert not {engines} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)
