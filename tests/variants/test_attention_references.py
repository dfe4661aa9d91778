"""Every mechanism that sees a past has the output and gradients of its reference loops, for
every pair of choices."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from torch import Tensor

from tests.reference import linear
from tests.reference.differential import differential
from tests.reference.gated_delta import gated_delta
from tests.reference.gated_linear import gated_linear
from tests.reference.latent import latent_attention
from tests.reference.linformer import linformer
from tests.reference.local import local_attention
from tests.reference.longformer import longformer_attention
from tests.reference.nsa import native_sparse
from tests.reference.performer import random_feature_product
from tests.reference.reformer import reformer
from tests.reference.transformer_xl import transformer_xl
from tests.support.attention_case import (
    SCHEMES,
    Case,
    assert_outcome,
    covering_array,
    matrices,
    mix_of,
    outcome,
    reference_output,
    run,
    set_fractions,
)
from variants.contract import Sublayer
from variants.differential import Differential
from variants.gated_delta import GatedDelta
from variants.gated_linear import GatedLinear
from variants.kernels import window_cpu
from variants.latent import Latent
from variants.linear import LinearAttention
from variants.linformer import Linformer
from variants.local import LocalAttention
from variants.longformer import Longformer
from variants.nsa import NativeSparse
from variants.performer import Performer
from variants.reformer import Reformer
from variants.transformer_xl import TransformerXL

pytestmark = pytest.mark.numeric

CACHES = {"cache": ["kv", "hidden"], "attend_self": [True, False]}
LENGTHS = {"length": [1, 4, 7], "past": [0, 2, 9]}
PIECES = {
    "kernels.carried_sums.CHUNKS_PER_PIECE": 2,
    "local.ROWS_AT_ONCE": 2,
    "nsa.QUERIES_AT_ONCE": 5,
}
"""Sizes with which mechanisms compute a segment in several pieces."""
INTEGER_SPANS = {"length": 5, "past": 4, "span": 8, "heads": 9, "spans": "zero"}


class Mechanism(NamedTuple):
    """A sublayer, its reference and the choices with which they are compared.

    Attributes:
        make: constructor, called with the choices that are not fields of ``Case``; None for
        ``Attention``. expected: the reference's output, a function of the sublayer, ``Case``, the
        other choices, ``x`` and ``past``. factors: values of choices; every pair of values of two
        choices is tested. more: further combinations of choices to test.
        backends: compared backends, which must refuse choices that they do not support
        (``must_refuse``). noise: scale of the noise added to initial parameters."""

    make: Callable[..., Sublayer] | None
    expected: Callable[..., Tensor]
    factors: dict[str, list]
    more: Sequence[dict] = ()
    backends: Sequence[str] = ("auto",)
    noise: float = 0.0


def common_arguments(sublayer: Sublayer, case: Case, past: Tensor) -> dict:
    """Return the keyword arguments that most references take."""
    choices = {"attend_self": case.attend_self, "position": case.position, "past": past}
    choices |= {
        "past_is_constant": case.cache == "kv",
        "table": getattr(sublayer.position, "table", None),
    }
    return matrices(sublayer) | mix_of(sublayer) | choices


def of_attention(sublayer: Sublayer, case: Case, _: dict, x: Tensor, past: Tensor) -> Tensor:
    return reference_output(sublayer, x=x, past=past, position=case.position)


def of_transformer_xl(sublayer: Sublayer, case: Case, _: dict, x: Tensor, past: Tensor) -> Tensor:
    position = sublayer.position
    vectors = {"wr": position.project.weight, "u": position.to_keys, "v": position.to_distances}
    return transformer_xl(x, **vectors, **common_arguments(sublayer, case, past), span=case.span)


def of_features(sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor) -> Tensor:
    common = common_arguments(sublayer, case, past) | {"heads": case.heads}
    del common["past_is_constant"]
    if isinstance(sublayer, Performer):
        return linear.linear_attention(
            x, **common, product=random_feature_product(sublayer.directions)
        )
    phi = {"elu": linear.elu_plus_one, "relu": linear.relu}[choices.get("feature_map", "elu")]
    return linear.linear_attention(
        x, **common, product=lambda head, query, key: phi(query) @ phi(key)
    )


def of_differential(sublayer: Sublayer, case: Case, _: dict, x: Tensor, past: Tensor) -> Tensor:
    parameters = {name: getattr(sublayer, name) for name in ("gain", "initial", "heads")}
    common = common_arguments(sublayer, case, past) | {
        "factors": [*sublayer.factors],
        "span": case.span,
    }
    return differential(x, **common, **parameters)


def of_latent(sublayer: Sublayer, case: Case, _: dict, x: Tensor, past: Tensor) -> Tensor:
    down, up = sublayer.down.weight, sublayer.up.weight
    weights = {"wq": sublayer.query.weight, "wo": sublayer.output.weight, "gain": sublayer.gain}
    weights |= {"wc": down[: sublayer.latent], "wr": down[sublayer.latent :]}
    weights |= dict(zip(("wk", "wv"), up.chunk(2), strict=True))
    common = {name: getattr(case, name) for name in ("heads", "span", "attend_self", "position")}
    return latent_attention(x, **weights, **common, **mix_of(sublayer), past=past)


def of_gates(sublayer: Sublayer, case: Case, _: dict, x: Tensor, past: Tensor) -> Tensor:
    decay, common = (
        sublayer.decay,
        {"heads": case.heads, "attend_self": case.attend_self, "past": past},
    )
    wa = decay.up.weight if decay.down is None else decay.up.weight @ decay.down.weight
    common |= matrices(sublayer) | mix_of(sublayer) | {"wa": wa, "ba": decay.up.bias}
    if isinstance(sublayer, GatedLinear):
        return gated_linear(x, **common)
    gate_weights = {"wg": sublayer.gate.weight, "wb": sublayer.strength.weight}
    return gated_delta(x, **common, **gate_weights, filters=sublayer.filters, gain=sublayer.gain)


def of_linformer(sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor) -> Tensor:
    weights = {
        n.removesuffix(".weight").split("compressor.")[-1]: p
        for n, p in sublayer.named_parameters()
    }
    if "position.table" in weights:
        weights["table"] = weights["position.table"]
    common = {
        name: getattr(case, name) for name in ("heads", "span", "attend_self", "position", "cache")
    }
    return sum(linformer(x, past=past, weights=weights, **common, **choices))


def of_native_sparse(
    sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor
) -> Tensor:
    weights = {
        n.removesuffix(".weight").split("compressor.")[-1]: p
        for n, p in sublayer.named_parameters()
    }
    weights |= {"gates": sublayer.branch_gates.weight, "gate_bias": sublayer.branch_gates.bias}
    common = {
        name: getattr(case, name)
        for name in ("heads", "span", "attend_self", "position", "kv_heads")
    }
    return native_sparse(x, past=past, weights=weights, **common, **choices)


def of_local(sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor) -> Tensor:
    common = common_arguments(sublayer, case, past) | {"past": list(past)}
    return local_attention(x, **common, heads=case.heads, **choices)


def of_longformer(sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor) -> Tensor:
    windows = {"windows": list(sublayer.span.visible_keys), "dilations": list(sublayer.span.steps)}
    return longformer_attention(x, **common_arguments(sublayer, case, past), **windows)


def of_reformer(sublayer: Sublayer, case: Case, choices: dict, x: Tensor, past: Tensor) -> Tensor:
    common = common_arguments(sublayer, case, past) | {
        "span": case.span,
        "rotations": sublayer.rotations,
    }
    return reformer(x, **common, bucket_keys=choices["bucket_keys"])


SHIFT = {"key_shift": [False, True]}
SHAPES = {"span": [3, 8, 20], "heads": [1, 3], "d_head": [2, 6], **LENGTHS, **CACHES, **SHIFT}
ATTENTION = SHAPES | {
    "position": list(SCHEMES),
    "spans": ["fixed", "dynamic", "zero", "fractional"],
}
ATTENTION |= {"persistent": [0, 3]}
CARRIED = {
    "length": [1, 8],
    "past": [0, 4],
    "position": ["none", "alibi"],
    "attend_self": [True, False],
    **SHIFT,
}
LINEAR = CARRIED | {
    "chunk": [1, 3, 4, 64],
    "feature_map": ["elu", "relu"],
    "heads": [2, 5],
    "d_head": [2, 3],
}
GATED = {
    "length": [1, 8, 11],
    "past": [0, 4],
    "attend_self": [True, False],
    "chunk": [1, 3, 64],
    "d_head": [2, 3],
}
GATED |= SHIFT
DELTA = GATED | {"decay": ["head", "channel"], "filter_bytes": [1, 3]}
PERFORMER = CARRIED | {
    "chunk": [2, 3, 64],
    "features": [1, 5, None],
    "heads": [1, 3],
    "d_head": [2, 3],
}
BLOCKS = {"ratio, window, span": [(3, 4, 13), (4, 2, 11), (1, 3, 8), (2, 5, 9), (5, 1, 12)]}
BLOCKS |= {
    "past, length": [(0, 11), (7, 6), (14, 1), (16, 4)],
    "heads": [2],
    **CACHES,
    "position": list(SCHEMES),
    **SHIFT,
}
BLOCKS |= {"compressor": ["mean", "linear", "softmax"], "top_k": [None, 1, 2]}
CHUNKS = {
    "ratio": 4,
    "window": 6,
    "span": 21,
    "compressor": "linear",
    "top_k": None,
    "position": "rotary",
}
CHUNKS |= {"past": 10, "length": 37, "heads": 1}
ALL_READ = {
    "ratio": 3,
    "window": 4,
    "span": 13,
    "compressor": "softmax",
    "top_k": 9,
    "position": "relative",
}
# queries of the last one see no summary
MORE_BLOCKS = [CHUNKS, ALL_READ | {"past": 19}, ALL_READ | {"length": 3}]
SPARSE = {
    "block, selected, window, span": [
        (3, 2, 4, 13),
        (4, 1, 2, 11),
        (1, 3, 8, 9),
        (5, 3, 1, 12),
        (2, 9, 3, 8),
    ]
}
SPARSE |= {"past, length": [(0, 11), (7, 6), (14, 1), (16, 5)], "heads": [4], "kv_heads": [1, 2, 4]}
SPARSE |= {"attend_self": [True, False], "position": ["none", "rotary"], "d_head": [2], **SHIFT}
LOCAL = (
    CACHES
    | SHIFT
    | {"length": [1, 5, 12], "past": [0, 1, 4, 13], "position": list(SCHEMES), "block": [5]}
)
DILATED = (
    CACHES
    | SHIFT
    | {
        "windows": [(1,), (4,)],
        "dilation": [(1,), (2,), (3,)],
        "dilated_heads": [1, 3],
        "span": [12],
    }
)
WINDOWS = DILATED | {"length": [1, 2, 7], "past": [0, 1, 4, 13], "position": list(SCHEMES)}
REFORMER = {
    "buckets": 4,
    "rounds": 3,
    "bucket_keys": 2,
    "d_head": 4,
    "heads": 2,
    "length": 9,
    "past": 8,
}
REFORMER_CHANGES = [
    {"past": 0, "length": 13, "position": "rotary"},
    {"position": "alibi"},
    {"length": 1, "past": 12, "position": "rotary", "attend_self": False},
    {"length": 1, "past": 0},
    {"length": 7, "past": 2, "cache": "hidden", "position": "rotary"},
    {"cache": "hidden", "attend_self": False, "position": "alibi"},
    {"span": 40, "bucket_keys": 3, "attend_self": False},
    {"bucket_keys": 50, "rounds": 2, "position": "rotary"},
    {"length": 12, "bucket_keys": 1, "buckets": 2, "position": "alibi", "attend_self": False},
    {"length": 4, "past": 3, "span": 1},
    {"rounds": 1, "buckets": 6, "span": 5},
]
PARTS = {
    "parts": ["", "sink", "qk_norm gate", "gate sink", "key_bias", "key_bias sink"],
    "heads, kv_heads": [(4, 1), (4, 2), (3, 1)],
}
PARTS |= {
    "spans": ["fixed", "dynamic", "zero"],
    "persistent": [0, 3],
    "position": ["rotary", "relative", "alibi"],
}
PARTS |= SHAPES | {"span": [3, 8]}
del PARTS["heads"]
PAIRS = SHAPES | {"span": [3, 8], "heads": [2, 4], "position": list(SCHEMES)}
LATENTS = {
    "span": [3, 8],
    "heads": [1, 3],
    "latent": [1, 3],
    "d_position": [2, 4],
    "attend_self": [True, False],
}
LATENTS |= LENGTHS | SHIFT | {"position": ["none", "rotary", "alibi"]}
ALL = ("plain", "fused", "kernel", "chunked")
MECHANISMS = {
    "attention": Mechanism(
        None, of_attention, ATTENTION, [INTEGER_SPANS | {"ramp": r} for r in (1, 20)], ALL
    ),
    "parts": Mechanism(None, of_attention, PARTS, backends=ALL),
    "transformer_xl": Mechanism(TransformerXL, of_transformer_xl, SHAPES, backends=ALL, noise=1.0),
    "linear": Mechanism(LinearAttention, of_features, LINEAR),
    "differential": Mechanism(Differential, of_differential, PAIRS, backends=ALL, noise=0.3),
    "latent": Mechanism(Latent, of_latent, LATENTS, backends=ALL, noise=0.3),
    "gated_linear": Mechanism(GatedLinear, of_gates, GATED, noise=1.0),
    "gated_delta": Mechanism(GatedDelta, of_gates, DELTA, noise=1.0),
    "performer": Mechanism(Performer, of_features, PERFORMER, noise=0.5),
    "linformer": Mechanism(
        Linformer, of_linformer, BLOCKS, MORE_BLOCKS, ("plain", "kernel", "fused"), noise=0.3
    ),
    "nsa": Mechanism(NativeSparse, of_native_sparse, SPARSE, backends=("auto", "plain"), noise=0.5),
    "local": Mechanism(LocalAttention, of_local, LOCAL, backends=ALL),
    "longformer": Mechanism(
        Longformer, of_longformer, WINDOWS, backends=("plain", "auto", "chunked", "fused")
    ),
    "reformer": Mechanism(Reformer, of_reformer, {}, [REFORMER | row for row in REFORMER_CHANGES]),
}


def choices_of(mechanism: Mechanism) -> list[dict]:
    """Return all combinations of choices to test. A factor named "a, b" sets both choices."""
    rows = covering_array(mechanism.factors, strength=2) if mechanism.factors else []
    return [
        *({name: x for n, v in row.items() for name, x in split(n, v)} for row in rows),
        *mechanism.more,
    ]


def split(names: str, values: object) -> list[tuple[str, object]]:
    return list(zip(names.split(", "), values, strict=True)) if ", " in names else [(names, values)]


def must_refuse(name: str, row: dict, backend: str) -> bool:
    """Return whether a backend must refuse these choices."""
    relative = name == "transformer_xl" or row.get("position") == "relative"
    dynamic = row.get("spans") == "dynamic" and backend in ("fused", "kernel")
    return dynamic or (
        backend == "fused"
        and (relative or name == "linformer" or "key_bias" in row.get("parts", ""))
    )


CASES = [(name, row) for name, mechanism in MECHANISMS.items() for row in choices_of(mechanism)]


@pytest.mark.parametrize(
    "name, row", CASES, ids=["-".join(map(str, (name, *row.values()))) for name, row in CASES]
)
def test_output_and_every_gradient_equal_those_of_the_reference(name, row, monkeypatch):
    """A backend that does not support the choices refuses them."""
    for constant, size in PIECES.items():
        monkeypatch.setattr(f"variants.{constant}", size)
    mechanism, (case, choices) = MECHANISMS[name], Case.split({"backend": "auto"} | row)
    sublayer = case.build(mechanism.make, noise=mechanism.noise, **choices)
    if "ramp" in row:  # integer spans 0 to S put keys on both kinks of the mask
        set_fractions(sublayer, [n / 8 for n in range(9)])
    past, x = case.stream()
    named = {"x": x} | dict(sublayer.named_parameters())
    expected = outcome(mechanism.expected(sublayer, case, choices, x, past), named)
    for backend in mechanism.backends:
        sublayer.wanted_backend = backend
        if must_refuse(name, row, backend):
            with pytest.raises(
                ValueError, match=rf"runtime\.backend={backend} .*allowed are auto, .*plain"
            ):
                run(sublayer, x, past)
        elif backend != "kernel" or window_cpu.obstacle() is None:
            tolerance = 1e-9 if name == "performer" else 1e-10
            y = run(sublayer, x, past, loss=name == "linformer")
            assert_outcome(outcome(y, named), expected, tolerance=tolerance)
