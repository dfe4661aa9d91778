"""Runtime: device, processes, precision, threads, determinism and compilation."""

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

_DEFAULT_THREADS = torch.get_num_threads()  # PyTorch's choice, before a job of this process sets another number
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Instructions of x86 CPUs that multiply bfloat16, as ``torch.cpu.get_capabilities`` names them."""
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each NVIDIA device that the driver lists, including those that torch cannot use."""


@contextlib.contextmanager
def compile_clock(*, compiled: bool) -> Iterator[SimpleNamespace]:
    """Context whose object counts the ``seconds`` of compiling in its block. Imports the compiler if ``compiled``."""
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
    """A device with its precision. ``compiled`` has, for each compiled model, the function that runs its graphs."""

    device: torch.device  # where tensors live; each process of the run has its own GPU
    precision: str  # ``float32``, or ``bfloat16`` for autocast with float32 parameters
    compile: bool  # whether the model's forward pass is compiled
    tf32: bool = False  # whether float32 matrix products use NVIDIA's TF32, which is much faster and rounds factors
    allocator: str | None = None  # as ``machine.set_allocator`` returns it
    processes: ProcessGroup = SINGLE
    compiled: dict[nn.Module, Compiled] = field(default_factory=dict, repr=False, compare=False)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context for a forward pass in this precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def forward(self, model: nn.Module) -> Callable:
        """Return the function that runs the model's forward pass, compiled if ``compile``."""
        if self.compile and model not in self.compiled:
            self.compiled[model] = Compiled(model)
        return self.compiled.get(model, model)

    def to_device(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """Return token ids (int64, below 256) on the device. They go to a GPU as pinned uint8, without waiting."""
        if self.device.type == "cpu":
            return batches
        pinned = [batch.to(torch.uint8).pin_memory() for batch in batches]
        return tuple(batch.to(self.device, non_blocking=True).long() for batch in pinned)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device computes while the host goes on."""
        return self.device.type != "cpu"

    def synchronise(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_asynchronous:
            torch.cuda.synchronize(self.device)

    def to_host(self, number: Tensor) -> Callable[[], float]:
        """Start an asynchronous device-to-host copy of a scalar. The returned function waits and returns the number."""
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
        on_gpu, cpu_name = self.device.type == "cuda", machine.cpu_name()
        gpu_versions = {}
        if on_gpu:
            gpu_versions["cudnn"] = torch.backends.cudnn.version()
            if machine.NVIDIA_DRIVER.exists():
                gpu_versions["driver"] = machine.NVIDIA_DRIVER.read_text().strip()
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else cpu_name,
            "device_kind": self.device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "compile": self.compile,
            "tf32": self.tf32,
            "processes": self.processes.world_size,
            "versions": machine.versions(hip=torch.version.hip, **gpu_versions),
            "machine": {"cpu": cpu_name, "cores": os.cpu_count() or 1},
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "environment": machine.environment(),
            "allocator": self.allocator,
        }


def device_of(name: str) -> torch.device:
    """Return the device of ``runtime.device``. ValueError if torch does not see it, or if it is ``auto`` and torch
    cannot use the machine's NVIDIA GPU."""
    count = torch.cuda.device_count()
    if name == "auto":
        has_nvidia = NVIDIA_DEVICES.is_dir() and any(NVIDIA_DEVICES.iterdir())
        if not count and has_nvidia and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            raise ValueError(
                f"runtime.device=auto: torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the NVIDIA "
                "device of this machine: install a newer driver (CUDA 13 needs 580) or a torch with CUDA, or set "
                "runtime.device=cpu"
            )
        return torch.device("cuda" if count else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
            return device
    if name.startswith("mps"):
        raise ValueError(f"runtime.device={name}: Apple's GPUs are not supported; allowed are auto, cpu, cuda, cuda:N")
    raise ValueError(
        f"runtime.device={name}: torch {torch.__version__} sees {count} CUDA devices; allowed are auto, cpu"
        + ", cuda, cuda:N" * bool(count)
    )


def device_of_rank(name: str, processes: ProcessGroup) -> torch.device:
    """Return the CPU, or the GPU of this process's local rank. ValueError for too few GPUs, or for ``cuda:N``."""
    device, needed = device_of(name), processes.local_world_size
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, cuda")
    if (count := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes need as many CUDA devices, torch sees {count}; allowed are "
            f"runtime.device=cpu, or torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", processes.local_rank)


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the GPU, or the CPU by ``BFLOAT16_INSTRUCTIONS``, multiplies bfloat16 without emulation."""
    if device.type == "cpu":
        return any(map(machine.cpu_capabilities().get, BFLOAT16_INSTRUCTIONS))
    return torch.cuda.is_bf16_supported(including_emulation=False)


def missing_for_compile() -> str | None:
    """Return which of Triton, C++ compiler and Python's header is missing for compiling on a GPU, or None."""
    if find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
        return "a C++ compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h"


def resolve_auto(settings: RuntimeSettings) -> RuntimeSettings:
    """Return the settings with ``auto`` resolved in ``precision`` and ``compile``. Precision becomes bfloat16 where
    it is native. A model is compiled on CUDA if the compiler is installed; if it is not, a line is printed."""
    precision, compile = settings.precision, settings.compile
    if precision == "auto":
        precision = "bfloat16" if has_native_bfloat16(device_of(settings.device)) else "float32"
    if compile == "auto":
        on_gpu = device_of(settings.device).type == "cuda"
        missing = missing_for_compile() if on_gpu else None
        compile = on_gpu and missing is None
        if missing:
            print(f"runtime.compile=auto: not compiled, because {missing} is not installed")
    return replace(settings, precision=precision, compile=compile)


def device_kind(settings: RuntimeSettings) -> str:
    """Return ``cpu`` or ``cuda``. ValueError as from ``device_of``."""
    return device_of(settings.device).type


def free_earlier_jobs() -> None:
    """Free what earlier jobs of this process have left: reference cycles, compiled graphs and cached GPU memory."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # earlier graphs would count towards this job's limit of recompilations
    if torch.cuda.is_initialized():  # otherwise the call would initialize CUDA, which takes GPU memory
        torch.cuda.empty_cache()


def start(settings: RuntimeSettings, *, processes: ProcessGroup = SINGLE) -> Runtime:
    """Set this process's threads, determinism and allocator, and return its runtime. ValueError names a wrong key."""
    if processes.world_size > 1:
        device = device_of_rank(settings.device, processes)
    else:
        device = device_of(settings.device)
    if settings.tf32 and device.type != "cuda":
        raise ValueError(f"runtime.tf32=true: runtime.device={device.type} does not support TF32; allowed is false")
    settings = resolve_auto(settings)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device.index)  # otherwise libraries allocate their workspaces on the first GPU
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.set_num_threads(settings.threads or _DEFAULT_THREADS)
    machine.set_graph_folder()
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # this debugging aid would fill every new tensor
    options = {name: getattr(settings, name) for name in ("precision", "compile", "tf32")}
    return Runtime(device=device, processes=processes, allocator=machine.set_allocator(settings.allocator), **options)
