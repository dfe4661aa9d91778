"""Attention backends: which of them can run here, and ``attend``, one call for all of them, with the past in parts.

``fused`` is torch's flash or memory-efficient attention, ``kernel`` our own (``window_cpu.py``, ``triton_window.py``),
``chunked`` is plain PyTorch on a few queries at a time, and ``plain`` keeps all scores in memory (``window.py``). A
mechanism outside this package can use them too: it derives from ``OnKernels`` and has ``heads``, ``d_head``,
``position``, ``cache``, ``dropout`` and ``wanted_backend``. The names in this file, in ``Window`` and in
``VisibleKeys`` stay stable. ``tests/outside_attention.py`` is an example.

    visible = Window((span,) * heads, shift)                  # kernels/window.py: which keys a query sees, and how much
    keys = VisibleKeys.joined(k, v, before(state, visible.past(), k.dtype))           # context.py: past and segment
    y = attend(self.backend(x.device, training=self.training), q, keys, visible, bias=.., vectors=..)   # [B, H, T, K]
    state = keys.last(visible.past())
"""

import torch
from torch import Tensor

from variants.context import VisibleKeys
from variants.contract import Sublayer
from variants.kernels import chunked, fused, operation, triton_window, window, window_cpu
from variants.kernels.dropout import draw_seed
from variants.kernels.window import Inputs, Persistent, Window

TAKE_VECTORS = ("kernel", "chunked")
"""Backends that take one vector per distance directly, in place of a bias computed from the query."""


def is_operation(backend: str, device: torch.device) -> bool:
    """Whether torch can trace a backend as one operation."""
    return backend == "fused" or (backend == "kernel" and device.type != "cpu")


def attend(
    backend: str,
    q: Tensor,
    keys: VisibleKeys,
    visible: Window,
    *,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    past_learns: bool = False,
) -> Tensor:
    """Return head outputs ``[B, H, T, K]``.

    Args:
        keys: keys, values and their biases. If heads have pasts of unequal length, one call reads all heads, packed.
        seed: dropout seed for backends that draw dropout from counters; None to draw one.
        past_learns: whether keys and values of the past have gradients.
        others: see ``window.attend`` and ``chunked.attend``.
    """
    if (backend, q.device.type) == ("kernel", "cpu"):  # reads the past in place
        same = {"bias": bias, "vectors": vectors, "persistent": persistent, "sink": sink}
        same |= {"key_bias": keys.key_bias, "query_bias": keys.query_bias}
        return window_cpu.attend(q, keys.k, keys.v, visible, past=keys.past, **same)
    k, v, key_bias, lengths = keys.packed()
    bias = None if bias is None else bias[..., : max(visible.max_keys)]
    added = {"bias": bias, "persistent": persistent, "sink": sink, "key_bias": key_bias, "query_bias": keys.query_bias}
    if backend == "plain" and lengths is None:
        return window.attend(q, k, v, visible, dropout=dropout, **added)
    seed = draw_seed(q.device) if dropout and seed is None else seed
    added |= {"vectors": vectors, "dropout": dropout, "seed": seed, "lengths": lengths}
    if backend in ("plain", "chunked"):
        return chunked.attend(q, k, v, visible, **added)
    if backend == "fused" and fused.is_triangle(visible, inputs := Inputs.of(q, k, v, visible, **added)):
        return fused.triangle(inputs)
    own = () if past_learns or not keys.past else (keys.k, keys.v, keys.key_bias)
    if own:  # the past is constant; only ``own``, the segment's, learns
        k, v, added["key_bias"] = (x if x is None else x.detach() for x in (k, v, key_bias))
    return operation.attend(backend, q, k, v, visible, own=own, **added)


class OnKernels(Sublayer):
    """A sublayer whose attention over a window runs on the backends."""

    spans_of_input: bool = False
    """Whether spans depend on the input."""
    biases_keys: bool = False
    """Whether keys have biases."""

    @property
    def kernel_width(self) -> int:
        """Width of the queries and keys that backends get."""
        return self.d_head

    @property
    def has_vectors(self) -> bool:
        """Whether the position scheme adds a vector per distance to the keys."""
        return self.position.vectors(1) is not None

    def able(self, device: torch.device) -> tuple[str, ...]:
        """Return backends that the mechanism supports on ``device``, by preference; ``obstacles`` may exclude some."""
        on_cpu = device.type == "cpu"
        return ("kernel", "fused", *(("plain", "chunked") if on_cpu else ("chunked", "plain")))

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return tuple(name for name in self.able(device) if not self.obstacles(name, device, training=training))

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Return the requested backend, or for ``auto`` the first that can run; on a GPU the first in plain PyTorch.
        There the harness tests kernels on the very device before a run, and replaces ``auto`` by one that passed."""
        wanted = self.wanted_backend
        if wanted == "auto":
            of_torch = [] if device.type == "cpu" else ["chunked", "plain"]
            able = (name for name in of_torch or self.able(device) if name in self.able(device))
            return next(name for name in able if not self.obstacles(name, device, training=training))
        if reasons := self.obstacles(wanted, device, training=training):
            allowed = ", ".join(["auto", *self.backends(device, training=training)])
            raise ValueError(f"runtime.backend={wanted} cannot run with {', '.join(reasons)}: allowed are {allowed}")
        return wanted

    def obstacles(self, backend: str, device: torch.device, *, training: bool) -> list[str]:
        """Return the reasons why ``backend`` cannot run on ``device``; empty if it can."""
        dropout = self.dropout if training else 0.0
        if backend not in self.able(device):
            return [type(self).__name__]
        if backend not in ("fused", "kernel"):
            return []
        if backend == "fused":
            missing = fused.obstacle(device, dropout=dropout)
        elif device.type == "cpu":
            missing = window_cpu.available() or (f"model.dropout={dropout}" if dropout else None)
        else:
            missing = triton_window.available(device, self.kernel_width)
        takes = self.position.constant_bias or (backend == "kernel" and self.has_vectors)
        reasons = {
            "spans that depend on the input": self.spans_of_input,
            "a key bias": self.biases_keys and backend == "fused",
            "a position scheme whose bias depends on the query": not takes,
            missing: missing,
        }
        return [reason for reason, holds in reasons.items() if holds]
