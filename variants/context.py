"""Context: the keys and values that the queries of a segment see, and those that are carried to the
next segment.

A state of keys and values is ``(keys, values)``. Each is a tensor ``[B, H, P, K]``; or a tuple with
a tensor ``[B, 1, P_h, K]`` for each head, if heads carry pasts of unequal length. Key biases, if
any, are a third entry, without the dimension K; they are relative to the bias of the state's
last byte."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from variants.contract import State
from variants.kernels.window import PastKV, replaced


class VisibleKeys(NamedTuple):
    """Keys, values and biases that the queries of a segment see."""

    k: Tensor  # of the segment, [B, H, T, K]
    v: Tensor
    past: list[PastKV]  # parts of keys and values before the segment
    whole: PastKV | None = None  # past and segment concatenated, [B, H, P + T, K]
    # b of the segment, [B, H, T], relative to the last past byte; -inf hides a key
    key_bias: Tensor | None = None
    # b of queries, [B, H, T]; b_j - b_t is added to the score of query t and key j
    query_bias: Tensor | None = None

    @classmethod
    def joined(
        cls, k: Tensor, v: Tensor, past: list[PastKV], *biases: Tensor | None
    ) -> "VisibleKeys":
        """Return keys with ``whole`` set, unless the past has several parts. Attention and state
        share this copy."""
        keys = cls(k, v, past, None, *biases)
        if len(past) > 1:
            return keys
        whole = keys.segment()
        if past:
            pairs = zip(past[0].tensors(), whole.tensors(), strict=True)
            whole = PastKV(*(torch.cat(pair, dim=2) for pair in pairs))
        return replaced(keys, whole=whole)

    def segment(self) -> PastKV:  # not a property, which torch 2.10 cannot trace in a named tuple
        return PastKV(self.k, self.v, self.key_bias)

    def each(self, function: Callable[[PastKV], PastKV]) -> "VisibleKeys":
        """Apply ``function`` to every part."""
        segment = function(self.segment())
        past = [function(part) for part in self.past]
        whole = self.whole and function(self.whole)
        return VisibleKeys(segment.k, segment.v, past, whole, segment.key_bias, self.query_bias)

    def of_heads(self, first: int, n_heads: int) -> "VisibleKeys":
        """Return views of the keys of ``n_heads`` heads from head ``first`` on."""
        keys = replaced(self, past=[]).each(lambda part: part.of_heads(first, first + n_heads))
        fields = {"past": _of_heads(self.past, first, n_heads)}
        if self.query_bias is not None:
            size = self.query_bias.shape[1] // self.k.shape[1]
            fields["query_bias"] = self.query_bias.narrow(1, first * size, n_heads * size)
        return replaced(keys, **fields)

    def repeated(self, times: int) -> "VisibleKeys":
        """Copy every key-value head for each of the ``times`` neighbouring query heads that read
        it. Key biases are not repeated, because every query head already has one."""

        def repeat(part: PastKV) -> PastKV:
            k, v = (x.repeat_interleave(times, dim=1) for x in part[:2])
            return PastKV(k, v, part.key_bias)

        return self.each(repeat)

    def rebased(self) -> "VisibleKeys":
        """Make key biases relative to the segment's last byte, so that carried biases do not
        grow with the stream."""
        base = self.query_bias[..., -1:]
        n_heads = [part.key_bias.shape[1] for part in self.past]
        of_parts = zip(self.past, base.split(n_heads, dim=1) if n_heads else (), strict=True)
        past = [PastKV(k, v, bias - part_base) for (k, v, bias), part_base in of_parts]
        whole = self.whole and replaced(self.whole, key_bias=self.whole.key_bias - base)
        return replaced(self, past=past, whole=whole, key_bias=self.key_bias - base)

    def packed(self) -> dict[str, Tensor | None]:
        """Return past and segment in one tensor, as fields of ``Inputs`` of
        ``kernels/window.py``."""
        if len(self.past) < 2:
            whole = self.whole or VisibleKeys.joined(self.k, self.v, self.past, self.key_bias).whole
            return whole._asdict() | {"query_bias": self.query_bias, "lengths": None}
        tensors, lengths = _pack_heads(self.past, self.segment(), [math.inf] * self.k.shape[1])
        packed = PastKV(*(x.squeeze(1) for x in tensors))
        return packed._asdict() | {"query_bias": self.query_bias, "lengths": torch.tensor(lengths)}

    def state(self) -> State:
        """Return the state of all keys, detached."""
        if self.whole is None:
            return self.last(math.inf)
        return tuple(x.detach() for x in self.whole.tensors())

    def last(self, *lengths: float) -> State:
        """Return the state of the last keys; ``lengths`` is their number for all heads, or a
        number for each head."""
        return last_keys([] if self.whole else self.past, self.whole or self.segment(), *lengths)


def before(state: State, n_past: int | None, dtype: torch.dtype | None = None) -> list[PastKV]:
    """Split a state into parts of the last ``n_past`` keys and values (None: all), in ``dtype``
    (None: unchanged)."""
    if state is None:
        return []
    # keys, values, maybe key biases
    fields = [(part,) if isinstance(part, Tensor) else part for part in state]

    def cut(x: Tensor) -> Tensor:
        x = x if n_past is None else x[:, :, max(0, x.shape[2] - n_past) :]
        # key biases are not converted
        if dtype is None or x.dim() == 3:
            return x
        return x.to(dtype)

    return [PastKV(*map(cut, tensors)) for tensors in zip(*fields, strict=True)]


def _of_heads(parts: list[PastKV], first: int, n_heads: int) -> list[PastKV]:
    """Return views of ``n_heads`` heads from head ``first`` on, in the parts that have them."""
    views = []
    for part in parts:
        last = min(first + n_heads, part.k.shape[1])
        if max(first, 0) < last:
            views.append(part.of_heads(max(first, 0), last))
        first -= part.k.shape[1]
    return views


def last_keys(old: list[PastKV], new: PastKV, *lengths: float) -> State:
    """Compute ``VisibleKeys.last`` for parts ``old`` and segment ``new``. Tensors of single
    heads are views of one."""
    if len(lengths) == 1 and len(old) < 2:
        pairs = zip(old[0].tensors() if old else [None] * 3, new.tensors(), strict=False)
        return tuple(last(*lengths, 2, *pair) for pair in pairs)
    tensors, lengths = _pack_heads(
        old, new, lengths if len(lengths) > 1 else lengths * new.k.shape[1]
    )
    return tuple(x.detach().split(lengths, dim=2) for x in tensors)


def _pack_heads(
    old: list[PastKV], new: PastKV, max_lengths: Sequence[float]
) -> tuple[list[Tensor], list[int]]:
    """Concatenate the last keys of each head, at most ``max_lengths``, head after head, ``[B, 1,
    sum of lengths, ..]``; key biases have the H / G query heads of a head in place of 1. Also
    return the lengths."""
    pieces = []
    lengths = []
    for h, remaining in enumerate(max_lengths):
        of_head = []
        for part in (new.of_heads(h, h + 1), *_of_heads(old, h, 1)):
            length = min(remaining, part.k.shape[2])
            of_head.insert(0, [x.narrow(2, x.shape[2] - length, length) for x in part.tensors()])
            remaining -= length
        pieces += of_head
        lengths.append(sum(k.shape[2] for k, *_ in of_head))
    return [torch.cat(views, dim=2) for views in zip(*pieces, strict=True)], lengths


def last(length: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """Return the last ``length`` rows of ``old`` and ``new``, concatenated and detached. The
    storage is at most a third larger, so that a state does not hold a whole segment in memory."""
    new = new.detach()
    new_length = min(length, new.shape[dim])
    old_length = 0
    if old is not None:
        old_length = min(length - new_length, old.shape[dim])
    view = new.narrow(dim, new.shape[dim] - new_length, new_length)
    if old_length:
        return torch.cat(
            [old.detach().narrow(dim, old.shape[dim] - old_length, old_length), view], dim
        )
    # a graph cannot read sizes of storages, and must not return views
    if torch.compiler.is_compiling():
        return view.clone(memory_format=torch.contiguous_format)
    if 4 * view.nbytes >= 3 * new.untyped_storage().nbytes():
        return view
    return view.clone()


def weights_of(sum_values: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Measure the weights ``[B, H, T, n]`` of ``sum_values``, which maps values ``[.., n, K]`` to
    weighted sums ``[B, H, T, K]``. It is called with one-hot values, for K of the n rows at a
    time, so any backend can be measured."""
    n, width = values.shape[-2:]
    one_hot = torch.eye(n, -(-n // width) * width, dtype=values.dtype, device=values.device)
    parts = [
        sum_values(part.expand_as(values).contiguous()) for part in one_hot.split(width, dim=1)
    ]
    return torch.cat(parts, dim=-1)[..., :n]
