"""Cases of attention over a window, most at sizes that are no multiples of blocks, and the
backends to compare."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.support.attention_case import DOUBLE, covering_array
from variants.kernels import chunked, operation, window, window_cpu
from variants.kernels.window import Inputs, PastKV, Persistent, Window
from variants.position import alibi_slopes


def kernel(
    q: Tensor, k: Tensor, v: Tensor, visible: Window, *, dropout: float = 0.0, seed=None, **added
) -> Tensor:
    """Return the CPU kernel, called with a past and a segment. Two groups of heads have pasts of
    different lengths."""
    past, half, pasts = k.shape[2] - q.shape[2], q.shape[1] // 2, []
    of_keys = [k, v] if added.get("key_bias") is None else [k, v, added["key_bias"]]
    if of_keys[2:]:
        added["key_bias"] = of_keys[2][:, :, past:]
    for heads in (range(half), range(half, q.shape[1])) if past else ():
        if heads:
            begin = max(0, past - max(visible.max_keys[h] for h in heads) + 1 - visible.shift)
            pasts.append(PastKV(*(x[:, heads.start : heads.stop, begin:past] for x in of_keys)))
    return window_cpu.attend(q, k[:, :, past:], v[:, :, past:], visible, past=pasts, **added)


def packed(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the backend ``attend``, called with the visible keys of all heads concatenated."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, visible: Window, *, key_bias: Tensor | None = None, **added
    ) -> Tensor:
        inputs = packed_inputs(Inputs(q, k, v, key_bias=key_bias), visible)
        return attend(
            q,
            inputs.k,
            inputs.v,
            visible,
            key_bias=inputs.key_bias,
            lengths=inputs.lengths,
            **added,
        )

    return call


def packed_inputs(inputs: Inputs, visible: Window) -> Inputs:
    """Return inputs whose keys, values and key biases are those that each head may see, one head
    after another."""
    counts = [
        min(inputs.k.shape[2], n - 1 + visible.shift + inputs.q.shape[2]) for n in visible.max_keys
    ]
    of_keys = {n: x for n in ("k", "v", "key_bias") if (x := getattr(inputs, n)) is not None}
    rows = {
        n: [x[:, h, x.shape[2] - m :] for h, m in enumerate(counts)] for n, x in of_keys.items()
    }
    return inputs._replace(
        **{n: torch.cat(x, 1) for n, x in rows.items()}, lengths=torch.tensor(counts)
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Attention of T queries over ``past`` + T keys.

    Attributes:
        max_keys: number of columns of each head, one for each distance; at least what its span and
        ramp reach. z: span of each head, "query" for a random span for each head and query, or None
        for a hard window. bias: "column" for ALiBi's bias for each head and column, "query" for a
        random one for each query as well. persistent: N, the number of persistent vectors.
        key_bias: whether keys and queries have biases; every fifth key is then hidden.
        both: whether queries see both of their sides.
        valid: number of keys of each stream before padding, or None."""

    T: int = 37
    past: int = 0
    max_keys: tuple[int, ...] = (24, 24)
    shift: int = 0
    z: tuple[float, ...] | str | None = None
    ramp: int = 4
    width: int = 8
    bias: str | None = None
    vectors: bool = False
    persistent: int = 0
    sink: bool = False
    key_bias: bool = False
    dropout: float = 0.0
    both: bool = False
    valid: tuple[int, ...] | None = None
    streams: int = 2
    dtype: torch.dtype = DOUBLE

    @property
    def query_shape(self) -> tuple[int, int, int]:
        return self.streams, len(self.max_keys), self.T

    def inputs(self) -> dict[str, Tensor]:
        """Return tensors by their names in ``Inputs``; all but a bias of columns require their
        gradient."""
        heads, columns = len(self.max_keys), max(self.max_keys)
        shapes = {
            "q": (*self.query_shape, self.width),
            "k": (self.streams, heads, self.past + self.T, self.width),
        }
        shapes["v"] = shapes["k"]
        if self.persistent:
            vectors = (heads, self.persistent, self.width)
            shapes |= {"extra_q": shapes["q"], "extra_k": vectors, "extra_v": vectors}
        shapes |= {"sink": (heads,)} if self.sink else {}
        shapes |= (
            {"key_bias": shapes["k"][:3], "query_bias": self.query_shape} if self.key_bias else {}
        )
        shapes |= {"vectors": (columns, self.width)} if self.vectors else {}
        shapes |= {"bias": (*self.query_shape, columns)} if self.bias == "query" else {}
        generator = torch.Generator().manual_seed(0)
        inputs = {
            name: torch.randn(*shape, generator=generator, dtype=DOUBLE)
            for name, shape in shapes.items()
        }
        if self.key_bias:
            inputs["key_bias"][..., ::5] = -torch.inf
        if self.bias == "column":
            inputs["bias"] = -alibi_slopes(heads).double()[:, None] * torch.arange(columns)
        if self.z == "query":
            inputs["z"] = torch.rand(self.query_shape, generator=generator, dtype=DOUBLE) * columns
        elif self.z is not None:
            inputs["z"] = torch.tensor(self.z, dtype=DOUBLE)
        return {
            name: x.to(self.dtype).requires_grad_(name != "bias" or x.dim() == 4)
            for name, x in inputs.items()
        }

    def call(self, attend: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Tensor:
        """Return the output of a backend, with a fixed seed for dropout."""
        fields = Inputs(**inputs)
        added = {
            name: getattr(fields, name)
            for name in ("bias", "vectors", "sink", "key_bias", "query_bias")
        }
        added["dropout"] = self.dropout
        if self.valid:
            added["valid"] = torch.tensor(self.valid, device=fields.q.device)
        if fields.extra_q is not None:
            added["persistent"] = Persistent(fields.extra_q, fields.extra_k, fields.extra_v)
        seed = torch.tensor(2**40 + 5, device=fields.q.device)
        return attend(
            fields.q,
            fields.k,
            fields.v,
            self.hard_window()._replace(z=fields.z),
            **added,
            seed=seed,
        )

    def hard_window(self) -> Window:
        """Return the window without spans, as ``forward`` and ``backward`` of a backend take it."""
        return Window(self.max_keys, self.shift, ramp=self.ramp if self.z else 0, both=self.both)


small = partial(Case, streams=1, width=16)
SMALL_CASES = {
    "one byte": small(T=1, max_keys=(24,)),
    "one byte that sees nothing": small(T=1, shift=1, max_keys=(4, 4), z=(0.0, 3.5), persistent=3),
    "a sink and nothing else": small(T=1, shift=1, max_keys=(4, 4), sink=True),
    "a sink": small(
        T=33,
        past=30,
        max_keys=(16, 50, 30),
        z=(3.3, 47.6, 20.0),
        ramp=3,
        shift=1,
        sink=True,
        bias="column",
    ),
    "a sink beside vectors": small(
        T=19, past=50, max_keys=(17, 17), persistent=3, vectors=True, sink=True
    ),
    "a hidden byte and nothing else": small(T=1, max_keys=(4, 4), key_bias=True),
    "key biases": small(
        T=21,
        past=35,
        max_keys=(16, 33),
        z=(6.0, 30.5),
        shift=1,
        persistent=3,
        sink=True,
        key_bias=True,
        streams=2,
    ),
    "key biases and vectors": small(T=19, past=50, max_keys=(17, 17), vectors=True, key_bias=True),
    "one byte after a long past": small(T=1, past=40, z=(2.5, 19.0), vectors=True),
    "one byte, shifted": small(T=1, past=9, shift=1, max_keys=(4, 4)),
    "a segment longer than the window": small(max_keys=(9, 9), bias="column"),
    "whole blocks": small(T=32, past=16, max_keys=(48, 48)),
    "a past longer than the window": small(T=19, past=50, max_keys=(17, 17), shift=1),
    "spans none and all": small(T=35, past=9, max_keys=(8, 40), z=(0.0, 40.0), ramp=7),
    "uneven heads, out of order": small(
        T=33, past=30, max_keys=(16, 50, 30), z=(3.3, 47.6, 20.0), ramp=3, shift=1
    ),
    "columns wider than spans": small(T=20, past=40, max_keys=(60, 60), z=(1.5, 20.25)),
    "a ramp wider than blocks": small(T=20, past=40, max_keys=(60, 60), z=(0.0, 18.5), ramp=40),
    "blind first rows and a bias": small(
        T=18, max_keys=(20, 20), shift=1, z=(0.5, 20.0), bias="column"
    ),
    "vectors": small(T=21, past=14, max_keys=(16, 33), z=(6.0, 30.5), vectors=True, shift=1),
    "vectors, hard, streams": small(T=17, max_keys=(20, 20), vectors=True, streams=3),
    "persistent and everything": small(
        T=18,
        past=5,
        max_keys=(12, 23),
        z=(4.5, 16.0),
        persistent=19,
        vectors=True,
        shift=1,
        streams=2,
    ),
}
"""Small cases. A blind query sees no key. Cases with ``z=None`` have one window for all heads."""
LARGE = {
    "two chunks": Case(T=150, max_keys=(130,) * 3),
    "spans out of order": Case(
        T=150, max_keys=(24, 9, 24, 130, 9), z=(12.0, 0.0, 19.0, 130.0, 4.5)
    ),
    "persistent, blind": Case(max_keys=(24, 9), shift=1, persistent=40, z=(7.0, 1.5)),
    "bias": Case(T=200, past=3, max_keys=(150, 150), bias="column"),
    "all": Case(
        T=129,
        past=70,
        max_keys=(64, 12, 64),
        shift=1,
        z=(40.0, 7.0, 63.0),
        bias="column",
        persistent=5,
    ),
    "key biases over several chunks of keys": Case(
        T=290, past=301, max_keys=(64, 560, 300), z=(40.0, 550.0, 63.5), key_bias=True
    ),
    "wide": Case(width=96, max_keys=(24, 9), z=(16.0, 3.5), persistent=2),
    "uneven width": Case(width=12, max_keys=(24, 9, 9), z=(16.0, 3.5, 0.0), persistent=2),
}
"""Larger cases for the CPU backends, whose blocks are larger."""
PER_QUERY = {
    "a span for each query": Case(T=150, past=20, max_keys=(64, 64), z="query", ramp=7),
    "a bias for each query": Case(
        T=70, past=9, shift=1, max_keys=(24, 64, 24), z=(12.0, 60.0, 3.0), bias="query"
    ),
    "dropout": Case(
        T=150, past=20, max_keys=(24, 64, 24), z=(12.0, 60.0, 3.0), dropout=0.3, persistent=5
    ),
    "dropout, blind": Case(T=3, shift=1, max_keys=(4, 4), dropout=0.5, persistent=3),
    "everything": Case(
        T=140,
        past=33,
        shift=1,
        max_keys=(50, 50, 50),
        z="query",
        dropout=0.2,
        persistent=7,
        bias="query",
    ),
}
both = partial(Case, both=True, width=16)
BOTH = {
    "both sides": both(max_keys=(9, 9)),
    "both sides of one byte": both(T=1, max_keys=(4, 4), bias="column"),
    "both sides, padding": both(max_keys=(9, 9), valid=(37, 12)),
    "both sides, all keys": both(T=40, max_keys=(60, 60)),
    "both sides, all keys, padding": both(T=40, max_keys=(60, 60), valid=(1, 39)),
    "both sides, ends of ramps": both(
        T=150, max_keys=(24, 9, 24, 130, 9), z=(12.0, 0.0, 19.0, 130.0, 4.5), valid=(150, 101)
    ),
    "both sides, everything": both(
        T=290,
        max_keys=(64, 12, 140),
        z=(40.0, 7.0, 133.0),
        bias="column",
        persistent=5,
        sink=True,
        valid=(290, 130),
    ),
    "both sides, dropout": both(
        T=150, max_keys=(24, 64), z=(12.0, 60.0), dropout=0.3, persistent=5, valid=(97, 150)
    ),
    "both sides, a bias for each query": both(T=70, max_keys=(24, 24), bias="query"),
}
HEADS = {
    "one key": {"max_keys": (1, 1)},
    "hard": {"max_keys": (150, 150, 150)},
    "short": {"max_keys": (9, 9, 9), "z": (9.0, 2.5, 0.0), "ramp": 1},
    "long": {"max_keys": (64, 290, 128, 256), "z": (0.0, 290.0, 63.5, 200.0), "ramp": 33},
}
ADDED = {"nothing": {}, "bias": {"bias": "column"}, "vectors": {"vectors": True}}
FACTORS = {
    "heads": list(HEADS),
    "added": list(ADDED),
    "T": [1, 33, 127, 129, 300],
    "past": [0, 1, 40, 300],
    "width": [1, 3, 16],
    "persistent": [0, 1, 40],
    "shift": [0, 1],
    "streams": [1, 2],
}
CASES = SMALL_CASES | LARGE | PER_QUERY | BOTH
for row in covering_array(FACTORS, strength=2):
    name = "-".join(map(str, row.values()))
    CASES[name] = Case(**HEADS[row.pop("heads")], **ADDED[row.pop("added")], **row)
ATTEND = {"plain": window.attend, "chunked": chunked.attend, "kernel": kernel}
ATTEND["fused"] = partial(operation.attend, "fused")


def can_compute(backend: str, case: Case) -> bool:
    per_query = case.z == "query" or case.bias == "query" or case.dropout > 0
    added = case.vectors or case.key_bias
    if backend == "kernel" and case.both:
        return False
    return backend in ("plain", "chunked") or not (per_query or (backend == "fused" and added))
