"""Backends of attention: one call, whichever code computes it, for a past that is in one part or in several."""

import torch
from torch import Tensor

from variants.context import VisibleKeys
from variants.kernels import chunked, operation, window
from variants.kernels.dropout import draw_seed
from variants.kernels.window import Persistent, Window

TAKE_VECTORS = ("kernel", "chunked")
"""Backends that take a vector per distance as such, in place of a bias that depends on the query."""


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
    limits: Tensor | None = None,
    past_learns: bool = False,
) -> Tensor:
    """What the heads give, ``[B, H, T, K]``.

    Args:
        keys: with all of them in ``whole``.
        limits: ``visible.max_keys`` as a tensor on the CPU, where they must not be constants of a graph.
        past_learns: whether keys and values of the past have gradients.
        others: as ``window.attend`` and ``chunked.attend`` have them.
    """
    seed = draw_seed(q.device) if dropout and backend != "plain" else None
    found = []
    for heads, k, v in keys.whole:
        own = _Heads(list(heads), every=len(heads) == q.shape[1])
        beside = persistent and Persistent(own.of(persistent.q, 1), own.of(persistent.k, 0), own.of(persistent.v, 0))
        z, max_keys = visible.z, tuple(visible.max_keys[h] for h in heads)
        z = None if z is None else own.of(z, 0 if z.dim() == 1 else 1)
        added = None if bias is None else own.of(bias[..., : max(max_keys)], 0 if bias.dim() == 2 else 1)
        part = visible._replace(max_keys=max_keys, z=z)
        same = {"bias": added, "persistent": beside, "dropout": dropout}
        if backend == "plain":
            found.append(window.attend(own.of(q, 1), k, v, part, **same))
            continue
        same |= {"vectors": vectors, "seed": own.seed(seed)}
        if backend == "chunked":
            found.append(chunked.attend(own.of(q, 1), k, v, part, **same))
            continue
        same["limits"] = None if limits is None else own.of(limits, 0)
        learned = None if past_learns else (own.of(keys.k, 1), own.of(keys.v, 1))
        if learned:
            k, v = k.detach(), v.detach()
        found.append(operation.attend(backend, own.of(q, 1), k, v, part, own=learned, **same))
    order = [h for heads, *_ in keys.whole for h in heads]
    assert order == sorted(order), "parts are single heads in their order"
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class _Heads:
    """Some heads of all, which are numbered anew in a call of their own."""

    def __init__(self, numbers: list[int], *, every: bool):
        self.numbers, self.every = numbers, every

    def of(self, x: Tensor, dim: int) -> Tensor:
        """What is theirs of ``x``, a view: they are neighbours."""
        return x if self.every else x.narrow(dim, self.numbers[0], len(self.numbers))

    def seed(self, seed: Tensor | None) -> Tensor | None:
        """Of their dropout: counters would repeat under the same."""
        return seed if seed is None or self.every else seed + self.numbers[0]
