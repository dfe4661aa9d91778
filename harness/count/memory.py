"""Memory: bytes of tensors, and the peak of memory in use.

On a GPU the peak is that of torch's tensors, and beside it that of its allocator's reserve, which decides what runs out
of memory. On a CPU it is the high-water mark of the process above a baseline, called approximate: it has the
allocator's freed blocks, late libraries and pages of mapped files.
"""

import ctypes
import re
import resource
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from variants.contract import State

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def tensors_of(tree: object) -> list[Tensor]:
    """All tensors in a structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of each tensor, the same one once; of a sparse tensor, of its indices and values."""
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        sparse = tensor.layout == torch.sparse_coo  # the public indices and values want it coalesced
        total += sum(dense.nbytes for dense in ((tensor._indices(), tensor._values()) if sparse else (tensor,)))
    return total


def state_bytes(state: State) -> int:
    """Bytes of a carried state per stream. A view counts its elements, not the storage that it keeps alive."""
    return sum(tensor_bytes([tensor]) // len(tensor) for tensor in tensors_of(state))


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the present gradients, to be read after a backward pass."""
    return tensor_bytes(p.grad for p in parameters if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors in the optimizers' states, which their first step makes."""
    return tensor_bytes(tensor for optimizer in optimizers for tensor in tensors_of(dict(optimizer.state)))


class Peak(NamedTuple):
    """Most bytes in use at one time.

    Attributes:
        bytes: None where nothing was measured; ``approximate`` for the process's memory in place of the tensors'.
        reserved_bytes: most that the GPU's allocator held, in use or not, evaluations included; None on a CPU.
    """

    bytes: int | None
    approximate: bool
    reserved_bytes: int | None = None

    def or_higher(self, other: "Peak") -> "Peak":
        """The higher one of each figure; ``approximate`` is the other's."""
        figures = ([n for n in pair if n is not None] for pair in zip(self[::2], other[::2], strict=True))
        most, reserved = (max(numbers, default=None) for numbers in figures)
        return Peak(most, other.approximate, reserved)

    def across(self, largest: Callable[[int], int]) -> "Peak":
        """The peak of all processes: ``largest`` of each measured figure."""
        most, reserved = (number if number is None else largest(number) for number in self[::2])
        return Peak(most, self.approximate, reserved)


class PeakMemory:
    """The peak of memory in use since the last ``reset``. Make it before the model, for the baseline of a CPU; reset it
    after warm-up, in which steps allocate and compile. Without Linux the high-water mark is not reset."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()
        self._baseline_bytes = high_water_bytes() if device.type == "cpu" else 0

    def reset(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        # Freed blocks go back to the system first: a later peak would hide in them.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        with suppress(OSError):  # only Linux sets the mark to what is in use now
            CLEAR.write_text("5")  # proc_pid_clear_refs(5): the mark and nothing else

    def read(self) -> Peak:
        if self.device.type == "cpu":
            return Peak(max(0, high_water_bytes() - self._baseline_bytes), approximate=True)
        statistics = torch.cuda.memory_stats(self.device)
        allocated, reserved = (statistics[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved"))
        return Peak(allocated, approximate=False, reserved_bytes=reserved)


def high_water_bytes() -> int:
    """Most resident memory of this process since its start, or since its mark was reset."""
    mark = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    if mark:
        return int(mark[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
