"""Runtime, where and how a run computes: device, processes, precision, threads, determinism, compilation.

Only this module knows. Everything else follows its input's device and dtype.
"""

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from harness.device import choice, machine
from harness.device.compiled import Compiled
from harness.device.load import LoadMeter
from harness.device.processes import SINGLE, ProcessGroup
from harness.plan.settings import RuntimeSettings

_THREADS = torch.get_num_threads()  # PyTorch's choice, before any job of this process made its own


class CompileClock:
    """Counts ``seconds`` in which torch traces and compiles, while the ``with`` statement lasts, so that a budget of
    seconds is one of training. Unless something is ``compiled`` at all, nothing of the compiler is imported."""

    def __init__(self, *, compiled: bool):
        self.compiled, self.seconds = compiled, 0.0

    def __enter__(self) -> Self:
        if self.compiled:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_) -> None:
        if self.compiled:
            from torch._dynamo.callback import callback_handler

            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def _start(self, _arguments: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _arguments: object) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A device with its precision.

    Attributes:
        device: where tensors live; each process of the run has one of its own.
        precision: ``float32``, or ``bfloat16`` for autocast with float32 parameters.
        compile: whether the model's forward is compiled.
        tf32: whether products of float32 round their factors to 10 bits, which GPUs by NVIDIA do several times faster.
        allocator: what becomes of freed memory, or None where that is not ours to say; see ``machine.use_allocator``.
    """

    device: torch.device
    precision: str
    compile: bool
    tf32: bool = False
    allocator: str | None = None
    processes: ProcessGroup = SINGLE
    compiled: dict[nn.Module, Compiled] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        assert self.precision in ("float32", "bfloat16"), f"runtime.precision={self.precision} is not settled"

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def forward(self, model: nn.Module) -> Callable:
        """What to call for a forward pass of the model: compiled if that was asked for."""
        if self.compile and model not in self.compiled:
            self.compiled[model] = Compiled(model)
        return self.compiled.get(model, model)

    def send(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """Bytes (int64 on the host, from 0 to 255) as int64 on the device. To a GPU an eighth of that travels, from
        memory that its copy engine reads, and nobody waits."""
        if self.device.type == "cpu":
            return batches
        narrow = [batch.to(torch.uint8).pin_memory() for batch in batches]
        return tuple(batch.to(self.device, non_blocking=True).long() for batch in narrow)

    def compile_clock(self) -> CompileClock:
        """Counts the seconds of compiling, in a ``with`` statement."""
        return CompileClock(compiled=self.compile)

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def to_host(self, number: Tensor) -> Callable[[], float]:
        """Start a copy of a scalar to the host; what is returned gives it, and waits only for what came before it."""
        if self.device.type == "cpu":
            return number.clone().item
        copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        sent = torch.Event(self.device)
        sent.record()

        def read() -> float:
            sent.synchronize()
            return copy.item()

        return read

    def load_meter(self) -> LoadMeter:
        """What others take of this machine from now on; the other processes of this run are no others."""
        wanted = torch.get_num_threads() if self.device.type == "cpu" else 1
        several = self.processes.world_size > 1
        return LoadMeter(wanted=wanted * self.processes.local_world_size, root=os.getppid() if several else None)

    def describe(self) -> dict[str, object]:
        """Device, processes, versions and the machine around them, for provenance."""
        on_gpu, name = self.device.type == "cuda", machine.cpu_name()
        of_gpu = {"cudnn": torch.backends.cudnn.version(), "driver": machine.driver()} if on_gpu else {}
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else name,
            "device_kind": self.device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "compile": self.compile,
            "tf32": self.tf32,
            "processes": self.processes.world_size,
            "versions": machine.versions(hip=torch.version.hip, **of_gpu),
            "machine": {"cpu": name, "cores": os.cpu_count() or 1},
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "environment": machine.environment(),
            "allocator": self.allocator,
        }


def device_kind(settings: RuntimeSettings) -> str:
    """``cpu`` or ``cuda``: where a run of these settings computes. ValueError as ``start`` has it."""
    return choice.named(settings.device).type


def forget_earlier_jobs() -> None:
    """What an earlier job of this process left: objects in cycles, compiled graphs, blocks kept by the allocator."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its guards would count against this job's limit of recompilations
    if torch.cuda.is_initialized():  # to ask a fresh one would take memory there
        torch.cuda.empty_cache()


def start(settings: RuntimeSettings, *, processes: ProcessGroup = SINGLE) -> Runtime:
    """Choose the device, of several processes the GPU of this one's rank, and set what is global: threads, determinism
    and the allocator. ValueError naming ``runtime.device`` if it is not there, or ``runtime.tf32``."""
    several = processes.world_size > 1
    device = choice.of_rank(settings.device, processes) if several else choice.named(settings.device)
    if settings.tf32 and device.type != "cuda":
        raise ValueError(f"runtime.tf32=true: runtime.device={device.type} has no such products; allowed is false")
    settings = choice.settled(settings)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device.index)  # or libraries put their workspaces on the first one
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.set_num_threads(settings.threads or _THREADS)
    machine.use_own_compiled_graphs()
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a pass over every tensor
    return Runtime(
        device=device,
        precision=settings.precision,
        compile=settings.compile,
        tf32=settings.tf32,
        allocator=machine.use_allocator(settings.allocator),
        processes=processes,
    )
