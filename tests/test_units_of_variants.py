"""Units of every variant, replicated and divided: the steps of one process, resumed by as many and by others."""

import copy

import pytest
import yaml

from harness.device.processes import SINGLE, ProcessGroup, joined
from harness.device.units import gathered
from harness.loop.trainer import Trainer
from tests.composing import CONF, small
from tests.many import launch
from tests.runs import CARRY, SPARSE, own_folder, restored  # noqa: F401 - fixtures
from tests.test_processes import divided_run

pytestmark = pytest.mark.faults
STEPS = 30
COMMON = ("batch.streams=12", "model.head_zero_init=false", f"budget.steps={STEPS}", *CARRY)
SHARDS = ("none", "full")


def words_of(variant: str) -> tuple[str, ...]:
    sizes = (yaml.safe_load((CONF / "variant" / f"{variant}.yaml").read_text()).get("small") or {}).get("model") or {}
    return (f"variant={variant}", *small(variant), *(f"model.{key}={value}" for key, value in sizes.items()))


CASES = {path.stem: (*words_of(path.stem), "optim=adamw") for path in sorted((CONF / "variant").glob("*.yaml"))}
CASES["compressed_top_k"] += (
    "seed=1",
)  # with 0, rounding decides in the 29th step which of two blocks has the higher score
CASES |= {
    "relative positions": ("variant=mhsa", "position=relative", "model.cache=hidden", "optim=adamw", "optim.clip=0.1"),
    "accumulated": ("variant=mhsa", "batch.accumulate=3", "runtime.checkpoint=layers", "optim=adamw"),
    "sparse rows": SPARSE,
    "adagrad": ("variant=mhsa", "optim=adagrad", "optim.lr=0.003", "optim.schedule.warmup_steps=0"),
    "muon": ("variant=mhsa", "optim=muon", "optim.clip=0.1"),
    "tied": ("variant=mhsa", "model.tied=true", "optim=adamw"),
    "odd": ("variant=mhsa", "model.d_model=20", "model.heads=5", "optim=adamw"),
}


def made(processes: ProcessGroup, words: tuple[str, ...], shard: str) -> Trainer:
    return divided_run(processes, *COMMON, *words, f"runtime.shard={shard}", precision="float64")


def bits(run: Trainer, until: int) -> list[float]:
    found = []
    while run.spent.steps < until:
        run.step()
        found.append(run.train_row()["bits_per_byte"])
    return found


def trained(processes: ProcessGroup, words: tuple[str, ...], shard: str, begun: dict | None = None) -> dict:
    """Bits of all steps, the weights at the end, the content in the middle, and what came of that; and of ``begun``."""
    try:
        run = made(processes, words, shard)
    except ValueError as error:
        return {"refused": str(error)}
    first = bits(run, STEPS // 2)
    middle = copy.deepcopy(gathered(run.content()))
    found = {"bits": first + bits(run, STEPS), "weights": gathered(run.model.state_dict()), "middle": middle}
    for name, content in {"again": middle, "other": begun}.items():
        if content is not None:
            run = made(processes, words, shard)
            run.restore(copy.deepcopy(content))  # optimizers go on in the tensors that they are given
            found[name] = {"bits": bits(run, STEPS), "weights": gathered(run.model.state_dict())}
    return found


def all_cases(names: list[str], begun: dict) -> dict[tuple[str, str], dict]:
    with joined() as processes:
        found = {
            (name, shard): trained(processes, CASES[name], shard, begun.get(name)) for name in names for shard in SHARDS
        }
        return found if processes.is_main else {key: one.get("bits") for key, one in found.items()}


def farthest(found: dict, expected: dict) -> float:
    return max((found[name] - tensor).abs().max().item() for name, tensor in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(name, here):
    one = trained(SINGLE, CASES[name], "full")
    begun, said = {name: one.get("middle")}, []
    for number in (2, 3, 4):
        first, *others = launch(all_cases, [name], begun, number=number)
        for shard in SHARDS:
            found = first[name, shard]
            if "refused" in found:
                said.append(found["refused"])
                continue
            assert all(found["bits"] == other[name, shard] for other in others)
            again, other = found["again"], found["other"]
            assert again["bits"] == found["bits"][STEPS // 2 :], "resumed by as many"
            assert farthest(again["weights"], found["weights"]) == 0
            allowed = 1e-12 if name != "muon" else 1e-6
            assert other["bits"] == pytest.approx(one["bits"][STEPS // 2 :], abs=allowed), "resumed by others"
            assert found["bits"] == pytest.approx(one["bits"], abs=allowed)
            apart = farthest(found["weights"], one["weights"])
            furthest = max(abs(a - b) for a, b in zip(found["bits"], one["bits"], strict=True))
            print(f"{name}, {number} processes, {shard}: bits within {furthest:.1e}, weights within {apart:.1e}")
            assert apart < 10 * allowed
        begun = {name: first[name, "full"].get("middle")}
    assert len(said) in (0, 6) and all("processes would see a part" in reason for reason in said)
