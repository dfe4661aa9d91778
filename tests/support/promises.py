"""Names of the contract's promises, and the small sublayers and models on which tests check
them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from harness.model import LanguageModel
from variants.conformance import Finding, check
from variants.contract import Honours, LayerContext, State, Sublayer, SublayerOutput
from variants.position import NoPosition
from variants.product_key_memory import ProductKeyMemory

LOGITS = "logits are float32 [B, T, V] and finite"
FUTURE_EVAL = "evaluation does not see the future"
FUTURE_TRAIN = "training does not see the future"
REACH = "no byte beyond the declared reach matters"
INFLUENCE = "bytes influence logits"
MAP = "attention maps are weights of visible bytes"
SEGMENTS = "segments do not matter"
FAR_START = "a stream may start at 10**7"
STREAMS = "streams do not mix"
DETACHED = "state is detached, and its dimension 0 is streams"
NO_SHARING = "two models share no tensor"
PROJECTION = "project_ is idempotent; outputs stay finite, also from old states"
SAVED = "a saved and loaded model is the same model"
WRITES = "a forward pass changes no buffer"
RANDOM = "evaluation draws no random numbers"
TABLES = "tables declare the rows that a byte reads"
PRECISION = "float32 and bfloat16 compute what float64 does"
IDEAL = "ideal FLOPs are at most the executed ones, and at least half"
AUXILIARY = "the auxiliary loss is for training only"
STATISTICS = "statistics add up"
BFLOAT16 = "bfloat16 autocast is finite"
LARGE = "large weights give finite numbers"
FLOPS = "ideal_flops() is a positive int, and needed_flops().forward is no less"
LIMITS_KNOWN = "declared limits are known"
DERIVATIVE = "gradients match finite differences"
MODES = "training without dropout is evaluation"
REACH_USED = "the declared reach is used"
GRADIENT = "the likelihood moves every parameter"

memory = partial(
    ProductKeyMemory,
    half_keys=7,
    top_k=5,
    heads=2,
    d_query=8,
    query_norm="layer",
    activation="softmax",
    share="layer",
    sparse=False,
)


def model_of(
    *sublayers: Callable[[LayerContext], Sublayer],
    scheme=NoPosition,
    layers: int = 2,
    span: int = 8,
    heads: int = 2,
    **context,
) -> Callable[[], LanguageModel]:
    """Return a function that makes a model of width 16 in which every layer has these sublayers."""

    def make() -> LanguageModel:
        pool = {}
        layer = {f"part{i}": sublayer for i, sublayer in enumerate(sublayers)}

        def context_of(i: int) -> LayerContext:
            common = {
                "d_model": 16,
                "n_layers": layers,
                "heads": heads,
                "span": span,
                "scheme": scheme,
                "pool": pool,
            }
            return LayerContext(layer=i, **common, **context)

        return LanguageModel([layer] * layers, context_of, vocabulary=31)

    return make


def findings_of(make: Callable[[], nn.Module]) -> dict[str, Finding]:
    return {finding.promise: finding for finding in check(make, span=5, vocabulary=31)}


class Gate(Sublayer):
    """A minimal sublayer without a state, which keeps all promises. Subclasses break promises by
    overriding methods."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.gate = nn.Linear(context.d_model, context.d_model)
        self.value = nn.Linear(context.d_model, context.d_model)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        x = self.transform_input(x)
        return self.transform_output(
            SublayerOutput(self.gate(x).sigmoid() * self.value(x)), x, collect_stats
        )

    def transform_input(self, x: Tensor) -> Tensor:
        return x

    def transform_output(
        self, out: SublayerOutput, x: Tensor, collect_stats: bool
    ) -> SublayerOutput:
        return out


class Sums(Gate):
    """A gated sum of values that halves at every byte: a minimal mechanism with a state, which
    keeps all promises."""

    honours = Honours()
    decay = 0.5

    def reach(self) -> int | None:
        return None

    def read_state(self, state: State) -> State:
        return state

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        state = self.read_state(state)
        total = x.new_zeros(len(x), x.shape[2]) if state is None else state.to(x.dtype)
        sums = []
        for v_t in self.value(x).unbind(1):
            total = self.decay * total + v_t
            sums.append(total)
        out = SublayerOutput(self.gate(x).sigmoid() * torch.stack(sums, dim=1), self.carry(total))
        return self.transform_output(out, x, collect_stats)

    def carry(self, total: Tensor) -> Tensor:
        return total.detach()


def toy(
    base: type[Sublayer] = Gate, *, init: Callable[[Sublayer], object] | None = None, **members
) -> type[Sublayer]:
    """Return a subclass with these members. Its constructor ends with ``init(self)``."""

    def __init__(self, context: LayerContext):
        base.__init__(self, context)
        init(self)

    return type("Toy", (base,), members | ({"__init__": __init__} if init else {}))


def parameter(value: object) -> Callable[[Sublayer], None]:
    """Return a function that registers a parameter ``extra``, for ``init`` of ``toy``."""
    return lambda self: self.register_parameter("extra", nn.Parameter(torch.tensor(value)))
