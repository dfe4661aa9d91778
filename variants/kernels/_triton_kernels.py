"""Triton kernels of ``triton_window.py``, whose docstring has the equations. Importing this file
needs triton.

Each program computes a block of queries (or of keys, or of distances) of one head of one stream, in
a loop over blocks of its head's window. Key j of L is at distance x = offset + t - j from query t,
with offset = L - T - shift. A block of pairs needs no mask if all are visible with m = 1. Scores
and log-sum-exps are in base 2. A head of width K has WIDTH columns in registers, a power of two.
Each element is written by one program only. No result of tl.dot is transposed: Triton below 3.7.1
compiled that wrongly for sm_90.

Arguments, where the name is not enough:
    ramp_end: z + R of each head, or None for a hard window.
    table, vectors: a bias [H, distances] that is added to scores, and p [distances, K]; each may be
    None. k, v: keys and values, packed head after head, ``stream_keys`` per stream; with ALL, all
    streams share one set. key_bias, query_bias: ``key_bias_j - query_bias_t`` is added to scores;
    query_bias is [B, H, T]. Or both None. heads: int32 [4, H]. By row: visible keys of each head;
    indices of heads, by descending visible keys, so that the
        longest start first; L of each head; and the index of its first key.
    seed: seed of dropout, which drops the same weights as ``dropout.py``; None without dropout.
    ALL: whether every query sees every key (persistent vectors).
    DROP, SCALE: a weight whose random number is less than DROP is dropped; other weights are
    multiplied by SCALE.
"""

import triton
import triton.language as tl

from variants.kernels import dropout

STREAM, QUERY, KEY = (tl.constexpr(dropout.FACTORS[name]) for name in ("stream", "query", "key"))
FIRST, SECOND, PERSISTENT = (tl.constexpr(factor) for factor in (*dropout.MIX, dropout.PERSISTENT))
LOG2E = tl.constexpr(1.4426950408889634)
# ``window.max_exponent`` of float32, in base 2
MAX_EXPONENT = tl.constexpr(70 * 1.4426950408889634)
# whether kernels run on the host; set when triton is imported
INTERPRETED = triton.knobs.runtime.interpret
# no compilation per length
kernel = triton.jit(do_not_specialize=("B", "T", "stream_keys", "longest", "distances"))


@triton.jit
def _block(rows, BLOCK: tl.constexpr):
    """Return the program's stream, and the first row of its block."""
    blocks = tl.cdiv(rows, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK


@triton.jit
def _head(heads, ramp_end, b, T, stream_keys, ramp, ALL: tl.constexpr):
    """Return the program's head, the row of its first query in stream b, its number of keys L, the
    row of its first key in stream b, its number of visible keys, the number of nearest keys that
    have m = 1 and give no gradient to z, and z + R."""
    H = tl.num_programs(1)
    h = tl.load(heads + H + tl.program_id(1))
    first = tl.load(heads + 3 * H + h).to(tl.int64)
    if not ALL:
        first += b * stream_keys
    visible = tl.load(heads + h)
    full = visible
    end = 0.0
    if ramp_end is not None:
        end = tl.load(ramp_end + h).to(tl.float32)
        visible = tl.maximum(tl.minimum(visible, tl.floor(end).to(tl.int32) + 1), 0)
        full = tl.maximum(tl.minimum(full, tl.ceil(end).to(tl.int32) - ramp), 0)
    return h, (b * H + h) * T, tl.load(heads + 2 * H + h), first, visible, full, end


@triton.jit
def _at(rows, size, K: tl.constexpr, WIDTH: tl.constexpr):
    """Return offsets ``[block, WIDTH]`` of rows in a contiguous matrix of ``size`` rows, and a mask
    of existing elements."""
    columns = tl.arange(0, WIDTH)
    exists = ((rows >= 0) & (rows < size))[:, None]
    if K != WIDTH:
        exists = exists & (columns < K)[None, :]
    return rows[:, None] * K + columns[None, :], exists


@triton.jit
def _load(x, rows, size, K: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of a matrix, ``[block, WIDTH]``, with zeros for rows and columns that do not
    exist."""
    at, exists = _at(rows, size, K, WIDTH)
    return tl.load(x + at, mask=exists, other=0.0)


@triton.jit
def _store(x, rows, size, value, K: tl.constexpr, WIDTH: tl.constexpr):
    at, exists = _at(rows, size, K, WIDTH)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def _biases(x, at, size):
    """Return elements of a vector, ``[block]``, with zeros for elements that do not exist."""
    return tl.load(x + at, mask=(at >= 0) & (at < size), other=0.0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def _row_numbers(seed, b, h, t):
    """Return the numbers of ``dropout.row_numbers`` for queries t, uint32; without dropout, t
    itself, which is not used."""
    counter = t
    if seed is not None:
        word = tl.load(seed) + h
        x = _mix(word.to(tl.uint32) ^ (b.to(tl.uint32) * STREAM)) ^ (word >> 32).to(tl.uint32)
        counter = _mix(_mix(x) ^ (t.to(tl.uint32) * QUERY))
    return counter


@triton.jit
def _drop(value, seed, counter, x, j, ALL: tl.constexpr, DROP: tl.constexpr, SCALE: tl.constexpr):
    """Return ``value`` times SCALE, or 0 for a dropped weight. ``counter`` is from
    ``_row_numbers``."""
    if seed is not None:
        key_number = (j.to(tl.uint32) ^ PERSISTENT) if ALL else x.to(tl.uint32)
        value = tl.where(_mix(counter ^ (key_number * KEY)) >= DROP, value * SCALE, 0.0)
    return value


@triton.jit
def _key_blocks(t0, offset, visible, full, T, L, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Return bounds first, inner, outer, last of the keys for a block of queries. From inner to
    outer no mask is needed."""
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
    """Return bounds of the queries for a block of keys, as in ``_key_blocks``."""
    if ALL:
        return 0, 0, T // BLOCK * BLOCK, T
    first = tl.maximum(j0 - offset, 0) // BLOCK * BLOCK
    last = tl.minimum(j0 + BLOCK - 1 - offset + visible, T)
    inner = tl.maximum(tl.cdiv(tl.maximum(j0 + BLOCK - 1 - offset, 0), BLOCK) * BLOCK, first)
    outer = tl.maximum(tl.minimum(full + j0 - offset, T), 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, tl.maximum(outer, first))
    return first, inner, tl.maximum(outer, inner), last


@triton.jit
def _q_dot_p(
    q, vectors, x_first, distances, KEY_AXIS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return q . p_x of a block of pairs, with keys along KEY_AXIS: diagonals of products with 2
    BLOCK vectors p.

    ``x_first``: the smallest distance in the block, between its first query and its last key."""
    p = _load(vectors, x_first + tl.arange(0, 2 * BLOCK), distances, K, WIDTH)
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if KEY_AXIS == 1:
        return tl.gather(
            tl.dot(q, tl.trans(p), input_precision=PRECISION), row - column + BLOCK - 1, 1
        )
    return tl.gather(tl.dot(p, tl.trans(q), input_precision=PRECISION), column - row + BLOCK - 1, 0)


@triton.jit
def _add_table_in_base_2(scores, x, table, h, distances):
    if table is not None:
        scores += tl.load(table + h * distances + tl.minimum(tl.maximum(x, 0), distances - 1))
    return scores * LOG2E


@triton.jit
def _visible(x, j, visible, L, ALL: tl.constexpr):
    if ALL:
        return (j < L) & (x == x)  # x == x is true and gives the mask the block's shape
    return (x >= 0) & (x < visible)


@kernel
def forward(
    q, k, v, prior, prior_lse, y, lse, ramp_end, heads, table, key_bias, query_bias, vectors, seed,
    T, stream_keys, shift, distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output ``[B, H, T, K]`` and log-sum-exp ``[B, H, T]``, inf for a query that sees no key.
    Grid: (B * blocks, H).

    ``prior``, ``prior_lse``: float32 output and log-sum-exp of a part of the same softmax, to
    merge with; or None."""
    b, t0 = _block(T, BLOCK)
    h, row, L, first, visible, full, end = _head(heads, ramp_end, b, T, stream_keys, ramp, ALL)
    k, v, offset = k + first * K, v + first * K, L - T - shift
    t = t0 + tl.arange(0, BLOCK)
    q_t = _load(q + row * K, t, T, K, WIDTH)
    counter = _row_numbers(seed, b, h, t)[:, None]
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        bias_t = _biases(query_bias + row, t, T)[:, None]
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    if prior is not None:
        peak = tl.load(prior_lse + row + t, mask=t < T, other=0.0)
        total += 1.0  # the prior part is like one key whose score is prior_lse
        out = _load(prior + row * K, t, T, K, WIDTH)
    # bounds[3] replaces L below, to save a register
    bounds = _key_blocks(t0, offset, visible, full, T, L, BLOCK, ALL)
    for part in tl.static_range(3):
        for j0 in range(bounds[part], bounds[part + 1], BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            x = (offset + t)[:, None] - j[None, :]
            scores = tl.dot(
                q_t, tl.trans(_load(k, j, bounds[3], K, WIDTH)), input_precision=PRECISION
            )
            if vectors is not None:
                scores += _q_dot_p(
                    q_t,
                    vectors,
                    offset + t0 - j0 - BLOCK + 1,
                    distances,
                    1,
                    K,
                    WIDTH,
                    BLOCK,
                    PRECISION,
                )
            if key_bias is not None:
                scores += _biases(key_bias + first, j, bounds[3])[None, :] - bias_t
            scores = _add_table_in_base_2(scores, x, table, h, distances)
            if part != 1:
                is_visible = _visible(x, j[None, :], visible, bounds[3], ALL)
                if ramp_end is not None:
                    m = tl.minimum((end - x) / ramp, 1.0)
                    is_visible = is_visible & (m > 0)
                    scores += tl.log2(tl.where(is_visible, m, 1.0))
                scores = tl.where(is_visible, scores, float("-inf"))
            new = tl.maximum(peak, tl.max(scores, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - safe[:, None])
            rescale = tl.exp2(peak - safe)
            total = total * rescale + tl.sum(weights, 1)
            weights = _drop(weights, seed, counter, x, j[None, :], ALL, DROP, SCALE).to(
                v.dtype.element_ty
            )
            out = tl.dot(
                weights,
                _load(v, j, bounds[3], K, WIDTH),
                out * rescale[:, None],
                input_precision=PRECISION,
            )
            peak = new
    empty = total == 0
    _store(y + row * K, t, T, out / tl.where(empty, 1.0, total)[:, None], K, WIDTH)
    tl.store(
        lse + row + t,
        tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total))),
        mask=t < T,
    )


@kernel
def query_gradient(
    g, q, k, v, y, lse, delta, dq, dz, dquery_bias, ramp_end, heads, table, key_bias, query_bias,
    vectors, seed, T, stream_keys, shift, distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dq``, ``delta`` = g . y, ``dquery_bias [B, H, T]`` and each program's part of ``dz
    [H, B * blocks]``; ``dquery_bias`` and ``dz`` may be None. Grid: (B * blocks, H)."""
    b, t0 = _block(T, BLOCK)
    h, row, L, first, visible, full, end = _head(heads, ramp_end, b, T, stream_keys, ramp, ALL)
    k, v, offset = k + first * K, v + first * K, L - T - shift
    t = t0 + tl.arange(0, BLOCK)
    q_t, g_t = _load(q + row * K, t, T, K, WIDTH), _load(g + row * K, t, T, K, WIDTH)
    lse_t = tl.load(lse + row + t, mask=t < T, other=float("inf"))
    delta_t = tl.sum(g_t.to(tl.float32) * _load(y + row * K, t, T, K, WIDTH).to(tl.float32), 1)
    tl.store(delta + row + t, delta_t, mask=t < T)
    dquery = tl.zeros([BLOCK, WIDTH], tl.float32)
    dspan = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        bias_t = _biases(query_bias + row, t, T)[:, None]
    counter = _row_numbers(seed, b, h, t)[:, None]
    r, i = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
    diagonal = r - i + BLOCK - 1  # index in the block of the key at distance x_first + i
    bounds = _key_blocks(t0, offset, visible, full, T, L, BLOCK, ALL)
    for part in tl.static_range(3):
        for j0 in range(bounds[part], bounds[part + 1], BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            x = (offset + t)[:, None] - j[None, :]
            x_first = offset + t0 - j0 - BLOCK + 1
            keys = _load(k, j, bounds[3], K, WIDTH)
            scores = tl.dot(q_t, tl.trans(keys), input_precision=PRECISION)
            if vectors is not None:
                scores += _q_dot_p(q_t, vectors, x_first, distances, 1, K, WIDTH, BLOCK, PRECISION)
            if key_bias is not None:
                scores += _biases(key_bias + first, j, bounds[3])[None, :] - bias_t
            scores = _add_table_in_base_2(scores, x, table, h, distances) - lse_t[:, None]
            if part != 1:
                scores = tl.where(
                    _visible(x, j[None, :], visible, bounds[3], ALL), scores, float("-inf")
                )
            dweights = tl.dot(
                g_t, tl.trans(_load(v, j, bounds[3], K, WIDTH)), input_precision=PRECISION
            )
            if part != 1 and ramp_end is not None:
                # a key of weight 0 may score above the log-sum-exp
                scores = tl.minimum(scores, MAX_EXPONENT)
            dweights = _drop(dweights, seed, counter, x, j[None, :], ALL, DROP, SCALE)
            dscores = tl.exp2(scores) * (dweights - delta_t[:, None])
            if part != 1 and ramp_end is not None:
                ahead = end - x
                if dz is not None:
                    # The ramp is closed: at its end z + R, m and the weight are 0, but the key
                    # still counts for dz.
                    dspan += tl.sum(tl.where((ahead <= ramp) & (ahead >= 0), dscores, 0.0), 1)
                # tl.where would spill registers
                dscores *= tl.minimum(tl.maximum(ahead / ramp, 0.0), 1.0)
            if dquery_bias is not None:
                dbias -= tl.sum(dscores, 1)
            dquery = tl.dot(dscores.to(k.dtype.element_ty), keys, dquery, input_precision=PRECISION)
            if vectors is not None:
                p = _load(vectors, x_first + tl.arange(0, 2 * BLOCK), distances, K, WIDTH)
                by_distance = tl.gather(dscores, tl.minimum(tl.maximum(diagonal, 0), BLOCK - 1), 1)
                by_distance = tl.where((diagonal >= 0) & (diagonal < BLOCK), by_distance, 0.0).to(
                    k.dtype.element_ty
                )
                dquery = tl.dot(by_distance, p, dquery, input_precision=PRECISION)
    _store(dq + row * K, t, T, dquery, K, WIDTH)
    if dquery_bias is not None:
        tl.store(dquery_bias + row + t, dbias, mask=t < T)
    if dz is not None:
        tl.store(dz + h * tl.num_programs(0) + tl.program_id(0), tl.sum(dspan, 0) / ramp)


@kernel
def key_gradient(
    g, q, k, v, lse, delta, dk, dv, dkey_bias, ramp_end, heads, table, key_bias, query_bias,
    vectors, seed, T, stream_keys, longest, shift, distances, ramp, SEGMENT_ONLY: tl.constexpr,
    DROP: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dk`` and ``dv``, packed like keys, but for each stream even if streams share keys;
    with SEGMENT_ONLY only for the last T keys of each head, ``[B, H, T, K]``. ``dkey_bias`` has the
    same shape without K, or is None. ``longest`` is the largest number of keys of a head that
    get gradients. Grid: (B * blocks of so many keys, H)."""
    b, row0 = _block(longest, BLOCK)
    h, row, L, first, visible, full, end = _head(heads, ramp_end, b, T, stream_keys, ramp, ALL)
    offset = L - T - shift
    written, at = L, first
    if ALL:
        at = b * stream_keys + first
    else:
        if SEGMENT_ONLY:
            written, at = T, row
        if row0 >= written:  # this head has fewer keys than another
            return
    j0 = L - written + row0
    j = j0 + tl.arange(0, BLOCK)
    keys, values = _load(k + first * K, j, L, K, WIDTH), _load(v + first * K, j, L, K, WIDTH)
    dkeys, dvalues = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if key_bias is not None:
        bias_j = _biases(key_bias + first, j, L)[:, None]
    bounds = _query_blocks(j0, offset, visible, full, T, BLOCK, ALL)
    for part in tl.static_range(3):
        for t0 in range(bounds[part], bounds[part + 1], BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            x = (offset + t)[None, :] - j[:, None]
            q_t = _load(q + row * K, t, T, K, WIDTH)
            if seed is not None:  # no spills if g_t is loaded here with dropout, and below without
                g_t = _load(g + row * K, t, T, K, WIDTH)
            lse_t = tl.load(lse + row + t, mask=t < T, other=float("inf"))
            scores = tl.dot(keys, tl.trans(q_t), input_precision=PRECISION)
            if vectors is not None:
                scores += _q_dot_p(
                    q_t,
                    vectors,
                    offset + t0 - j0 - BLOCK + 1,
                    distances,
                    0,
                    K,
                    WIDTH,
                    BLOCK,
                    PRECISION,
                )
            if key_bias is not None:
                scores += bias_j - _biases(query_bias + row, t, T)[None, :]
            scores = _add_table_in_base_2(scores, x, table, h, distances) - lse_t[None, :]
            if part != 1:
                scores = tl.where(_visible(x, j[:, None], visible, L, ALL), scores, float("-inf"))
            weights = tl.exp2(scores)
            if part != 1 and ramp_end is not None:
                m = tl.minimum((end - x) / ramp, 1.0)
                weights = tl.where(m > 0, weights * m, 0.0)
            if seed is None:
                g_t = _load(g + row * K, t, T, K, WIDTH)
            counter = _row_numbers(seed, b, h, t)[None, :]
            dropped = _drop(weights, seed, counter, x, j[:, None], ALL, DROP, SCALE).to(
                g.dtype.element_ty
            )
            dvalues = tl.dot(dropped, g_t, dvalues, input_precision=PRECISION)
            delta_t = tl.load(delta + row + t, mask=t < T, other=0.0)
            dweights = tl.dot(values, tl.trans(g_t), input_precision=PRECISION)
            dweights = (
                _drop(dweights, seed, counter, x, j[:, None], ALL, DROP, SCALE) - delta_t[None, :]
            )
            dscores = weights * dweights
            dkeys = tl.dot(dscores.to(q.dtype.element_ty), q_t, dkeys, input_precision=PRECISION)
            if dkey_bias is not None:
                dbias += tl.sum(dscores, 1)
    rows = row0 + tl.arange(0, BLOCK)
    _store(dk + at * K, rows, written, dkeys, K, WIDTH)
    _store(dv + at * K, rows, written, dvalues, K, WIDTH)
    if dkey_bias is not None:
        tl.store(dkey_bias + at + rows, dbias, mask=rows < written)


@kernel
def vector_gradient(
    g, q, k, v, lse, delta, dvectors, ramp_end, heads, key_bias, query_bias, vectors, seed, B, T,
    stream_keys, shift, distances, ramp, DROP: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sums of dp over groups of streams, ``[groups, H, distances, K]``. Grid: (distance
    blocks, H, groups)."""
    H, groups = tl.num_programs(1), tl.num_programs(2)
    x0, group = tl.program_id(0) * BLOCK, tl.program_id(2)
    x = x0 + tl.arange(0, BLOCK)
    b = group.to(tl.int64)
    h, _, L, first, visible, full, end = _head(heads, ramp_end, b, T, stream_keys, ramp, False)
    offset = L - T - shift
    dp = tl.zeros([BLOCK, WIDTH], tl.float32)
    p = _load(vectors, x, distances, K, WIDTH)
    t_first = tl.maximum(x0 - offset, 0) // BLOCK * BLOCK
    t_end = tl.where(x0 < visible, T, 0)
    for _ in range(0, tl.cdiv(B - group, groups)):
        row = (b * H + h) * T
        for t0 in range(t_first, t_end, BLOCK):
            t = t0 + tl.arange(0, BLOCK)
            q_t, g_t = _load(q + row * K, t, T, K, WIDTH), _load(g + row * K, t, T, K, WIDTH)
            lse_t = tl.load(lse + row + t, mask=t < T, other=float("inf"))
            delta_t = tl.load(delta + row + t, mask=t < T, other=0.0)
            # keys on the diagonals of these distances
            near = offset + t0 - x0 - BLOCK + 1 + tl.arange(0, 2 * BLOCK)
            diagonal = tl.arange(0, BLOCK)[None, :] - tl.arange(0, BLOCK)[:, None] + BLOCK - 1
            scores = tl.dot(
                _load(k + first * K, near, L, K, WIDTH), tl.trans(q_t), input_precision=PRECISION
            )
            if key_bias is not None:
                scores += (
                    _biases(key_bias + first, near, L)[:, None]
                    - _biases(query_bias + row, t, T)[None, :]
                )
            scores = tl.gather(scores, diagonal, 0) + tl.dot(
                p, tl.trans(q_t), input_precision=PRECISION
            )
            is_visible = (x[:, None] < visible) & (x[:, None] <= (offset + t)[None, :])
            weights = tl.exp2(tl.where(is_visible, scores * LOG2E - lse_t[None, :], float("-inf")))
            if ramp_end is not None:
                m = tl.minimum((end - x) / ramp, 1.0)[:, None]
                weights = tl.where(m > 0, weights * m, 0.0)
            dweights = tl.dot(
                _load(v + first * K, near, L, K, WIDTH), tl.trans(g_t), input_precision=PRECISION
            )
            counter = _row_numbers(seed, b, h, t)[None, :]
            dweights = _drop(
                tl.gather(dweights, diagonal, 0), seed, counter, x[:, None], x, False, DROP, SCALE
            )
            dscores = (weights * (dweights - delta_t[None, :])).to(q.dtype.element_ty)
            dp = tl.dot(dscores, q_t, dp, input_precision=PRECISION)
        b += groups
        first += groups * stream_keys
    at = (group * H + h).to(tl.int64) * distances * K
    _store(dvectors + at, x, distances, dp, K, WIDTH)
