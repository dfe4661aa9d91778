"""Tables sharded by columns: with ``runtime.shard=full`` each process holds some columns of all rows of each table.

    1. gather the row indices and weights of all bytes of all processes
    2. sum this process's columns of these rows, for all bytes
    3. exchange the sums, so that each process gets all columns for its bytes; gradients return the same way

Traffic grows with a step's bytes, not with the table. FSDP refuses sparse gradients and gathers whole tables."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness.device.processes import ProcessGroup

FINISHED = -1  # sent in place of a table's index by a process that has no more reads


class ShardedTables:
    """The tables of a model; ``tables`` are this process's columns. ``attributes`` has, for each table of a module, the
    module and the table's name. ValueError if a table's columns cannot be divided among the processes."""

    def __init__(self, attributes: Sequence[tuple[nn.Module, str]], processes: ProcessGroup):
        self._attributes, self._processes = attributes, processes
        self.tables = list(dict.fromkeys(getattr(module, name) for module, name in attributes))
        self._full_shapes = [table.shape for table in self.tables]
        self._indices: dict[Tensor, int] = {}
        self._sum_local_rows = next((module.sum_rows for module, _ in attributes), None)
        for table, (_, width) in zip(self.tables, self._full_shapes, strict=True):
            columns = table.data.chunk(processes.world_size, dim=1)
            if len(columns) < processes.world_size:
                raise ValueError(
                    f"runtime.shard=full: a table of {width} columns cannot be divided among {processes.world_size} "
                    "processes; allowed are fewer processes, or runtime.shard=none"
                )
            table.data = columns[processes.rank].clone(memory_format=torch.contiguous_format)

    def install(self, mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
        """Replace tables by ``DTensor``, and their modules' ``sum_rows`` by this object's. Return DTensors by table."""
        dtensors = {}
        for table, shape in zip(self.tables, self._full_shapes, strict=True):
            full = DTensor.from_local(table.data, mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
            dtensors[table] = nn.Parameter(full, requires_grad=False)
        for module, name in self._attributes:
            setattr(module, name, dtensors[getattr(module, name)])
            module.sum_rows = self.sum_rows
        self._indices = {dtensor: index for index, dtensor in enumerate(dtensors.values())}
        return dtensors

    @torch.compiler.disable
    def sum_rows(self, values: Tensor, slots: Tensor, weights: Tensor, *, sparse: bool) -> Tensor:
        """Return sums of rows, as ``variants/kernels/table.py`` does. While one process calls it, all others must call
        it or ``serve_reads``; their numbers of bytes may differ."""
        index = self._indices[values]
        readers = self._processes.all_gather((index, slots.shape[1], len(slots)))
        return self._sum_rows(index, slots, weights, [n_bytes for *_, n_bytes in readers], sparse=sparse)

    @torch.no_grad()
    def serve_reads(self) -> None:
        """Take part in the reads of other processes, with no reads of its own, until all processes call this."""
        while self.tables:
            readers = self._processes.all_gather((FINISHED, 0, 0))
            index, n_rows, _ = max(readers)
            if index == FINISHED:
                return
            slots = torch.empty(0, n_rows, dtype=torch.int64, device=self.tables[index].device)
            self._sum_rows(index, slots, slots.float(), [n_bytes for *_, n_bytes in readers], sparse=False)

    def _sum_rows(self, index: int, slots: Tensor, weights: Tensor, counts: Sequence[int], *, sparse: bool) -> Tensor:
        """Return sums ``[n, columns]`` for ``slots`` and ``weights`` ``[n, n_rows]``; ``counts`` has n by process."""
        table, processes = self.tables[index], self._processes
        n_slots, width = self._full_shapes[index]
        world_size, n_bytes, n_rows = processes.world_size, counts[processes.rank], weights.shape[1]
        slots = processes.concatenate(slots.to(torch.int32 if n_slots < 2**31 else torch.int64), lengths=counts)
        sent, received = [weights.numel()] * world_size, [count * n_rows for count in counts]
        copies = weights.to(table.dtype).flatten().repeat(world_size)
        weights = _Exchange.apply(copies, sent, received, processes, world_size)
        sums = self._sum_local_rows(table, slots, weights.view(len(slots), n_rows), sparse=sparse)
        widths = [len(columns) for columns in torch.arange(width).chunk(world_size)]
        sent, received = [count * sums.shape[1] for count in counts], [n_bytes * columns for columns in widths]
        blocks = _Exchange.apply(sums.flatten(), sent, received, processes, 1 / world_size).split(received)
        return torch.cat([block.view(n_bytes, columns) for block, columns in zip(blocks, widths, strict=True)], dim=1)


class _Exchange(torch.autograd.Function):
    """``ProcessGroup.exchange`` with gradients, which return the same way and are multiplied by ``scale``. Tables get
    the gradient of the mean loss of all processes, and weights get that of the loss of their own process."""

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
