"""Latent attention: the state has one short vector per byte, from which keys and values of all
heads are projected.

    c = norm(W_c x),    k_h = [W_k c; rotate(r)],    v_h = W_v c,    r = W_r x,
    q_h = [W_q x; rotate(W_p x)],
    y = W_o concat_h(softmax(q_h . k_h / sqrt(K + R)) v_h)

(2405.04434, 2.1.2 and 2.1.3). norm is an RMS norm with a gain. All heads share c and r, so the
state of a byte is ``latent`` + R numbers in place of 2 H K. Only r and W_p x are rotated. Each
segment projects past keys and values again from carried c and r, with the present weights. The
weights get gradients from past bytes; past c and r are constants.

Departures from the paper:
- Queries are not compressed, as in the paper's small model. c has a norm with a gain, as in the
  paper's code.
- By default latent is 2 K and R is K / 2; the paper has 4 K and K / 2 for 128 heads.
- r is carried unrotated, and rotated when it is read. With ALiBi or no positions, r is a part of
  the key that all heads share.
- The paper multiplies W_k and W_v into W_q and W_o, so that a query multiplies c itself. This
  implementation projects the keys of the whole window, also for a single query.
- Values are padded with zeros to width K + R, because backends need keys and values of equal width.
- ``cache: hidden`` is refused, because inputs are not carried. Relative vectors are refused."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from variants.attention import Attention, Segment, carried_dtype
from variants.contract import Honours, LayerContext, NeededFlops, check_numbers
from variants.kernels.window import PastKV
from variants.multi_head import HeadKeywords


class Latent(Attention):
    """Causal attention over the last S positions, with latents as the state.

    Args:
        latent: width of c; None for 2 K.
        d_position: R, width of r, even for rotary positions; None for K / 2, rounded down to an
            even number, at least 2.
        heads: keywords of ``MultiHead``."""

    honours = Honours(position={"rotate", "decay"}, attend_self={True, False}, span=True)
    maps = ()

    def __init__(
        self,
        context: LayerContext,
        *,
        latent: int | None = None,
        d_position: int | None = None,
        **heads: Unpack[HeadKeywords],
    ):
        check_numbers(1, null="null for 2 d_head", latent=latent)
        check_numbers(1, null="null for half of d_head", d_position=d_position)
        super().__init__(context, **heads)
        self.latent = latent or 2 * self.d_head
        self.d_position = self.extra_columns = d_position or max(2, self.d_head // 4 * 2)
        self.position = context.position(self.d_position)
        width = context.d_model
        bias = heads.get("bias", False)
        # [W_q; W_p] of each head
        self.query = nn.Linear(width, self.heads * self.kernel_width, bias=bias)
        self.down = nn.Linear(width, self.latent + self.d_position, bias=bias)  # [W_c; W_r]
        self.up = nn.Linear(self.latent, 2 * self.heads * self.d_head, bias=bias)  # [W_k; W_v]
        self.gain = nn.Parameter(torch.ones(self.latent))
        self.maps = ("query", "down", "up")
        # c is carried like inputs, with r, and projected again
        self.cache = "hidden"
        self.carried_width = self.latent

    @property
    def kernel_width(self) -> int:
        return self.d_head + self.d_position

    def project_qkv(self, x: Tensor, start: Tensor, before: Tensor | None = None) -> Segment:
        q = (
            (self.query(x) * self.kernel_width**-0.5)
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
        )
        q = torch.cat(
            [q[..., : self.d_head], self.position.rotate(q[..., self.d_head :], start)], dim=-1
        )
        c, r = self.down(x).split([self.latent, self.d_position], dim=-1)
        latents = torch.cat([self._normed(c, self.gain), r], dim=-1)
        k, v = self._project_latents(latents, start, before)
        return Segment(latents, q, k, v, start, self.span(x), None)

    def project_key(self, x: Tensor) -> Tensor:
        return self.split(self.up(x[..., : self.latent]).chunk(2, dim=-1)[0])

    def _project_latents(
        self, latents: Tensor, start: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, T, K + R]`` of ``latents [B, T, latent + R]`` from
        position ``start`` on. ``before`` is the unmixed key before them; r is not mixed."""
        c, r = latents.split([self.latent, self.d_position], dim=-1)
        k, v = (self.split(part) for part in self.up(c).chunk(2, dim=-1))
        k, _ = self.shift_keys(k, before)
        r = self.position.rotate(r[:, None], start).expand(-1, self.heads, -1, -1)
        return torch.cat([k, r.to(k.dtype)], dim=-1), F.pad(v, (0, self.d_position))

    def reproject_past(
        self, old: Tensor, segment: Segment, n_past: int | None, heads: slice
    ) -> PastKV:
        """Project the last ``n_past`` latents before the segment; None for all. All heads have
        equal spans."""
        old, extra = self.past_inputs(old, n_past)
        k, v = self._project_latents(old.to(carried_dtype(segment.x)), segment.start - old.shape[1])
        return PastKV(k[:, :, extra:], v[:, :, extra:])

    def join(self, y: Tensor) -> Tensor:
        return super().join(y[..., : self.d_head])

    def needed_flops(self, segment: int, *, carried: int) -> NeededFlops:
        """Count as in ``Attention``, but the r of past keys needs no gradient."""
        needed = super().needed_flops(segment, carried=carried)
        past = self._pairs(segment, carried)[1]
        return needed._replace(backward=needed.backward - 2 * self.d_position * past / segment)
