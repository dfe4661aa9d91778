"""How this process was started: alone, or by ``torchrun`` as one of several of one command. Reads the environment only.

No torch here: the command line wants to know before anything heavy is imported.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Launch(NamedTuple):
    """What ``torchrun`` says in the environment.

    Attributes:
        rank, number: this process among all of the command, and how many there are.
        local_rank, local_number: the same on this machine.
    """

    rank: int = 0
    number: int = 1
    local_rank: int = 0
    local_number: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """The command line's first words, for a command that may be typed again."""
        if self.number == 1:
            return ("python",)
        machines = self.number // self.local_number
        nodes = (f"--nnodes={machines}",) if machines > 1 else ()
        return ("torchrun", *nodes, f"--nproc-per-node={self.local_number}")


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process; one that is alone where ``RANK`` and ``WORLD_SIZE`` are not both set."""
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return Launch()
    rank, number = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_rank = int(environment.get("LOCAL_RANK", rank))
    return Launch(rank, number, local_rank, int(environment.get("LOCAL_WORLD_SIZE", number)))


def check_launch(arguments: Sequence[str], *, many: bool, launch: Launch | None = None) -> None:
    """ValueError where several processes were started for what is done by one.

    Args:
        arguments: of the command line, without the script.
        many: whether the command can be done by several processes together.
        launch: None for that of this process.
    """
    launch = launch or read_launch()
    if launch.number == 1:
        return
    if not many:
        raise ValueError(
            f"torchrun with {launch.number} processes: bench measures in one; allowed is python -m bench.VERB"
        )
    flags = [word for word in arguments if word == "-m" or (len(word) > 3 and "--multirun".startswith(word))]
    flags += [word for word in arguments if word.startswith("sweep=") and word != "sweep=null"]
    if flags or "hydra.mode=MULTIRUN" in arguments:
        raise ValueError(
            f"{(flags or ['hydra.mode=MULTIRUN'])[0]}: a sweep starts jobs of its own, and torchrun started "
            f"{launch.number} processes of it; allowed are python train.py -m, or torchrun with one job"
        )
