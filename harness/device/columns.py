"""Columns: tables that no single device need hold. With ``runtime.shard=full`` each process has some columns of all rows.

    rows that all bytes of all processes read, and their weights    gathered
    this process's columns of all of these sums                     computed here, as one process does
    whole sums of this process's bytes                              exchanged, and their gradients back

so what is sent grows with the bytes of a step and not with the table. The gradient of a process's columns is complete with its
backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness.device.processes import ProcessGroup

DONE = -1
"""In place of a table's number."""


class Columns:
    """The tables of a model, which this cuts: each parameter keeps this process's columns. ValueError where one has too few.

    Args:
        places: modules with the names of their tables, which they read by their ``sum_rows``.

    Attributes:
        tables: as the optimizers know them.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]], processes: ProcessGroup):
        self._places = places
        self.tables = list(dict.fromkeys(getattr(module, name) for module, name in places))
        self._shapes = [table.shape for table in self.tables]
        self._read: Callable | None = next((module.sum_rows for module, _ in places), None)
        self._numbers: dict[Tensor, int] = {}
        self._processes, self._apart = processes, False
        for table, shape in zip(self.tables, self._shapes, strict=True):
            columns = table.data.chunk(processes.world_size, dim=1)
            if len(columns) < processes.world_size:
                raise ValueError(
                    f"runtime.shard=full: a table of {shape[1]} columns cannot be divided among {processes.world_size} "
                    "processes; allowed are fewer, or runtime.shard=none"
                )
            table.data = columns[processes.rank].clone(memory_format=torch.contiguous_format)

    def put_into_model(self, mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
        """Have the model know the whole of each table, as torch does, and read it from here; these, by table."""
        managed = {}
        for table, shape in zip(self.tables, self._shapes, strict=True):
            whole = DTensor.from_local(table.data, mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
            managed[table] = nn.Parameter(whole, requires_grad=False)
        for module, name in self._places:
            setattr(module, name, managed[getattr(module, name)])
            module.sum_rows = self.sum_rows
        self._numbers = {whole: number for number, whole in enumerate(managed.values())}
        return managed

    @torch.compiler.disable
    def sum_rows(self, values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
        """As the contract has it; all processes call it, with any numbers of bytes."""
        number = self._numbers[values]
        if self._apart:
            self._meet(number, slots.shape[1])
        return self._summed(number, slots, weights, sparse=sparse)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """``ProcessGroup.apart``."""
        self._apart = bool(self.tables)
        try:
            yield
            while self._apart and (reading := max(self._meet(DONE, 0))) != (DONE, 0):
                self._read_nothing(*reading)
        finally:
            self._apart = False

    @torch.no_grad()
    def _read_nothing(self, number: int, reads: int) -> None:
        slots = torch.empty(0, reads, dtype=torch.int64, device=self.tables[number].device)
        self._summed(number, slots, slots.to(torch.float32), sparse=False)

    def _meet(self, number: int, reads: int) -> list[tuple[int, int]]:
        """Of all processes: the table that each reads now, and how many rows a byte."""
        return [(int(n), int(r)) for n, r in self._processes.all_gather_numbers([number, reads])]

    def _summed(self, number: int, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
        table, (rows, width) = self.tables[number], self._shapes[number]
        index = torch.int32 if rows < 2**31 else torch.int64
        gathered = self._processes.gather(slots.to(index))
        bytes_of = [len(own) for own in gathered]
        weights = _Gathered.apply(weights.to(table.dtype), bytes_of, self._processes)
        sums = self._read(table, torch.cat(gathered), weights, sparse=sparse)
        widths = [len(columns) for columns in torch.arange(width).chunk(self._processes.world_size)]
        return _Exchanged.apply(sums, bytes_of, widths, self._processes)


class _Gathered(torch.autograd.Function):
    """``[n, r]`` of each process to ``[all n, r]`` in all, of which each makes a share of the result."""

    @staticmethod
    def forward(ctx, own: Tensor, bytes_of: Sequence[int], processes: ProcessGroup) -> Tensor:
        ctx.bytes_of, ctx.processes, ctx.shape = bytes_of, processes, own.shape
        return torch.cat(processes.gather(own, lengths=bytes_of))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares = ctx.processes.exchange(gradient.split(ctx.bytes_of), [ctx.shape] * len(ctx.bytes_of))
        return torch.stack(shares).sum(0).mul_(len(shares)), None, None


class _Exchanged(torch.autograd.Function):
    """Own columns of all bytes, ``[all n, own width]``, to all columns of own bytes, ``[n, width]``.

    A table's gradient is that of the mean of all processes' losses, so from here on gradients are divided by their number; those
    of weights, which are of this process's loss, are multiplied again.
    """

    @staticmethod
    def forward(ctx, sums: Tensor, bytes_of: Sequence[int], widths: Sequence[int], processes: ProcessGroup) -> Tensor:
        ctx.bytes_of, ctx.widths, ctx.processes = bytes_of, widths, processes
        own = bytes_of[processes.rank]
        return torch.cat(processes.exchange(sums.split(bytes_of), [(own, width) for width in widths]), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = ctx.widths[ctx.processes.rank]
        shapes = [(number, own) for number in ctx.bytes_of]
        found = torch.cat(ctx.processes.exchange(gradient.split(ctx.widths, dim=1), shapes))
        return found.div_(len(shapes)), None, None, None
