"""Triton kernels of ``triton_window.py``, which says what they compute. Importing this file needs triton.

Each program owns a block of queries (or of keys, or of distances) of one head of one stream, and loops over the blocks
in its head's window. Key j is column x = o + t - j of query t, with o = L - T - shift. A block needs no mask if all its
pairs are visible with m = 1. Scores and log-sum-exps are in base 2. Heads of width K have WIDTH columns in registers, a
power of two. Only one program writes each number. Products are never transposed: on Hopper the results were wrong.

Arguments that need more than their name:
    far: z + R of each head, or None for a hard window.
    table, vectors: a bias [H, distances] that is added to scores, and p [distances, K]; each may be None.
    k, v: keys and values, packed head after head, ``stream_keys`` per stream; with ALL, all streams share one set.
    key_bias, query_bias: ``key_bias_j - query_bias_t`` is added to scores; query_bias is [B, H, T]. Or both None.
    heads: int32 [4, H]: visible keys of each head; heads from the longest to the shortest, so that the long ones start
        first; L of each head; and the index of its first key.
    seed: seed of dropout, which drops the same weights as ``dropout.py``, number for number; None without dropout.
    ALL: queries see all keys (persistent vectors). DROP: numbers below it drop a weight. SCALE: the rest's factor.
"""

import triton
import triton.language as tl

from variants.kernels import dropout

STREAM, QUERY, KEY = (tl.constexpr(dropout.FACTORS[name]) for name in ("stream", "query", "key"))
FIRST, SECOND, PERSISTENT = (tl.constexpr(factor) for factor in (*dropout.MIX, dropout.PERSISTENT))
LOG2E = tl.constexpr(1.4426950408889634)
HIGHEST = tl.constexpr(70 * 1.4426950408889634)  # bound of exponents, ``window.highest`` of float32 in base 2
INTERPRETED = triton.knobs.runtime.interpret  # whether kernels run on the host; set when triton is imported
kernel = triton.jit(do_not_specialize=("B", "T", "stream_keys", "longest", "distances"))  # else each length compiles


@triton.jit
def _head(heads, far, b, stream_keys, ramp, ALL: tl.constexpr):
    """The program's head, its number of keys L, the row of its first key in stream b, how many keys it may see, how
    many of the nearest have m = 1 and give its span no gradient, and z + R."""
    H = tl.num_programs(1)
    h = tl.load(heads + H + tl.program_id(1))
    first = tl.load(heads + 3 * H + h).to(tl.int64)
    if not ALL:
        first += b * stream_keys
    visible = tl.load(heads + h)
    full = visible
    end = 0.0
    if far is not None:
        end = tl.load(far + h).to(tl.float32)
        visible = tl.maximum(tl.minimum(visible, tl.floor(end).to(tl.int32) + 1), 0)
        full = tl.maximum(tl.minimum(full, tl.ceil(end).to(tl.int32) - ramp), 0)
    return h, tl.load(heads + 2 * H + h), first, visible, full, end


@triton.jit
def _at(rows, size, K: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets ``[block, WIDTH]`` of rows in a contiguous matrix of ``size`` rows, and a mask of existing elements."""
    columns = tl.arange(0, WIDTH)
    there = ((rows >= 0) & (rows < size))[:, None]
    if K != WIDTH:
        there = there & (columns < K)[None, :]
    return rows[:, None] * K + columns[None, :], there


@triton.jit
def _load(x, rows, size, K: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a matrix ``[block, WIDTH]``, with zeros outside of it."""
    at, there = _at(rows, size, K, WIDTH)
    return tl.load(x + at, mask=there, other=0.0)


@triton.jit
def _store(x, rows, size, value, K: tl.constexpr, WIDTH: tl.constexpr):
    at, there = _at(rows, size, K, WIDTH)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _biases(x, at, size):
    """Elements of a vector ``[block]``, with zeros outside of it."""
    return tl.load(x + at, mask=(at >= 0) & (at < size), other=0.0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def _drawn(seed, b, h, t):
    """The number from which dropout draws each row of weights, uint32; without dropout, a value that is not used."""
    drawn = t
    if seed is not None:
        word = tl.load(seed) + h
        x = _mix(word.to(tl.uint32) ^ (b.to(tl.uint32) * STREAM)) ^ (word >> 32).to(tl.uint32)
        drawn = _mix(_mix(x) ^ (t.to(tl.uint32) * QUERY))
    return drawn


@triton.jit
def _drop(value, seed, drawn, x, j, ALL: tl.constexpr, DROP: tl.constexpr, SCALE: tl.constexpr):
    """``value`` times SCALE, or 0 for a dropped weight. Weights are numbered by distance x or, with ALL, vector j."""
    if seed is not None:
        number = (j.to(tl.uint32) ^ PERSISTENT) if ALL else x.to(tl.uint32)
        value = tl.where(_mix(drawn ^ (number * KEY)) >= DROP, value * SCALE, 0.0)
    return value


@triton.jit
def _key_blocks(t0, offset, visible, full, T, L, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Bounds of the keys that queries t0 .. see: first, inner, outer, last. Blocks from inner to outer need no mask."""
    if ALL:
        return 0, 0, L // BLOCK * BLOCK, L
    high = offset + tl.minimum(t0 + BLOCK, T)  # one past the nearest key of the last query
    first = tl.maximum(offset + t0 - visible + 1, 0) // BLOCK * BLOCK
    inner = tl.maximum(tl.cdiv(tl.maximum(high - full, 0), BLOCK) * BLOCK, first)
    outer = (offset + t0 + 1) // BLOCK * BLOCK
    inner = tl.minimum(inner, tl.maximum(outer, first))
    return first, inner, tl.maximum(outer, inner), high


@triton.jit
def _query_blocks(j0, offset, visible, full, T, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Bounds of the queries that see keys j0 .., as in ``_key_blocks``."""
    if ALL:
        return 0, 0, T // BLOCK * BLOCK, T
    first = tl.maximum(j0 - offset, 0) // BLOCK * BLOCK
    last = tl.minimum(j0 + BLOCK - 1 - offset + visible, T)
    inner = tl.maximum(tl.cdiv(tl.maximum(j0 + BLOCK - 1 - offset, 0), BLOCK) * BLOCK, first)
    outer = tl.maximum(tl.minimum(full + j0 - offset, T), 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, tl.maximum(outer, first))
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def _near(
    q, vectors, x_first, distances,
    AXIS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . p_x of a block of pairs, queries along axis 1 - AXIS: products of q and 2 BLOCK distances, on diagonals.

    ``x_first``: the smallest distance in the block, from its first query to its last key.
    """
    p = _load(vectors, x_first + tl.arange(0, 2 * BLOCK), distances, K, WIDTH)
    one, other = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if AXIS == 1:
        wide = tl.dot(q, tl.trans(p), input_precision=PRECISION)
        return tl.gather(wide, one - other + BLOCK - 1, 1)
    wide = tl.dot(p, tl.trans(q), input_precision=PRECISION)
    return tl.gather(wide, other - one + BLOCK - 1, 0)


@triton.jit
def _in_base_2(scores, x, table, h, distances):
    if table is not None:
        scores += tl.load(table + h * distances + tl.minimum(tl.maximum(x, 0), distances - 1))
    return scores * LOG2E


@triton.jit
def _seen(x, j, visible, L, ALL: tl.constexpr):
    if ALL:
        return (j < L) & (x == x)
    return (x >= 0) & (x < visible)


@kernel
def forward(
    q, k, v, start, start_lse, y, lse, far, heads, table, key_bias, query_bias, vectors, seed, T, stream_keys,
    shift, distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output ``[B, H, T, K]`` and log-sum-exp ``[B, H, T]``, inf for a query that sees nothing. Grid: (B * blocks, H).

    ``start``, ``start_lse``: float32 output and log-sum-exp of another part of the same softmax, to merge in; or None.
    """
    H, blocks = tl.num_programs(1), tl.cdiv(T, BLOCK)
    b, t0 = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    h, L, first, visible, full, end = _head(heads, far, b, stream_keys, ramp, ALL)
    k, v, offset = k + first * K, v + first * K, L - T - shift
    row, t = (b * H + h) * T, t0 + tl.arange(0, BLOCK)
    own = _load(q + row * K, t, T, K, WIDTH)
    drawn = _drawn(seed, b, h, t)[:, None]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        base = _biases(query_bias + row, t, T)[:, None]
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    if start is not None:
        top = tl.load(start_lse + row + t, mask=t < T, other=0.0)
        total += 1.0
        out = _load(start + row * K, t, T, K, WIDTH)
    bounds = _key_blocks(t0, offset, visible, full, T, L, BLOCK, ALL)  # bounds[3] stands for L below: one register less
    for part in tl.static_range(3):
        for j0 in range(bounds[part], bounds[part + 1], BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            x = (offset + t)[:, None] - j[None, :]
            scores = tl.dot(own, tl.trans(_load(k, j, bounds[3], K, WIDTH)), input_precision=PRECISION)
            if vectors is not None:
                scores += _near(own, vectors, offset + t0 - j0 - BLOCK + 1, distances, 1, K, WIDTH, BLOCK, PRECISION)
            if key_bias is not None:
                scores += _biases(key_bias + first, j, bounds[3])[None, :] - base
            scores = _in_base_2(scores, x, table, h, distances)
            if part != 1:
                seen = _seen(x, j[None, :], visible, bounds[3], ALL)
                if far is not None:
                    m = tl.minimum((end - x) / ramp, 1.0)
                    seen = seen & (m > 0)
                    scores += tl.log2(tl.where(seen, m, 1.0))
                scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            weights = _drop(weights, seed, drawn, x, j[None, :], ALL, DROP, SCALE).to(v.dtype.element_ty)
            out = tl.dot(weights, _load(v, j, bounds[3], K, WIDTH), out * shrink[:, None], input_precision=PRECISION)
            top = new
    blind = total == 0
    _store(y + row * K, t, T, out / tl.where(blind, 1.0, total)[:, None], K, WIDTH)
    tl.store(lse + row + t, tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, total))), mask=t < T)


@kernel
def query_gradient(
    g, q, k, v, y, lse, delta, dq, dz, dquery_bias, far, heads, table, key_bias, query_bias, vectors, seed, T,
    stream_keys, shift, distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dq``, ``delta`` = g . y, ``dquery_bias [B, H, T]`` and each program's part of ``dz [H, B * blocks]``. The
    last two may be None. Grid: (B * blocks, H).
    """
    H, blocks = tl.num_programs(1), tl.cdiv(T, BLOCK)
    b, t0 = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    h, L, first, visible, full, end = _head(heads, far, b, stream_keys, ramp, ALL)
    k, v, offset = k + first * K, v + first * K, L - T - shift
    row, t = (b * H + h) * T, t0 + tl.arange(0, BLOCK)
    own, up = _load(q + row * K, t, T, K, WIDTH), _load(g + row * K, t, T, K, WIDTH)
    joint = tl.load(lse + row + t, mask=t < T, other=float("inf"))
    paid = tl.sum(up.to(tl.float32) * _load(y + row * K, t, T, K, WIDTH).to(tl.float32), 1)
    tl.store(delta + row + t, paid, mask=t < T)
    moved = tl.zeros([BLOCK, WIDTH], tl.float32)
    span = tl.zeros([BLOCK], tl.float32)
    lowered = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        base = _biases(query_bias + row, t, T)[:, None]
    drawn = _drawn(seed, b, h, t)[:, None]
    r, i = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
    place = r - i + BLOCK - 1  # index in the block of the key at distance x_first + i
    bounds = _key_blocks(t0, offset, visible, full, T, L, BLOCK, ALL)
    for part in tl.static_range(3):
        for j0 in range(bounds[part], bounds[part + 1], BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            x = (offset + t)[:, None] - j[None, :]
            x_first = offset + t0 - j0 - BLOCK + 1
            keys = _load(k, j, bounds[3], K, WIDTH)
            scores = tl.dot(own, tl.trans(keys), input_precision=PRECISION)
            if vectors is not None:
                scores += _near(own, vectors, x_first, distances, 1, K, WIDTH, BLOCK, PRECISION)
            if key_bias is not None:
                scores += _biases(key_bias + first, j, bounds[3])[None, :] - base
            scores = _in_base_2(scores, x, table, h, distances) - joint[:, None]
            if part != 1:
                scores = tl.where(_seen(x, j[None, :], visible, bounds[3], ALL), scores, float("-inf"))
            reward = tl.dot(up, tl.trans(_load(v, j, bounds[3], K, WIDTH)), input_precision=PRECISION)
            if part != 1 and far is not None:
                scores = tl.minimum(scores, HIGHEST)  # a key of weight 0 may score above the log-sum-exp
            change = tl.exp2(scores) * (_drop(reward, seed, drawn, x, j[None, :], ALL, DROP, SCALE) - paid[:, None])
            if part != 1 and far is not None:
                ahead = end - x
                if dz is not None:
                    # The ramp is closed: at its far end m and the weight are 0, but the key still gives a gradient.
                    span += tl.sum(tl.where((ahead <= ramp) & (ahead >= 0), change, 0.0), 1)
                change *= tl.minimum(tl.maximum(ahead / ramp, 0.0), 1.0)  # tl.where would spill
            if dquery_bias is not None:
                lowered -= tl.sum(change, 1)
            moved = tl.dot(change.to(k.dtype.element_ty), keys, moved, input_precision=PRECISION)
            if vectors is not None:
                p = _load(vectors, x_first + tl.arange(0, 2 * BLOCK), distances, K, WIDTH)
                by_distance = tl.gather(change, tl.minimum(tl.maximum(place, 0), BLOCK - 1), 1)
                by_distance = tl.where((place >= 0) & (place < BLOCK), by_distance, 0.0).to(k.dtype.element_ty)
                moved = tl.dot(by_distance, p, moved, input_precision=PRECISION)
    _store(dq + row * K, t, T, moved, K, WIDTH)
    if dquery_bias is not None:
        tl.store(dquery_bias + row + t, lowered, mask=t < T)
    if dz is not None:
        tl.store(dz + h * tl.num_programs(0) + tl.program_id(0), tl.sum(span, 0) / ramp)


@kernel
def key_gradient(
    g, q, k, v, lse, delta, dk, dv, dkey_bias, far, heads, table, key_bias, query_bias, vectors, seed, T,
    stream_keys, longest, shift, distances, ramp, OWN: tl.constexpr, DROP: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dk`` and ``dv``, packed as keys, but for each stream even where streams share keys; with OWN only of the
    last T keys of each head, ``[B, H, T, K]``. ``dkey_bias``, alike without K, may be None. ``longest``: most rows of a
    head. Grid: (B * blocks of ``longest``, H).
    """
    H, blocks = tl.num_programs(1), tl.cdiv(longest, BLOCK)
    b, own0 = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    h, L, first, visible, full, end = _head(heads, far, b, stream_keys, ramp, ALL)
    row, offset = (b * H + h) * T, L - T - shift
    written, at = L, first
    if ALL:
        at = b * stream_keys + first
    else:
        if OWN:
            written, at = T, row
        if own0 >= written:  # this head has fewer keys than another
            return
    j0 = L - written + own0
    j = j0 + tl.arange(0, BLOCK)
    keys, values = _load(k + first * K, j, L, K, WIDTH), _load(v + first * K, j, L, K, WIDTH)
    dkeys, dvalues = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    raised = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        bias = _biases(key_bias + first, j, L)[:, None]
    bounds = _query_blocks(j0, offset, visible, full, T, BLOCK, ALL)
    for part in tl.static_range(3):
        for t0 in range(bounds[part], bounds[part + 1], BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            x = (offset + t)[None, :] - j[:, None]
            own = _load(q + row * K, t, T, K, WIDTH)
            if seed is not None:  # here or below: wherever the compiler keeps all in registers
                up = _load(g + row * K, t, T, K, WIDTH)
            joint = tl.load(lse + row + t, mask=t < T, other=float("inf"))
            scores = tl.dot(keys, tl.trans(own), input_precision=PRECISION)
            if vectors is not None:
                scores += _near(own, vectors, offset + t0 - j0 - BLOCK + 1, distances, 0, K, WIDTH, BLOCK, PRECISION)
            if key_bias is not None:
                scores += bias - _biases(query_bias + row, t, T)[None, :]
            scores = _in_base_2(scores, x, table, h, distances) - joint[None, :]
            if part != 1:
                scores = tl.where(_seen(x, j[:, None], visible, L, ALL), scores, float("-inf"))
            weights = tl.exp2(scores)
            if part != 1 and far is not None:
                m = tl.minimum((end - x) / ramp, 1.0)
                weights = tl.where(m > 0, weights * m, 0.0)
            if seed is None:
                up = _load(g + row * K, t, T, K, WIDTH)
            drawn = _drawn(seed, b, h, t)[None, :]
            dropped = _drop(weights, seed, drawn, x, j[:, None], ALL, DROP, SCALE).to(g.dtype.element_ty)
            dvalues = tl.dot(dropped, up, dvalues, input_precision=PRECISION)
            paid = tl.load(delta + row + t, mask=t < T, other=0.0)
            reward = tl.dot(values, tl.trans(up), input_precision=PRECISION)
            reward = _drop(reward, seed, drawn, x, j[:, None], ALL, DROP, SCALE) - paid[None, :]
            change = weights * reward
            dkeys = tl.dot(change.to(q.dtype.element_ty), own, dkeys, input_precision=PRECISION)
            if dkey_bias is not None:
                raised += tl.sum(change, 1)
    rows = own0 + tl.arange(0, BLOCK)
    _store(dk + at * K, rows, written, dkeys, K, WIDTH)
    _store(dv + at * K, rows, written, dvalues, K, WIDTH)
    if dkey_bias is not None:
        tl.store(dkey_bias + at + rows, raised, mask=rows < written)


@kernel
def vector_gradient(
    g, q, k, v, lse, delta, dvectors, far, heads, key_bias, query_bias, vectors, seed, B, T, stream_keys, shift,
    distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dp by groups of streams, ``[groups, H, distances, K]``. Grid: (blocks of distances, H, groups)."""
    H, groups = tl.num_programs(1), tl.num_programs(2)
    x0, group = tl.program_id(0) * BLOCK, tl.program_id(2)
    x = x0 + tl.arange(0, BLOCK)
    b = group.to(tl.int64)
    h, L, start, visible, full, end = _head(heads, far, b, stream_keys, ramp, False)
    offset = L - T - shift
    dp = tl.zeros([BLOCK, WIDTH], tl.float32)
    p = _load(vectors, x, distances, K, WIDTH)
    first = tl.maximum(x0 - offset, 0) // BLOCK * BLOCK
    last = tl.where(x0 < visible, T, 0)
    for _ in range(0, tl.cdiv(B - group, groups)):
        row = (b * H + h) * T
        for t0 in range(first, last, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            own, up = _load(q + row * K, t, T, K, WIDTH), _load(g + row * K, t, T, K, WIDTH)
            joint = tl.load(lse + row + t, mask=t < T, other=float("inf"))
            paid = tl.load(delta + row + t, mask=t < T, other=0.0)
            near = offset + t0 - x0 - BLOCK + 1 + tl.arange(0, 2 * BLOCK)  # keys on the diagonals of these distances
            place = tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None] + BLOCK - 1
            scores = tl.dot(_load(k + start * K, near, L, K, WIDTH), tl.trans(own), input_precision=PRECISION)
            if key_bias is not None:
                scores += _biases(key_bias + start, near, L)[:, None] - _biases(query_bias + row, t, T)[None, :]
            scores = tl.gather(scores, place, 0) + tl.dot(p, tl.trans(own), input_precision=PRECISION)
            seen = (x[:, None] < visible) & (x[:, None] <= (offset + t)[None, :])
            weights = tl.exp2(tl.where(seen, scores * LOG2E - joint[None, :], float("-inf")))
            if far is not None:
                m = tl.minimum((end - x) / ramp, 1.0)[:, None]
                weights = tl.where(m > 0, weights * m, 0.0)
            reward = tl.dot(_load(v + start * K, near, L, K, WIDTH), tl.trans(up), input_precision=PRECISION)
            drawn = _drawn(seed, b, h, t)[None, :]
            reward = _drop(tl.gather(reward, place, 0), seed, drawn, x[:, None], x, False, DROP, SCALE) - paid[None, :]
            dp = tl.dot((weights * reward).to(q.dtype.element_ty), own, dp, input_precision=PRECISION)
        b += groups
        start += groups * stream_keys
    at = (group * H + h).to(tl.int64) * distances * K
    _store(dvectors + at, x, distances, dp, K, WIDTH)
