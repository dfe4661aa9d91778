"""Whether this process is alone or one of ``torchrun``'s. Without torch: the command line asks before slow imports."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PLACE = ("MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """Rank and number of processes of the command, and of this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """The command line's first words, to type the command again."""
        if self.world_size == 1:
            return ("python",)
        machines = self.world_size // self.local_world_size
        nodes = (f"--nnodes={machines}",) if machines > 1 else ()
        return ("torchrun", *nodes, f"--nproc-per-node={self.local_world_size}")


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process, alone where ``RANK`` or ``WORLD_SIZE`` is not set. ValueError where a variable of
    torchrun is missing or no number."""
    if not environment.get("RANK") or environment.get("WORLD_SIZE", "") in ("", "1"):
        return Launch()
    texts = {name: environment.get(name, "") for name in (*RANKS, *PLACE)}
    if not all(texts[name].isdecimal() for name in RANKS) or not all(texts.values()):
        words = ", ".join(f"{name}={text}" for name, text in texts.items())
        alone = "neither RANK nor WORLD_SIZE for one process alone"
        raise ValueError(f"{words} in the environment: allowed is what torchrun sets, or {alone}")
    return Launch(*(int(texts[name]) for name in RANKS))


def is_later() -> bool:
    """Whether this process is not the first of several; False for an unreadable environment: all print then."""
    try:
        return read_launch().rank > 0
    except ValueError:
        return False


def check_launch(arguments: Sequence[str], *, many: bool, launch: Launch | None = None) -> None:
    """ValueError where torchrun started several processes (``launch``, or this one's) for a command that is not for
    ``many``, or whose ``arguments`` are a sweep."""
    number = (launch or read_launch()).world_size
    if number == 1:
        return
    if not many:
        raise ValueError(f"torchrun with {number} processes: bench measures in one; allowed is python -m bench.VERB")
    for word in arguments:
        flag = word == "-m" or (len(word) > 3 and "--multirun".startswith(word)) or word == "hydra.mode=MULTIRUN"
        if flag or (word.startswith("sweep=") and word != "sweep=null"):
            raise ValueError(
                f"{word}: a sweep starts jobs of its own, and torchrun started {number} processes of it; allowed are "
                "python train.py -m, or torchrun with one job"
            )
