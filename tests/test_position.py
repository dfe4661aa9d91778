"""Position schemes beyond the reference of attention: sinusoids, slopes, shared tables, and angles at stream position 10**7."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.attention_case import DOUBLE, Case
from tests.promises import model_of
from tests.reference import positions as reference
from variants.attention import Attention
from variants.contract import LayerContext
from variants.position import Alibi, Relative, Rotary, Sinusoidal, alibi_slopes, rotary_frequencies

pytestmark = pytest.mark.numeric

FAR = 10**7


def context(**changes) -> LayerContext:
    return Case(heads=2, span=6).context(**{"d_model": 8} | changes)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_are_the_references_and_the_only_absolute_scheme(width):
    start = torch.tensor([0, 1000])
    table = Sinusoidal(context(d_model=width), d_head=0).embed(torch.zeros(2, 5, width, dtype=DOUBLE), start)
    rows = [[reference.sinusoid(first + t, d_model=width) for t in range(5)] for first in start.tolist()]
    torch.testing.assert_close(table, torch.stack([torch.stack(row) for row in rows]), rtol=0, atol=1e-12)
    assert [scheme.relative for scheme in (Sinusoidal, Rotary, Relative, Alibi)] == [False, True, True, True]
    x = normal(1, 3, 8)
    assert torch.equal(Rotary(context(), d_head=0).embed(x, torch.tensor([5])), x)


def test_alibi_slopes_and_bias_by_hand():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    for heads in range(1, 20):
        assert alibi_slopes(heads).tolist() == reference.alibi_slopes(heads).tolist()
    bias = Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4), 4)
    assert bias.dtype == DOUBLE
    assert bias.tolist() == [[0, -1 / 16, -2 / 16, -3 / 16], [0, -1 / 256, -2 / 256, -3 / 256]]
    assert Alibi(context(), d_head=4).bias(normal(1, 2, 3, 4).bfloat16(), 4).dtype == torch.float32


def test_one_relative_table_for_the_network_or_one_a_layer_and_of_a_run_and_a_width():
    for share, number in (("network", 1), ("layer", 2)):
        whole = context(scheme=lambda context, *, d_head, share=share: Relative(context, d_head=d_head, share=share))
        layers = torch.nn.ModuleList([Attention(whole), Attention(whole)])
        tables = [p for p in layers.parameters() if p.shape == (6, 4)]
        assert len({table.sum().item() for table in tables}) == len(tables) == number
    one, other = Case(position="relative"), Case(position="relative")
    assert one.build().position.table is not other.build().position.table
    whole = context()
    assert Relative(whole, d_head=4).table is Relative(whole, d_head=4).table
    assert Relative(whole, d_head=2).table.shape == (6, 2)
    assert not list(Relative(whole, d_head=0).parameters())


def test_bad_input_names_its_key():
    with pytest.raises(ValueError, match=r"position=rotary: head width .* must be even: 5"):
        Rotary(context(), d_head=5)
    with pytest.raises(ValueError, match=r"position\.share=heads: allowed are network, layer"):
        Relative(context(), d_head=4, share="heads")


class Calls(TorchDispatchMode):
    """What a forward pass calls, and every dtype that it makes."""

    def __init__(self):
        super().__init__()
        self.calls, self.dtypes = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.calls[str(function.overloadpacket)] += 1
        self.dtypes |= {tensor.dtype for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)}
        return made


@pytest.mark.parametrize("base", [10000.0, 0.5])
def test_angles_far_along_are_right_without_float64(base):
    rotary, at = Rotary(context(), d_head=16, base=base), torch.tensor([FAR, 3, FAR + 12345, -7])
    x = torch.zeros(4, 1, 5, 16)
    x[..., :8] = 1  # turned: the cosines, then the sines
    scheme = Sinusoidal(context(), d_head=0)
    with Calls() as made:
        turned = rotary.rotate(x, at)[:, 0]
        table = scheme.embed(torch.zeros(4, 5, 8), at)
    assert torch.float64 not in made.dtypes
    places = (at[:, None] + torch.arange(5)).double()[..., None]
    angle, slow = (places * rotary_frequencies(width, base) for width, base in ((16, base), (8, 10000.0)))
    expected = torch.cat([angle.cos(), angle.sin()], dim=-1)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(table[..., 0::2].double(), slow.sin(), rtol=0, atol=1e-6)


def test_tables_are_made_once_a_forward():
    tokens = torch.randint(31, (2, 8))
    for layers in (1, 4):
        model = model_of(Attention, scheme=Rotary, layers=layers)()
        state = model(tokens).state
        for _ in range(2):  # the same state again: another pass
            with Calls() as made:
                out = model(tokens, state)
            calls = made.calls["aten.cos"], made.calls["aten.sin"]
            assert calls == (2, 2), "of the start and of the places in the segment"
        assert torch.equal(copy.deepcopy(model)(tokens, state).logits, out.logits)
