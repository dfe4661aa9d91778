"""Memory: what is kept, in bytes, and the peak of what was in use.

On CUDA the peak is what torch allocated for tensors, exactly. A CPU has no such counter, so there it is the
high-water mark of the process above a baseline, called approximate: freed blocks that the allocator keeps, libraries
that are loaded late and pages of mapped files that were read count too.
"""

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

from harness.count.formulas import tensors_of
from variants.contract import State

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of each tensor, the same one once; of a sparse tensor, of its indices and values."""
    return sum(_own_bytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def state_bytes(state: State) -> int:
    """Bytes of a carried state per stream. A view counts its own elements, not the storage that it keeps alive."""
    return sum(tensor_bytes([tensor]) // len(tensor) for tensor in tensors_of(state))


def parameter_bytes(model: nn.Module) -> int:
    return tensor_bytes(model.parameters())


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that are there: take it after a backward pass, before they are cleared."""
    return tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors in the optimizers' states, which most of them make in their first step."""
    return tensor_bytes(tensor for optimizer in optimizers for tensor in tensors_of(dict(optimizer.state)))


def _own_bytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return _own_bytes(tensor._indices()) + _own_bytes(tensor._values())  # the public ones want it coalesced
    return tensor.numel() * tensor.element_size()


class Peak(NamedTuple):
    """Most bytes that were in use at one time, and whether that is approximate."""

    bytes: int
    approximate: bool


class PeakMemory:
    """The peak of memory in use since the last ``reset``.

    Make it before the model, so that on a CPU all that the run needs lies above the baseline; reset it after warm-up,
    because first steps allocate and compile. A process that did other work before is best avoided.

    On a CPU it resets the high-water mark of the whole process. Where the system does not permit that, the mark only
    rises, and the peak is the rise since the meter was made.
    """

    def __init__(self, device: torch.device):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"runtime.device={device}: peak memory is known on cpu and cuda")
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()  # its statistics cannot be reset before
        self.reset()
        self._baseline_bytes = 0 if device.type == "cuda" else high_water_bytes()

    def reset(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            release_freed()
            lower_high_water()

    def read(self) -> Peak:
        if self.device.type == "cuda":
            return Peak(torch.cuda.max_memory_allocated(self.device), approximate=False)
        return Peak(max(0, high_water_bytes() - self._baseline_bytes), approximate=True)


def high_water_bytes() -> int:
    """Most resident memory that this process had since it began, or since ``lower_high_water``."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    if found:
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def lower_high_water() -> None:
    """Set the process's high-water mark to what is in use now, where the system permits it."""
    with suppress(OSError):
        CLEAR.write_text("5")  # Linux, proc_pid_clear_refs(5): the mark and nothing else


def release_freed() -> None:
    """Give freed blocks back to the system: glibc keeps those below 32 MiB, and a later peak would hide in them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
