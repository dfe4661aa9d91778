"""Every variant, sharded between two processes, trains as in one process and resumes bit for
bit, or is refused."""

import copy

import pytest
import torch

from harness.device.full_tensors import full_tensors
from harness.device.processes import SINGLE, ProcessGroup, join_processes
from tests.harness.test_distributed_training import distributed_trainer
from tests.support.rank_processes import launch
from tests.support.small_configs import VARIANT_NAMES, sized
from tests.support.small_runs import CARRY, saved, temporary_cwd  # noqa: F401 - a fixture

pytestmark = pytest.mark.faults
STEPS = 20
COMMON = (
    "runtime.shard=full",
    "batch.streams=4",
    "model.head_zero_init=false",
    f"budget.steps={STEPS}",
    *CARRY,
)

CASES = {name: (*sized(name), "optim=adamw") for name in VARIANT_NAMES}
CASES |= {
    "accumulated": (
        "variant=mhsa",
        "batch.accumulate=2",
        "runtime.checkpoint=layers",
        "optim=adamw",
    ),
    "odd": ("variant=mhsa", "model.d_model=20", "model.heads=5", "model.tied=true", "optim=adamw"),
}


def train_and_resume(processes: ProcessGroup, words: tuple[str, ...]) -> dict:
    """Return scores of all steps and final weights, of a run and of one resumed from its middle, or
    why the run is refused."""
    results, middle, first = {}, None, []
    try:
        for name in ("whole", "resumed"):
            run, bits = distributed_trainer(processes, *COMMON, *words, precision="float64"), []
            if middle:
                run.load_checkpoint(middle)
            while run.state.spent.steps < STEPS:
                run.step()
                bits.append(run.train_row().bits_per_byte)
                if name == "whole" and run.state.spent.steps == STEPS // 2:
                    middle, first = copy.deepcopy(full_tensors(saved(run))), [*bits]
            results[name] = (
                (bits if name == "whole" else first + bits),
                full_tensors(run.model.state_dict()),
            )
    except ValueError as error:
        return {"refused": str(error)}
    return results


def train_in_all_processes(words: tuple[str, ...]) -> dict:
    with join_processes() as processes:
        return train_and_resume(processes, words)


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_variant_trains_as_in_one_process_and_resumes_bit_for_bit(name, cwd):
    first, second = launch(train_in_all_processes, CASES[name])
    if "refused" in first:
        assert "processes sees only a part" in first["refused"]
        return
    bits, weights = train_and_resume(SINGLE, CASES[name])["whole"]
    assert (
        first["whole"][0]
        == second["whole"][0]
        == first["resumed"][0]
        == pytest.approx(bits, abs=1e-11)
    )
    torch.testing.assert_close(first["resumed"][1], first["whole"][1], rtol=0, atol=0)
    torch.testing.assert_close(first["whole"][1], weights, rtol=0, atol=1e-11)
