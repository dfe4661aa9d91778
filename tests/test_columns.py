"""Tables of which each process has some columns: they train, score and resume as the whole ones of one process."""

import re

import pytest
import torch
from torch import nn

from harness.device.columns import Columns
from harness.device.processes import SINGLE, ProcessGroup, joined
from harness.device.units import gathered
from harness.loop.trainer import Trainer
from tests.many import launch
from tests.runs import CARRY, SPARSE, VARIANTS, elsewhere, make_run, own_folder, restored, run_job  # noqa: F401 - fixtures
from tests.test_processes import divided_run

pytestmark = pytest.mark.numeric

STEPS = 6
COMMON = (
    *CARRY,
    "runtime.shard=full",
    "model.d_model=20",  # three processes have 7, 7 and 6 columns
    "batch.streams=6",
    "model.head_zero_init=false",
    f"budget.steps={STEPS}",
    "eval.streams=2",  # the third process has nothing to score
)
TWO = ("variant.layers=[attention,memory]", "variant.at={}")
CASES = {
    "dense, relu": (
        *VARIANTS["product_key_memory"],
        *TWO,
        "variant.memory.activation=relu",
        "optim=adamw",
        "optim.clip=0.1",
    ),
    "shared by two layers, in parts": (
        *SPARSE,
        *TWO,
        "variant.memory.share=network",
        "optim.clip=0.001",
        "+variant.groups.values.clip=0.01",
        "batch.accumulate=2",
    ),
}


def tables_of(run: Trainer) -> list[nn.Parameter]:
    names = [name for name, _ in run.model.named_parameters()]
    found = zip(names, run.update.units.parameters, strict=True)
    return [parameter for name, parameter in found if name.endswith("values")]


def found_by(processes: ProcessGroup, words: tuple[str, ...]) -> dict:
    run, bits = divided_run(processes, *COMMON, *words, precision="float64"), []
    for _ in range(STEPS):
        run.step()
        bits.append(run.train_row()["bits_per_byte"])
    score = run.evaluate(run.corpus.splits["valid"][:300])
    return {
        "bits": bits,
        "score": score.bits_per_byte,
        "metrics": run.model.metrics(score.stats),
        "shapes": [tuple(table.shape) for table in tables_of(run)],
        "averaged": [table in {*run.update.units.whole} for table in tables_of(run)],
        "weights": gathered(run.model.state_dict()),
        "optimizers": gathered(run.optimizers.state_dict())["groups"],
        "flops": run.model.ideal_flops(),
    }


def found_by_all() -> dict[str, dict]:
    with joined() as processes:
        return {name: found_by(processes, words) for name, words in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, dict]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("columns"))
        return launch(found_by_all, number=3)


@pytest.mark.parametrize("name", CASES)
def test_columns_are_those_of_one_process(ranks, name):
    one = found_by(SINGLE, CASES[name])
    assert [rank[name]["shapes"][0] for rank in ranks] == [(64, 7), (64, 7), (64, 6)]
    for found in (rank[name] for rank in ranks):
        assert not any(found["averaged"])
        assert len(found["shapes"]) == len(one["shapes"])
        assert found["bits"] == pytest.approx(one["bits"], abs=1e-12)
        assert found["score"] == pytest.approx(one["score"], abs=1e-12)
        assert found["metrics"] == pytest.approx(one["metrics"], abs=1e-9)
        assert found["flops"] == one["flops"]
        torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=1e-12)
        for group, state in one["optimizers"].items():
            torch.testing.assert_close(found["optimizers"][group]["state"], state["state"], rtol=0, atol=1e-12)


def test_a_table_of_too_few_columns_is_refused():
    model = make_run(*VARIANTS["product_key_memory"], "model.d_model=4", "model.heads=1").model
    few = ProcessGroup(rank=0, world_size=3, local_rank=0, local_world_size=3)
    with pytest.raises(ValueError, match=re.escape("a table of 4 columns cannot be divided among 3 processes")):
        Columns([(sublayer, "values") for _, sublayer in model.sublayers() if sublayer.tables], few)
