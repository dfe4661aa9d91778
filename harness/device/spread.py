"""Spreading: a model in units, whose gradients torch averages among processes during the backward pass.

A unit is a residual sublayer; the last unit has the rest, such as embedding and head. With ``runtime.shard=none`` each
process has all parameters (torch's ``replicate``); with ``full`` some rows of each, of its gradient and of its
optimizer's state (``fully_shard``), and some columns of tables. Parameters FSDP cannot shard stay plain tensors for
``ProcessGroup.average_gradients_``.

torch makes ``DTensor`` of a unit's parameters. The optimizer's plain parameter becomes this process's part of it, and
gets its averaged gradient. Importing this module takes most of a second.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate  # not public yet; tested with torch 2.13
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial

from harness.device.processes import ProcessGroup
from harness.device.sharded_tables import ShardedTables
from harness.device.units import Units, gathered, is_divided


class SpreadUnits(Units):
    """The same for one of several processes. All make it, from models with equal weights.

    Args:
        units: modules of the model; the model itself is the last one.
        whole: the parameters that are in no unit.
        tables: modules, with names of what ``full`` divides by columns.
        shard: ``none`` or ``full``.
        device: where the model goes, which before may be on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        processes: ProcessGroup,
        units: Iterable[nn.Module],
        *,
        whole: Set[nn.Parameter],
        tables: Sequence[tuple[nn.Module, str]],
        shard: str,
        device: torch.device,
    ):
        super().__init__(model)
        self._model, self._processes = model, processes
        processes.tables = ShardedTables(tables if shard == "full" else [], processes)
        if self.parameters[0].device.type != device.type:
            model.to(device)
        self._mesh = init_device_mesh(self.parameters[0].device.type, (processes.world_size,))
        engine, unmanaged = fully_shard if shard == "full" else replicate, whole | {*processes.tables.tables}
        names = {parameter: name for name, parameter in model.named_parameters() if parameter not in unmanaged}
        for unit in (*units, model):
            engine(unit, mesh=self._mesh, ignored_params=unmanaged)
        model.set_reduce_scatter_unused_params(True)  # a step may skip a parameter in one process alone
        for parameter, name in names.items():
            managed = model.get_parameter(name)
            parameter.data = managed.detach().to_local()  # the same memory
            managed.register_post_accumulate_grad_hook(partial(_hand_over, parameter))
            if shard == "full":
                self.parts[parameter] = managed
        self.parts |= processes.tables.put_into_model(self._mesh)
        self.whole = [p for p in self.parameters if p not in names and p not in self.parts]

    def begin_part(self, *, last: bool) -> None:
        """Gradients are sent once a step; sharded ones in each part."""
        self._model.set_requires_gradient_sync(last or bool(self.parts))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        units = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        self._processes.all_gather(None, patient=True)
        if self.parts:
            self._model.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                if self.parts and unit is not self._model:
                    unit.set_reshard_after_forward(True, recurse=False)

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This process's part of a tensor of the parameter's whole shape; any other tensor as it is."""
        managed = self.parts.get(parameter)
        if managed is None or whole.shape != managed.shape:
            return whole
        return divided_like(managed, whole).to_local().clone()

    def whole_of(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Its opposite: the whole, divided as it is."""
        managed = self.parts.get(parameter)
        return part if managed is None or part.shape != parameter.shape else _divided(part, managed)

    def total(self, tensor: Tensor, *, of: str = "sum") -> Tensor:
        return DTensor.from_local(tensor, self._mesh, [Partial(of)]).full_tensor() if self.parts else tensor


def divided_like(held: Tensor, tensor: Tensor) -> Tensor:
    """A tensor, whole or divided, divided like ``held``."""
    if not is_divided(held):
        return gathered(tensor)
    if is_divided(tensor):
        return tensor.redistribute(placements=held.placements)
    (chunk,) = held.__create_chunk_list__()  # cut first: the device may lack room for the whole
    part = tensor[tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))]
    return _divided(part.to(held.device), held)


def _divided(part: Tensor, like: DTensor) -> DTensor:
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _hand_over(parameter: nn.Parameter, managed: DTensor) -> None:
    """Move the averaged gradient to the optimizer's parameter."""
    gradient, managed.grad = managed.grad.to_local(), None
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
