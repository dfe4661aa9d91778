"""Feed-forward block: two matrices with an activation between them, for each byte independently.

    y = W2 a(W1 x + b1) + b2   relu   a(h) = max(0, h)   (arXiv 1706.03762, section 3.3)
                                        gelu   a(h) = h Phi(h)   (arXiv 1606.08415, the exact form)
                                        relu2  a(h) = max(0, h)**2     (arXiv 2109.08668)
                                        swiglu a(g, h) = silu(g) h     (arXiv 2002.05202)

``hidden`` is the input width of W2. With swiglu, W1 has two outputs per hidden unit, and the block
has 1.5 times the parameters; with 2/3 of the width it has as many as with another activation.
Weights are initialised as in ``nn.Linear``. Dropout is applied to the activations."""

import torch.nn.functional as F
from torch import Tensor, nn

from variants.contract import (
    LayerContext,
    NeededFlops,
    State,
    Sublayer,
    SublayerOutput,
    check_choice,
    check_numbers,
)


def swiglu(h: Tensor) -> Tensor:
    """Map ``h [..., 2*hidden]``, gates first, to ``[..., hidden]``."""
    gate, linear = h.chunk(2, dim=-1)
    return F.silu(gate) * linear


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "relu2": lambda h: F.relu(h).square(),
    "swiglu": swiglu,
}


class FeedForward(Sublayer):
    """Two linear maps with an activation between them.

    Args:
        hidden: input width of the second matrix; None for 4 D.
        activation: one of ``ACTIVATIONS``.
        zero_init: start the second matrix and its bias at zero, so that the block adds nothing at
            first. The first matrix then gets no gradient in the first step."""

    def __init__(
        self,
        context: LayerContext,
        *,
        hidden: int | None,
        activation: str,
        bias: bool,
        zero_init: bool,
    ):
        super().__init__()
        check_numbers(1, hidden=hidden, null="null for 4 times the width")
        check_choice(ACTIVATIONS, activation=activation)
        hidden = 4 * context.d_model if hidden is None else hidden
        self.activate = ACTIVATIONS[activation]
        self.dropout = context.dropout
        self.enter = nn.Linear(
            context.d_model, 2 * hidden if activation == "swiglu" else hidden, bias=bias
        )
        self.leave = nn.Linear(hidden, context.d_model, bias=bias)
        if zero_init:
            for parameter in self.leave.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        start: Tensor | None = None,
        *,
        collect_stats: bool = False,
    ) -> SublayerOutput:
        activations = self.activate(self.enter(x))  # [B, T, hidden]
        return SublayerOutput(self.leave(F.dropout(activations, self.dropout, self.training)))

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count both matrices; the activation is neglected."""
        return NeededFlops.of_products(self.ideal_flops())
