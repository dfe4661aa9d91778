"""Position schemes: sinusoids, slopes, shared tables, and angles at stream position 10**7."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.reference import positions as reference
from tests.support.attention_case import DOUBLE, Case
from tests.support.promises import model_of
from tests.support.reference_case import normal
from variants.attention import Attention
from variants.contract import LayerContext
from variants.position import Alibi, Relative, Rotary, Sinusoidal, alibi_slopes, rotary_frequencies

pytestmark = pytest.mark.numeric

FAR = 10**7


def context(**changes) -> LayerContext:
    return Case(heads=2, span=6).context(**{"d_model": 8} | changes)


@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_equal_the_reference_and_are_the_only_absolute_scheme(width):
    start = torch.tensor([0, 1000])
    table = Sinusoidal(context(d_model=width), d_head=0).embed(
        torch.zeros(2, 5, width, dtype=DOUBLE), start
    )
    rows = [
        [reference.sinusoid(first + t, d_model=width) for t in range(5)] for first in start.tolist()
    ]
    torch.testing.assert_close(
        table, torch.stack([torch.stack(row) for row in rows]), rtol=0, atol=1e-12
    )
    assert [scheme.relative for scheme in (Sinusoidal, Rotary, Relative, Alibi)] == [
        False,
        True,
        True,
        True,
    ]
    x = normal(1, 3, 8)
    assert torch.equal(Rotary(context(), d_head=0).embed(x, torch.tensor([5])), x)


def test_alibi_slopes_and_biases_equal_numbers_worked_out_by_hand():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    for heads in range(1, 20):
        assert alibi_slopes(heads).tolist() == reference.alibi_slopes(heads).tolist()
    bias = Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4), 4)
    assert bias.dtype == DOUBLE
    assert bias.tolist() == [[0, -1 / 16, -2 / 16, -3 / 16], [0, -1 / 256, -2 / 256, -3 / 256]]
    assert Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4).bfloat16(), 4).dtype == torch.float32


def test_relative_tables_are_shared_as_configured_and_differ_by_model_and_width():
    for share, n_tables in (("network", 1), ("layer", 2)):
        common = context(
            scheme=lambda context, *, d_head, share=share: Relative(
                context, d_head=d_head, share=share
            )
        )
        layers = torch.nn.ModuleList([Attention(common), Attention(common)])
        tables = [p for p in layers.parameters() if p.shape == (6, 4)]
        assert len({table.sum().item() for table in tables}) == len(tables) == n_tables
    assert (
        Case(position="relative").build().position.table
        is not Case(position="relative").build().position.table
    )
    common = context()
    assert Relative(common, d_head=4).table is Relative(common, d_head=4).table
    assert Relative(common, d_head=2).table.shape == (6, 2)
    assert not list(Relative(common, d_head=0).parameters())


class Calls(TorchDispatchMode):
    """Counts the calls of each operation and records the dtypes of their outputs."""

    def __init__(self):
        super().__init__()
        self.calls, self.dtypes = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        self.calls[str(function.overloadpacket)] += 1
        self.dtypes |= {
            tensor.dtype for tensor in tree_leaves(outputs) if isinstance(tensor, torch.Tensor)
        }
        return outputs


@pytest.mark.parametrize("base", [10000.0, 0.5])
def test_angles_far_along_the_stream_are_accurate_without_float64(base):
    rotary, at = Rotary(context(), d_head=16, base=base), torch.tensor([FAR, 3, FAR + 12345, -7])
    x = torch.zeros(4, 1, 5, 16)
    x[..., :8] = 1  # its rotation is the cosines, then the sines
    scheme = Sinusoidal(context(), d_head=0)
    with Calls() as record:
        rotated = rotary.rotate(x, at)[:, 0]
        table = scheme.embed(torch.zeros(4, 5, 8), at)
    assert torch.float64 not in record.dtypes
    positions = (at[:, None] + torch.arange(5)).double()[..., None]
    angle, sinusoid_angle = (
        positions * rotary_frequencies(width, base) for width, base in ((16, base), (8, 10000.0))
    )
    expected = torch.cat([angle.cos(), angle.sin()], dim=-1)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(table[..., 0::2].double(), sinusoid_angle.sin(), rtol=0, atol=1e-6)


def test_rotary_tables_are_computed_once_in_a_forward_pass():
    tokens = torch.randint(31, (2, 8))
    for layers in (1, 4):
        model = model_of(Attention, scheme=Rotary, layers=layers)()
        state = model(tokens).state
        for _ in range(2):  # the second pass has the same state
            with Calls() as record:
                out = model(tokens, state)
            calls = record.calls["aten.cos"], record.calls["aten.sin"]
            assert calls == (2, 2), (
                "one call for the start and one for the positions in the segment"
            )
        assert torch.equal(copy.deepcopy(model)(tokens, state).logits, out.logits)
