"""CUDA devices that are not there: what torch says of them, without anything that computes."""

import pytest
import torch


def pretend(patch: pytest.MonkeyPatch, *, devices: int) -> list[int]:
    """Let torch see so many. Returns the indices that are made the current device, as they come."""
    chosen: list[int] = []
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a run there sets it for good, and rows depend on it
    patch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    patch.setattr(torch.cuda, "device_count", lambda: devices)
    patch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen
