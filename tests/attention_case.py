"""One sublayer beside its reference: how the tests of mechanisms build, feed and compare the two.

Everything is float64, widths and lengths are odd, and D is not H K, so that an axis taken for another shows.
"""

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
from variants.contract import LayerContext, State, Sublayer, set_shapes
from variants.forget_gate import ForgetGate
from variants.position import Alibi, NoPosition, Relative, Rotary

B, D = 2, 5
DOUBLE = torch.float64
SCHEMES = {"none": NoPosition, "rotary": Rotary, "relative": Relative, "alibi": Alibi}
HIDDEN = 0.8
"""A first input above which the cases' bytes are no keys."""
FRACTIONS = {"zero": 0.0, "whole": 0.25, "between": 0.37, "all": 1.0}
"""What the first head's span begins at, as a fraction of S; the next head has the next, so heads differ."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sublayer and what it is fed: ``past`` bytes, then ``length`` bytes.

    ``span`` is fixed, dynamic, or a key of FRACTIONS: an adaptive span that begins there.
    """

    length: int = 5
    past: int = 0
    span: int = 8
    heads: int = 3
    d_head: int = 2
    position: str = "none"
    cache: str = "kv"
    attend_self: bool = True
    spans: str = "fixed"
    ramp: int = 3
    persistent: int = 0
    backend: str = "plain"
    dropout: float = 0.0
    kv_heads: int | None = None
    parts: str = ""  # of qk_norm, gate, sink and key_bias, some

    def context(self, **changes) -> LayerContext:
        names = ("heads", "span", "attend_self", "cache", "backend", "dropout")
        keywords = {name: getattr(self, name) for name in names}
        scheme = lambda context, *, d_head: SCHEMES[self.position](context, d_head=d_head)  # noqa: E731
        return LayerContext(**{"d_model": D, "layer": 0, "n_layers": 1, "scheme": scheme} | keywords | changes)

    def build(self, make: Callable[..., Sublayer] | None = None, *, moved: float = 0.0, **keywords) -> Sublayer:
        """A sublayer in training mode whose weights depend on nothing but the seed: ``Attention`` unless ``make`` says another.

        Args:
            moved: how far parameters are moved off their start, where zeros would hide what is behind them.
        """
        torch.manual_seed(0)
        if make is not None:
            keywords |= {"kv_heads": self.kv_heads} if self.kv_heads else {}
            sublayer = make(self.context(), d_head=self.d_head, **keywords).to(DOUBLE)
            with torch.no_grad():
                for parameter in sublayer.parameters() if moved else ():
                    parameter.add_(moved * torch.randn(parameter.shape, dtype=DOUBLE))
            return sublayer
        spans = {"fixed": None, "dynamic": partial(DynamicSpan, ramp=self.ramp, bias=-0.5)}
        persistent = partial(PersistentKV, number=self.persistent) if self.persistent else None
        attention = Attention(
            self.context(),
            d_head=self.d_head,
            span=spans.get(self.spans, partial(AdaptiveSpan, ramp=self.ramp)),
            persistent=persistent,
            kv_heads=self.kv_heads,
            **dict.fromkeys(self.parts.split(), True) | ({"key_bias": Hiding} if "key_bias" in self.parts else {}),
            **keywords,
        ).to(DOUBLE)
        for parameter in (attention.query_gain, attention.key_gain, attention.sink):
            if parameter is not None:
                parameter.data += torch.randn(parameter.shape, dtype=DOUBLE)
        if self.spans in FRACTIONS:
            first = list(FRACTIONS).index(self.spans)
            set_fractions(attention, [list(FRACTIONS.values())[(first + h) % 4] for h in range(self.heads)])
        return attention

    def stream(self) -> tuple[Tensor, Tensor]:
        """Past ``[B, past, D]`` and segment ``[B, length, D]``, a leaf."""
        x = torch.randn(B, self.past + self.length, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
        return x[:, : self.past], x[:, self.past :].clone().requires_grad_()

    def whole(self) -> Tensor:
        """Past and segment in one, without a gradient."""
        return torch.cat(self.stream(), dim=1).detach()


def set_fractions(attention: Attention, fractions: list[float]) -> None:
    with torch.no_grad():
        attention.span.fraction.copy_(torch.tensor(fractions, dtype=DOUBLE))
    attention.project_()
    set_shapes(attention)


def starts(at: int) -> Tensor:
    """Stream positions of ``at`` bytes into two streams that began elsewhere: relative schemes must not mind."""
    return torch.tensor([at, at + 1003])


def run(attention: Sublayer, x: Tensor, past: Tensor, *, loss: bool = False) -> Tensor:
    """Outputs ``[B, T, D]`` for ``x``, with the state that ``past`` left; with ``loss``, its own loss is added to each."""
    state: State = attention(past, None, starts(0)).state if past.shape[1] else None
    out = attention(x, state, starts(past.shape[1]))
    return out.y + out.loss if loss and out.loss is not None else out.y


def reference_mask(attention: Attention) -> Mask | None:
    """The soft mask as the reference has it."""
    spans = attention.span
    if isinstance(spans, AdaptiveSpan):
        return adaptive_mask(spans.fraction, span=spans.span, ramp=spans.ramp)
    if isinstance(spans, DynamicSpan):
        return dynamic_mask(spans.gate.weight, biases=spans.gate.bias, span=spans.span, ramp=spans.ramp)
    return None


class Hiding(ForgetGate):
    """A forget gate, and bytes that are no keys."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = super().forward(x)[0]
        return b.masked_fill(x[..., :1].mT > HIDDEN, -torch.inf), b


def reference_biases(attention: Attention, x: Tensor, past: Tensor) -> dict[str, Tensor]:
    """Biases as the reference has them."""
    if attention.key_bias is None:
        return {}
    stream, gate = torch.cat([past, x], dim=1), attention.key_bias.gate
    constant = past.shape[1] if attention.cache == "kv" else 0
    biases = forget_biases(stream, weight=gate.weight, bias=gate.bias, constant=constant)
    hides = isinstance(attention.key_bias, Hiding)
    return {"biases": biases} | ({"hidden": stream[..., 0] > HIDDEN} if hides else {})


def matrices(attention: nn.Module) -> dict[str, Tensor]:
    """Its projections by the names that references have for them."""
    names = ("query", "key", "value", "output")
    return {f"w{name[0]}": getattr(attention, name).weight for name in names if hasattr(attention, name)}


def by_reference(attention: Attention, *, x: Tensor, past: Tensor, position: str) -> Tensor:
    """What the papers say ``run`` gives, by loops. Past keys and values of ``cache: kv`` are constants."""
    vectors = attention.persistent
    keys, values = persistent_vectors(vectors.key, value_parameters=vectors.value) if vectors else (None, None)
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
        gains=None if attention.key_gain is None else torch.stack([attention.query_gain, attention.key_gain]),
        wg=attention.gate.weight if "gate" in attention.maps else None,
        sink=attention.sink,
        **reference_biases(attention, x, past),
        past=past,
        past_is_constant=attention.cache == "kv",
    )


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of ``y``; zeros where an input does not matter."""
    upstream = torch.randn(y.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return list(torch.autograd.grad(y, inputs, upstream, retain_graph=True, materialize_grads=True))


def assert_near(one: Tensor, expected: Tensor, *, tolerance: float = 1e-10, what: str = "value") -> None:
    """Equal to ``tolerance`` of the largest entry, or of 1 where entries are smaller."""
    assert one.shape == expected.shape, what
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(one, expected, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}")


def outcome(y: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The value, and the gradient with respect to every one of ``named``."""
    names = [f"gradient of {name}" for name in named]
    return {"value": y, **dict(zip(names, gradients(y, list(named.values())), strict=True))}


def assert_outcome(one: dict[str, Tensor], other: dict[str, Tensor], *, tolerance: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert_near(x, other[name], tolerance=tolerance, what=name)


def assert_same(one: Tensor, other: Tensor, *, named: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Equal values and equal gradients with respect to every one of ``named``."""
    assert_outcome(outcome(one, named), outcome(other, named), tolerance=tolerance)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor))])
        return made


def covering(factors: dict[str, list], *, strength: int) -> list[dict]:
    """Choices in which every ``strength`` values of different factors occur together, by greedy search; no chance."""
    random, names, rows = Random(0), list(factors), []
    missing = {
        tuple(zip(chosen, values, strict=True))
        for chosen in combinations(names, strength)
        for values in product(*(factors[name] for name in chosen))
    }
    while missing:
        needed = dict(min(missing, key=repr))
        candidates = [{name: random.choice(factors[name]) for name in names} | needed for _ in range(40)]
        best = max(candidates, key=lambda row: len(missing.intersection(combinations(row.items(), strength))))
        missing.difference_update(combinations(best.items(), strength))
        rows.append(best)
    return rows
