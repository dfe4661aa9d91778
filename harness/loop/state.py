"""TrainState: what training is at a moment, and what a checkpoint of it has."""

import math
import random
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from harness.count.memory import Peak
from harness.data.streams import shard_slice
from harness.device.full_tensors import full_tensors, is_dtensor
from harness.device.processes import ProcessGroup
from harness.device.runtime import Runtime
from harness.device.seeds import seed_rank
from harness.model import LanguageModel
from harness.optim.budget import Spent
from harness.optim.optimizers import Optimizers
from harness.plan.build import Plan
from variants.contract import State, cat_streams, map_state

ONLY_OF_RUN = ("nats", "steps", "best_bits", "rows", "sha256", "wandb_id")
"""Fields of ``TrainState`` that only the run itself continues, not a longer training."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """The last validation, or the beginning of training: the ``bytes`` and the ``fraction`` of the
    budget that were spent by then, and ``size``, the pairs of its sample."""

    bytes: int = 0
    fraction: float = 0.0
    size: int | None = None


@dataclass(kw_only=True)
class TrainState:
    """What training is at a moment."""

    model: LanguageModel
    optimizers: Optimizers
    carried: State = None  # of this process's streams after the last step
    spent: Spent = Spent()  # by all processes; seconds are the main process's, without compiling
    last_step: Spent  # of the last step alone, or of the first before it is made
    compile_seconds: float = 0.0
    nats: float = 0.0  # since the last train row: the sum of the mean nats per byte of the steps
    steps: int = 0  # and their number
    validated: Validated = Validated()
    best_bits: float = math.inf  # lowest of all validations so far
    peak: Peak = Peak(None, approximate=False)  # of training
    rows: int = 0  # of the record, when the checkpoint was saved
    sha256: str | None = None  # of these rows
    wandb_id: str | None = None

    def to_checkpoint(self, processes: ProcessGroup) -> dict:
        """Return what an exact resume needs, as plain values and tensors. All processes must call
        this, and the main one saves it."""
        content = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "state": tree_map_only(Tensor, Tensor.cpu, self.carried),  # not the storage of a view
            "spent": vars(self.spent),
            "last": vars(self.last_step),
            "compile_seconds": self.compile_seconds,
            "validated": vars(self.validated),
            "peak": tuple(self.peak),
            "random": random_state(),
            **{name: getattr(self, name) for name in ONLY_OF_RUN},
        }
        if processes.world_size == 1:
            return content
        content["state"] = cat_streams(processes.all_gather(content["state"]))
        content["random"], *content["random_others"] = processes.all_gather(content["random"])
        return full_tensors(content, keep=processes.is_main)

    def load_checkpoint(
        self,
        content: dict,
        plan: Plan,
        runtime: Runtime,
        *,
        restore: Literal["weights", "everything", "run"],
    ) -> None:
        """Continue from the ``content`` of a checkpoint, which another number of processes may have
        saved; then processes draw random numbers from the plan's seed. ``restore`` takes weights
        only, everything that a longer training needs, or what the run itself needs. ValueError,
        beginning with ``init_from.run``, for another model."""
        processes = runtime.processes
        load_weights(self.model, content["model"], source=f"init_from.run={plan.init_from.run}")
        if restore == "weights":
            return
        self.optimizers.load_state_dict(content["optimizers"])

        def share(tensor: Tensor) -> Tensor:
            return tensor[shard_slice(len(tensor), processes.shard)].to(runtime.device)

        self.carried = map_state(share, content["state"])
        self.spent = Spent(**content["spent"])
        self.last_step = Spent(**content["last"])
        self.compile_seconds = content["compile_seconds"]
        random_states = [content["random"], *content.get("random_others", ())]
        if len(random_states) == processes.world_size:
            set_random_state(random_states[processes.rank])
        else:
            seed_rank(plan.seed, step=self.spent.steps, rank=processes.rank)
        if restore == "run":
            self.peak = Peak(*content.get("peak", self.peak))  # older checkpoints have none
            self.validated = Validated(**content["validated"])
            for name in ONLY_OF_RUN:
                setattr(self, name, content[name])


def load_weights(model: LanguageModel, weights: dict[str, Tensor], *, source: str) -> None:
    """Load ``weights`` into a model. ValueError, beginning with ``source``, if names, shapes or
    dtypes differ."""
    state = model.state_dict()
    expected, actual = (
        {name: f"{tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in each.items()}
        for each in (state, weights)
    )
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"{source}: its model differs, {name} is {actual.get(name, 'absent')}, and this "
                f"run needs {expected.get(name, 'none')}; allowed is a run of the same variant "
                "and sizes"
            )
    if any(map(is_dtensor, state.values())):
        from harness.device.distributed_parameters import distribute_like  # late: slow to import

        weights = {name: distribute_like(state[name], tensor) for name, tensor in weights.items()}
    model.load_state_dict(weights)
    model.project_()


def random_state() -> dict[str, object]:
    """Return the state of each generator of this process; None for an unused GPU, where reading
    the state would allocate memory."""
    name, keys, *rest = numpy.random.get_state()
    accelerator = None
    if torch.cuda.is_initialized():
        accelerator = torch.cuda.get_rng_state()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": accelerator,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }


def set_random_state(state: dict[str, object]) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state.get("accelerator") is not None:
        torch.cuda.set_rng_state(state["accelerator"])
    random.setstate(state["python"])
    numpy.random.set_state(tuple(state["numpy"]))
