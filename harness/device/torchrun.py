"""Launch by ``torchrun``. The command line imports this module first, so it does not import
torch."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """This process's rank and the number of processes, in the run and (``local``) on this
    machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """First words of the command line that starts these processes again."""
        if self.world_size == 1:
            return ("python",)
        machines = self.world_size // self.local_world_size
        nodes = ()
        if machines > 1:
            nodes = (f"--nnodes={machines}",)
        return ("torchrun", *nodes, f"--nproc-per-node={self.local_world_size}")


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return this process's launch. ValueError if a variable of torchrun is missing, or a rank
    or size is no number."""
    if not environment.get("RANK") or environment.get("WORLD_SIZE", "") in ("", "1"):
        return Launch()
    texts = {name: environment.get(name, "") for name in (*RANKS, *ADDRESS)}
    if not all(texts[name].isdecimal() for name in RANKS) or not all(texts.values()):
        variables = ", ".join(f"{name}={text}" for name, text in texts.items())
        raise ValueError(
            f"{variables} in the environment: allowed are the variables that torchrun sets, or for "
            "a single process neither RANK nor WORLD_SIZE"
        )
    return Launch(*(int(texts[name]) for name in RANKS))


def is_secondary() -> bool:
    """Return whether this process has a rank above 0, so that it does not print. False if the
    variables cannot be read."""
    try:
        return read_launch().rank > 0
    except ValueError:
        return False


def check_launch(arguments: Sequence[str], *, multiprocess: bool) -> None:
    """Raise ValueError if torchrun started several processes of a sweep, or of a command that is
    not ``multiprocess``."""
    n_processes = read_launch().world_size
    if n_processes == 1:
        return
    if not multiprocess:
        raise ValueError(
            f"torchrun with {n_processes} processes: allowed is python -m bench.COMMAND, in one "
            "process"
        )
    for word in arguments:
        multirun = word in ("-m", "hydra.mode=MULTIRUN") or (
            len(word) > 3 and "--multirun".startswith(word)
        )
        if multirun or (word.startswith("sweep=") and word != "sweep=null"):
            raise ValueError(
                f"{word}: torchrun started {n_processes} processes, and a sweep starts its own "
                "jobs; allowed are python train.py -m, or torchrun without a sweep"
            )
