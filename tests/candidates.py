"""Attention that offers candidates to be proven on any device: right ones, and some that are wrong in a way of their own."""

import ctypes

import torch
from torch import Tensor

from variants.attention import Attention
from variants.contract import LayerContext, Proof
from variants.kernels import fused, proof, window


class Offering(Attention):
    """Multi-head attention whose ``fused`` is right; ``kernel`` errs, ``flex`` crashes, ``sdpa`` fails at the run's shapes.

    Args:
        offered: names, in order of preference.
    """

    def __init__(self, context: LayerContext, *, offered: list):
        super().__init__(context)
        self.offered, self.wanted = tuple(offered), context.backend

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return (*self.offered, "plain")

    def backend(self, device: torch.device, *, training: bool) -> str:
        return "plain" if self.wanted in ("auto", "plain") else "fused"

    def forward(self, x: Tensor, *arguments, **keywords):
        if self.wanted == "sdpa" and x.shape[1] > 8:
            raise RuntimeError("too long for it")
        return super().forward(x, *arguments, **keywords)

    def prove(self, backend: str, device: torch.device, *, precision: str, deterministic: bool) -> list[Proof]:
        if backend == "flex":
            ctypes.string_at(0)
        attend = _one_hundredth if backend == "kernel" else fused.attend
        dtype = getattr(torch, precision)
        sizes = {"width": self.d_head, "heads": self.heads, "lengths": (33, 1)}
        return list(proof.prove(attend, device=device, dtype=dtype, deterministic=deterministic, **sizes))

    def proof_class(self) -> dict[str, object]:
        return {"width": self.d_head, "heads": self.heads, "cache": self.cache}


def _one_hundredth(q: Tensor, *arguments, **same) -> Tensor:
    return window.attend(q * 0.99 + 0.01 * q.detach(), *arguments, **same)
