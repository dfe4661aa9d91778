"""Longformer: windows that grow with depth, dilated for some heads of the upper layers (2004.05150, 3.1 and 4.1).

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax over j of (q_t . k_j + position) / sqrt(K),
    j = t - shift - n x,   x = 0 .. w - 1     (shift 0, or 1 where a position does not see itself)

Each head sees w keys, few in the bottom layer and many in the top. ``dilated_heads`` heads see every n-th visible key,
counted from the nearest. S bounds the distance: a dilated head sees fewer than w keys if n (w - 1) exceeds it.

A dilated head is a plain window in each of the n classes of positions that are equal modulo n, so every backend can
compute it. Classes are counted from the segment's first byte, so no phase is carried. Ours: default windows grow from
S/16 to S/2 in equal ratios. There is no global attention, as in the paper's language models.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from variants import backends
from variants.attention import Attention, AttentionSpan
from variants.context import VisibleKeys
from variants.contract import LayerContext
from variants.kernels.window import PastKV, Persistent, Window
from variants.multi_head import HeadKeywords

SMALLEST, LARGEST = 1 / 16, 1 / 2
"""Default windows of the bottom and of the top layer, as fractions of S."""


def grown_window(span: int, *, layer: int, n_layers: int) -> int:
    """Return a layer's w in keys, a constant multiple of that below; at least 2: a softmax over 1 has no gradient."""
    height = layer / (n_layers - 1) if n_layers > 1 else 1.0
    return max(2, round(span * SMALLEST * (LARGEST / SMALLEST) ** height))


def grown_dilation(*, layer: int, n_layers: int) -> int:
    """Return a layer's n as in the paper (appendix): 1 in the lower half, 2, 3 and 4 in thirds of the upper."""
    return 1 + max(0, 6 * layer // n_layers - 2)


class DilatedWindows(AttentionSpan):
    """Spans of a layer's heads; ``max_keys`` counts all keys from the nearest to the farthest, also skipped ones.

    Args:
        window: w in keys; None to derive it from depth and span.
        steps: n of each head; heads of equal n are neighbours.
    """

    def __init__(self, context: LayerContext, *, window: int | None, steps: tuple[int, ...]):
        super().__init__(context)
        self.window, self.steps, self.depth = window, steps, {"layer": context.layer, "n_layers": context.n_layers}
        self.bounded = True if window is None else None
        self.set_span(context.span)

    def set_span(self, span: int) -> None:
        self.span = span
        window = grown_window(span, **self.depth) if self.window is None else min(self.window, span)
        keys = [min(window, 1 + (span - 1) // n) for n in self.steps]
        self.set_keys((1 + n * (number - 1) for number, n in zip(keys, self.steps, strict=True)), keys)

    def alike(self) -> list[tuple[int, int, int, int]]:
        """Return groups of heads with equal windows: the first head, the number of heads, w and n."""
        kinds = Counter(zip(self.visible_keys, self.steps, strict=True))
        return [(self.steps.index(n), heads, number, n) for (number, n), heads in kinds.items()]


class Longformer(Attention):
    """Causal multi-head attention over windows that grow with depth, dilated for some heads.

    Args:
        windows: w in keys for each layer, from 1 to S; None for S/16 at the bottom to S/2 at the top.
        dilation: n for each layer, at least 1 (no dilation); None for 1 in the lower half, then up to 4.
        dilated_heads: number of dilated heads in a layer with n > 1, the last ones.
        The others are those of ``Attention``.
    """

    limits = frozenset(
        {"ideal_flops"}
    )  # plain PyTorch multiplies all pairs of a segment; a narrow window sees few of them

    def __init__(
        self,
        context: LayerContext,
        *,
        windows: tuple[int, ...] | None = None,
        dilation: tuple[int, ...] | None = None,
        dilated_heads: int = 2,
        **heads: Unpack[HeadKeywords],
    ):
        _check("windows", windows, layers=context.n_layers, most=context.span)
        _check("dilation", dilation, layers=context.n_layers)
        if not 0 <= dilated_heads <= context.heads:
            raise ValueError(f"dilated_heads={dilated_heads}: allowed are 0 to model.heads={context.heads}")
        grown = grown_dilation(layer=context.layer, n_layers=context.n_layers)
        step = grown if dilation is None else dilation[context.layer]
        steps = (1,) * (context.heads - dilated_heads) + (step,) * dilated_heads
        window = None if windows is None else windows[context.layer]
        span = partial(DilatedWindows, window=window, steps=steps)
        super().__init__(context, **heads, span=span)
        self.period = step

    def reach(self) -> int:
        return self.reach_now()

    def _in_positions(
        self, backend: str, q: Tensor, keys: VisibleKeys, visible: Window, persistent: Persistent | None
    ) -> Tensor:
        """Return head outputs ``[B, H, T, K]``; ``visible`` is not read, because the windows are constant."""
        most, outputs = max(self.span.max_keys), []
        vectors = self.position.vectors(most) if backend in backends.TAKE_VECTORS else None
        bias = self.position.bias(q, most) if vectors is None else None
        for first, heads, w, n in self.span.alike():
            columns = slice(0, n * w, n)
            added = {"vectors": None if vectors is None else vectors[columns]}
            added["bias"] = None if bias is None else bias.narrow(int(bias.dim() > 2), first, heads)[..., columns]
            q_and_keys = q.narrow(1, first, heads), keys.of_heads(first, heads)
            outputs.append(self._over_classes(backend, *q_and_keys, (w,) * heads, n, **added))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _over_classes(
        self,
        backend: str,
        q: Tensor,
        keys: VisibleKeys,
        max_keys: tuple[int, ...],
        n: int,
        *,
        bias: Tensor | None,
        vectors: Tensor | None,
    ) -> Tensor:
        """Return head outputs ``[B, H, T, K]``; queries r, r + n, .. see only keys r - shift, r - shift + n, .."""
        if n == 1:
            return self.attend(backend, q, keys, Window(max_keys, self.shift), bias=bias, vectors=vectors)
        length, outputs = q.shape[2], []

        def of_class(
            x: Tensor, r: int
        ) -> Tensor:  # [B, H, T, ..], padded to one length for all classes; no query sees the padding
            return F.pad(x, (0, 0, 0, -length % n))[:, :, r::n]

        for r in range(min(n, length)):
            c, past = (r - self.shift) % n, []  # class of the keys, and its past keys
            for part in keys.past:
                of_past = slice((part.k.shape[2] + c) % n, None, n)
                past.append(PastKV(part.heads, part.k[:, :, of_past], part.v[:, :, of_past]))
            k, v = of_class(keys.k, c), of_class(keys.v, c)
            met = VisibleKeys(k, v, past)
            bias_of_class = of_class(bias, r) if bias is not None and bias.dim() > 2 else bias
            visible = Window(max_keys, int(r < self.shift))  # with a shift, keys of class 0 are one row back
            outputs.append(self.attend(backend, of_class(q, r), met, visible, bias=bias_of_class, vectors=vectors))
        return rearrange(outputs, "r B H m K -> B H (m r) K")[:, :, :length]

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int]:
        totals = [0, 0, 0]
        for _, heads, w, n in self.span.alike():
            distances = range(self.shift, self.shift + n * w, n)
            new = sum(max(0, segment - far) for far in distances)
            past = sum(max(0, min(segment, segment + carried - far)) for far in distances) - new
            # A past key is seen if one of the distances leads from it to a query of the segment.
            met = sum((self.shift - i) % n < segment for i in range(1, min(carried, distances[-1]) + 1))
            totals = [total + heads * number for total, number in zip(totals, (new, past, met), strict=True)]
        return tuple(totals)


def _check(name: str, numbers: Sequence | None, *, layers: int, most: int | None = None) -> None:
    """Raise ValueError unless ``numbers`` is None or has one number per layer, from 1 to ``most``."""
    if numbers is not None and (len(numbers) != layers or min(numbers) < 1 or max(numbers) > (most or max(numbers))):
        upper = "at least 1" if most is None else f"from 1 to model.span={most}"
        raise ValueError(f"{name}={list(numbers)}: must be {layers} integers, one for each layer, {upper}; or null")
