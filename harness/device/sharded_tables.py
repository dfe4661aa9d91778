"""Sharded tables: with ``runtime.shard=full`` each process has some columns of all rows, and no device a whole table.

    rows that all bytes of all processes read, and their weights    gathered
    this process's columns of all of these sums                     computed as by one process
    whole sums of this process's bytes                              exchanged, and their gradients back

Traffic grows with a step's bytes, not with the table. FSDP refuses sparse gradients and gathers whole dense tables.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness.device.processes import ProcessGroup

DONE = -1
"""In place of a table's number."""


class ShardedTables:
    """The ``tables`` of a model, as the optimizers know them, cut to this process's columns; ValueError where one has
    too few. ``places``: modules, and names of tables that their ``sum_rows`` reads."""

    def __init__(self, places: Sequence[tuple[nn.Module, str]], processes: ProcessGroup):
        self._places, self._processes = places, processes
        self.tables = list(dict.fromkeys(getattr(module, name) for module, name in places))
        self._shapes = [table.shape for table in self.tables]
        self._numbers: dict[Tensor, int] = {}
        self._read = next((module.sum_rows for module, _ in places), None)
        for table, (_, width) in zip(self.tables, self._shapes, strict=True):
            columns = table.data.chunk(processes.world_size, dim=1)
            if len(columns) < processes.world_size:
                raise ValueError(
                    f"runtime.shard=full: a table of {width} columns cannot be divided among {processes.world_size} "
                    "processes; allowed are fewer, or runtime.shard=none"
                )
            table.data = columns[processes.rank].clone(memory_format=torch.contiguous_format)

    def put_into_model(self, mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
        """Put a ``DTensor`` in the place of each table, whose sums are read from here; these by table."""
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
        """As in the contract; all processes call it or ``serve``, with any numbers of bytes."""
        number = self._numbers[values]
        readers = self._processes.all_gather((number, slots.shape[1], len(slots)))
        return self._summed(number, slots, weights, [n_bytes for *_, n_bytes in readers], sparse=sparse)

    @torch.no_grad()
    def serve(self) -> None:
        """Take part in the reads of other processes until all call it."""
        while self.tables:
            readers = self._processes.all_gather((DONE, 0, 0))
            number, reads, _ = max(readers)
            if number == DONE:
                return
            slots = torch.empty(0, reads, dtype=torch.int64, device=self.tables[number].device)
            self._summed(number, slots, slots.float(), [n_bytes for *_, n_bytes in readers], sparse=False)

    def _summed(self, number: int, slots: Tensor, weights: Tensor, bytes_of: Sequence[int], *, sparse: bool) -> Tensor:
        table, (rows, width), processes = self.tables[number], self._shapes[number], self._processes
        several, n_bytes, reads = processes.world_size, bytes_of[processes.rank], weights.shape[1]
        slots = processes.gather(slots.to(torch.int32 if rows < 2**31 else torch.int64), lengths=bytes_of)
        sizes = [weights.numel()] * several, [n * reads for n in bytes_of]
        weights = _Exchanged.apply(weights.to(table.dtype).flatten().repeat(several), *sizes, processes, several)
        sums = self._read(table, slots, weights.view(len(slots), reads), sparse=sparse)
        widths = [len(columns) for columns in torch.arange(width).chunk(several)]
        sizes = [n * sums.shape[1] for n in bytes_of], [n_bytes * columns for columns in widths]
        parts = _Exchanged.apply(sums.flatten(), *sizes, processes, 1 / several).split(sizes[1])
        return torch.cat([part.view(n_bytes, columns) for part, columns in zip(parts, widths, strict=True)], dim=1)


class _Exchanged(torch.autograd.Function):
    """``ProcessGroup.exchange``, whose gradients go back the same way, times ``scale``: a table's gradient is that of
    the mean of all processes' losses, and gradients of weights are of this process's loss."""

    @staticmethod
    def forward(
        ctx, flat: Tensor, sent: Sequence[int], received: Sequence[int], processes: ProcessGroup, scale: float
    ) -> Tensor:
        ctx.sizes, ctx.processes, ctx.scale = (received, sent), processes, scale
        return processes.exchange(flat, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.processes.exchange(gradient.contiguous(), *ctx.sizes).mul_(ctx.scale), None, None, None, None
