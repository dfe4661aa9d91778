"""The references themselves, against facts that were not written by the same hand: torch's own layers, closed forms,
numbers that can be worked out on paper. What is checked here may then judge the product.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.adaptive_span import (
    adaptive_mask,
    dynamic_fractions,
    dynamic_mask,
    soft_mask,
    span_loss,
)
from tests.reference.all_attention import persistent_vectors
from tests.reference.attention import attention
from tests.reference.feed_forward import feed_forward
from tests.reference.positions import alibi_slopes, rotary, sinusoid
from tests.reference_case import (
    EXACT,
    B,
    D,
    H,
    K,
    S,
    T,
    assert_same,
    normal,
    stream,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.numeric


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {name: normal(D, D, seed=i + 1) for i, name in enumerate(("wq", "wk", "wv", "wo"))}


def split_heads(y: Tensor) -> Tensor:
    """``[B, T, H K]`` to ``[B, H, T, K]``."""
    return y.unflatten(-1, (H, -1)).transpose(1, 2)


def by_torch(x: Tensor, *, weights: dict[str, Tensor], bias: Tensor) -> Tensor:
    """The same attention by torch's scaled_dot_product_attention, ``bias [.., T, T]`` added to scaled scores."""
    q, k, v = (split_heads(x @ weights[name].T) for name in ("wq", "wk", "wv"))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return y.transpose(1, 2).flatten(2) @ weights["wo"].T


def numbers() -> Tensor:
    """x of every (query, key): ``[T, T]``, negative where the key is not in the past."""
    return torch.arange(T)[:, None] - torch.arange(T)[None, :]


def hard(*, span: int) -> Tensor:
    """0 on the ``span`` visible keys of a query, minus infinity elsewhere."""
    x = numbers()
    return torch.zeros(T, T, dtype=torch.float64).masked_fill((x < 0) | (x >= span), -math.inf)


def test_attention_is_torch_multihead_attention(x, weights):
    layer = nn.MultiheadAttention(D, H, bias=False, batch_first=True, dtype=torch.float64)
    parameters = {
        "in_proj_weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "out_proj.weight": weights["wo"],
    }
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    theirs, _ = torch.func.functional_call(layer, parameters, (x, x, x), {"attn_mask": causal, "need_weights": False})
    ours = attention(x, **weights, heads=H, span=T, attend_self=True, position="none")
    assert_same(ours, theirs, inputs=[x, *weights.values()])


def test_without_self_the_first_query_sees_nothing_and_the_second_copies(x, weights):
    y = attention(x, **weights, heads=H, span=1, attend_self=False, position="none")
    assert torch.equal(y[:, 0], torch.zeros(B, D, dtype=torch.float64))
    torch.testing.assert_close(y[:, 1:], x[:, :-1] @ weights["wv"].T @ weights["wo"].T, **EXACT)


def test_alibi_is_a_bias_on_scaled_scores(x, weights):
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # two heads
    bias = hard(span=S) - slopes[:, None, None] * numbers()
    ours = attention(x, **weights, heads=H, span=S, attend_self=True, position="alibi")
    assert_same(ours, by_torch(x, weights=weights, bias=bias), inputs=[x, *weights.values()])


def test_relative_is_a_bias_that_depends_on_the_query(x, weights):
    table = normal(S, K)
    q = split_heads(x @ weights["wq"].T)
    per_column = q @ table.T / math.sqrt(K)  # [B, H, T, S]
    columns = numbers().clamp(0, S - 1).expand(B, H, T, T)
    bias = hard(span=S) + per_column.gather(-1, columns)
    ours = attention(x, **weights, heads=H, span=S, attend_self=True, position="relative", table=table)
    assert_same(ours, by_torch(x, weights=weights, bias=bias), inputs=[x, table, *weights.values()])


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("position", ["none", "rotary", "relative", "alibi"])
def test_two_segments_are_one(x, weights, position, attend_self):
    same = dict(**weights, heads=H, span=S, attend_self=attend_self, position=position, table=normal(S, K))
    whole = attention(x, **same)
    second = attention(x[:, 2:], **same, past=x[:, :2], start=2)
    assert_same(whole[:, 2:], second, inputs=[x, *weights.values()])
    again, constant = (
        attention(x[:, 2:], **same, past=x[:, :2], start=2, past_is_constant=fixed) for fixed in (False, True)
    )
    torch.testing.assert_close(constant, again, **EXACT)
    one, other = (torch.autograd.grad(y.sum(), [weights[n] for n in ("wk", "wv", "wo")]) for y in (again, constant))
    assert [torch.allclose(*pair) for pair in zip(one, other, strict=True)] == [False, False, True]


def test_rotary_turns_complex_numbers():
    vector, position = normal(K).detach(), 5
    pairs = torch.complex(vector[: K // 2], vector[K // 2 :])
    angles = torch.tensor([5.0, 5 / 100], dtype=torch.float64)  # 10000^(-2i/4) = 1, 1/100
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotary(vector, position=position), torch.cat([turned.real, turned.imag]), **EXACT)


def test_sinusoids_by_hand():
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]  # 10000^(2/4) = 100
    torch.testing.assert_close(sinusoid(3, d_model=4), torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_a_shift_of_sinusoids_is_a_rotation():
    shift = 7
    for position in (0, 1, 40):
        here, there = sinusoid(position, d_model=D), sinusoid(position + shift, d_model=D)
        for i in range(0, D, 2):
            angle = shift / 10_000 ** (i / D)
            cos, sin = math.cos(angle), math.sin(angle)
            turn = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
            torch.testing.assert_close(turn @ here[i : i + 2], there[i : i + 2], **EXACT)


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(1).tolist() == [1 / 256]
    sixteen = alibi_slopes(16).tolist()
    assert sixteen[:2] == pytest.approx([math.sqrt(1 / 2), 1 / 2])
    assert alibi_slopes(12).tolist() == pytest.approx([*alibi_slopes(8).tolist(), *sixteen[0:8:2]])
    assert alibi_slopes(3).tolist() == pytest.approx([1 / 16, 1 / 256, 1 / 4])


@pytest.mark.parametrize(
    ("x", "z", "weight", "slope"),
    [
        (0, 0.0, 1.0, 1 / 4),  # where every head starts: the kink at x = z counts
        (1, 0.0, 3 / 4, 1 / 4),
        (4, 0.0, 0.0, 1 / 4),  # and so does the one at x = z + R
        (5, 0.0, 0.0, 0.0),
        (2, 3.0, 1.0, 0.0),
        (3, 3.0, 1.0, 1 / 4),
        (4, 2.5, 5 / 8, 1 / 4),
        (6, 2.0, 0.0, 1 / 4),
        (7, 2.0, 0.0, 0.0),
    ],
)
def test_soft_mask_by_hand(x, z, weight, slope):
    z = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    mask = soft_mask(x, z=z, ramp=4)
    assert mask.item() == weight
    assert torch.autograd.grad(mask, z)[0].item() == slope


def soft(z: Tensor, *, ramp: int) -> Tensor:
    """m_z(x) of every (query, key) for ``z [..., 1, 1]`` or ``[..., T, 1]``."""
    return torch.clamp((ramp + z - numbers()) / ramp, 0, 1)


@pytest.mark.parametrize("fractions", [(0.0, 0.5), (0.1, 0.7), (0.25, 1.0)])
def test_a_soft_mask_is_a_bias_of_its_logarithm(x, weights, fractions):
    ramp = 2
    fractions = torch.tensor(fractions, dtype=torch.float64, requires_grad=True)
    mask = soft((S * fractions)[:, None, None], ramp=ramp) * (hard(span=S) == 0)
    q, k, v = (split_heads(x @ weights[name].T) for name in ("wq", "wk", "wv"))
    unnormalised = mask * torch.exp(q @ k.transpose(-1, -2) / math.sqrt(K))
    theirs = unnormalised / unnormalised.sum(-1, keepdim=True) @ v
    theirs = theirs.transpose(1, 2).flatten(2) @ weights["wo"].T
    same = {"heads": H, "span": S, "attend_self": True, "position": "none"}
    ours = attention(x, **weights, **same, mask=adaptive_mask(fractions, span=S, ramp=ramp))
    torch.testing.assert_close(theirs, by_torch(x, weights=weights, bias=mask.log()), **EXACT)
    assert_same(ours, theirs, inputs=[x, fractions, *weights.values()])


def test_dynamic_spans_follow_the_query(x, weights):
    vectors, biases = normal(H, D, seed=5), normal(H, seed=6)
    fractions = torch.sigmoid(x @ vectors.T + biases)  # [B, T, H]
    z = S * fractions.transpose(1, 2)[..., None]  # [B, H, T, 1]
    bias = hard(span=S) + soft(z, ramp=2).detach().log()
    same = {"heads": H, "span": S, "attend_self": True, "position": "none"}
    ours = attention(x, **weights, **same, mask=dynamic_mask(vectors, biases=biases, span=S, ramp=2))
    torch.testing.assert_close(ours, by_torch(x, weights=weights, bias=bias), **EXACT)
    torch.testing.assert_close(dynamic_fractions(x, vectors=vectors, biases=biases), fractions, **EXACT)
    for gradient in torch.autograd.grad(ours.square().sum(), [vectors, biases]):
        assert gradient.abs().min() > 0


def test_span_loss_by_hand():
    fractions = torch.tensor([0.25, 0.5], dtype=torch.float64, requires_grad=True)
    loss = span_loss(fractions, span=1024, weight=0.002)
    assert loss.item() == pytest.approx(0.002 * (256 + 512) / 2)
    assert torch.autograd.grad(loss, fractions)[0].tolist() == pytest.approx([1.024, 1.024])
    per_byte = torch.tensor([[[0.25, 0.5], [0.75, 0.5]]], dtype=torch.float64)
    assert float(span_loss(per_byte, span=1024, weight=0.002)) == pytest.approx(0.002 * 512)


def test_persistent_vectors_are_more_keys(x, weights):
    keys, values = normal(H, 3, K, seed=1), normal(H, 3, K, seed=2)
    q, k, v = (split_heads(x @ weights[name].T) for name in ("wq", "wk", "wv"))
    k, v = (torch.cat([a, b.expand(B, H, 3, K)], dim=2) for a, b in ((k, keys), (v, values)))
    bias = torch.cat([hard(span=S), torch.zeros(T, 3, dtype=torch.float64)], dim=1)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2) @ weights["wo"].T
    scaled = persistent_vectors(keys / 2, value_parameters=values / math.sqrt(3))  # sqrt(K) = 2
    vectors = dict(zip(("persistent_keys", "persistent_values"), scaled, strict=True))
    ours = attention(x, **weights, **vectors, heads=H, span=S, attend_self=True, position="none")
    assert_same(ours, theirs, inputs=[x, keys, values, *weights.values()])


def test_persistent_vectors_alone_are_a_feed_forward_with_softmax(x, weights):
    keys, values = normal(H, 5, K, seed=1), normal(H, 5, K, seed=2)
    vectors = {"persistent_keys": keys, "persistent_values": values}
    ours = attention(x, **weights, **vectors, heads=H, span=0, attend_self=True, position="rotary")
    theirs = torch.zeros_like(x)
    for h in range(H):  # the sum of H feed-forwards with 5 inner units each
        block = slice(h * K, (h + 1) * K)
        up = keys[h] @ weights["wq"][block] / math.sqrt(K)
        down = weights["wo"][:, block] @ values[h].T
        theirs = theirs + feed_forward(x, up=up, down=down, activation="softmax")
    assert_same(ours, theirs, inputs=[x, keys, values, weights["wq"], weights["wo"]])


def test_a_soft_mask_spares_the_persistent_vectors(x, weights):
    keys, values = normal(H, 3, K, seed=1), normal(H, 3, K, seed=2)
    same = dict(**weights, heads=H, attend_self=True, position="none", persistent_keys=keys, persistent_values=values)
    closed = adaptive_mask(torch.zeros(H, dtype=torch.float64), span=S, ramp=1)  # ramp 1 and z = 0: only x = 0 is left
    ours, only_itself = attention(x, **same, span=S, mask=closed), attention(x, **same, span=1)
    assert_same(ours, only_itself, inputs=[x, keys, values, *weights.values()])
