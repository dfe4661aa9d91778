"""Whether this process was started alone, or by ``torchrun`` as one of several of one command.

Reads the environment only. No torch here: the command line wants to know before anything heavy is imported.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Launch(NamedTuple):
    """What ``torchrun`` says in the environment.

    Attributes:
        rank, world_size: this process among all of the command, and how many there are.
        local_rank, local_world_size: the same on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """The command line's first words, for a command that may be typed again."""
        if self.world_size == 1:
            return ("python",)
        machines = self.world_size // self.local_world_size
        nodes = (f"--nnodes={machines}",) if machines > 1 else ()
        return ("torchrun", *nodes, f"--nproc-per-node={self.local_world_size}")


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process; one that is alone where ``RANK`` and ``WORLD_SIZE`` are not both set.

    ValueError where what is set cannot be: a process that waits for others that were never started waits for minutes.
    """
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return Launch()
    number = _read(environment, "WORLD_SIZE", range(1, sys.maxsize))
    rank = _read(environment, "RANK", range(number))
    local_world_size = _read(environment, "LOCAL_WORLD_SIZE", range(1, number + 1), default=number)
    local_rank = _read(environment, "LOCAL_RANK", range(local_world_size), default=rank % local_world_size)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if number > 1 and not environment.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={number}: {' and '.join(missing)} must be set, too, where the processes meet; torchrun sets "
            "them all, and one process alone has no WORLD_SIZE in its environment"
        )
    return Launch(rank, number, local_rank, local_world_size)


def _read(environment: Mapping[str, str], name: str, allowed: range, *, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        found = int(text)
    except ValueError:
        found = None
    if found is None or found not in allowed:
        most = "on" if allowed.stop == sys.maxsize else f"to {allowed.stop - 1}"
        raise ValueError(
            f"{name}={text} in the environment: allowed are whole numbers from {allowed.start} {most}, as torchrun sets "
            "them; one process alone has neither RANK nor WORLD_SIZE there"
        )
    return found


def is_later() -> bool:
    """Whether this process is not the first of several; where the environment is nonsense, nobody else may speak."""
    try:
        return read_launch().rank > 0
    except ValueError:
        return False


def check_launch(arguments: Sequence[str], *, many: bool, launch: Launch | None = None) -> None:
    """ValueError where several processes were started for what is done by one.

    Args:
        arguments: of the command line, without the script.
        many: whether the command can be done by several processes together.
        launch: None for that of this process.
    """
    launch = launch or read_launch()
    if launch.world_size == 1:
        return
    if not many:
        raise ValueError(
            f"torchrun with {launch.world_size} processes: bench measures in one; allowed is python -m bench.VERB"
        )
    flags = [word for word in arguments if word == "-m" or (len(word) > 3 and "--multirun".startswith(word))]
    flags += [word for word in arguments if word.startswith("sweep=") and word != "sweep=null"]
    if flags or "hydra.mode=MULTIRUN" in arguments:
        raise ValueError(
            f"{(flags or ['hydra.mode=MULTIRUN'])[0]}: a sweep starts jobs of its own, and torchrun started "
            f"{launch.world_size} processes of it; allowed are python train.py -m, or torchrun with one job"
        )
