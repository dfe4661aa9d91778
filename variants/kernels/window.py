"""Attention over a window of the past: what it computes, as pure functions, and the plain backend.

Query t of a segment of T bytes attends to keys of the past and of the segment, L in all. Column x
is a query's x-th visible key, counted from the nearest, x = 0: key j = L - T + t - shift - x, with
shift 1 if a query does not see itself. Tables of terms that depend on the distance have an entry
for each column; ``skew_table`` moves them to keys.

    a_tx = m_x exp(s_tx) / Z_t,   a_tn = exp(p_tn) / Z_t,   y_t = sum_x a_tx v_x + sum_n a_tn u_n

with a soft mask m in [0, 1] (1905.07799, 2.2), and scores p and values u of persistent vectors in
the same softmax (1907.01470, 3.1). Z_t is the sum of the numerators, without an epsilon: the output
of a query that sees no key is 0. At kinks of m the gradient is that of torch.clamp.

The other backends compute the same in less memory."""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from variants.kernels import dropout as dropout_counters


def replaced(fields: NamedTuple, **values: object) -> NamedTuple:
    """Return ``fields`` with other ``values``. In a compiled graph (torch 2.11), ``_replace``
    returns an empty tuple."""
    return type(fields)(**dict(zip(fields._fields, fields, strict=True)) | values)


class Window(NamedTuple):
    """The keys that a query may see."""

    # the largest number of keys that each head may see; other past keys are never read
    max_keys: tuple[int, ...]
    shift: int = 0  # 0 if a query sees itself, else 1
    # spans in keys, [H] or [B, H, T]; None for a hard window, then all ``max_keys`` are equal
    z: Tensor | None = None
    ramp: int = 0  # R, keys over which the soft mask falls from 1 to 0
    max_keys_tensor: Tensor | None = None
    """In a compiled graph the present ``max_keys``, int64 ``[H]`` on the CPU. The field
    ``max_keys`` is then a constant upper bound, so that new spans do not recompile the graph."""
    both: bool = False
    """Whether a query sees keys at distances below ``max_keys`` on both of its sides. Then it sees
    itself, and ``shift`` is the number of keys after the last query's own."""

    def past(self) -> int:
        """Return the number of keys before the segment that its first query may see."""
        return max(self.max_keys) - 1 + self.shift


class Persistent(NamedTuple):
    """Key-value vectors that every query sees."""

    q: Tensor  # scaled queries before position encoding, [B, H, T, K]
    k: Tensor  # [H, N, K]
    v: Tensor


class PastKV(NamedTuple):
    """Keys and values of n neighbouring heads: of P bytes before the segment, of the segment, or of
    both. In a list of parts, the heads of a part follow those of the part before."""

    k: Tensor  # [B, n, P, K]
    v: Tensor
    key_bias: Tensor | None = None  # [B, r n, P], where r heads of queries read each head of keys

    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def of_heads(self, first: int, last: int) -> "PastKV":
        """Return views of the heads from ``first`` to before ``last``."""
        sizes = [x.shape[1] // self.k.shape[1] for x in self.tensors()]
        pairs = zip(self.tensors(), sizes, strict=True)
        return PastKV(*(x[:, first * size : last * size] for x, size in pairs))


class Inputs(NamedTuple):
    """Inputs of a backend for L keys, N persistent vectors and n distances.

    Attributes:
        q: scaled queries ``[B, H, T, K]``.
        k, v: keys and values ``[B, H, L, K]``, of which the last T are the segment's; or packed
            ``[B, sum of lengths, K]``, head after head, with ``lengths`` keys in each head.
        z: spans in keys, or None for a hard window.
        extra_q, extra_k, extra_v: the fields of ``Persistent``, or None.
        vectors: ``[n, K]``, or None; ``q @ vectors.T`` is added to the scores of columns.
        bias: ``[H, n]`` or ``[B, H, T, n]``, or None; it is added to the scores of columns.
        sink: ``[H]``, the score of an additional entry of the softmax with value 0, or None.
        key_bias: ``[B, H, L]``, or packed ``[B, sum of lengths]``, or None; it is added to all
            scores of a key, and -inf hides the key.
        query_bias: ``[B, H, T]`` and finite, or None without ``key_bias``; it is subtracted from a
            query's scores.
        seed: seed of the dropout, an int64 scalar from ``dropout.draw_seed``, or None.
        dropout: dropout rate of attention weights.
        lengths: L of each head, int64 ``[H]`` on the CPU, or None if it is equal for all heads.
        valid: number of keys of each stream, int64 ``[B]``; those after them are padding, which
            only padding sees, and which sees only padding. Only with a window of both sides."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor | None = None
    extra_q: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    vectors: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    key_bias: Tensor | None = None
    query_bias: Tensor | None = None
    seed: Tensor | None = None
    dropout: float = 0.0
    lengths: Tensor | None = None
    valid: Tensor | None = None

    @classmethod
    def from_call(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        *,
        persistent: Persistent | None = None,
        **options,
    ) -> "Inputs":
        """Return inputs from the arguments of ``attend``."""
        return cls(q, k, v, window.z, *(persistent or (None, None, None)), **options)

    def key_counts(self) -> tuple[int, ...]:
        """Return l of each head."""
        if self.lengths is None:
            return (self.k.shape[2],) * self.q.shape[1]
        return tuple(self.lengths.tolist())

    def of_heads(self, x: Tensor, heads: slice) -> Tensor:
        """Return a view ``[B, n, L, ..]`` of keys, values or key biases ``x``, of neighbouring
        heads with equal L."""
        if self.lengths is None:
            return x[:, heads]
        counts = self.key_counts()
        first = sum(counts[: heads.start])
        last = sum(counts[: heads.stop])
        return x[:, first:last].unflatten(1, (heads.stop - heads.start, counts[heads.start]))


def soft_mask(z: Tensor, ramp: int, max_keys: int) -> Tensor:
    """Return m_z(x) = clamp((R + z - x) / R, 0, 1) at x = 0 .. max_keys - 1: ``[..., max_keys]``
    for ``z [...]``."""
    x = torch.arange(max_keys, device=z.device, dtype=z.dtype)
    return torch.clamp((ramp + z[..., None] - x) / ramp, 0, 1)


def ramp_slope(z: Tensor, ramp: int, max_keys: int) -> Tensor:
    """Return dm/dz, ``[..., max_keys]``: 1 / R on the closed ramp, also at its end z + R, where m
    is 0. z + R is rounded as in ``soft_mask``, so that both functions put a key on the same side of
    a kink."""
    x = torch.arange(max_keys, device=z.device)
    ramp_end = (z + ramp)[..., None]
    return ((x >= ramp_end.ceil() - ramp) & (x <= ramp_end)).to(z.dtype) / ramp


def skew_table(table: Tensor, rows: int, keys: int, *, shift: int = 0) -> Tensor:
    """Move a table with entries per column x, ``[H, n]`` or ``[B, H, rows, n]``, to keys j: ``[..,
    H, rows, keys]``.

    Row t, column x goes to key keys - rows + t - shift - x. Keys without a column get zeros;
    columns that fall before the first key are dropped."""
    band = table if table.dim() == 4 else table[:, None].expand(-1, rows, -1)
    width = band.shape[-1] + rows - 1 + shift
    # Padded rows have width + 1 entries, so reading them as rows of ``width`` entries moves row t
    # by t entries.
    padded = F.pad(band.flip(-1), (0, rows + shift))
    view = padded.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width))
    if width >= keys:
        return view[..., width - keys :]
    return F.pad(view, (keys - width, 0))


def spread_distances(
    table: Tensor, rows: int, keys: int, *, shift: int = 0, both: bool = False
) -> Tensor:
    """Do the same for a table of distances, ``shift`` and ``both`` being those of a ``Window``."""
    if not both:
        return skew_table(table, rows, keys, shift=shift)
    n_after = table.shape[-1] - 1
    sides = torch.cat([table.flip(-1), table[..., 1:]], dim=-1)
    return skew_table(sides, rows, keys + n_after, shift=shift)[..., :keys]


def visible_mask(
    rows: int, keys: int, max_keys: int, *, shift: int, device: torch.device, both: bool = False
) -> Tensor:
    """Return boolean ``[rows, keys]``: whether key j is one of the ``max_keys`` nearest, on one
    side or ``both``, that query t may see."""
    t = torch.arange(keys - rows, keys, device=device)[:, None]
    x = t - torch.arange(keys, device=device) - shift
    if both:
        x = x.abs()
    return (x >= 0) & (x < max_keys)


def padding_mask(valid: Tensor, rows: int, keys: int, *, shift: int) -> Tensor:
    """Return boolean ``[B, 1, rows, keys]``: whether either the query or the key is padding. The
    first ``valid [B]`` keys are not. ``shift`` is that of a ``Window`` of both sides. Every query
    sees a key, its own: torch's kernels do not agree on the output of one that sees none."""
    is_padding = torch.arange(keys, device=valid.device) >= valid[:, None]
    queries = is_padding[:, keys - rows - shift : keys - shift]
    return (queries[:, :, None] != is_padding[:, None])[:, None]


def count_pairs(rows: int, past: int, max_keys: int, *, shift: int) -> tuple[int, int]:
    """Count one head's visible pairs of a query and a key: those with a key of the segment, and
    with a past key."""
    counts = []
    for last in (
        rows,
        past + rows,
        past,
    ):  # pairs of ``last`` bytes; byte i = 1 .. ``last`` sees i - shift keys or fewer
        growing = max(0, min(last - shift, max_keys))
        counts.append(growing * (growing + 1) // 2 + (max(0, last - shift) - growing) * max_keys)
    return counts[0], counts[1] - counts[2] - counts[0]


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, **options) -> Tensor:
    """Return the plain backend: all scores in memory, every gradient by autograd. Other backends
    have the same arguments.

    Args:
        q, k, v: see ``Inputs``; ``k`` and ``v`` are not packed.
        window: which keys a query may see; n is the largest of ``window.max_keys``.
        options: ``persistent``, and other fields of ``Inputs`` except ``lengths``, with at most one
            of ``bias`` and ``vectors``. Without a ``seed``, torch's generator draws the dropout.

    Returns: ``[B, H, T, K]``."""
    return attend_inputs(Inputs.from_call(q, k, v, window, **options), window)


def attend_inputs(inputs: Inputs, window: Window) -> Tensor:
    """Compute ``attend``. ``inputs.seed`` may also be the row numbers ``[B, H, T]`` that belong
    to a seed."""
    (q, k, v, z, extra_q, extra_k, extra_v), sink, dropout = inputs[:7], inputs.sink, inputs.dropout
    rows = q.shape[2]
    max_keys = max(window.max_keys)
    n_keys = min(k.shape[2], rows + window.past())
    k = k[:, :, k.shape[2] - n_keys :]
    v = v[:, :, v.shape[2] - n_keys :]

    sides = {"shift": window.shift, "both": window.both}
    over_keys = partial(spread_distances, rows=rows, keys=n_keys, **sides)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    bias = inputs.bias if inputs.vectors is None else q @ inputs.vectors.T.to(q.dtype)
    if bias is not None:
        scores = scores + over_keys(bias.to(scores.dtype))
    if inputs.key_bias is not None:
        key_bias = inputs.key_bias[:, :, None, inputs.key_bias.shape[2] - n_keys :]
        scores = scores + (key_bias - inputs.query_bias[..., None]).to(scores.dtype)
    hidden = ~visible_mask(rows, n_keys, max_keys, device=q.device, **sides)
    if inputs.valid is not None:
        hidden = hidden | padding_mask(inputs.valid, rows, n_keys, shift=window.shift)
    scores = scores.masked_fill(hidden, -torch.inf)
    if z is not None:
        # Beyond the closed ramp a key is hidden; at the ramp's end m is 0 but still has a gradient.
        within = torch.arange(max_keys, device=q.device) <= (z.detach()[..., None] + window.ramp)
        scores = scores.masked_fill(~(over_keys(within.to(scores.dtype)) > 0), -torch.inf)
    if extra_q is not None:
        extra = (extra_q @ extra_k.mT).to(scores.dtype)  # [B, H, T, N]
        scores = torch.cat([scores, extra], dim=-1)
    mask = None
    weighted_scores = scores.detach()
    if z is not None:
        mask = over_keys(soft_mask(z, window.ramp, max_keys).to(scores.dtype))
        mask = mask if extra_q is None else F.pad(mask, (0, extra.shape[-1]), value=1.0)
        weighted_scores = weighted_scores.masked_fill(mask.detach() == 0, -torch.inf)
    max_score = weighted_scores.amax(dim=-1, keepdim=True)
    if sink is not None:
        sink = sink.to(scores.dtype)[:, None, None]
        max_score = max_score.maximum(sink.detach())
    max_score = max_score.masked_fill(max_score == -torch.inf, 0)
    scores = scores - max_score
    if mask is None:
        weights = torch.exp(scores)
    # the score of a key with m = 0 may be above max_score; the bound keeps its gradient for the
    # span finite
    else:
        bound = max_exponent(scores.dtype)
        weights = torch.exp(scores.masked_fill_(scores.detach() > bound, bound)) * mask
    total = weights.sum(dim=-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - max_score)
    weights = weights / total.masked_fill(total == 0, 1)
    if dropout and inputs.seed is not None:
        n_persistent = weights.shape[-1] - n_keys
        keep = _keep_mask(
            inputs.seed, q, n_keys, shift=window.shift, n_persistent=n_persistent, rate=dropout
        )
        weights = weights * (keep / (1 - dropout))
    else:
        weights = F.dropout(weights, dropout)
    weights = weights.to(v.dtype)
    y = weights[..., :n_keys] @ v
    if extra_q is None:
        return y
    return y + weights[..., n_keys:] @ extra_v


def _keep_mask(
    seed: Tensor, q: Tensor, n_keys: int, *, shift: int, n_persistent: int, rate: float
) -> Tensor:
    """Return boolean ``[B, H, T, n_keys + n_persistent]``, false for a dropped weight."""
    row = seed if seed.dim() else dropout_counters.row_numbers(seed, *q.shape[:3])
    t = torch.arange(q.shape[2], device=q.device)[:, None]
    x = t + (n_keys - q.shape[2] - shift) - torch.arange(n_keys, device=q.device)
    extra = dropout_counters.PERSISTENT + torch.arange(n_persistent, device=q.device)
    return dropout_counters.keep_mask(row, torch.cat([x, extra.expand(len(x), -1)], dim=1), rate)


def merge_parts(
    y: Tensor, lse: Tensor, extra_y: Tensor | None, extra_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two parts of one softmax.

    Given the merged output and log-sum-exp, the backward pass of a part computes the gradients of
    the whole softmax.

    Args:
        y, extra_y: outputs ``[B, H, T, K]``; None for zeros.
        lse, extra_lse: log-sum-exps ``[B, H, T]``, inf or -inf for a query that sees no key."""
    lses = [x.masked_fill(x == torch.inf, -torch.inf) for x in (lse, extra_lse)]
    merged_lse = torch.logaddexp(*lses)
    empty = merged_lse == -torch.inf
    shares = [(x - merged_lse.masked_fill(empty, 0)).exp()[..., None] for x in lses]
    merged_y = y * shares[0] if extra_y is None else y * shares[0] + extra_y * shares[1]
    return merged_y.to(y.dtype), merged_lse.where(~empty, lse)


def merge_sink(y: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Merge an output and log-sum-exp with the sink ``[H]``, whose value is 0."""
    return merge_parts(y, lse, None, sink.to(lse.dtype)[:, None].expand_as(lse))


def sink_gradient(delta: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of the sink.

    Args:
        delta: product of output and upstream gradient, summed over K, ``[B, H, T]``.
        lse: log-sum-exp of the whole softmax, ``[B, H, T]``."""
    weights = (sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    return -(weights * delta).sum(dim=(0, 2))


def max_exponent(dtype: torch.dtype) -> float:
    """Return the bound of exponents: its exp is at most the largest number of ``dtype`` divided by
    e^18, about 7e7."""
    return math.floor(math.log(torch.finfo(dtype).max)) - 18.0
