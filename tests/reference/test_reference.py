"""The references of attention, compared with torch's layers, closed forms and numbers worked out
by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.adaptive_span import adaptive_mask, soft_mask, span_loss
from tests.reference.all_attention import persistent_vectors
from tests.reference.attention import attention
from tests.reference.feed_forward import feed_forward
from tests.reference.positions import alibi_slopes, rotary, sinusoid
from tests.support.reference_case import EXACT, B, D, H, K, S, T, assert_same, normal

pytestmark = pytest.mark.numeric
X, WEIGHTS = (
    normal(B, T, D),
    {name: normal(D, D, seed=i + 1) for i, name in enumerate(("wq", "wk", "wv", "wo"))},
)
PARAMETERS = [X, *WEIGHTS.values()]
ARGUMENTS = WEIGHTS | {"heads": H, "span": S, "attend_self": True}
DISTANCES = torch.arange(T)[:, None] - torch.arange(T)
"""Distance of every query and key, ``[T, T]``, negative where the key is later than the query."""
HARD = torch.zeros(T, T, dtype=torch.float64).masked_fill(
    (DISTANCES < 0) | (DISTANCES >= S), -math.inf
)
"""0 on the S visible keys of a query, minus infinity elsewhere."""


def projected(*names: str) -> list[Tensor]:
    """Return projections of X for each head, ``[B, H, T, K]``."""
    return [(X @ WEIGHTS[name].T).unflatten(-1, (H, -1)).transpose(1, 2) for name in names]


def by_torch(
    bias: Tensor, *, more_keys: Tensor | None = None, more_values: Tensor | None = None
) -> Tensor:
    """Return the attention of ``ARGUMENTS`` by torch, with ``bias [.., T, keys]`` added to the
    scores.

    Args:
        more_keys, more_values: ``[H, N, K]``, appended to keys and values."""
    q, k, v = projected("wq", "wk", "wv")
    if more_keys is not None:
        k, v = (
            torch.cat([x, more.expand(B, *more.shape)], 2)
            for x, more in ((k, more_keys), (v, more_values))
        )
    return (
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        @ WEIGHTS["wo"].T
    )


def test_attention_equals_torchs_multihead_attention():
    layer = nn.MultiheadAttention(D, H, bias=False, batch_first=True, dtype=torch.float64)
    in_proj = torch.cat([WEIGHTS[name] for name in ("wq", "wk", "wv")])
    parameters = {"in_proj_weight": in_proj, "out_proj.weight": WEIGHTS["wo"]}
    causal = {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1), "need_weights": False}
    expected, _ = torch.func.functional_call(layer, parameters, (X, X, X), causal)
    assert_same(attention(X, **ARGUMENTS | {"span": T}), expected, inputs=PARAMETERS)


def test_alibi_and_relative_positions_are_biases_of_scaled_scores():
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # two heads
    expected = by_torch(HARD - slopes[:, None, None] * DISTANCES)
    assert_same(attention(X, **ARGUMENTS, position="alibi"), expected, inputs=PARAMETERS)
    table, (q,) = normal(S, K), projected("wq")
    columns = DISTANCES.clamp(0, S - 1).expand(B, H, T, T)
    expected = by_torch(HARD + (q @ table.T / math.sqrt(K)).gather(-1, columns))
    assert_same(
        attention(X, **ARGUMENTS, position="relative", table=table),
        expected,
        inputs=[*PARAMETERS, table],
    )


def test_rotations_sinusoids_and_slopes_equal_numbers_worked_out_by_hand():
    vector, position = normal(K).detach(), 5
    pairs = torch.complex(vector[: K // 2], vector[K // 2 :])
    angles = torch.tensor([5.0, 5 / 100], dtype=torch.float64)  # 10000^(-2i/4) = 1, 1/100
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(
        rotary(vector, position=position), torch.cat([rotated.real, rotated.imag]), **EXACT
    )
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]  # 10000^(2/4) = 100
    torch.testing.assert_close(
        sinusoid(3, d_model=4), torch.tensor(expected, dtype=torch.float64), **EXACT
    )
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]
    assert alibi_slopes(1).tolist() == [1 / 256]
    sixteen = alibi_slopes(16).tolist()
    assert sixteen[:2] == pytest.approx([math.sqrt(1 / 2), 1 / 2])
    assert alibi_slopes(12).tolist() == pytest.approx([*alibi_slopes(8).tolist(), *sixteen[0:8:2]])


def test_the_soft_mask_its_gradient_at_the_kinks_and_the_span_loss_equal_hand_computed_numbers():
    by_hand = {
        (0, 0.0): (1.0, 1 / 4),
        (1, 0.0): (3 / 4, 1 / 4),
        (4, 0.0): (0.0, 1 / 4),
        (5, 0.0): (0.0, 0.0),
    }
    for (x, span), expected in (by_hand | {(2, 3.0): (1.0, 0.0), (4, 2.5): (5 / 8, 1 / 4)}).items():
        z = torch.tensor(span, dtype=torch.float64, requires_grad=True)
        mask = soft_mask(x, z=z, ramp=4)
        assert (mask.item(), torch.autograd.grad(mask, z)[0].item()) == expected
    per_byte = torch.tensor([[[0.25, 0.5], [0.75, 0.5]]], dtype=torch.float64)
    assert float(span_loss(per_byte[0, 0], span=1024, weight=0.002)) == pytest.approx(
        0.002 * (256 + 512) / 2
    )
    assert float(span_loss(per_byte, span=1024, weight=0.002)) == pytest.approx(0.002 * 512)


def soft(z: Tensor, *, ramp: int) -> Tensor:
    """Return the soft mask m_z(x) of every query and key, ``[..., T, T]``, for ``z [..., 1, 1]`` or
    ``[..., T, 1]``."""
    return torch.clamp((ramp + z - DISTANCES) / ramp, 0, 1)


@pytest.mark.parametrize("fractions", [(0.0, 0.5), (0.25, 1.0)])
def test_a_soft_mask_equals_its_logarithm_added_to_the_scores(fractions):
    fractions = torch.tensor(fractions, dtype=torch.float64, requires_grad=True)
    mask = soft((S * fractions)[:, None, None], ramp=2) * (HARD == 0)
    q, k, v = projected("wq", "wk", "wv")
    unnormalised = mask * torch.exp(q @ k.transpose(-1, -2) / math.sqrt(K))
    expected = (unnormalised / unnormalised.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(
        2
    ) @ WEIGHTS["wo"].T
    actual = attention(X, **ARGUMENTS, mask=adaptive_mask(fractions, span=S, ramp=2))
    torch.testing.assert_close(expected, by_torch(mask.log()), **EXACT)
    assert_same(actual, expected, inputs=[*PARAMETERS, fractions])


def test_persistent_vectors_are_additional_keys_and_equal_a_softmax_feed_forward_without_context():
    keys, values = normal(H, 3, K, seed=1), normal(H, 3, K, seed=2)
    scaled = persistent_vectors(keys / 2, value_parameters=values / math.sqrt(3))  # sqrt(K) = 2
    vectors = dict(zip(("persistent_keys", "persistent_values"), scaled, strict=True))
    bias = torch.cat([HARD, torch.zeros(T, 3, dtype=torch.float64)], dim=1)
    expected = by_torch(bias, more_keys=keys, more_values=values)
    assert_same(attention(X, **ARGUMENTS, **vectors), expected, inputs=[*PARAMETERS, keys, values])
    without_context = attention(X, **ARGUMENTS | {"span": 0, "position": "rotary"}, **vectors)
    expected = torch.zeros_like(X)
    for h in range(H):  # the sum of H feed-forwards with 3 inner units each
        block = slice(h * K, (h + 1) * K)
        up, down = (
            keys[h] @ WEIGHTS["wq"][block] / math.sqrt(K),
            WEIGHTS["wo"][:, block] @ values[h].T,
        )
        expected = expected + feed_forward(X, up=up, down=down, activation="softmax")
    assert_same(without_context, expected, inputs=[X, keys, values, WEIGHTS["wq"], WEIGHTS["wo"]])
    # leaves distance 0 and the vectors
    closed = adaptive_mask(torch.zeros(H, dtype=torch.float64), span=S, ramp=1)
    only_itself = attention(X, **ARGUMENTS | {"span": 1}, **vectors)
    assert_same(
        attention(X, **ARGUMENTS, **vectors, mask=closed),
        only_itself,
        inputs=[*PARAMETERS, keys, values],
    )
