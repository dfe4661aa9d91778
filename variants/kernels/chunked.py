"""The chunked backend: ``window.attend`` a chunk of queries at a time, which does all that it does in less memory.

Queries are cut and heads grouped as in ``fused.py``, and each chunk meets only the band of keys that its heads may see. Scores
of one chunk exist at a time; the backward computes them again, and its gradients are those that autograd has for the chunk. So
spans for each query, biases for each query, relative vectors and dropout all work, and no new formula is needed.

Dropout is drawn from counters (``dropout.py``): a chunk is told the numbers of its rows, and drops what the whole would.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from variants.kernels import dropout as dropout_counters
from variants.kernels import window as plain
from variants.kernels.fused import Differentiable, arranged, by_max_keys, chunks, groups, inverse
from variants.kernels.given import Given
from variants.kernels.window import Persistent, Window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    bias: Tensor | None = None,
    vectors: Tensor | None = None,
    persistent: Persistent | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same function as ``window.attend``.

    Args:
        vectors: ``[n, K]`` in place of a bias, which is then ``q @ vectors.T`` and exists for one chunk at a time.
        seed: of the dropout, which is drawn from counters alone; None only where there is none.
    """
    assert bias is None or vectors is None, "a bias, or vectors to make one from"
    extra = (None, None, None) if persistent is None else persistent
    given = Given(q, k, v, window.z, *extra, vectors, bias, dropout, seed)
    return Differentiable.apply(forward, backward, window._replace(z=None), *given)


def forward(given: Given, window: Window) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]``, and an empty tensor: the backward needs nothing."""
    order = by_max_keys(window)
    y = torch.zeros(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    for part, places, seen in _parts(given, window, order):
        y[places["q"]] = _of_part(part, seen)
    return arranged(y, inverse(order)), y.new_empty(0)


def backward(
    g: Tensor, y: Tensor, saved: Tensor, given: Given, window: Window, wanted: frozenset[str], *, own_only: bool = False
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` fields of ``given``, summed over chunks in float32.

    Args:
        g: the output's gradient; ``y`` and ``saved`` are not read.
        own_only: those of keys and values are of the segment's own, ``[B, H, T, K]``.
    """
    order, names = by_max_keys(window), sorted(wanted)
    g = arranged(g, order)
    totals = {name: torch.zeros_like(arranged(getattr(given, name), order, name), dtype=_island(g)) for name in names}
    for part, places, seen in _parts(given, window, order):
        found = _gradients(g[places["q"]], part, seen, names)
        for name, gradient in zip(names, found, strict=True):
            totals[name][places[name]] += gradient
    if own_only:
        totals |= {name: totals[name][:, :, -g.shape[2] :] for name in wanted & {"k", "v"}}
    back = inverse(order)
    return {name: arranged(x, back, name).to(getattr(given, name).dtype) for name, x in totals.items()}


def executed_flops(
    window: Window, *, streams: int, rows: int, keys: int, width: int, persistent: int, vectors: bool
) -> tuple[int, int]:
    """FLOPs of a forward and of a backward of all that can have a gradient: products, 2 a multiply-add.

    Args:
        persistent: N, vectors beside the context.
        vectors: whether scores have a product with a vector for each column.
    """
    products = 0
    for seen, _, t, j in _cuts(rows, keys, window):
        own = 2 * (j.stop - j.start + persistent) + vectors * seen.max_keys[0]
        products += len(seen.max_keys) * (t.stop - t.start) * own
    forward = 2 * streams * width * products
    return forward, 3 * forward


def _parts(given: Given, window: Window, order: list[int]) -> Iterator[tuple[Given, dict[str, tuple], Window]]:
    """What each chunk is given, where that lies in each field, heads in ``order``, and what the chunk may see.

    Dropout's seed becomes the numbers of the chunk's rows.
    """
    q, row = given.q, None
    if given.dropout:
        streams, heads, queries = (torch.arange(size, device=q.device) for size in q.shape[:3])
        row = dropout_counters.rows(given.seed, streams=streams, heads=heads, queries=queries)
    given = arranged(given, order)._replace(seed=row if row is None else arranged(row, order))
    for seen, heads, t, j in _cuts(q.shape[2], given.k.shape[2], window):
        whole, columns = slice(None), slice(max(seen.max_keys))
        by_query, by_key = (whole, heads, t), (whole, heads, j)
        places = {
            "q": by_query,
            "k": by_key,
            "v": by_key,
            "z": by_query if given.z is not None and given.z.dim() == 3 else (heads,),
            "extra_q": by_query,
            "extra_k": (heads,),
            "extra_v": (heads,),
            "vectors": (columns,),
            "bias": (*by_query, columns) if given.bias is not None and given.bias.dim() == 4 else (heads, columns),
            "seed": by_query,
        }
        there = {name: x[place] for name, place in places.items() if (x := getattr(given, name)) is not None}
        yield given._replace(**there), places, seen


def _cuts(rows: int, keys: int, window: Window) -> Iterator[tuple[Window, slice, slice, slice]]:
    """What a chunk may see, its heads, its queries, and the keys that it meets."""
    blind = max(0, rows + window.shift - keys)  # first rows that see no key, but maybe persistent vectors
    for max_keys, of_group in groups(tuple(sorted(window.max_keys))):
        heads, seen = slice(of_group[0], of_group[-1] + 1), window._replace(max_keys=(max_keys,) * len(of_group))
        if blind:
            yield seen, heads, slice(0, blind), slice(0, blind)
        for begin, end, low, high in chunks(rows, keys, max_keys, window.shift):
            yield seen._replace(shift=0), heads, slice(begin, end), slice(low, high)


def _gradients(g: Tensor, part: Given, window: Window, names: list[str]) -> tuple[Tensor, ...]:
    """Of the named fields, by a forward pass that keeps its intermediates; also where autograd records nothing."""

    def of(*fields: Tensor) -> Tensor:
        return _of_part(part._replace(**dict(zip(names, fields, strict=True))), window)

    _, pull = torch.func.vjp(of, *(getattr(part, name) for name in names))
    return pull(g)


def _of_part(part: Given, window: Window) -> Tensor:
    q = part.q
    bias = part.bias if part.vectors is None else q @ part.vectors.T.to(q.dtype)
    persistent = None
    if part.extra_q is not None:
        persistent = Persistent(part.extra_q, part.extra_k.to(q.dtype), part.extra_v.to(q.dtype))
    return plain.attend(
        q,
        part.k.to(q.dtype),
        part.v.to(q.dtype),
        window._replace(z=part.z),
        bias=bias,
        persistent=persistent,
        dropout=part.dropout,
        seed=part.seed,
    )


def _island(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
