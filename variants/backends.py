"""Backends of attention: which of them compute the same here, and one call, whichever does, for a past in parts.

- ``kernel``: our own, for a CPU (``window_cpu.py``) or for a GPU (``triton_window.py``);
- ``fused``: torch's flash attention on a CPU, its memory-efficient attention on a GPU, and where the window is the whole
  triangle what torch itself takes (``fused.py``);
- ``chunked``: plain PyTorch a few queries at a time (``chunked.py``);
- ``plain``: ``window.py``, scores in memory.

A mechanism from outside may use them as ours do: what is named here and in ``Window`` and ``VisibleKeys`` stays as it is.

    visible = Window((span,) * heads, shift)                  # kernels/window.py: which keys a query sees, and how much
    keys = VisibleKeys.joined(k, v, before(state, visible.past(), k.dtype))           # context.py: past and segment
    y = attend(choose(wanted, need, x.device), q, keys, visible, bias=.., vectors=.., dropout=..)       # [B, H, T, K]
    state = keys.last(visible.past())

``Sublayer.backend`` returns what ``choose`` says and ``Sublayer.backends`` what is ``possible``; a GPU takes a kernel where it
was proven. ``tests/offered.py`` is one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from variants.context import VisibleKeys
from variants.kernels import chunked, fused, operation, triton_window, window, window_cpu
from variants.kernels.dropout import draw_seed
from variants.kernels.window import Inputs, Persistent, Window

TAKE_VECTORS = ("kernel", "chunked")
"""Backends that take a vector per distance as such, in place of a bias that depends on the query."""


class Need(NamedTuple):
    """What a sublayer asks of a backend.

    Attributes:
        d_head: head width K.
        dropout: rate on attention weights.
        spans_of_input: whether spans depend on the input.
        constant_bias: whether what is added to scores, if anything, is a constant for each head and distance.
        vectors: whether it is else the query times a vector for each distance.
    """

    d_head: int
    dropout: float
    spans_of_input: bool
    constant_bias: bool
    vectors: bool


def possible(need: Need, device: torch.device) -> tuple[str, ...]:
    """Names of the backends that compute what is needed there, in the order of preference."""
    plain = ("plain", "chunked") if device.type == "cpu" else ("chunked", "plain")
    return (*(name for name in ("kernel", "fused") if not _obstacles(name, need, device)), *plain)


def choose(wanted: str, need: Need, device: torch.device) -> str:
    """The backend that was asked for, or for ``auto`` the first that is possible; on a GPU the first that is plain PyTorch.

    Kernels are taken there when they were proven on that very device, by which ``auto`` becomes their name.

    Raises:
        ValueError: naming ``runtime.backend`` where what was asked for is not possible.
    """
    if wanted == "auto":
        return possible(need, device)[0] if device.type == "cpu" else "chunked"
    if obstacles := _obstacles(wanted, need, device):
        allowed = ", ".join(["auto", *possible(need, device)])
        raise ValueError(f"runtime.backend={wanted} cannot run with {', '.join(obstacles)}: allowed are {allowed}")
    return wanted


def _obstacles(backend: str, need: Need, device: torch.device) -> list[str]:
    """Why a backend cannot run."""
    if backend not in ("fused", "kernel"):
        return []
    known = need.constant_bias or (backend == "kernel" and need.vectors)
    found = {
        "spans that depend on the input": need.spans_of_input,
        "a position scheme whose bias depends on the query": not known,
    }
    if backend == "fused":
        missing = fused.obstacle(device, dropout=need.dropout)
    elif device.type == "cpu":
        missing = window_cpu.available() or (f"model.dropout={need.dropout}" if need.dropout else None)
    else:
        missing = triton_window.available(device, need.d_head)
    return [name for name, stands in found.items() if stands] + ([missing] if missing else [])


def is_operation(backend: str, device: torch.device) -> bool:
    """Whether a backend is one operation, which torch can trace."""
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
    dropout: float = 0.0,
    seed: Tensor | None = None,
    past_learns: bool = False,
) -> Tensor:
    """What the heads give, ``[B, H, T, K]``.

    Args:
        keys: with all of them in ``whole``, but for the CPU's kernel.
        seed: of the dropout, where it is drawn from counters; None to draw one.
        past_learns: whether keys and values of the past have gradients.
        others: as ``window.attend`` and ``chunked.attend`` have them.
    """
    if (backend, q.device.type) == ("kernel", "cpu"):  # reads the past where it is
        return window_cpu.attend(
            q, keys.k, keys.v, visible, past=keys.past, bias=bias, vectors=vectors, persistent=persistent
        )
    if dropout and backend != "plain" and seed is None:
        seed = draw_seed(q.device)
    found = []
    for heads, k, v in keys.whole:
        own = _Heads(list(heads), every=len(heads) == q.shape[1])
        added = (
            None if bias is None else own.of(bias[..., : max(visible.max_keys[h] for h in heads)], int(bias.dim() > 2))
        )
        beside = persistent and Persistent(own.of(persistent.q, 1), own.of(persistent.k, 0), own.of(persistent.v, 0))
        same = {"bias": added, "vectors": vectors, "persistent": beside}
        learned = None if past_learns or not keys.past else (own.of(keys.k, 1), own.of(keys.v, 1))
        dropped = {"dropout": dropout, "seed": own.seed(seed)}
        found.append(_attend(backend, own.of(q, 1), k, v, own.window(visible), learned, **same, **dropped))
    order = [h for heads, *_ in keys.whole for h in heads]
    assert order == sorted(order), "parts are single heads in their order"
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: Window,
    own: tuple[Tensor, Tensor] | None,
    *,
    vectors: Tensor | None,
    seed: Tensor | None,
    **same,
) -> Tensor:
    """The call for heads whose past is of one length; ``own`` as ``operation.attend`` has it."""
    if backend == "plain":
        return window.attend(q, k, v, part, **same)
    same |= {"vectors": vectors, "seed": seed}
    if backend == "chunked":
        return chunked.attend(q, k, v, part, **same)
    if backend == "fused" and fused.is_triangle(part, inputs := Inputs.of(q, k, v, part, **same)):
        return fused.triangle(inputs)
    return operation.attend(backend, q, *((k, v) if own is None else (k.detach(), v.detach())), part, own=own, **same)


class _Heads:
    """Some heads of all, which are numbered anew in a call of their own."""

    def __init__(self, numbers: list[int], *, every: bool):
        self.numbers, self.every = numbers, every

    def of(self, x: Tensor, dim: int) -> Tensor:
        """What is theirs of ``x``, a view: they are neighbours."""
        return x if self.every else x.narrow(dim, self.numbers[0], len(self.numbers))

    def window(self, visible: Window) -> Window:
        """What they may see."""
        z, limits = visible.z, visible.limits
        return visible._replace(
            max_keys=tuple(visible.max_keys[h] for h in self.numbers),
            z=None if z is None else self.of(z, 0 if z.dim() == 1 else 1),
            limits=None if limits is None else self.of(limits, 0),
        )

    def seed(self, seed: Tensor | None) -> Tensor | None:
        """Of their dropout, in which the first of a call has number 0."""
        return seed if seed is None or self.every else seed + self.numbers[0]
