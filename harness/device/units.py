"""Units: the parameters of a model in this process: whole, or divided as in ``spread.py``."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

ROWS_AT_ONCE = 2**20
"""Of a table divided by columns, when it is gathered."""


class Units:
    """The ``parameters`` of a model in its only process, as the optimizers know them; ``whole``: those whose gradients
    are averaged after the backward pass; ``parts``: divided ones, with their ``DTensor``."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.whole, self.parts = self.parameters, {}

    def begin_part(self, *, last: bool) -> None:
        """A part of a step's streams follows."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which parameters are whole, for reading only, and ranks may run different numbers of forwards."""
        return nullcontext()

    def total(self, tensor: Tensor, *, of: str = "sum") -> Tensor:
        """Sum, or ``max``, of all processes' tensors, where parameters are divided."""
        return tensor


def is_divided(leaf: object) -> bool:
    """Whether it is a ``DTensor``, whose class takes most of a second to import."""
    return hasattr(leaf, "full_tensor")


def gathered(tree: object, *, keep: bool = True) -> object:
    """The same structure with whole tensors on the host in place of divided ones; all processes call it. Without
    ``keep`` this process gets None in place of each, to save memory."""

    def whole(leaf: object) -> object:
        if not is_divided(leaf):
            return leaf
        tensor = _whole(leaf)
        return tensor if keep else None

    return tree_map(whole, tree)


def _whole(divided: Tensor) -> Tensor:
    if divided.placements[0].is_shard(1):  # a table, which a device may have no room for
        return torch.cat([rows.full_tensor().cpu() for rows in divided.split(ROWS_AT_ONCE)])
    return divided.full_tensor().cpu()
