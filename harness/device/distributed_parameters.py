"""Parameters of a model that several processes train; torch averages gradients during the backward
pass.

Each residual sublayer is one FSDP unit, and the rest of the model, such as embedding and head, is
the last unit. With ``runtime.shard=none`` each process is a replica, with one shard. With
``runtime.shard=full`` it has some rows of each parameter, of its gradient and of its optimizer
state (``fully_shard``). Parameters that FSDP does not take stay plain tensors, whole in each
process; ``ProcessGroup.average_gradients_`` averages their gradients.

torch replaces a unit's parameters by ``DTensor``. The optimizers keep the original parameter
objects, which get the memory of this process's shard and the shard's averaged gradient.
Importing this module takes most of a second."""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial

from harness.device.full_tensors import full_tensors, is_dtensor
from harness.device.output import libraries_on_stderr
from harness.device.processes import ProcessGroup


class DistributedParameters:
    """Parameters of a model as one of several processes has them. Every process makes one, from a
    model with equal weights. The optimizers update ``local_parameters``: each parameter, or this
    process's shard of it, whose ``DTensor`` is in ``dtensors``."""

    def __init__(
        self,
        model: nn.Module,
        processes: ProcessGroup,
        # modules that become FSDP units; the model itself becomes the last one
        units: Iterable[nn.Module],
        *,
        ignored: Set[nn.Parameter],  # parameters that FSDP leaves alone
        shard: str,
    ):
        self.local_parameters = list(model.parameters())
        self.dtensors: dict[nn.Parameter, nn.Parameter] = {}
        self._model = model
        self._processes = processes
        if shard == "full":
            sizes = (processes.world_size,)
            dimensions = None
            options = {}
        else:
            sizes = (processes.world_size, 1)
            dimensions = ("replicas", "shards")
            options = {"reshard_after_forward": False}
        with libraries_on_stderr():
            device = self.local_parameters[0].device.type
            self._mesh = init_device_mesh(device, sizes, mesh_dim_names=dimensions)
        names = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter not in ignored
        }
        for unit in (*units, model):
            fully_shard(unit, mesh=self._mesh, ignored_params=ignored, **options)
        self._reduce_unused_parameters()
        for parameter, name in names.items():
            dtensor = model.get_parameter(name)
            parameter.data = dtensor.detach().to_local()  # shares memory with the DTensor
            if parameter.requires_grad:
                dtensor.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))
            if shard == "full":
                self.dtensors[parameter] = dtensor
        # Their gradients are averaged after the backward pass.
        self.averaged_parameters = [p for p in self.local_parameters if p not in names]

    def _units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def _reduce_unused_parameters(self) -> None:
        """Let processes send gradients of 0 for parameters that a step does not use: others may
        use them."""
        if hasattr(self._model, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
            self._model.set_reduce_scatter_unused_params(True)
            return
        for unit in self._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.post_backward = partial(_reduce_with_zeros, group, group.post_backward)

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare the backward pass of a microbatch. Replicated gradients are sent after the last
        one of a step, sharded ones after each."""
        self._model.set_requires_gradient_sync(last or bool(self.dtensors))

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which parameters are complete, for reading; processes may run different
        numbers of forward passes."""
        units = self._units()
        # a barrier: unshard itself waits for TIMEOUT only
        self._processes.all_gather(None, long_wait=True)
        if self.dtensors:
            self._model.set_reshard_after_forward(False)
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                if self.dtensors and unit is not self._model:
                    unit.set_reshard_after_forward(True, recurse=False)

    def to_shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return this process's shard of a tensor of the parameter's full shape, and any other
        tensor unchanged."""
        dtensor = self.dtensors.get(parameter)
        if dtensor is None or full.shape != dtensor.shape:
            return full
        return distribute_like(dtensor, full).to_local().clone()

    def to_dtensor(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Return the ``DTensor`` of a tensor of the shape of the parameter's shard, and any
        other tensor unchanged."""
        dtensor = self.dtensors.get(parameter)
        if dtensor is None or shard.shape != parameter.shape:
            return shard
        return _from_shard(shard, dtensor)

    def reduce_shards(self, tensor: Tensor, *, operation: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of all processes' tensors if parameters are sharded, else
        ``tensor``."""
        if not self.dtensors:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Partial(operation)]).full_tensor()


def distribute_like(reference: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` (full, or a ``DTensor``) sharded like ``reference``, in full if that is
    a plain tensor."""
    if not is_dtensor(reference):
        return full_tensors(tensor)
    if is_dtensor(tensor):
        return tensor.redistribute(placements=reference.placements)
    (chunk,) = reference.__create_chunk_list__()
    slices = tuple(
        slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )
    # sliced before it is moved: the device may lack room for all of it
    shard = tensor[slices].to(reference.device)
    return _from_shard(shard, reference)


def _from_shard(shard: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _reduce_with_zeros(group: Any, post_backward: Callable[[], None], *_unused: object) -> None:
    """Call ``post_backward`` of an FSDP unit's parameters ``group``, after zeros became their
    missing gradients."""
    for parameter in group.fsdp_params:
        # it has one once it was gathered
        if group.reduce_grads and hasattr(parameter, "_unsharded_param"):
            full = parameter.unsharded_param
            if (
                full.requires_grad
                and full.grad is None
                and parameter.unsharded_accumulated_grad is None
            ):
                full.grad = torch.zeros_like(full)
    post_backward()


def _move_gradient(parameter: nn.Parameter, dtensor: DTensor) -> None:
    """Move the averaged gradient from the model's ``DTensor`` to the optimizer's parameter."""
    gradient = dtensor.grad.to_local()
    dtensor.grad = None
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
