"""Runtime: a device and its processes, with the precision and the compilation of forward passes."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.device import machine
from harness.device.compiled import Compiled
from harness.device.processes import SINGLE, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A device with its precision. ``compiled`` has, for each compiled model, the function that
    runs its graphs."""

    device: torch.device  # where tensors live; each process of the run has its own GPU
    precision: str  # ``float32``, or ``bfloat16`` for autocast with float32 parameters
    compile: bool  # whether the model's forward pass is compiled
    # whether float32 matrix products use NVIDIA's TF32, which is much faster and rounds factors
    tf32: bool = False
    allocator: str | None = None  # as ``machine.set_allocator`` returns it
    processes: ProcessGroup = SINGLE
    compiled: dict[nn.Module, Compiled] = field(default_factory=dict, repr=False, compare=False)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context for a forward pass in this precision."""
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"
        )

    def forward(self, model: nn.Module) -> Callable:
        """Return the function that runs the model's forward pass, compiled if ``compile``."""
        if self.compile and model not in self.compiled:
            self.compiled[model] = Compiled(model)
        return self.compiled.get(model, model)

    def to_device(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """Return token ids (int64 and below 256, or int32) on the device, as int64. They go to a
        GPU from pinned memory, those of int64 as uint8, without waiting."""
        if self.device.type == "cpu":
            return tuple(batch.long() for batch in batches)
        sent = [batch.to(torch.uint8) if batch.dtype == torch.int64 else batch for batch in batches]
        return tuple(batch.pin_memory().to(self.device, non_blocking=True).long() for batch in sent)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device computes while the host goes on."""
        return self.device.type != "cpu"

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_asynchronous:
            torch.cuda.synchronize(self.device)

    def to_host(self, number: Tensor) -> Callable[[], float]:
        """Start an asynchronous device-to-host copy of a scalar. The returned function waits and
        returns the number."""
        if self.device.type == "cpu":
            return number.clone().item
        copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        copied = torch.Event(self.device)
        copied.record()

        def read() -> float:
            copied.synchronize()
            return copy.item()

        return read

    def describe(self) -> dict[str, object]:
        """Return the keys of a row that describe device, processes, versions and machine."""
        on_gpu = self.device.type == "cuda"
        cpu_name = machine.cpu_name()
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else cpu_name,
            "device_kind": self.device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "compile": self.compile,
            "tf32": self.tf32,
            "processes": self.processes.world_size,
            "versions": machine.versions(cuda=on_gpu),
            "machine": {"cpu": cpu_name, "cores": os.cpu_count() or 1},
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "environment": machine.environment(),
            "allocator": self.allocator,
        }
