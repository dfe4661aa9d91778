"""Sublayers in float64 and their references. D is not H K, so that a confusion of these axes
fails."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from random import Random

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.reference.adaptive_span import adaptive_mask, dynamic_mask
from tests.reference.all_attention import persistent_vectors
from tests.reference.attention import Mask
from tests.reference.attention import attention as reference
from tests.reference.forget_gate import forget_biases
from variants.adaptive_span import AdaptiveSpan, DynamicSpan
from variants.all_attention import PersistentKV
from variants.attention import Attention
from variants.contract import LayerContext, Position, State, Sublayer, set_shapes
from variants.forget_gate import ForgetGate
from variants.key_shift import KeyShift
from variants.position import Alibi, NoPosition, Relative, Rotary

B, D = 2, 5
DOUBLE = torch.float64
SCHEMES = {"none": NoPosition, "rotary": Rotary, "relative": Relative, "alibi": Alibi}
HIDING_THRESHOLD = 0.8
"""With ``key_bias``, bytes whose first input coordinate is above this threshold are hidden from
all queries."""
FRACTIONS = {"zero": 0.0, "integer": 0.25, "fractional": 0.37, "all": 1.0}
"""Initial spans as fractions of S. ``Case.spans`` is the key of the first head; further heads
have the next keys."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The choices of a sublayer, and the lengths of its input: ``past`` bytes, then ``length``
    bytes.

    ``spans`` is "fixed", "dynamic", or a key of ``FRACTIONS`` for adaptive spans with these initial
    values. ``parts`` has the names of optional parts, separated by spaces: qk_norm, gate, sink
    and key_bias."""

    length: int = 5
    past: int = 0
    span: int = 8
    heads: int = 3
    d_head: int = 2
    position: str = "none"
    cache: str = "kv"
    attend_self: bool = True
    direction: str = "causal"
    spans: str = "fixed"
    ramp: int = 3
    persistent: int = 0
    backend: str = "plain"
    dropout: float = 0.0
    kv_heads: int | None = None
    key_shift: bool = False
    parts: str = ""

    @classmethod
    def split(cls, choices: dict) -> tuple["Case", dict]:
        """Return a case of those choices that are its fields, and the other choices, which are
        keywords of a sublayer."""
        fields = {
            name: choice for name, choice in choices.items() if name in cls.__dataclass_fields__
        }
        return cls(**fields), {
            name: choice for name, choice in choices.items() if name not in fields
        }

    def context(self, **changes) -> LayerContext:
        names = ("heads", "span", "attend_self", "direction", "cache", "backend", "dropout")
        keywords = {name: getattr(self, name) for name in names}

        def scheme(context: LayerContext, *, d_head: int) -> Position:
            return SCHEMES[self.position](context, d_head=d_head)

        return LayerContext(
            **{"d_model": D, "layer": 0, "n_layers": 1, "scheme": scheme} | keywords | changes
        )

    def build(
        self, make: Callable[..., Sublayer] | None = None, *, noise: float = 0.0, **keywords
    ) -> Sublayer:
        """Return a sublayer in training mode with seeded weights: ``Attention``, or what ``make``
        returns.

        Args:
            noise: scale of the noise added to initial parameters if ``make`` is set, because zeros
                could hide errors.
        """
        torch.manual_seed(0)
        keywords = {"zero_init": False} | keywords  # an output of zero would hide errors
        if make is not None:
            keywords |= {"kv_heads": self.kv_heads} if self.kv_heads else {}
            keywords |= {"key_shift": True} if self.key_shift else {}
            sublayer = with_random_mix(
                make(self.context(), d_head=self.d_head, **keywords).to(DOUBLE)
            )
            with torch.no_grad():
                for parameter in sublayer.parameters() if noise else ():
                    parameter.add_(noise * torch.randn(parameter.shape, dtype=DOUBLE))
            return sublayer
        spans = {"fixed": None, "dynamic": partial(DynamicSpan, ramp=self.ramp, bias=-0.5)}
        persistent = partial(PersistentKV, number=self.persistent) if self.persistent else None
        attention = Attention(
            self.context(),
            d_head=self.d_head,
            span=spans.get(self.spans, partial(AdaptiveSpan, ramp=self.ramp)),
            persistent=persistent,
            kv_heads=self.kv_heads,
            key_shift=self.key_shift,
            **dict.fromkeys(self.parts.split(), True)
            | ({"key_bias": Hiding} if "key_bias" in self.parts else {}),
            **keywords,
        ).to(DOUBLE)
        with_random_mix(attention)
        for parameter in (attention.query_gain, attention.key_gain, attention.sink):
            if parameter is not None:
                parameter.data += torch.randn(parameter.shape, dtype=DOUBLE)
        if self.spans in FRACTIONS:
            first = list(FRACTIONS).index(self.spans)
            set_fractions(
                attention, [list(FRACTIONS.values())[(first + h) % 4] for h in range(self.heads)]
            )
        return attention

    def stream(self) -> tuple[Tensor, Tensor]:
        """Return past ``[B, past, D]``, and segment ``[B, length, D]``, a leaf that requires its
        gradient."""
        x = torch.randn(
            B, self.past + self.length, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)
        )
        return x[:, : self.past], x[:, self.past :].clone().requires_grad_()

    def joined(self) -> Tensor:
        """Return past and segment in one tensor, detached."""
        return torch.cat(self.stream(), dim=1).detach()


def set_fractions(attention: Attention, fractions: list[float]):
    """Set the learned spans of the heads to fractions of S."""
    with torch.no_grad():
        attention.span.fraction.copy_(torch.tensor(fractions, dtype=DOUBLE))
    attention.project_()
    set_shapes(attention)


def starts(position: int) -> Tensor:
    """Start positions of the two streams. The second is shifted, which must not matter to
    relative schemes."""
    return torch.tensor([position, position + 1003])


def run(attention: Sublayer, x: Tensor, past: Tensor, *, loss: bool = False) -> Tensor:
    """Return outputs ``[B, T, D]`` for ``x`` after ``past``. With ``loss``, the auxiliary loss is
    added to every number."""
    state: State = attention(past, None, starts(0)).state if past.shape[1] else None
    out = attention(x, state, starts(past.shape[1]))
    return out.y + out.loss if loss and out.loss is not None else out.y


def reference_mask(attention: Attention) -> Mask | None:
    """Return the reference's soft mask with the spans of ``attention``, or None for fixed spans."""
    spans = attention.span
    if isinstance(spans, AdaptiveSpan):
        return adaptive_mask(spans.fraction, span=spans.span, ramp=spans.ramp)
    if isinstance(spans, DynamicSpan):
        return dynamic_mask(
            spans.gate.weight, biases=spans.gate.bias, span=spans.span, ramp=spans.ramp
        )
    return None


class Hiding(ForgetGate):
    """A forget gate that also hides some bytes from all queries."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = super().forward(x)[0]
        return b.masked_fill(x[..., :1].mT > HIDING_THRESHOLD, -torch.inf), b


def reference_biases(attention: Attention, x: Tensor, past: Tensor) -> dict[str, Tensor]:
    """Return the reference's keyword arguments for key biases, empty if the sublayer has none."""
    if attention.key_bias is None:
        return {}
    stream, gate = torch.cat([past, x], dim=1), attention.key_bias.gate
    constant = past.shape[1] if attention.cache == "kv" else 0
    biases = forget_biases(stream, weight=gate.weight, bias=gate.bias, constant=constant)
    hides = isinstance(attention.key_bias, Hiding)
    return {"biases": biases} | ({"hidden": stream[..., 0] > HIDING_THRESHOLD} if hides else {})


def matrices(attention: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the projections by their names in the references: wq, wk, wv and wo."""
    names = ("query", "key", "value", "output")
    return {
        f"w{name[0]}": getattr(attention, name).weight for name in names if hasattr(attention, name)
    }


def with_random_mix(sublayer: Sublayer) -> Sublayer:
    """Return the sublayer, whose channels mix keys by different weights."""
    shifts = [module for module in sublayer.modules() if isinstance(module, KeyShift)]
    for shift in shifts:
        shift.mix.data += torch.randn(shift.mix.shape, dtype=DOUBLE)
    return sublayer


def mix_of(sublayer: nn.Module) -> dict[str, Tensor]:
    """Return the references' argument for the weights of mixed keys, empty if keys are not
    mixed."""
    return {} if sublayer.key_shift is None else {"mix": sublayer.key_shift.mix}


def reference_output(
    attention: Attention, *, x: Tensor, past: Tensor, position: str, **others: object
) -> Tensor:
    """Return the output of ``run`` by the reference's loops. With ``cache: kv`` past keys and
    values are constants. ``others`` are further keywords of the reference."""
    vectors = attention.persistent
    keys, values = (
        persistent_vectors(vectors.key, value_parameters=vectors.value) if vectors else (None, None)
    )
    return reference(
        x,
        **matrices(attention),
        heads=attention.heads,
        span=attention.span.span,
        attend_self=attention.shift == 0,
        position=position,
        table=getattr(attention.position, "table", None),
        mask=reference_mask(attention),
        persistent_keys=keys,
        persistent_values=values,
        gains=None
        if attention.key_gain is None
        else torch.stack([attention.query_gain, attention.key_gain]),
        wg=attention.gate.weight if "gate" in attention.maps else None,
        sink=attention.sink,
        **mix_of(attention),
        **reference_biases(attention, x, past),
        past=past,
        past_is_constant=attention.cache == "kv",
        **others,
    )


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return gradients of a fixed random projection of ``y``, zeros for inputs on which ``y`` does
    not depend."""
    upstream = torch.randn(y.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)).to(
        y.dtype
    )
    return list(torch.autograd.grad(y, inputs, upstream, retain_graph=True, materialize_grads=True))


def assert_near(actual: Tensor, expected: Tensor, *, tolerance: float = 1e-10, what: str = "value"):
    """Assert equal numbers up to ``tolerance`` times the largest expected magnitude, which
    counts as at least 1."""
    assert actual.shape == expected.shape, what
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )


def outcome(y: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a dictionary of ``y``, as "value", and of its gradients with respect to the tensors in
    ``named``."""
    names = [f"gradient of {name}" for name in named]
    return {"value": y, **dict(zip(names, gradients(y, list(named.values())), strict=True))}


def assert_outcome(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-10
):
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert_near(x, expected[name], tolerance=tolerance, what=name)


def assert_same(
    actual: Tensor, expected: Tensor, *, named: dict[str, Tensor], tolerance: float = 1e-10
):
    """Assert equal values and equal gradients with respect to the tensors in ``named``."""
    assert_outcome(outcome(actual, named), outcome(expected, named), tolerance=tolerance)


class LargestTensor(TorchDispatchMode):
    """Records in ``elements`` the number of elements of the largest tensor that an operation
    returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(x.numel() for x in tree_leaves(outputs) if isinstance(x, Tensor))]
        )
        return outputs


def covering_array(factors: dict[str, list], *, strength: int) -> list[dict]:
    """Return rows, chosen greedily, in which every combination of values of ``strength`` factors
    occurs at least once."""
    random, names, rows = Random(0), list(factors), []
    missing = {
        tuple(zip(chosen, values, strict=True))
        for chosen in combinations(names, strength)
        for values in product(*(factors[name] for name in chosen))
    }
    while missing:
        needed = dict(min(missing, key=repr))
        candidates = [
            {name: random.choice(factors[name]) for name in names} | needed for _ in range(40)
        ]
        best = max(
            candidates,
            key=lambda row: len(missing.intersection(combinations(row.items(), strength))),
        )
        missing.difference_update(combinations(best.items(), strength))
        rows.append(best)
    return rows
