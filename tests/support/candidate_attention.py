"""Attention with one correct and two wrong backends, for tests of the selection of a backend on
an untested device."""

import ctypes

import torch
from torch import Tensor

from variants.attention import Attention
from variants.contract import LayerContext, SublayerOutput


class CandidateAttention(Attention):
    """Multi-head attention. Backend ``fused`` is correct, ``kernel`` has a wrong gradient,
    ``chunked`` crashes.

    Args:
        offered: names of backends, in order of preference."""

    def __init__(self, context: LayerContext, *, offered: list):
        super().__init__(context)
        self.offered, self.wanted = tuple(offered), context.backend

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return (*self.offered, "plain")

    def backend(self, device: torch.device, *, training: bool) -> str:
        return "plain" if self.wanted in ("auto", "plain") else "fused"

    def forward(self, x: Tensor, *arguments, **keywords) -> SublayerOutput:
        if self.wanted == "chunked":
            ctypes.string_at(0)
        out = super().forward(x, *arguments, **keywords)
        return (
            out._replace(y=0.99 * out.y + 0.01 * out.y.detach()) if self.wanted == "kernel" else out
        )
