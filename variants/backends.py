"""Attention backends: which of them can run on a device, and ``attend``, a single function that calls any of them.

``fused`` is torch's flash or memory-efficient attention. ``kernel`` is a kernel of this package (``window_cpu.py``,
``triton_window.py``). ``chunked`` is plain PyTorch on a few queries at a time. ``plain`` has all scores in memory
(``window.py``). A mechanism outside this package can use them too: it derives from ``OnKernels`` and has the attributes
``heads``, ``d_head``, ``position``, ``cache``, ``dropout`` and ``wanted_backend``. The names in this file, in
``Window`` and in ``VisibleKeys`` stay stable. ``tests/outside_attention.py`` is an example.

    visible = Window((span,) * heads, shift)                  # kernels/window.py: the keys that a query may see
    keys = VisibleKeys.joined(k, v, before(state, visible.past(), k.dtype))           # context.py: past and segment
    y = attend(self.backend(x.device, training=self.training), q, keys, visible, bias=.., vectors=..)   # [B, H, T, K]
    state = keys.last(visible.past())"""

import torch
from torch import Tensor

from variants.context import VisibleKeys
from variants.contract import Sublayer
from variants.kernels import chunked, fused, operation, triton_window, window, window_cpu
from variants.kernels.dropout import draw_seed
from variants.kernels.window import Inputs, Persistent, Window

TAKE_VECTORS = ("kernel", "chunked")
"""Backends that accept a vector per distance, in place of a bias computed from the query."""


def is_operation(backend: str, device: torch.device) -> bool:
    """Whether torch can trace the backend as one operation."""
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
        keys: keys, values and their biases. They are packed if heads have pasts of unequal length.
        seed: seed of counter-based dropout (``kernels/dropout.py``), None to draw one; ``plain`` may draw without it.
        past_learns: whether keys and values of the past get gradients.
        q, visible, bias, vectors, persistent, sink, dropout: see ``window.attend``."""
    options = {"bias": bias, "persistent": persistent, "sink": sink, "query_bias": keys.query_bias}
    if (backend, q.device.type) == ("kernel", "cpu"):  # this kernel reads past and segment without a copy
        options |= {"vectors": vectors, "key_bias": keys.key_bias}
        return window_cpu.attend(q, keys.k, keys.v, visible, past=keys.past, **options)
    k, v, key_bias, lengths = keys.packed()
    options |= {"bias": None if bias is None else bias[..., : max(visible.max_keys)], "key_bias": key_bias}
    if backend == "plain" and lengths is None:
        return window.attend(q, k, v, visible, dropout=dropout, **options)
    seed = draw_seed(q.device) if dropout and seed is None else seed
    options |= {"vectors": vectors, "dropout": dropout, "seed": seed, "lengths": lengths}
    if backend in ("plain", "chunked"):
        return chunked.attend(q, k, v, visible, **options)
    if backend == "fused" and fused.is_full_causal(visible, inputs := Inputs.from_call(q, k, v, visible, **options)):
        return fused.full_causal(inputs)
    segment = () if past_learns or not keys.past else (keys.k, keys.v, keys.key_bias)
    if segment:  # the past is constant; only the segment gets gradients
        k, v, options["key_bias"] = (x if x is None else x.detach() for x in (k, v, key_bias))
    return operation.attend(backend, q, k, v, visible, segment=segment, **options)


class OnKernels(Sublayer):
    """A sublayer whose attention over a window runs on the backends."""

    spans_of_input: bool = False
    """Whether spans depend on the input."""
    biases_keys: bool = False
    """Whether keys have biases."""

    @property
    def kernel_width(self) -> int:
        """Width of the queries and keys that are passed to backends."""
        return self.d_head

    @property
    def has_vectors(self) -> bool:
        """Whether the position scheme adds a vector per distance to the keys."""
        return self.position.vectors(1) is not None

    def able(self, device: torch.device) -> tuple[str, ...]:
        """Return the mechanism's backends for ``device``, preferred first; ``obstacles`` may exclude some of them."""
        on_cpu = device.type == "cpu"
        return ("kernel", "fused", *(("plain", "chunked") if on_cpu else ("chunked", "plain")))

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return tuple(name for name in self.able(device) if not self.obstacles(name, device, training=training))

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Return the configured backend. ``auto`` is the first that can run: on a GPU, the first in plain PyTorch.

        On a GPU the harness tests kernels before a run, and replaces ``auto`` by a kernel that passed."""
        name = self.wanted_backend
        if name == "auto":
            in_pytorch = [name for name in ("chunked", "plain") if name in self.able(device)]
            candidates = self.able(device) if device.type == "cpu" else in_pytorch
            return next(name for name in candidates if not self.obstacles(name, device, training=training))
        if reasons := self.obstacles(name, device, training=training):
            allowed = ", ".join(["auto", *self.backends(device, training=training)])
            raise ValueError(f"runtime.backend={name} cannot run with {', '.join(reasons)}: allowed are {allowed}")
        return name

    def obstacles(self, backend: str, device: torch.device, *, training: bool) -> list[str]:
        """Return the reasons why ``backend`` cannot run on ``device``; empty if it can."""
        dropout = self.dropout if training else 0.0
        if backend not in self.able(device):
            return [type(self).__name__]
        if backend not in ("fused", "kernel"):
            return []
        if backend == "fused":
            reason = fused.obstacle(device, dropout=dropout)
        elif device.type == "cpu":
            reason = window_cpu.obstacle() or (f"model.dropout={dropout}" if dropout else None)
        else:
            reason = triton_window.obstacle(device, self.kernel_width)
        reasons = []
        if self.spans_of_input:
            reasons.append("spans that depend on the input")
        if self.biases_keys and backend == "fused":
            reasons.append("a key bias")
        if not self.position.constant_bias and not (backend == "kernel" and self.has_vectors):
            reasons.append("a position scheme whose bias depends on the query")
        return [*reasons, *filter(None, [reason])]
