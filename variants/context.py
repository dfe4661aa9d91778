"""Context: the keys and values that the queries of a segment see, and those that are carried to the next segment.

A state of keys and values is ``(keys, values)``. Each is a tensor ``[B, H, P, K]``; or a tuple with a tensor ``[B, 1,
P_h, K]`` for each head, if heads carry pasts of unequal length. Key biases, if any, are a third entry, without the
dimension K; they are relative to the bias of the state's last byte."""

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
    key_bias: Tensor | None = None  # b of the segment, [B, H, T], relative to the last past byte; -inf hides a key
    query_bias: Tensor | None = None  # b of queries, [B, H, T]; b_j - b_t is added to the score of query t and key j

    @classmethod
    def joined(cls, k: Tensor, v: Tensor, past: list[PastKV], *biases: Tensor | None) -> "VisibleKeys":
        """Return keys with ``whole`` set, unless the past has several parts. Attention and state share this copy."""
        keys = cls(k, v, past, None, *biases)
        if len(past) > 1:
            return keys
        pairs = zip(*(part.tensors() for part in (*past, keys.segment())), strict=True)
        whole = [torch.cat(pair, dim=2) if past else pair[0] for pair in pairs]
        return replaced(keys, whole=PastKV(keys.segment().heads, *whole))

    def segment(self) -> PastKV:  # not a property, which torch 2.10 cannot trace in a named tuple
        return PastKV(tuple(range(self.k.shape[1])), self.k, self.v, self.key_bias)

    def each(self, function: Callable[[PastKV], PastKV | None]) -> "VisibleKeys":
        """Apply ``function`` to every part; past parts for which it returns None are left out."""
        segment, whole = function(self.segment()), self.whole and function(self.whole)
        past = [*filter(None, map(function, self.past))]
        return VisibleKeys(*segment[1:3], past, whole, segment.key_bias, self.query_bias)

    def of_heads(self, first: int, n_heads: int) -> "VisibleKeys":
        """Return views of the keys of ``n_heads`` heads from head ``first`` on, renumbered from 0."""
        keys = self.each(lambda part: part.of_heads(first, n_heads))
        if self.query_bias is None:
            return keys
        size = self.query_bias.shape[1] // self.k.shape[1]
        return replaced(keys, query_bias=self.query_bias.narrow(1, first * size, n_heads * size))

    def repeated(self, times: int) -> "VisibleKeys":
        """Copy every key-value head for each of the ``times`` neighbouring query heads that read it. Key biases are not
        repeated, because every query head already has one."""

        def repeat(part: PastKV) -> PastKV:
            heads = tuple(h * times + i for h in part.heads for i in range(times))
            return replaced(
                part, heads=heads, k=part.k.repeat_interleave(times, dim=1), v=part.v.repeat_interleave(times, dim=1)
            )

        return self if times == 1 else self.each(repeat)

    def rebased(self) -> "VisibleKeys":
        """Make key biases relative to the segment's last byte, so that carried biases do not grow with the stream."""

        def rebase(part: PastKV) -> PastKV:
            by_head = self.query_bias[..., -1:].unflatten(1, (self.k.shape[1], -1))
            by_head = by_head.narrow(1, part.heads[0], len(part.heads))
            return replaced(part, key_bias=part.key_bias - by_head.flatten(1, 2))

        return self if self.query_bias is None else self.each(rebase)

    def packed(self) -> dict[str, Tensor | None]:
        """Return past and segment in one tensor, as fields of ``Inputs`` of ``kernels/window.py``."""
        fields = dict.fromkeys(("key_bias", "lengths")) | {"query_bias": self.query_bias}
        if len(self.past) < 2:
            whole = self.whole or VisibleKeys.joined(self.k, self.v, self.past, self.key_bias).whole
            return fields | dict(zip(("k", "v", "key_bias"), whole[1:], strict=True))
        tensors, lengths = _pack_heads(self.past, self.segment(), [math.inf] * self.k.shape[1])
        fields |= zip(("k", "v", "key_bias"), (x.squeeze(1) for x in tensors), strict=False)
        return fields | {"lengths": torch.tensor(lengths)}

    def state(self) -> State:
        """Return the state of all keys, detached."""
        if self.whole is None:
            return self.last(*[math.inf] * self.k.shape[1])
        return tuple(x.detach() for x in self.whole.tensors())

    def last(self, *lengths: float) -> State:
        """Return the state of the last keys; ``lengths`` is their number for all heads, or a number for each head."""
        return last_keys([] if self.whole else self.past, self.whole or self.segment(), *lengths)


def before(state: State, past: int | None, dtype: torch.dtype | None = None) -> list[PastKV]:
    """Split a state into parts of the last ``past`` keys and values (None: all), in ``dtype`` (None: unchanged)."""
    if state is None:
        return []
    fields = [(part,) if isinstance(part, Tensor) else part for part in state]  # keys, values, maybe key biases
    keys = fields[0]
    heads = [tuple(range(keys[0].shape[1]))] if len(keys) == 1 else [(h,) for h in range(len(keys))]

    def cut(x: Tensor) -> Tensor:
        x = x if past is None else x[:, :, max(0, x.shape[2] - past) :]
        return x if dtype is None or x.dim() == 3 else x.to(dtype)  # key biases are not converted

    return [PastKV(part_heads, *map(cut, tensors)) for part_heads, *tensors in zip(heads, *fields, strict=True)]


def last_keys(old: list[PastKV], new: PastKV, *lengths: float) -> State:
    """Compute ``VisibleKeys.last`` for parts ``old`` and segment ``new``. Tensors of single heads are views of one."""
    if len(lengths) == 1 and len(old) < 2:
        pairs = zip(old[0].tensors() if old else [None] * 3, new.tensors(), strict=False)
        return tuple(last(*lengths, 2, *pair) for pair in pairs)
    tensors, lengths = _pack_heads(old, new, lengths if len(lengths) > 1 else lengths * len(new.heads))
    return tuple(x.detach().split(lengths, dim=2) for x in tensors)


def _pack_heads(old: list[PastKV], new: PastKV, max_lengths: Sequence[float]) -> tuple[list[Tensor], list[int]]:
    """Concatenate the last keys of each head, at most ``max_lengths``, head after head, ``[B, 1, sum of lengths, ..]``;
    key biases have the H / G query heads of a head in place of 1. Also return the lengths."""
    pieces, lengths = [[] for _ in new.tensors()], []
    for h, remaining in enumerate(max_lengths):
        parts, part_lengths = [part.of_heads(h, 1) for part in (*old, new) if h in part.heads], []
        for part in reversed(parts):
            part_lengths.append(min(remaining, part.k.shape[2]))
            remaining -= part_lengths[-1]
        for field_pieces, *tensors in zip(pieces, *(part.tensors() for part in parts), strict=True):
            for x, n in zip(tensors, reversed(part_lengths), strict=True):
                field_pieces.append(x.narrow(2, x.shape[2] - n, n))
        lengths.append(sum(part_lengths))
    return [torch.cat(field_pieces, dim=2) for field_pieces in pieces], lengths


def last(length: int, dim: int, old: Tensor | None, new: Tensor) -> Tensor:
    """Return the last ``length`` rows of ``old`` and ``new``, concatenated and detached. The storage is at most a third
    larger, so that a state does not hold a whole segment in memory."""
    new = new.detach()
    new_length = min(length, new.shape[dim])
    old_length = 0 if old is None else min(length - new_length, old.shape[dim])
    view = new.narrow(dim, new.shape[dim] - new_length, new_length)
    if old_length:
        return torch.cat([old.detach().narrow(dim, old.shape[dim] - old_length, old_length), view], dim)
    if torch.compiler.is_compiling():  # a graph cannot read sizes of storages, and must not return views
        return view.clone(memory_format=torch.contiguous_format)
    return view if 4 * view.nbytes >= 3 * new.untyped_storage().nbytes() else view.clone()


def weights_of(sum_values: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Measure the weights ``[B, H, T, n]`` of ``sum_values``, which maps values ``[.., n, K]`` to weighted sums ``[B,
    H, T, K]``. It is called with one-hot values, for K of the n rows at a time, so any backend can be measured."""
    n, width = values.shape[-2:]
    one_hot = torch.eye(n, -(-n // width) * width, dtype=values.dtype, device=values.device)
    parts = [sum_values(part.expand_as(values).contiguous()) for part in one_hot.split(width, dim=1)]
    return torch.cat(parts, dim=-1)[..., :n]
