"""Position schemes: against the references, at stream position 10**7, and in numbers that can be worked out."""

import math

import pytest
import torch

from tests.attention_case import DOUBLE, Case, gradients
from tests.reference import positions as reference
from variants.attention import Attention
from variants.contract import LayerContext
from variants.position import Alibi, NoPosition, Relative, Rotary, Sinusoidal, alibi_slopes, rotary_frequencies

pytestmark = pytest.mark.numeric

FAR = 10**7


def context(**changes) -> LayerContext:
    return LayerContext(
        **{"d_model": 8, "layer": 0, "n_layers": 2, "heads": 2, "span": 6, "scheme": NoPosition} | changes
    )


def normal(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def test_rotary_by_hand():
    assert rotary_frequencies(4, 10000.0).tolist() == pytest.approx([1, 0.01], abs=1e-15)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=DOUBLE).reshape(1, 1, 1, 4)
    y = Rotary(context(), d_head=4).rotate(x, torch.tensor([2])).flatten().tolist()
    cos, sin = math.cos(2), math.sin(2)  # planes (0, 2) by 2 radians and (1, 3) by 0.02
    assert y[0] == pytest.approx(cos - 3 * sin, abs=1e-14)
    assert y[2] == pytest.approx(sin + 3 * cos, abs=1e-14)
    assert y[1] == pytest.approx(2 * math.cos(0.02) - 4 * math.sin(0.02), abs=1e-14)
    assert y[3] == pytest.approx(2 * math.sin(0.02) + 4 * math.cos(0.02), abs=1e-14)


@pytest.mark.parametrize(("starts", "tolerance"), [((0, 5), 1e-12), ((FAR, FAR - 3), 1e-8)])
def test_rotary_is_the_references(starts, tolerance):
    """And its gradient, which has a backward of its own."""
    x = normal(2, 3, 7, 6).requires_grad_()
    y = Rotary(context(), d_head=6).rotate(x, torch.tensor(starts))
    turned = [[reference.rotary(x[b, :, t], position=starts[b] + t) for t in range(7)] for b in range(2)]
    expected = torch.stack([torch.stack(rows, dim=1) for rows in turned])
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(gradients(y, [x]), gradients(expected, [x]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("past", [0, 4])
def test_rotary_scores_far_along_are_those_at_zero_in_float32(past):
    rotary, q, k = Rotary(context(), d_head=16), normal(1, 2, 9, 16).float(), normal(1, 2, 9 + past, 16).float()

    def scores(start: int) -> torch.Tensor:
        at = torch.tensor([start])
        return rotary.rotate(q, at) @ rotary.rotate(k, at - past).mT / 4

    torch.testing.assert_close(scores(FAR), scores(0), rtol=0, atol=1e-5)


def test_rotary_needs_an_even_width():
    with pytest.raises(ValueError, match=r"position=rotary needs an even head width.*not 5"):
        Rotary(context(), d_head=5)


def test_rotary_base_is_used():
    x, at = normal(1, 1, 3, 4), torch.tensor([9])
    one, other = (Rotary(context(), d_head=4, base=base).rotate(x, at) for base in (10000.0, 100.0))
    assert not torch.allclose(one[..., 1], other[..., 1])
    assert rotary_frequencies(4, 100.0).tolist() == pytest.approx([1, 0.1], abs=1e-15)


@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_are_the_references(width):
    start = torch.tensor([0, 1000])
    table = Sinusoidal(context(), d_head=0).embed(torch.zeros(2, 5, width, dtype=DOUBLE), start)
    for b in range(2):
        for t in range(5):
            expected = reference.sinusoid(start[b].item() + t, d_model=width)
            torch.testing.assert_close(table[b, t], expected, rtol=0, atol=1e-12)


def test_a_shift_of_sinusoids_is_a_rotation():
    """p(t + n) = R_n p(t) with one R_n for all t: plane (2i, 2i + 1) turns by n / 10000^(2i / D)."""
    table = Sinusoidal(context(), d_head=0).embed(torch.zeros(1, 50, 8, dtype=DOUBLE), torch.tensor([3]))[0]
    sin, cos = table[:, 0::2], table[:, 1::2]
    angle = 7 * rotary_frequencies(8, 10000.0)
    torch.testing.assert_close(sin[7:], sin[:-7] * angle.cos() + cos[:-7] * angle.sin(), rtol=0, atol=1e-12)
    torch.testing.assert_close(cos[7:], cos[:-7] * angle.cos() - sin[:-7] * angle.sin(), rtol=0, atol=1e-12)


def test_sinusoids_are_the_only_absolute_scheme():
    assert not Sinusoidal.relative
    assert all(scheme.relative for scheme in (NoPosition, Rotary, Relative, Alibi))
    x = normal(1, 3, 8)
    assert torch.equal(Rotary(context(), d_head=0).embed(x, torch.tensor([5])), x)


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    assert alibi_slopes(1).tolist() == [1 / 256]
    for heads in range(1, 20):
        assert alibi_slopes(heads).tolist() == reference.alibi_slopes(heads).tolist()


def test_alibi_bias_by_hand():
    bias = Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4), 4)
    assert bias.dtype == DOUBLE
    assert bias.tolist() == [[0, -1 / 16, -2 / 16, -3 / 16], [0, -1 / 256, -2 / 256, -3 / 256]]
    assert Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4).bfloat16(), 4).dtype == torch.float32


def two_layers(share: str) -> torch.nn.ModuleList:
    whole = context(scheme=lambda context, *, d_head: Relative(context, d_head=d_head, share=share))
    torch.manual_seed(0)
    return torch.nn.ModuleList([Attention(whole), Attention(whole)])


def test_one_relative_table_for_the_network_or_one_a_layer():
    shared, own = two_layers("network"), two_layers("layer")
    assert shared[0].position.table is shared[1].position.table
    assert own[0].position.table is not own[1].position.table
    assert not torch.equal(own[0].position.table, own[1].position.table)
    tables = [[p for p in m.parameters() if p.shape == (6, 4)] for m in (shared, own)]
    assert [len(found) for found in tables] == [1, 2]
    with pytest.raises(ValueError, match=r"position\.share=heads: allowed are network, layer"):
        Relative(context(), d_head=4, share="heads")


def test_a_shared_table_gets_the_gradient_of_both_layers():
    shared = two_layers("network")
    x = normal(1, 5, 8).float()
    table = shared[0].position.table
    both = gradients(shared[0](x).y + shared[1](x).y, [table])[0]
    each = gradients(shared[0](x).y, [table])[0] + gradients(shared[1](x).y, [table])[0]
    torch.testing.assert_close(both, each)


def test_tables_of_other_runs_and_widths_are_others():
    one, other = Case(position="relative"), Case(position="relative")
    assert one.build().position.table is not other.build().position.table
    whole = context()
    assert Relative(whole, d_head=4).table is Relative(whole, d_head=4).table
    assert Relative(whole, d_head=2).table.shape == (6, 2)
    assert not list(Relative(whole, d_head=0).parameters())
