"""Parameters of a model as one process has them: all of them, or its shards (``distributed_parameters.py``)."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.utils._pytree import tree_map


class ModelParameters:
    """Parameters of a model that is trained by one process. ``DistributedParameters`` is the subclass for several. The
    optimizers update ``local_parameters``: each parameter, or this process's shard of it."""

    def __init__(self, model: nn.Module):
        self.local_parameters = list(model.parameters())
        self.averaged_parameters = self.local_parameters  # their gradients are averaged after the backward pass
        self.dtensors: dict[nn.Parameter, nn.Parameter] = {}  # the ``DTensor`` of each shard in ``local_parameters``

    def begin_microbatch(self, *, last: bool) -> None:
        """Prepare the backward pass of a microbatch. ``last`` states whether it is the last one of a step."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Context in which parameters are complete, for reading; processes may run different numbers of forwards."""
        return nullcontext()

    def reduce_shards(self, tensor: Tensor, *, operation: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of all processes' tensors if parameters are sharded, else ``tensor``."""
        return tensor


def is_dtensor(leaf: object) -> bool:
    """Whether ``leaf`` is a ``DTensor``, without importing that class, which takes most of a second."""
    return hasattr(leaf, "full_tensor")


def full_tensors(tree: object, *, keep: bool = True) -> object:
    """Return ``tree`` with each ``DTensor`` replaced by its full tensor on the host. All processes must call this. With
    ``keep=False`` this process gets None in place of full tensors, which saves memory."""

    def full(leaf: object) -> object:
        if not is_dtensor(leaf):
            return leaf
        tensor = leaf.full_tensor().cpu()
        return tensor if keep else None

    return tree_map(full, tree)
