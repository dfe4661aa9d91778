"""Torch's state in a process: what a run sets in it, and what earlier runs have left."""

import gc
import os
import sys

import torch

from harness.device import machine
from harness.device.processes import SINGLE, ProcessGroup
from harness.device.runtime import Runtime
from harness.device.selection import device_of_rank, resolve_auto
from harness.plan.settings import RuntimeSettings

# PyTorch's choice, before a job of this process sets another number
_DEFAULT_THREADS = torch.get_num_threads()


def free_earlier_jobs() -> None:
    """Free what earlier jobs of this process have left: reference cycles, compiled graphs and
    cached GPU memory."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        # earlier graphs would count towards this job's limit of recompilations
        torch._dynamo.reset()
    # otherwise the call would initialize CUDA, which takes GPU memory
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def configure_torch(settings: RuntimeSettings, *, processes: ProcessGroup = SINGLE) -> Runtime:
    """Set this process's threads, determinism and allocator, and return its runtime. ValueError
    names a wrong key."""
    device = device_of_rank(settings.device, processes)
    if settings.tf32 and device.type != "cuda":
        raise ValueError(
            f"runtime.tf32=true: runtime.device={device.type} does not support TF32; allowed is "
            "false"
        )
    settings = resolve_auto(settings)
    if device.type == "cuda" and device.index is not None:
        # otherwise libraries allocate their workspaces on the first GPU
        torch.cuda.set_device(device.index)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.set_num_threads(settings.threads or _DEFAULT_THREADS)
    machine.set_graph_folder()
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
    # this debugging aid would fill every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False
    return Runtime(
        device=device,
        processes=processes,
        allocator=machine.set_allocator(settings.allocator),
        precision=settings.precision,
        compile=settings.compile,
        tf32=settings.tf32,
    )
