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
from harness.device.seeds import seed_rank
from harness.model import LanguageModel
from harness.optim.budget import Spent
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state


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
            "nats": self.nats,
            "steps": self.steps,
            "validated": vars(self.validated),
            "best_bits": self.best_bits,
            "peak": tuple(self.peak),
            "rows": self.rows,
            "sha256": self.sha256,
            "wandb_id": self.wandb_id,
            "random": random_state(),
        }
        if processes.world_size == 1:
            return content
        content["state"] = cat_streams(processes.all_gather(content["state"]))
        content["random"], *content["random_others"] = processes.all_gather(content["random"])
        return full_tensors(content, keep=processes.is_main)

    def load_checkpoint(
        self,
        content: dict,
        processes: ProcessGroup,
        *,
        restore: Literal["weights", "everything", "run"],
        source: str,
        device: torch.device,
        seed: int,
    ) -> None:
        """Continue from the ``content`` of a checkpoint, which another number of processes may have
        saved; then processes draw random numbers from ``seed``. ``restore`` takes weights only,
        everything that a longer training needs, or what the run itself needs. ValueError,
        beginning with ``source``, for another model."""
        load_weights(self.model, content["model"], source=source)
        if restore == "weights":
            return
        self.optimizers.load_state_dict(content["optimizers"])

        def share(tensor: Tensor) -> Tensor:
            return tensor[shard_slice(len(tensor), processes.shard)].to(device)

        self.carried = map_state(share, content["state"])
        self.spent = Spent(**content["spent"])
        self.last_step = Spent(**content["last"])
        self.compile_seconds = content["compile_seconds"]
        random_states = [content["random"], *content.get("random_others", ())]
        if len(random_states) == processes.world_size:
            set_random_state(random_states[processes.rank])
        else:
            seed_rank(seed, step=self.spent.steps, rank=processes.rank)
        if restore == "run":
            self.peak = Peak(*content.get("peak", self.peak))  # older checkpoints have none
            self.validated = Validated(**content["validated"])
            for name in ("nats", "steps", "best_bits", "rows", "sha256", "wandb_id"):
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
