"""Causal multi-head attention over the last S positions of a stream, with all optional parts of our
variants.

The query of head h at stream position t sees keys r, which have the distances x = 0, 1, ... from
the nearest key, and persistent vectors n:

    w_x = m_h(x, x_t) exp(s_x)
    s_x = score(W_q x_t, W_k x_r), with a position term: see positions.py
    w_n = exp(q . M_k[n] / sqrt(K))    no mask and no position term, and the query is not rotated
    o_h = (sum_x w_x W_v x_r + sum_n w_n M_v[n]) / (sum_x w_x + sum_n w_n)
    y_t = W_o [o_1; ...; o_H]

With G < H heads of keys and values, head h reads W_k and W_v of head floor(h G / H) (2305.13245).
With gains c_q and c_k, q becomes c_q * q / sqrt(mean(q^2) + 1e-6), and k likewise. A gate
multiplies o_h elementwise by sigmoid(W_g x_t) (2505.06708). A sink s_h adds exp(s_h) to the
denominator of o_h (gpt-oss, 2508.10925). Biases b add b_hr - b_ht to s_x. No query sees a hidden
byte. With a mix, keys are those of key_shift.py.

Without mask and persistent vectors this is 1706.03762, sections 3.2.1 and 3.2.2. The mask m is that
of 1905.07799, 2 (adaptive_span.py), persistent vectors are those of 1907.01470
(all_attention.py). A query without keys has o = 0."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.key_shift import mixed_key
from tests.reference.positions import alibi_slopes, score

Mask = Callable[[int, int, Tensor], Tensor]
"""(head h, distance x of the visible key, input x_t [D] of the query) -> weight in [0, 1], a
scalar."""
Visible = Callable[[int, int], list[tuple[int, int]]]
"""(head h, index of the query) -> (distance x, index) of every key that it sees, nearest first."""
KeyWeight = Callable[[int, Tensor, Tensor, int], Tensor]
"""(head h, query [K], key [K], distance x of the visible key) -> unnormalised weight, a scalar."""


def visible_keys(query_index: int, *, span: int, attend_self: bool) -> list[tuple[int, int]]:
    """Return (x, index) of the at most ``span`` keys that the query at ``query_index`` sees,
    nearest first."""
    nearest = query_index if attend_self else query_index - 1
    return [(distance, nearest - distance) for distance in range(span) if nearest - distance >= 0]


def weighted_mean(weights: list[Tensor], vectors: list[Tensor], *, width: int) -> Tensor:
    """Return sum w v / sum w, ``[width]``. Zeros if there are no vectors or if all weights are
    0."""
    if not weights or sum(weights) == 0:
        return torch.zeros(width, dtype=torch.float64)
    return sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)


def normed(vector: Tensor, gain: Tensor | None) -> Tensor:
    """Return ``vector [K]`` divided by its root mean square and multiplied by the gain. Without a
    gain, the vector itself."""
    return vector if gain is None else gain * vector / torch.sqrt((vector**2).mean() + 1e-6)


def attention(
    x: Tensor,
    *,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    heads: int,
    span: int,
    attend_self: bool,
    position: str = "none",
    table: Tensor | None = None,
    weigh: KeyWeight | None = None,
    mask: Mask | None = None,
    persistent_keys: Tensor | None = None,
    persistent_values: Tensor | None = None,
    gains: Tensor | None = None,
    wg: Tensor | None = None,
    sink: Tensor | None = None,
    biases: Tensor | None = None,
    hidden: Tensor | None = None,
    past: Tensor | None = None,
    past_is_constant: bool = False,
    visible: Visible | None = None,
    start: int = 0,
    mix: Tensor | None = None,
) -> Tensor:
    """Return attention outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq: ``[H K, D]``; head h has rows h K to (h + 1) K.
        wk, wv: ``[G K, D]``, G a divisor of H.
        wo: ``[D, H K]``.
        span: S, the largest number of visible keys; with 0 only the persistent vectors are visible.
        attend_self: whether the nearest key is that of the query's own position, or the one before
            it.
        position: "none" (also for sinusoidal), "rotary", "relative" or "alibi".
        table: ``[S, K]``, the relative position vectors, shared by the heads.
        weigh: weight of a key, in place of ``exp(score)``.
        mask: soft mask of the context.
        persistent_keys, persistent_values: ``[H, N, K]``, M_k and M_v of the equations.
        gains: ``[2, K]``, c_q and c_k.
        wg: ``[H K, D]``, as ``wq``.
        sink: ``[H]``.
        biases: ``[B, H, L + T]``, b.
        hidden: ``[B, L + T]``, true for a hidden byte.
        past: ``[B, L, D]``, inputs of the same streams just before ``x``.
        past_is_constant: whether keys and values of the past are detached, so that ``wk`` and
            ``wv`` get no gradient.
        visible: visible keys, in place of the nearest ``span``. Index 0 is the first byte of
            ``past``.
        start: stream position of ``x[:, 0]``.
        mix: ``[G K]``, m of key_shift.py."""
    width = wq.shape[0] // heads
    slopes = alibi_slopes(heads)
    stream = x if past is None else torch.cat([past, x], dim=1)
    before = stream.shape[1] - x.shape[1]  # stream[:, before] is x[:, 0]
    visible = visible or (
        lambda head, query_index: visible_keys(query_index, span=span, attend_self=attend_self)
    )
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            query_index = before + t
            outputs = []
            for h in range(heads):
                block = slice(h * width, (h + 1) * width)
                query = normed(
                    wq[block] @ stream[b, query_index], None if gains is None else gains[0]
                )
                shared = h * (wk.shape[0] // width) // heads  # the head of keys and values
                of_keys = slice(shared * width, (shared + 1) * width)
                weights, values = [], []
                for distance, index in visible(h, query_index):
                    if hidden is not None and hidden[b, index]:
                        continue
                    constant = before if past_is_constant else 0
                    of_channels = None if mix is None else mix[of_keys]
                    key = mixed_key(wk[of_keys], stream[b], index, of_channels, constant=constant)
                    value = wv[of_keys] @ stream[b, index]
                    key = normed(key, None if gains is None else gains[1])
                    if past_is_constant and index < before:
                        key, value = key.detach(), value.detach()
                    if weigh is not None:
                        weight = weigh(h, query, key, distance)
                    else:
                        at = {"query_at": start + t, "key_at": start + t - (query_index - index)}
                        terms = {
                            "position": position,
                            "distance": distance,
                            "slope": float(slopes[h]),
                            "table": table,
                        }
                        s = score(query, key, **terms, **at)
                        if biases is not None:
                            s = s + biases[b, h, index] - biases[b, h, query_index]
                        weight = torch.exp(s)
                    m = 1.0 if mask is None else mask(h, distance, stream[b, query_index])
                    weights.append(m * weight)
                    values.append(value)
                if persistent_keys is not None:
                    for n in range(persistent_keys.shape[1]):
                        weights.append(torch.exp(query @ persistent_keys[h, n] / math.sqrt(width)))
                        values.append(persistent_values[h, n])
                if sink is not None:
                    weights.append(torch.exp(sink[h]))
                    values.append(torch.zeros(width, dtype=x.dtype))
                mean = weighted_mean(weights, values, width=width)
                outputs.append(
                    mean if wg is None else mean * torch.sigmoid(wg[block] @ stream[b, query_index])
                )
            y[b, t] = wo @ torch.cat(outputs)
    return y
