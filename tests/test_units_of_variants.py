"""Every variant, divided between two processes: the steps of one, resumed bit for bit."""

import copy

import pytest
import torch
import yaml

from harness.device.processes import SINGLE, ProcessGroup, joined
from harness.device.units import gathered
from harness.loop.train_state import TrainState
from tests.composing import CONF, small
from tests.many import launch
from tests.runs import CARRY, SPARSE, own_folder, restored  # noqa: F401 - fixtures
from tests.test_processes import divided_run

pytestmark = pytest.mark.faults
STEPS = 20
COMMON = ("runtime.shard=full", "batch.streams=4", "model.head_zero_init=false", f"budget.steps={STEPS}", *CARRY)


def words_of(variant: str) -> tuple[str, ...]:
    sizes = (yaml.safe_load((CONF / "variant" / f"{variant}.yaml").read_text()).get("small") or {}).get("model") or {}
    return (f"variant={variant}", *small(variant), *(f"model.{key}={value}" for key, value in sizes.items()))


CASES = {path.stem: (*words_of(path.stem), "optim=adamw") for path in sorted((CONF / "variant").glob("*.yaml"))}
CASES |= {
    "relative positions": ("variant=mhsa", "position=relative", "model.cache=hidden", "optim=adamw", "optim.clip=0.1"),
    "accumulated": ("variant=mhsa", "batch.accumulate=2", "runtime.checkpoint=layers", "optim=adamw"),
    "sparse rows": SPARSE,
    "adagrad": ("variant=mhsa", "optim=adagrad", "optim.lr=0.003", "optim.schedule.warmup_steps=0"),
    "muon": ("variant=mhsa", "optim=muon", "optim.clip=0.1"),
    "tied": ("variant=mhsa", "model.tied=true", "optim=adamw"),
    "odd": ("variant=mhsa", "model.d_model=20", "model.heads=5", "optim=adamw"),
}


def trained(processes: ProcessGroup, words: tuple[str, ...]) -> dict:
    """Bits of all steps and the weights at the end; again from the content in the middle."""

    def bits(run: TrainState, until: int) -> list[float]:
        each = []
        while run.spent.steps < until:
            run.step()
            each.append(run.train_row()["bits_per_byte"])
        return each

    try:
        run = divided_run(processes, *COMMON, *words, precision="float64")
        first = bits(run, STEPS // 2)
        middle = copy.deepcopy(gathered(run.content(rows=0)))
        whole = first + bits(run, STEPS), gathered(run.model.state_dict())
        run = divided_run(processes, *COMMON, *words, precision="float64")
        run.restore(middle)
        return {"whole": whole, "again": (first + bits(run, STEPS), gathered(run.model.state_dict()))}
    except ValueError as error:
        return {"refused": str(error)}


def trained_by_all(words: tuple[str, ...]) -> dict:
    with joined() as processes:
        return trained(processes, words)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name, here):
    first, second = launch(trained_by_all, CASES[name])
    if "refused" in first:
        assert "processes would see a part" in first["refused"]
        return
    within = 1e-11 if name != "muon" else 1e-5
    bits, weights = trained(SINGLE, CASES[name])["whole"]
    assert first["whole"][0] == second["whole"][0] == first["again"][0] == pytest.approx(bits, abs=within)
    torch.testing.assert_close(first["again"][1], first["whole"][1], rtol=0, atol=0)
    torch.testing.assert_close(first["whole"][1], weights, rtol=0, atol=within)
