"""An accelerator that is not there: what torch says of it, without anything that computes."""

import pytest
import torch


def pretend(patch: pytest.MonkeyPatch, kind: str | None, *, devices: int = 1) -> list[int]:
    """Let torch be a build for accelerators of this kind, of which the machine has some; None for a build for CPUs.

    Returns: the indices that are made the current device, as they come.
    """
    chosen: list[int] = []
    patch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # a run there sets it for good, and it is part of what rows depend on
    built = kind and torch.device(kind)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: built)
    patch.setattr(torch.accelerator, "is_available", lambda: bool(devices and built))
    patch.setattr(torch.accelerator, "device_count", lambda: devices if built else 0)
    patch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen
