"""Position schemes: one choice for all attention sublayers of a run.

All schemes depend only on distances to the query, except sinusoids, which are added to the embedded
bytes. All are as exact at stream position 10**7 as at 0: they compute angles in integers, or use
no absolute positions."""

import math

import torch
from torch import Tensor, nn

from variants.contract import LayerContext, Position, check_choice

HALF_BITS = 30
WHOLE_TURN = 2 ** (2 * HALF_BITS)


def rotary_frequencies(width: int, base: float = 10000.0) -> Tensor:
    """Return radians per position for each of the ``ceil(width / 2)`` planes, float64."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def turns(frequencies: Tensor) -> Tensor:
    """Return the rotation per position in units of 2^-60 turns, as upper and lower 30 bits, int64
    ``[2, ...]``. Their products with positions are exact modulo a whole turn, also on devices
    without float64."""
    units = (frequencies / (2 * math.pi) % 1 * WHOLE_TURN).to(torch.int64)
    return torch.stack([units >> HALF_BITS, units % 2**HALF_BITS])


def angles(position: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return angles ``[..., planes]``, from -pi to pi, of positions int64 ``[...]`` with
    absolute values below 2^32."""
    upper, lower = (position[..., None] * half for half in turns)
    units = ((upper % 2**HALF_BITS) << HALF_BITS) + lower + WHOLE_TURN // 2
    return (units % WHOLE_TURN - WHOLE_TURN // 2).to(dtype) * (2 * math.pi / WHOLE_TURN)


def sinusoids(position: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return interleaved sines and cosines of positions int64 ``[...]``, in float32 or wider:
    ``[..., D]``, or ``[..., D + 1]`` for odd D."""
    angle = angles(position, turns, torch.promote_types(dtype, torch.float32))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def alibi_slopes(heads: int) -> Tensor:
    """Return each head's penalty per position, float64 ``[H]``: a geometric sequence from 2^(-8/H).
    If H is not a power of two and P is the largest below it, these are the slopes of P heads,
    then every second slope of 2 P heads."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    next_slopes = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(2 * power)]
    return torch.tensor(slopes + next_slopes[0::2][: heads - power], dtype=torch.float64)


class NoPosition(Position):
    """No positions: outputs depend on the order of bytes only through the causal window."""


class Rotary(Position):
    """Rotate plane (i, i + K/2) of queries and keys by position * ``base``^(-2i/K) (2104.09864,
    3.2)."""

    def __init__(self, context: LayerContext, *, d_head: int, base: float = 10000.0):
        super().__init__(context, d_head=d_head)
        if d_head % 2:
            raise ValueError(
                f"position=rotary: head width (d_head, or d_model / heads) must be even: {d_head}"
            )
        if base <= 0:
            raise ValueError(f"position.base={base}: must be above 0")
        self.tables = context.shared(
            RotaryTables, (d_head, base), lambda: RotaryTables(d_head, base)
        )

    def rotate(self, x: Tensor, start: Tensor) -> Tensor:
        cos, sin = self.tables(start, x.shape[2], torch.promote_types(x.dtype, torch.float32))
        # If torch 2.11 compiles ``_Rotation`` in float32, its gradient is silently lost.
        return (_rotate if torch.compiler.is_compiling() else _Rotation.apply)(x, cos, sin)


class RotaryTables(nn.Module):
    """Cosines and sines of a segment's positions, computed once for all layers. They are cached as
    an attribute of the tensor ``start``, which the model creates for each forward pass."""

    def __init__(self, d_head: int, base: float):
        super().__init__()
        self.register_buffer("turns", turns(rotary_frequencies(d_head, base)), persistent=False)

    def forward(self, start: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, ``[B, 1, T, K/2]`` each, from positions ``start [B]`` on."""
        compiling = torch.compiler.is_compiling()
        tables = {}
        if not compiling:
            tables = start.__dict__.setdefault("rotary_tables", {})
        if (self, length, dtype) not in tables:
            tables[self, length, dtype] = self._make(start, length, dtype)
        return tables[self, length, dtype]

    def _make(self, start: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a = angles(start, self.turns, dtype)[:, None, None]
        b = angles(torch.arange(length, device=start.device), self.turns, dtype)
        (cos_a, sin_a), (cos_b, sin_b) = (a.cos(), a.sin()), (b.cos(), b.sin())
        return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b  # [B, 1, T, K/2]


class _Rotation(torch.autograd.Function):
    """Map (a, b) to (a cos - b sin, a sin + b cos). The backward pass is the inverse rotation, with
    half of the memory passes of autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(g, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    # torch.compile (2.13) fuses this expression, but fails on the writes below
    if torch.compiler.is_compiling():
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
    # one conversion, not one for each of four products: 1.7 to 3.5 times as fast except on CUDA
    if not x.is_cuda:
        a, b = x.to(cos.dtype).chunk(2, dim=-1)
    y = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    half = x.shape[-1] // 2
    torch.mul(a, cos, out=y[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(a, sin, out=y[..., half:]).addcmul_(b, cos)
    return y.to(x.dtype)


class Relative(Position):
    """A learned vector p_x for each visible key x, added to the key in the score; heads share it
    (1905.07799, 2.1).

    Args:
        share: ``network`` for one table in the whole model, as in the paper's code; ``layer`` for
            one per layer.
        std: standard deviation of the initial table."""

    constant_bias = False

    def __init__(
        self, context: LayerContext, *, d_head: int, share: str = "network", std: float = 1.0
    ):
        super().__init__(context, d_head=d_head)
        check_choice(("network", "layer"), **{"position.share": share})
        self.longest = context.span
        if d_head:  # [S, K]
            make_table = lambda: nn.Parameter(torch.randn(context.span, d_head) * std)  # noqa: E731
            self.table = context.shared(Relative, d_head, make_table, share=share)

    def vectors(self, max_keys: int) -> Tensor:
        return self.table[:max_keys]

    def ideal_flops(self, max_keys: float) -> float:
        return 2 * max_keys * self.table.shape[1]


class Alibi(Position):
    """Subtract slope_h x from the score of visible key x, counted from the nearest, x = 0
    (2108.12409, 3)."""

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__(context, d_head=d_head)
        slopes = alibi_slopes(context.heads)
        rounded = slopes.float()
        # Some devices have no float64, so a slope is stored as two float32 numbers, whose sum has
        # float64's precision.
        self.register_buffer(
            "halves", torch.stack([rounded, (slopes - rounded).float()]), persistent=False
        )

    def slopes(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.halves.to(dtype).sum(0)

    def bias(self, q: Tensor, max_keys: int) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return -self.slopes(dtype)[:, None] * torch.arange(max_keys, device=q.device, dtype=dtype)


class Sinusoidal(Position):
    """Add sin(p / 10000^(2i/D)) and the cosine to dimensions 2i and 2i + 1 of the embedded bytes
    (1706.03762, 3.5). Positions p are absolute, so scores depend on both positions, not only on
    their distance."""

    relative = False

    def __init__(self, context: LayerContext, *, d_head: int):
        super().__init__(context, d_head=d_head)
        self.register_buffer("turns", turns(rotary_frequencies(context.d_model)), persistent=False)

    def embed(self, x: Tensor, start: Tensor) -> Tensor:
        positions = start[:, None] + torch.arange(x.shape[1], device=x.device)
        return x + sinusoids(positions, self.turns, x.dtype)[..., : x.shape[-1]].to(x.dtype)
