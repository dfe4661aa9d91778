"""Memory: bytes of tensors, and the peak of memory in use. On a GPU the peak is that of torch's
tensors. The peak of the allocator's reserved memory is measured too, because it decides whether
memory runs out. On a CPU the peak is the high-water mark of the process's resident memory above a
baseline. It is approximate, because it includes freed blocks of the allocator, libraries that
are loaded late, and pages of memory-mapped files."""

import ctypes
import re
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from variants.contract import State

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def tensors_of(tree: object) -> list[Tensor]:
    """Return all tensors in a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors, each counted once. Those of a sparse tensor are the bytes of
    its indices and values."""
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        # the public methods indices() and values() require a coalesced tensor
        if tensor.layout == torch.sparse_coo:
            total += tensor._indices().nbytes + tensor._values().nbytes
        else:
            total += tensor.nbytes
    return total


def state_bytes(state: State) -> int:
    """Return the bytes of a carried state per stream. Of a view, only its elements count, not the
    storage that it keeps alive."""
    return sum(tensor_bytes([tensor]) // len(tensor) for tensor in tensors_of(state))


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of all gradients that exist, as after a backward pass."""
    return tensor_bytes(p.grad for p in parameters if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of all tensors in the optimizers' states, which exist after the first
    step."""
    return tensor_bytes(tensors_of([dict(optimizer.state) for optimizer in optimizers]))


class Peak(NamedTuple):
    """Most bytes in use at one time."""

    bytes: int | None  # None if nothing was measured
    # whether the memory of the process was measured, instead of that of torch's tensors
    approximate: bool
    # peak of what the GPU's allocator reserved, also in evaluations; None on a CPU
    reserved_bytes: int | None = None

    def maximum(self, new: "Peak") -> "Peak":
        """Return the maximum of both peaks, in each figure; ``approximate`` is that of ``new``."""
        pairs = (self.bytes, new.bytes), (self.reserved_bytes, new.reserved_bytes)
        n_bytes, reserved_bytes = (
            max((figure for figure in pair if figure is not None), default=None) for pair in pairs
        )
        return Peak(n_bytes, new.approximate, reserved_bytes)


class PeakMemory:
    """The peak of memory in use since the last ``reset``. On a CPU the baseline is measured when
    this object is made, which must be before the model is made. ``reset`` should be called after
    warm-up, because the first steps allocate and compile more. On a CPU it has an effect on
    Linux only."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()
        self._baseline_bytes = high_water_bytes() if device.type == "cpu" else 0

    def reset(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        # Return freed blocks to the system first. Later allocations would reuse them, and not raise
        # the mark.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        with suppress(OSError):  # the file exists on Linux only
            # proc_pid_clear_refs(5): 5 resets the high-water mark and nothing else
            CLEAR_REFS.write_text("5")

    def read(self) -> Peak:
        if self.device.type == "cpu":
            return Peak(max(0, high_water_bytes() - self._baseline_bytes), approximate=True)
        statistics = torch.cuda.memory_stats(self.device)
        return Peak(
            statistics["allocated_bytes.all.peak"],
            approximate=False,
            reserved_bytes=statistics["reserved_bytes.all.peak"],
        )


def high_water_bytes() -> int:
    """Return the peak resident memory of this process since its start, or since its high-water mark
    was reset."""
    mark = None
    if STATUS.exists():
        mark = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if mark:
        return int(mark[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems KiB
    if sys.platform == "darwin":
        return peak
    return peak * 1024
