"""Causal multi-head attention over the last S positions of a stream, with everything our variants put into it.

For the query of head h at stream position t, over its visible keys r (numbered x = 0, 1, ... from the nearest) and
its persistent vectors n:

    w_x = m_h(x, x_t) exp(s_x)         s_x = score(W_q x_t, W_k x_r), with a position term: see positions.py
    w_n = exp(q . M_k[n] / sqrt(K))    no mask, no position term; with rotary the query is not turned here
    o_h = (sum_x w_x W_v x_r + sum_n w_n M_v[n]) / (sum_x w_x + sum_n w_n)
    y_t = W_o [o_1; ...; o_H]

Heads of keys and values may be fewer: head h then reads W_k and W_v of head floor(h G / H) (2305.13245). With gains c, q and
k are divided by sqrt(mean of squares + 1e-6), then multiplied by c_q and c_k, number by number. A gate multiplies o_h by
sigmoid(W_g x_t), number by number (2505.06708). A sink s_h adds exp(s_h) to the denominator of o_h (gpt-oss, 2508.10925).
Biases b add b_hr - b_ht to s_x. A hidden byte is no key.

Without mask and persistent vectors this is 1706.03762, sections 3.2.1 and 3.2.2. The mask m is that of 1905.07799,
section 2 (adaptive_span.py), the persistent vectors those of 1907.01470 (all_attention.py). A query that sees
nothing has o_h = 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.positions import alibi_slopes, score

Mask = Callable[[int, int, Tensor], Tensor]
"""(head h, number x of the visible key, input x_t [D] of the query) -> weight in [0, 1], a scalar."""
Visible = Callable[[int, int], list[tuple[int, int]]]
"""(head h, index of the query) -> (number x, index) of every key that it sees, nearest first."""
Weigh = Callable[[int, Tensor, Tensor, int], Tensor]
"""(head h, query [K], key [K], number x of the visible key) -> its weight before they are normalised, a scalar."""


def visible_keys(now: int, *, span: int, attend_self: bool) -> list[tuple[int, int]]:
    """(x, index) of every key that the query at index ``now`` sees: at most ``span`` of them, nearest first."""
    nearest = now if attend_self else now - 1
    return [(number, nearest - number) for number in range(span) if nearest - number >= 0]


def weighted_mean(weights: list[Tensor], vectors: list[Tensor], *, width: int) -> Tensor:
    """sum w v / sum w, ``[width]``; zeros where there is nothing to average, or nothing has a weight."""
    if not weights or sum(weights) == 0:
        return torch.zeros(width, dtype=torch.float64)
    return sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)


def normed(vector: Tensor, gain: Tensor | None) -> Tensor:
    """``vector [K]`` over its root mean square, times a gain; itself where there is none."""
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
    weigh: Weigh | None = None,
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
) -> Tensor:
    """Attention outputs ``[B, T, D]`` for the inputs ``x [B, T, D]`` of one segment.

    Args:
        wq, wk, wv: ``[H K, D]``, head h owns rows h K to (h + 1) K.
        wk, wv: of G heads, G a divisor of H.
        wo: ``[D, H K]``.
        span: S, how many keys of the context a query sees at most; 0 leaves only the persistent vectors.
        attend_self: whether the query's own position is the nearest key; if not, the one before it is.
        position: "none" (also for sinusoidal), "rotary", "relative" or "alibi".
        table: ``[S, K]``, the relative positions, shared by the heads.
        weigh: in place of ``exp(score)`` with a position.
        mask: soft mask on the context.
        persistent_keys, persistent_values: ``[H, N, K]`` as they enter the equations: already scaled.
        gains: ``[2, K]``, c_q and c_k.
        wg: ``[H K, D]``, as ``wq``.
        sink: ``[H]``.
        biases: ``[B, H, L + T]``, b.
        hidden: ``[B, L + T]``.
        past: ``[B, L, D]``, inputs of the same streams just before ``x``; detached by the caller if so wanted.
        past_is_constant: whether no gradient goes to ``wk`` and ``wv`` by keys and values of the past.
        visible: what a query sees in place of the nearest ``span`` keys; indices count from the first of ``past``.
        start: stream position of ``x[:, 0]``.
    """
    width = wq.shape[0] // heads
    slopes = alibi_slopes(heads)
    stream = x if past is None else torch.cat([past, x], dim=1)
    before = stream.shape[1] - x.shape[1]  # stream[:, before] is x[:, 0]
    visible = visible or (lambda head, now: visible_keys(now, span=span, attend_self=attend_self))
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            now = before + t
            outputs = []
            for h in range(heads):
                block = slice(h * width, (h + 1) * width)
                query = normed(wq[block] @ stream[b, now], None if gains is None else gains[0])
                shared = h * (wk.shape[0] // width) // heads  # the head whose keys and values it reads
                of_keys = slice(shared * width, (shared + 1) * width)
                weights, values = [], []
                for number, index in visible(h, now):
                    if hidden is not None and hidden[b, index]:
                        continue
                    key, value = wk[of_keys] @ stream[b, index], wv[of_keys] @ stream[b, index]
                    key = normed(key, None if gains is None else gains[1])
                    if past_is_constant and index < before:
                        key, value = key.detach(), value.detach()
                    if weigh is not None:
                        weight = weigh(h, query, key, number)
                    else:
                        at = {"query_at": start + t, "key_at": start + t - (now - index)}
                        place = {"position": position, "number": number, "slope": float(slopes[h]), "table": table}
                        s = score(query, key, **place, **at)
                        if biases is not None:
                            s = s + biases[b, h, index] - biases[b, h, now]
                        weight = torch.exp(s)
                    m = 1.0 if mask is None else mask(h, number, stream[b, now])
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
                outputs.append(mean if wg is None else mean * torch.sigmoid(wg[block] @ stream[b, now]))
            y[b, t] = wo @ torch.cat(outputs)
    return y
