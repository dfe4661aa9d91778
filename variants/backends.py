"""Attention backends: a class for each way to compute attention over a window, and ``attend``,
which calls one by name.

A mechanism outside this package can use them too: it derives from ``OnKernels`` and has the
attributes ``heads``, ``d_head``, ``position``, ``cache``, ``dropout`` and ``wanted_backend``.
``OnKernels``, ``attend``, ``TAKE_VECTORS``, and the names in ``Window`` and in ``VisibleKeys`` stay
stable. ``tests/support/outside_attention.py`` is an example.

    visible = Window((span,) * heads, shift)  # kernels/window.py: the keys that a query may see
    past = before(state, visible.past(), k.dtype)
    keys = VisibleKeys.joined(k, v, past)  # context.py: past and segment
    backend = self.backend(x.device, training=self.training)
    y = attend(backend, q, keys, visible, bias=.., vectors=..)  # [B, H, T, K]
    state = keys.last(visible.past())"""

from types import ModuleType

import torch
from torch import Tensor

from variants.context import VisibleKeys
from variants.contract import Sublayer
from variants.kernels import chunked, fused, operation, triton_window, window, window_cpu
from variants.kernels.window import Inputs, Window


class Backend:
    """A way to compute attention over a window; in the base class one that can always run."""

    name: str
    """Its value of ``runtime.backend``."""
    module: ModuleType
    """The module that computes it."""
    is_operation = False
    """Whether torch traces it as one operation."""
    adds_only_columns = False
    """Whether it adds only constants of columns to scores, no key biases and no vectors."""
    reads_parts = False
    """Whether it reads the parts of a past where they are; others need past and segment in one
    tensor."""
    has_all_scores = False
    """Whether all scores are one tensor in memory; then heads of unequal spans carry pasts of equal
    length."""

    def obstacles(self, sublayer: "OnKernels", device: torch.device, dropout: float) -> list[str]:
        """Return the reasons why it cannot run; empty if it can."""
        return []

    def attend(self, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
        """Compute ``attend`` of this file."""
        return self.module.attend(q, window=visible, **keys.packed(), **options)


class Chunked(Backend):
    """Plain PyTorch on a few queries at a time."""

    name = "chunked"
    module = chunked


class Plain(Backend):
    """Plain PyTorch with all scores in memory."""

    name = "plain"
    module = window
    has_all_scores = True

    def attend(self, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
        if len(keys.past) > 1:  # another backend made the state
            return Chunked().attend(q, keys, visible, **options)
        return super().attend(q, keys, visible, **options)


class Kernel(Backend):
    """A backend with its own backward pass, which not every mechanism and machine allow."""

    drops = False
    """Whether it drops attention weights."""
    both_sides = False
    """Whether it computes windows of both sides."""

    def obstacles(self, sublayer: "OnKernels", device: torch.device, dropout: float) -> list[str]:
        position = sublayer.position
        has_vectors = not self.adds_only_columns and position.vectors(1) is not None
        reasons = {
            "spans that depend on the input": sublayer.spans_of_input,
            "a key bias": sublayer.biases_keys and self.adds_only_columns,
            "objective.direction=both": sublayer.both and not self.both_sides,
            "a position scheme whose bias depends on the query": not (
                position.constant_bias or has_vectors
            ),
            self.module.obstacle(device, sublayer.kernel_width): True,
            f"model.dropout={dropout}": dropout and not self.drops,
        }
        return [reason for reason, holds in reasons.items() if reason and holds]


class CpuKernel(Kernel):
    """The kernel of this package for CPUs."""

    name = "kernel"
    module = window_cpu
    reads_parts = True

    def attend(self, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
        options |= {"key_bias": keys.key_bias, "query_bias": keys.query_bias}
        return window_cpu.attend(q, keys.k, keys.v, visible, past=keys.past, **options)


class Operation(Kernel):
    """A backend that torch traces as one operation (``operation.py``)."""

    is_operation = True

    def attend(self, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
        call = keys.packed() | options
        past = [x for part in keys.past for x in part.tensors()]
        if past and not any(x.requires_grad for x in past):  # only the segment gets gradients
            call["segment"] = keys.segment().tensors()
            for name in ("k", "v", "key_bias"):
                call[name] = None if call[name] is None else call[name].detach()
        return operation.attend(self.name, q, window=visible, **call)


class Fused(Operation):
    """Torch's flash or memory-efficient attention."""

    name = "fused"
    module = fused
    adds_only_columns = True
    both_sides = True

    def attend(self, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
        inputs = Inputs.from_call(q, keys.k, keys.v, visible, key_bias=keys.key_bias, **options)
        if not keys.past and fused.is_full(visible, inputs):
            return fused.full(inputs, causal=not visible.both)
        return super().attend(q, keys, visible, **options)


class TritonKernel(Operation):
    """The kernel of this package for GPUs."""

    name = "kernel"
    module = triton_window
    drops = True


ON_CPU = {backend.name: backend for backend in (CpuKernel(), Fused(), Plain(), Chunked())}
"""Backends on a CPU by name, preferred first."""
ELSEWHERE = {backend.name: backend for backend in (TritonKernel(), Fused(), Chunked(), Plain())}
TAKE_VECTORS = tuple(name for name, backend in ON_CPU.items() if not backend.adds_only_columns)
"""Names of the backends that accept a vector per distance, in place of a bias computed from the
query."""


def on(device: torch.device) -> dict[str, Backend]:
    """Return the backends for a device by name, preferred first."""
    if device.type == "cpu":
        return ON_CPU
    return ELSEWHERE


def attend(backend: str, q: Tensor, keys: VisibleKeys, visible: Window, **options) -> Tensor:
    """Return head outputs ``[B, H, T, K]``.

    Args:
        backend: a name from ``OnKernels.backend``.
        keys: keys, values and their biases. They are packed if heads have pasts of unequal length.
        q, visible: see ``window.attend``.
        options: ``bias``, ``vectors``, ``persistent``, ``sink``, ``dropout`` and ``seed``; see
        ``window.attend``."""
    return on(q.device)[backend].attend(q, keys, visible, **options)


class OnKernels(Sublayer):
    """A sublayer whose attention over a window runs on the backends."""

    spans_of_input: bool = False
    """Whether spans depend on the input."""
    biases_keys: bool = False
    """Whether keys have biases."""
    both: bool = False
    """Whether a query sees both of its sides."""
    runs_on: tuple[type[Backend], ...] = (Backend,)
    """Classes of the backends that compute the mechanism."""

    def __init__(self):
        super().__init__()
        self._chosen: dict[tuple[str, torch.device, bool], Backend] = {}

    @property
    def kernel_width(self) -> int:
        """Width of the queries and keys that are passed to backends."""
        return self.d_head

    def obstacles(self, backend: str, device: torch.device, *, training: bool) -> list[str]:
        """Return the reasons why ``backend`` cannot run on ``device``; empty if it can."""
        found = on(device).get(backend)
        if not isinstance(found, self.runs_on):
            return [type(self).__name__]
        return found.obstacles(self, device, self.dropout if training else 0.0)

    def backends(self, device: torch.device, *, training: bool) -> tuple[str, ...]:
        return tuple(
            name for name in on(device) if not self.obstacles(name, device, training=training)
        )

    def backend(self, device: torch.device, *, training: bool) -> str:
        """Select the backend: the configured one, or for ``auto`` the first in the order of ``on``
        that can run, on a GPU without the kernels of this package and of torch.

        On a GPU the harness tests kernels before a run, and replaces ``auto`` by a kernel that
        passed."""
        name = self.wanted_backend
        if name == "auto":
            names = [n for n, b in on(device).items() if device.type == "cpu" or not b.is_operation]
            return next(n for n in names if not self.obstacles(n, device, training=training))
        if reasons := self.obstacles(name, device, training=training):
            allowed = ", ".join(["auto", *self.backends(device, training=training)])
            raise ValueError(
                f"runtime.backend={name} cannot run with {', '.join(reasons)}: allowed are "
                f"{allowed}"
            )
        return name

    def chosen_backend(self, device: torch.device) -> Backend:
        """Return the object of ``backend`` in the present mode. Outside of compiled graphs, it is
        chosen once."""
        key = (self.wanted_backend, device, self.training)
        chosen = {}
        if not torch.compiler.is_compiling():
            chosen = self._chosen
        if key not in chosen:
            chosen[key] = on(device)[self.backend(device, training=self.training)]
        return chosen[key]
