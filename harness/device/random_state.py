"""Random state of a process: the generators of torch, Python and NumPy are seeded, saved and restored in one call."""

import random

import numpy
import torch

from harness.hashing import integer_hash


def seed(number: int) -> None:
    """Seed all generators of this process."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)


def seed_rank(number: int, *, step: int, rank: int) -> None:
    """Seed all generators differently for each step and rank, so that processes draw different dropout masks."""
    seed(int(integer_hash(number, step, rank)[0]) >> 1)


def random_state() -> dict[str, object]:
    """Return every generator's state; None for an unused GPU, where reading the state would allocate memory."""
    name, keys, *rest = numpy.random.get_state()
    accelerator = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    state = {"torch": torch.get_rng_state(), "accelerator": accelerator, "python": random.getstate()}
    return state | {"numpy": (name, keys.tolist(), *rest)}


def set_random_state(state: dict[str, object]) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state.get("accelerator") is not None:
        torch.cuda.set_rng_state(state["accelerator"])
    random.setstate(state["python"])
    numpy.random.set_state(tuple(state["numpy"]))
