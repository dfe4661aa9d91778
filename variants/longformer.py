"""Longformer: windows that grow with depth, with dilation in some heads of the upper layers
(2004.05150, 3.1, 4.1).

    y_t = W_o concat_h sum_j a_tj v_j,   a_t = softmax over j of (q_t . k_j + position) / sqrt(K),
    j = t - shift - n x,   x = 0 .. w - 1     (shift 0, or 1 without ``attend_self``)

Each head sees w keys, few in the bottom layer and many in the top. ``dilated_heads`` heads see only
every n-th key, counted from the nearest. They see fewer than w keys if n (w - 1) exceeds S - 1.

With ``objective.direction=both``, windows of w keys reach to both sides (3.1: w / 2 on each side).

Positions that are equal modulo n form a class. Within a class, a dilated window is a window of
successive keys, which every backend can compute. Positions count from the segment's first byte, so
that no phase is carried. Default windows, which grow from S/16 to S/2 in equal ratios, are not the
paper's. Like the paper's language models, this class has no global attention."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from variants.attention import Attention
from variants.attention_span import AttentionSpan
from variants.backends import Backend
from variants.context import VisibleKeys
from variants.contract import LayerContext
from variants.kernels.fused import group_heads
from variants.kernels.window import PastKV, Window
from variants.multi_head import HeadKeywords

BOTTOM_FRACTION = 1 / 16
TOP_FRACTION = 1 / 2
"""Default windows of the bottom and of the top layer, as fractions of S."""


def grown_window(span: int, *, layer: int, n_layers: int) -> int:
    """Return the default w of a layer in keys. It grows by a constant factor from layer to layer,
    and is then rounded. It is at least 2, because a softmax over 1 key gives no gradient."""
    depth = 1.0
    if n_layers > 1:
        depth = layer / (n_layers - 1)
    return max(2, round(span * BOTTOM_FRACTION * (TOP_FRACTION / BOTTOM_FRACTION) ** depth))


def grown_dilation(*, layer: int, n_layers: int) -> int:
    """Return the n of a layer, from the paper's appendix: 1 in the lower half, 2 to 4 in thirds
    of the upper half."""
    return 1 + max(0, 6 * layer // n_layers - 2)


class DilatedWindows(AttentionSpan):
    """Spans of a layer's heads. ``max_keys`` includes the keys that dilation skips.

    Args:
        window: w in keys; None for ``grown_window``.
        steps: n of each head; heads of equal n are neighbours."""

    def __init__(self, context: LayerContext, *, window: int | None, steps: tuple[int, ...]):
        super().__init__(context)
        self.window = window
        self.steps = steps
        self.depth = {"layer": context.layer, "n_layers": context.n_layers}
        self.follows_model_span = None
        if window is None:
            self.follows_model_span = True
        self.set_span(context.span)

    def set_span(self, span: int) -> None:
        self.span = span
        window = grown_window(span, **self.depth) if self.window is None else min(self.window, span)
        keys = [min(window, 1 + (span - 1) // n) for n in self.steps]
        self.set_keys((1 + n * (w - 1) for w, n in zip(keys, self.steps, strict=True)), keys)
        # of heads with equal windows: w and n, and a slice of heads
        self.groups = [*group_heads(zip(keys, self.steps, strict=True))]


class Longformer(Attention):
    """Causal multi-head attention over windows that grow with depth, dilated for some heads.

    Args:
        windows: w in keys for each layer, from 1 to S; None for S/16 at the bottom to S/2 at the
            top.
        dilation: n for each layer, at least 1 (no dilation); None for 1 in the lower half, then up
            to 4.
        dilated_heads: number of dilated heads in a layer with n > 1, the last ones; 2 of 8 in the
            paper.
        heads: keywords of ``MultiHead``."""

    # Plain PyTorch multiplies all pairs of a segment, of which a short window sees few.
    limits = frozenset({"ideal_flops"})

    def __init__(
        self,
        context: LayerContext,
        *,
        windows: tuple[int, ...] | None = None,
        dilation: tuple[int, ...] | None = None,
        dilated_heads: int = 1,
        **heads: Unpack[HeadKeywords],
    ):
        _check_per_layer("windows", windows, layers=context.n_layers, largest=context.span)
        _check_per_layer("dilation", dilation, layers=context.n_layers)
        if not 0 <= dilated_heads <= context.heads:
            raise ValueError(
                f"dilated_heads={dilated_heads}: allowed are 0 to model.heads={context.heads}"
            )
        default = grown_dilation(layer=context.layer, n_layers=context.n_layers)
        step = default if dilation is None else dilation[context.layer]
        steps = (1,) * (context.heads - dilated_heads) + (step,) * dilated_heads
        window = None
        if windows is not None:
            window = windows[context.layer]
        span = partial(DilatedWindows, window=window, steps=steps)
        super().__init__(context, **heads, span=span)
        self.period = step

    def reach(self) -> int:
        return self.present_reach()

    def attend(
        self,
        backend: Backend,
        q: Tensor,
        keys: VisibleKeys,
        visible: Window,
        valid: Tensor | None = None,
        **options,
    ) -> Tensor:
        """Return head outputs ``[B, H, T, K]``. Of ``visible`` only ``both`` is used, because
        windows are constant."""
        vectors, bias = self.position.term(q, max(self.span.max_keys))
        outputs = []
        for (w, n), heads in self.span.groups:
            first = heads.start
            n_heads = heads.stop - first
            columns = slice(0, n * w, n)
            term = {"vectors": None if vectors is None else vectors[columns], "valid": valid}
            term["bias"] = (
                None
                if bias is None
                else bias.narrow(int(bias.dim() > 2), first, n_heads)[..., columns]
            )
            q_and_keys = q[:, heads], keys.of_heads(first, n_heads)
            group_window = Window((w,) * n_heads, self.shift, both=visible.both)
            outputs.append(self._attend_classes(backend, *q_and_keys, group_window, n, **term))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=1)

    def _attend_classes(
        self,
        backend: Backend,
        q: Tensor,
        keys: VisibleKeys,
        visible: Window,
        n: int,
        **term: Tensor | None,
    ) -> Tensor:
        """Return head outputs ``[B, H, T, K]`` with dilation n: queries of class r, at positions
        equal to r modulo n, see only keys of class r - shift. ``term`` is that of positions."""
        if n == 1:
            return super().attend(backend, q, keys, visible, **term)
        length = q.shape[2]
        outputs = []
        bias = term["bias"]
        valid = term["valid"]
        if visible.both and valid is None:  # the padding of classes is hidden, too
            valid = torch.full(q.shape[:1], length, device=q.device)

        # padded so that classes have equal length; the padding is hidden
        def select(x: Tensor, r: int) -> Tensor:
            return F.pad(x, (0, 0, 0, -length % n))[:, :, r::n]

        for r in range(min(n, length)):
            # class of the keys, and past keys of this class
            c = (r - self.shift) % n
            past = []
            for part in keys.past:
                rows = slice((part.k.shape[2] + c) % n, None, n)
                past.append(PastKV(part.k[:, :, rows], part.v[:, :, rows]))
            class_keys = VisibleKeys(select(keys.k, c), select(keys.v, c), past)
            if bias is not None and bias.dim() > 2:
                term["bias"] = select(bias, r)
            if valid is not None:
                term["valid"] = (valid - c + n - 1) // n
            # the nearest key of class 0 is in the previous row
            window = Window(visible.max_keys, int(r < self.shift), both=visible.both)
            outputs.append(super().attend(backend, select(q, r), class_keys, window, **term))
        return rearrange(outputs, "r B H m K -> B H (m r) K")[:, :, :length]

    def _pairs(self, segment: int, carried: int) -> tuple[int, int, int, int]:
        totals = [0, 0, 0, 0]
        for (w, n), heads in self.span.groups:
            distances = range(self.shift, self.shift + n * w, n)
            in_segment = sum(max(0, segment - distance) for distance in distances)
            past = (
                sum(max(0, min(segment, segment + carried - distance)) for distance in distances)
                - in_segment
            )
            # A past key is visible if one of the distances leads from it to a query of the segment.
            values = {i for i in range(1, distances[-1] + 1) if (self.shift - i) % n < segment}
            keys = values | ({i + 1 for i in values | {0}} if self.key_past else set())
            needed = (sum(i <= carried for i in bytes_) for bytes_ in (keys, values))
            counts = (in_segment, past, *needed)
            totals = [
                total + (heads.stop - heads.start) * count
                for total, count in zip(totals, counts, strict=True)
            ]
        return tuple(totals)


def _check_per_layer(
    name: str, numbers: Sequence | None, *, layers: int, largest: int | None = None
) -> None:
    """Raise ValueError unless ``numbers`` is None or has one number per layer, from 1 to
    ``largest``."""
    if numbers is None:
        return
    if len(numbers) != layers or min(numbers) < 1 or max(numbers) > (largest or max(numbers)):
        allowed = "at least 1"
        if largest is not None:
            allowed = f"from 1 to model.span={largest}"
        raise ValueError(
            f"{name}={list(numbers)}: must be {layers} integers, one for each layer, {allowed}; "
            "or null"
        )
