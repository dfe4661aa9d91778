"""Exchange: what the processes of a run send each other in a step, counted from the collective operations themselves.

They are issued by the trainer's very step in a group of torch's that does not communicate, so that an engine needs no formula
here. What a collective of S bytes sends from each of N processes is that of a ring, as in NCCL and gloo:

    all-reduce 2 S (N - 1) / N, all-gather S (N - 1) of S own bytes, reduce-scatter and all-to-all S (N - 1) / N

but gloo (torch 2.13) does a reduce-scatter as an all-reduce. A ring through several machines enters and leaves each of them
over all of its network cards at once, so that it is as fast as the slower of a device's links and a machine's cards.

Torch's fake group is private: it is imported here alone, tested with torch 2.13.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.count.formulas import tensors_of
from harness.count.memory import tensor_bytes
from harness.device import spread
from harness.device.processes import SINGLE, ProcessGroup
from harness.loop import kept_whole


class Collective(NamedTuple):
    """A collective operation: its name in torch, and the bytes of what each process gives."""

    name: str
    bytes: int

    def sent_bytes(self, processes: int, *, kind: str) -> float:
        """By each process, between devices of a ``kind``, which ``cpu`` has gloo and any other has NCCL."""
        others = processes - 1
        reduced = 2 * others / processes
        share = {"all_reduce": reduced, "all_gather": others, "reduce_scatter": reduced if kind == "cpu" else None}
        return self.bytes * (share.get(self.name) or others / processes)


OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::wait_tensor": None,
}
"""Of torch: the collective operation that each is, and at which of its arguments is what a process gives."""


def collective(operator: torch._ops.OpOverload, arguments: Sequence) -> Collective | None:
    """What an operator exchanges; None where it is no collective operation."""
    if operator.namespace not in ("c10d", "_c10d_functional") or OPERATORS[operator._schema.name] is None:
        return None
    name, place = OPERATORS[operator._schema.name]
    return Collective(name, tensor_bytes(tensors_of(arguments[place])))


def sent_bytes(sent: Counter[Collective], processes: int, *, kind: str) -> dict[str, int]:
    """By each process in a step, for each kind of collective operation."""
    found: Counter[str] = Counter()
    for one, calls in sent.items():
        found[one.name] += calls * one.sent_bytes(processes, kind=kind)
    return {name: round(size) for name, size in found.items()}


@dataclass(frozen=True, kw_only=True)
class Links:
    """What connects the devices of a run, in each direction.

    Attributes:
        per_machine: devices.
        bytes_per_s: from a device to others of its machine.
        network_bytes_per_s: from a machine to others, for each of its devices.
    """

    per_machine: int
    bytes_per_s: float
    network_bytes_per_s: float

    def seconds(self, sent: Mapping[str, int], processes: int) -> float:
        """The least time of an exchange, latencies not counted."""
        machine = self.per_machine * self.network_bytes_per_s
        ring = self.bytes_per_s if processes <= self.per_machine else min(self.bytes_per_s, machine)
        away = max(0, processes - self.per_machine) / max(1, processes - 1)
        to_each = max((1 - away) / self.bytes_per_s, away / self.network_bytes_per_s)
        return sum(size * (to_each if name == "all_to_all" else 1 / ring) for name, size in sent.items())


class PretendedGroup(ProcessGroup):
    """Processes that all do what this one does: numbers are known, though tensors have no data."""

    def all_gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """This process's, of each."""
        self.gather_like(torch.empty(len(numbers), dtype=torch.float64))
        return [list(numbers)] * self.world_size

    def gather_like(self, own: Tensor) -> None:
        """The exchange of such tensors, without what comes of it."""
        dist.all_gather([torch.empty_like(own) for _ in range(self.world_size)], own)


@contextmanager
def pretended(processes: int) -> Iterator[ProcessGroup]:
    """The first of so many processes, alone."""
    if processes == 1:
        yield SINGLE
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))  # reads values, which fake tensors have not
    try:
        with patch.object(spread, "init_device_mesh", lambda *_: mesh):
            yield PretendedGroup(rank=0, world_size=processes, local_rank=0, local_world_size=processes)
    finally:
        dist.destroy_process_group()


@contextmanager
def reads_known(model: nn.Module) -> Iterator[None]:
    """What a model reads outside of its forward pass is found now, while its parameters have values, and known later."""
    own = {parameter: name for name, parameter in model.named_parameters()}
    names = [own[parameter] for parameter in kept_whole._read_outside_forward(model)]
    with patch.object(kept_whole, "_read_outside_forward", lambda model: {model.get_parameter(name) for name in names}):
        yield
