"""Seeds of a process: the generators of torch, Python and NumPy are seeded in one call."""

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
    """Seed all generators differently for each step and rank, so that processes draw different
    dropout masks."""
    seed(int(integer_hash(number, step, rank)[0]) >> 1)
