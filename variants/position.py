"""Position schemes: one choice for all attention sublayers of a run.

Every scheme is relative to the query except the sinusoids, which are added to the embedded bytes once. All of them
stay exact at stream position 10**7: angles are taken in float64, or positions never enter as absolute numbers.

- Rotary: queries and keys are turned by their position, so that scores depend on the difference (2104.09864, 3.2).
- Relative: a learned vector per distance, q . (k + p_x), shared by heads (1905.07799, 2.1).
- Alibi: a fixed linear penalty on the distance (2108.12409, 3).
- Sinusoidal: sines and cosines of the absolute position (1706.03762, 3.5).
"""

import math

import torch
from torch import Tensor, nn

from variants.contract import LayerContext, Position


def rotary_frequencies(d_head: int, base: float, *, device: torch.device | None = None) -> Tensor:
    """Radians a position for each of the ``d_head / 2`` planes, float64 ``[d_head / 2]``.

    Args:
        device: where they are needed: made there, because a copy from the host waits for a GPU at every forward pass.
    """
    return base ** (-torch.arange(0, d_head, 2, dtype=torch.float64, device=device) / d_head)


def alibi_slopes(heads: int) -> Tensor:
    """Penalty a position for each head, float64 ``[H]``: a geometric sequence from 2^(-8/H).

    Head counts that are no power of two take every other slope of the next power for the surplus (2108.12409, 3).
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / whole) for h in range(whole)]
    finer = [2 ** (-8 * (h + 1) / (2 * whole)) for h in range(2 * whole)]
    return torch.tensor(slopes + finer[0::2][: heads - whole], dtype=torch.float64)


class NoPosition(Position):
    """No positions: order is known only through the causal window."""


class Rotary(Position):
    """Turn plane (i, i + K/2) of queries and keys by position * base^(-2i/K).

    Args:
        base: of the geometric sequence of frequencies.
    """

    def __init__(self, context: LayerContext, *, d_head: int, base: float = 10000.0):
        super().__init__(context, d_head=d_head)
        if d_head % 2:
            raise ValueError(f"position=rotary needs an even head width (model.d_model / model.heads), not {d_head}")
        if base <= 0:
            raise ValueError(f"position.base={base}: must be above 0")
        self.d_head, self.base = d_head, base

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        frequencies = rotary_frequencies(self.d_head, self.base, device=x.device)
        # cos(a + b) from the angle a of the segment's start, in float64, and small angles b inside the segment:
        # float32 angles of absolute positions would drift by 5 million.
        a = start.double()[:, None, None] * frequencies
        b = torch.arange(x.shape[2], device=x.device, dtype=torch.float64)[:, None] * frequencies
        cos = a.cos() * b.cos() - a.sin() * b.sin()  # [B, T, K/2]
        sin = a.sin() * b.cos() + a.cos() * b.sin()
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Compiled by torch 2.11 in float32, the function of our own loses its gradient without a word.
        turn = _turn if torch.compiler.is_compiling() else _Turn.apply
        return turn(x, cos.to(dtype)[:, None], sin.to(dtype)[:, None])


class _Turn(torch.autograd.Function):
    """(a, b) to (a cos - b sin, a sin + b cos), backwards by the opposite angle: half the passes of autograd's own."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(g, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():  # it fuses this by itself, and fails on the views written to below (torch 2.13)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
    y = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    half = x.shape[-1] // 2
    torch.mul(a, cos, out=y[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(a, sin, out=y[..., half:]).addcmul_(b, cos)
    return y.to(x.dtype)


class Relative(Position):
    """A learned vector p_x per visible key x, added to the key in the score; shared by heads.

    Args:
        share: ``network`` for one table in the whole model, as the span paper's code has it, or ``layer``.
        std: standard deviation of the initial table.
    """

    constant_bias = False

    def __init__(self, context: LayerContext, *, d_head: int, share: str = "network", std: float = 1.0):
        super().__init__(context, d_head=d_head)
        if share not in ("network", "layer"):
            raise ValueError(f"position.share={share}: allowed are network, layer")

        def make() -> nn.Parameter:
            return nn.Parameter(torch.randn(context.span, d_head) * std)

        self.longest = context.span
        if d_head:
            self.table = context.shared(Relative, d_head, make) if share == "network" else make()  # [S, K]

    def vectors(self, max_keys: int) -> Tensor:
        return self.table[:max_keys]

    def bias(self, q: Tensor, max_keys: int) -> Tensor:
        return q @ self.vectors(max_keys).T.to(q.dtype)

    def ideal_flops(self, max_keys: float) -> float:
        return 2 * max_keys * self.table.shape[1]


class Alibi(Position):
    """Scores lose slope_h for every visible key between."""

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__(context, d_head=d_head)
        self.register_buffer("slopes", alibi_slopes(context.heads), persistent=False)

    def bias(self, q: Tensor, max_keys: int) -> Tensor:
        bias = -self.slopes[:, None] * torch.arange(max_keys, device=self.slopes.device)
        return bias.to(torch.promote_types(q.dtype, torch.float32))


class Sinusoidal(Position):
    """Add sin(p / 10000^(2i/D)) and the cosine to dimensions 2i and 2i + 1 of the embedded bytes.

    Absolute positions: a stream that starts elsewhere is another input, and no promise is made that it scores alike.
    """

    relative = False

    def embed(self, x: Tensor, start: Tensor) -> Tensor:
        frequencies = rotary_frequencies(x.shape[-1], 10000.0, device=x.device)
        at = start[:, None] + torch.arange(x.shape[1], device=x.device)
        angle = at.double()[..., None] * frequencies
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., : x.shape[-1]]
        return x + table.to(x.dtype)
