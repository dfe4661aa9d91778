"""Runtime: device, processes, precision, threads, determinism and compilation. All other code follows its input's
device and dtype."""

import contextlib
import gc
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from harness.device import machine
from harness.device.compiled import Compiled
from harness.device.processes import SINGLE, ProcessGroup
from harness.plan.settings import RuntimeSettings

_THREADS = torch.get_num_threads()  # PyTorch's choice, before any job of this process made its own
MULTIPLIES_BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instructions of CPUs, as ``torch.cpu.get_capabilities`` names them."""
NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder for each NVIDIA device that the kernel's driver knows, whatever torch can use."""


@contextlib.contextmanager
def compile_clock(*, compiled: bool) -> Iterator[SimpleNamespace]:
    """Counts ``seconds`` of tracing and compiling in the block, which are left out of a budget of seconds. Imports the
    compiler only if something is ``compiled``."""
    clock = SimpleNamespace(seconds=0.0)
    if not compiled:
        yield clock
        return
    from torch._dynamo.callback import callback_handler

    def start(_arguments: object) -> None:
        clock.began = time.perf_counter()

    def end(_arguments: object) -> None:
        clock.seconds += time.perf_counter() - clock.began

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield clock
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A device with its precision.

    Attributes:
        device: where tensors live; each process of the run has one of its own.
        precision: ``float32``, or ``bfloat16`` for autocast with float32 parameters.
        compile: whether the model's forward is compiled.
        tf32: whether products of float32 round their factors to 10 bits, several times faster on NVIDIA's GPUs.
        allocator: as ``machine.use_allocator`` returns it.
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
        """The function of a forward pass of the model, compiled if ``compile``."""
        if self.compile and model not in self.compiled:
            self.compiled[model] = Compiled(model)
        return self.compiled.get(model, model)

    def send(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """Bytes (int64 on the host, 0 to 255) as int64 on the device: to a GPU as pinned uint8, without waiting."""
        if self.device.type == "cpu":
            return batches
        narrow = [batch.to(torch.uint8).pin_memory() for batch in batches]
        return tuple(batch.to(self.device, non_blocking=True).long() for batch in narrow)

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def to_host(self, number: Tensor) -> Callable[[], float]:
        """Start an asynchronous device-to-host copy of a scalar; the returned function waits for it."""
        if self.device.type == "cpu":
            return number.clone().item
        copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        sent = torch.Event(self.device)
        sent.record()

        def read() -> float:
            sent.synchronize()
            return copy.item()

        return read

    def describe(self) -> dict[str, object]:
        """Device, processes, versions and machine, for provenance."""
        on_gpu, name = self.device.type == "cuda", machine.cpu_name()
        of_gpu = {"cudnn": torch.backends.cudnn.version()} if on_gpu else {}
        of_gpu |= {"driver": machine.DRIVER.read_text().strip()} if on_gpu and machine.DRIVER.exists() else {}
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


def named(name: str) -> torch.device:
    """The device of ``runtime.device``; ValueError where torch sees none, or ``auto`` cannot use an NVIDIA one."""
    count = torch.cuda.device_count()
    if name == "auto":
        if not count and NVIDIA.is_dir() and any(NVIDIA.iterdir()) and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            raise ValueError(
                f"runtime.device=auto: torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the NVIDIA "
                "device of this machine: install a newer driver (CUDA 13 needs 580) or a torch with CUDA, or set "
                "runtime.device=cpu"
            )
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and (device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count)):
        return device
    raise ValueError(
        f"runtime.device={name}: torch {torch.__version__} sees {count} CUDA devices here; allowed are auto, cpu"
        + ", cuda, cuda:N" * bool(count)
    )


def of_rank(name: str, processes: ProcessGroup) -> torch.device:
    """A GPU for each process of the machine, or the CPU for all; ValueError for fewer GPUs, and for one by index."""
    device, needed = named(name), processes.local_world_size
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, cuda")
    if (count := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes and {count} CUDA devices here; allowed are "
            f"runtime.device=cpu, or torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", processes.local_rank)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 without emulation."""
    if device.type == "cpu":
        return any(map(torch.cpu.get_capabilities().get, MULTIPLIES_BFLOAT16))
    return torch.cuda.is_bf16_supported(including_emulation=False)


def lacks_to_compile() -> str | None:
    """What ``torch.compile`` needs for a GPU and the machine lacks: Triton, host compiler, Python's header; or None."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        return "a C++ compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h"


def settled(settings: RuntimeSettings) -> RuntimeSettings:
    """The settings without ``auto`` but for the device's: bfloat16 where the device multiplies it, compilation on CUDA
    where a compiler is installed, or else a printed line."""
    means = {"precision": settings.precision, "compile": settings.compile}
    if means["precision"] == "auto":
        means["precision"] = "bfloat16" if multiplies_bfloat16(named(settings.device)) else "float32"
    if means["compile"] == "auto":
        lacking = lacks_to_compile() if (on_gpu := named(settings.device).type == "cuda") else None
        means["compile"] = on_gpu and lacking is None
        if lacking:
            print(f"runtime.compile=auto: not compiled, because {lacking} is not here")
    return replace(settings, **means)


def device_kind(settings: RuntimeSettings) -> str:
    """``cpu`` or ``cuda``; ValueError as of ``named``."""
    return named(settings.device).type


def forget_earlier_jobs() -> None:
    """Free what an earlier job of this process left: cycles, compiled graphs, unused blocks of the allocator."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its guards would count against this job's limit of recompilations
    if torch.cuda.is_initialized():  # to ask a fresh one would take memory there
        torch.cuda.empty_cache()


def start(settings: RuntimeSettings, *, processes: ProcessGroup = SINGLE) -> Runtime:
    """The device of this process, with threads, determinism and allocator set. ValueError for a device that is missing,
    and for ``runtime.tf32`` elsewhere than on CUDA."""
    several = processes.world_size > 1
    device = of_rank(settings.device, processes) if several else named(settings.device)
    if settings.tf32 and device.type != "cuda":
        raise ValueError(f"runtime.tf32=true: runtime.device={device.type} has no such products; allowed is false")
    settings = settled(settings)
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
