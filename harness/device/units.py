"""Units: the parameters of a model as this process has them: whole, or, of several processes, as ``spread.py`` says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

ROWS_AT_ONCE = 2**20
"""Of a table that is divided by columns, where it is gathered."""


class Units:
    """The ``parameters`` of a model in its only process, as the optimizers know them; ``whole`` are those whose
    gradients are averaged when the backward pass has ended, ``parts`` those of which it has rows, with the whole."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.whole, self.parts = self.parameters, {}

    def begin_part(self, *, last: bool) -> None:
        """A part of a step's streams follows."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which all parameters are plain and whole, to be read and not written, and ranks may run different
        numbers of forward passes."""
        return nullcontext()

    def total(self, tensor: Tensor, *, of: str = "sum") -> Tensor:
        """Sum, or ``max``, of all processes' tensors, where parameters are divided."""
        return tensor


def is_divided(leaf: object) -> bool:
    """Whether it is a ``DTensor`` of torch, whose class takes most of a second to import."""
    return hasattr(leaf, "full_tensor")


def gathered(tree: object, *, keep: bool = True) -> object:
    """The same structure in which no tensor is divided, but whole on the host; all processes call it. Without ``keep`` this
    process, which has no use for them, gets None in place of each: they may be larger than what it has room for."""

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
