"""Runtime, where and how a run computes: device, processes, precision, threads, determinism, compilation, random state.

Only this module knows. Everything else follows its input's device and dtype.
"""

import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from harness.device import allocator, machine
from harness.device.compile_clock import CompileClock
from harness.device.load import LoadMeter
from harness.device.processes import SINGLE, ProcessGroup
from harness.hashing import integer_hash
from harness.plan.settings import RuntimeSettings
from variants.contract import State

_THREADS = torch.get_num_threads()  # PyTorch's choice, before any job of this process made its own


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A device with its precision.

    Attributes:
        device: where tensors live.
        precision: ``float32``, or ``bfloat16`` for autocast with float32 parameters.
        compile: whether the model's forward is compiled.
        allocator: what becomes of freed memory, or None where that is not ours to say; see ``allocator.use``.
        processes: of the run; each has a device of its own.
    """

    device: torch.device
    precision: str
    compile: bool
    allocator: str | None = None
    processes: ProcessGroup = SINGLE

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def forward(self, model: nn.Module) -> Callable:
        """What to call for a forward pass of the model: compiled if that was asked for.

        Shapes may become dynamic: the past grows until it is as long as the window.
        """
        if not self.compile:
            return model
        compiled = torch.compile(model)

        def segment(tokens: torch.Tensor, state: State = None, **keywords: bool):
            out = compiled(tokens, state, **keywords)
            return out._replace(state=model.trim(out.state))

        return segment

    def compile_clock(self) -> CompileClock:
        """Counts the seconds of compiling, in a ``with`` statement."""
        return CompileClock(compiled=self.compile)

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def load_meter(self) -> LoadMeter:
        """What others take of this machine from now on; the other processes of this run are no others."""
        wanted = torch.get_num_threads() if self.device.type == "cpu" else 1
        several = self.processes.world_size > 1
        return LoadMeter(wanted=wanted * self.processes.local_world_size, root=os.getppid() if several else None)

    def describe(self) -> dict[str, object]:
        """Device, processes, versions and the machine around them, for provenance."""
        on_gpu, gpu, cudnn = self.device.type == "cuda", {}, None
        if on_gpu:
            gpu = dict(machine.gpu_facts(str(torch.cuda.get_device_properties(self.device).uuid)))
            cudnn = torch.backends.cudnn.version()
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else machine.cpu_name(),
            "device_kind": self.device.type,
            "threads": torch.get_num_threads(),
            "precision": self.precision,
            "compile": self.compile,
            "processes": self.processes.world_size,
            "versions": machine.versions(cudnn=cudnn, driver=gpu.pop("driver", None)),
            "machine": {"cpu": machine.cpu_name(), "cores": os.cpu_count() or 1, **gpu},
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "environment": machine.environment(),
            "allocator": self.allocator,
        }


def device_kind(settings: RuntimeSettings) -> str:
    """``cuda`` or ``cpu``: where a run of these settings computes. ValueError as ``start`` has it."""
    return _device(settings.device).type


def take_gpu(settings: RuntimeSettings) -> machine.Lease | None:
    """Where ``auto`` finds GPUs, one that no other job of this machine has, else None; waits while all are taken."""
    names = _gpu_names() if settings.device == "auto" else []
    return machine.take_free(names) if names else None


def _gpu_names() -> list[str]:
    """One for each GPU that this process sees, the same in all processes whatever CUDA_VISIBLE_DEVICES says."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def forget_earlier_jobs() -> None:
    """What an earlier job of this process left: objects in cycles, compiled graphs, blocks kept by the allocator."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # its guards would count against this job's limit of recompilations
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def start(settings: RuntimeSettings, *, gpu: int | None = None, processes: ProcessGroup = SINGLE) -> Runtime:
    """Choose the device and set what is global: threads, determinism and the allocator.

    Args:
        gpu: the index of the GPU that ``auto`` means, for one process.
        processes: of the run; of several, each has the GPU of its own rank.

    Raises:
        ValueError: naming ``runtime.device`` if it is not there or not in this build of torch.
    """
    if processes.world_size > 1:
        device = _own_device(settings.device, processes)
    else:
        device = _device(settings.device if gpu is None else f"cuda:{gpu}")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or libraries put their workspaces on the first one
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
        allocator=allocator.use(settings.allocator),
        processes=processes,
    )


def seed(number: int) -> None:
    """All generators of this process."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def seed_apart(number: int, *, step: int, rank: int) -> None:
    """All generators of this process, other numbers for every step and rank: for dropout, once the model is made."""
    seed(int(integer_hash(number, step, rank)[0] >> np.uint64(1)))


def random_state() -> dict[str, object]:
    """Every generator's state, for a checkpoint."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }


def set_random_state(state: dict[str, object]) -> None:
    """Go on from ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


class StopSignal:
    """Turns signals into a request that the loop answers between two steps; a second one stops at once.

    SIGTERM and SIGINT, and the two of users where somebody listens already: a launcher that has jobs queued again.

    Args:
        alone: whether this process decides alone; several must first agree on the step.

    Attributes:
        heard: the signal that this process received, or 0.
        agreed: the signal that any process received, once all know of it, or 0.
    """

    def __init__(self, *, alone: bool = True):
        self.alone, self.heard, self.agreed = alone, 0, 0
        self._before: dict[int, object] = {}

    @property
    def number(self) -> int | None:
        """The signal to stop for, or None."""
        return (self.heard if self.alone else self.agreed) or None

    def __enter__(self) -> "StopSignal":
        users = [number for number in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(number))]
        for number in (signal.SIGTERM, signal.SIGINT, *users):
            with contextlib.suppress(ValueError):  # signals are set in the main thread only
                self._before[number] = signal.signal(number, self._receive)
        return self

    def pass_on(self) -> None:
        """Once all is saved, let the launcher hear of its own signal: it may end the process here."""
        if self.number in (signal.SIGUSR1, signal.SIGUSR2):
            self._before[self.number](self.number, None)

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        if self.heard:
            raise KeyboardInterrupt
        self.heard = number


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"runtime.device={name}: allowed are auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():
            raise ValueError(
                f"runtime.device={name}: this build of torch ({torch.__version__}) has no CUDA; allowed are auto, cpu"
            )
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(
                f"runtime.device={name}: there are {count} CUDA devices here; allowed are auto, cpu, cuda:0 .."
            )
    return device


def _own_device(name: str, processes: ProcessGroup) -> torch.device:
    """One GPU for each process of this machine, or the CPU for all."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device, needed = _device(name), processes.local_world_size
    if device.index is not None:
        raise ValueError(f"runtime.device={name} with {processes.world_size} processes: allowed are auto, cpu, cuda")
    count = torch.cuda.device_count()
    if count < needed:
        raise ValueError(
            f"runtime.device={name}: {needed} processes and {count} CUDA devices here; allowed are runtime.device=cpu, "
            f"or torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", processes.local_rank)
