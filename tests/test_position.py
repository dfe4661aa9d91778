"""Position schemes: against the references, at stream position 10**7, and in numbers that can be worked out."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.attention_case import DOUBLE, Case, gradients
from tests.promises import model_of
from tests.reference import positions as reference
from variants.attention import Attention
from variants.contract import LayerContext
from variants.position import Alibi, NoPosition, Relative, Rotary, Sinusoidal, alibi_slopes, rotary_frequencies

pytestmark = pytest.mark.numeric

FAR = 10**7
F32 = torch.float32


def context(**changes) -> LayerContext:
    return LayerContext(
        **{"d_model": 8, "layer": 0, "n_layers": 2, "heads": 2, "span": 6, "scheme": NoPosition} | changes
    )


def normal(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("starts", "tolerance"), [((0, 5), 1e-12), ((FAR, FAR - 3), 1e-8)])
def test_rotary_is_the_references(starts, tolerance):
    """And its gradient, which has a backward of its own."""
    x = normal(2, 3, 7, 6).requires_grad_()
    y = Rotary(context(), d_head=6).rotate(x, torch.tensor(starts))
    turned = [[reference.rotary(x[b, :, t], position=starts[b] + t) for t in range(7)] for b in range(2)]
    expected = torch.stack([torch.stack(rows, dim=1) for rows in turned])
    torch.testing.assert_close(y, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(gradients(y, [x]), gradients(expected, [x]), rtol=0, atol=tolerance)


def test_rotary_needs_an_even_width():
    with pytest.raises(ValueError, match=r"position=rotary needs an even head width.*not 5"):
        Rotary(context(), d_head=5)


@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_are_the_references(width):
    start = torch.tensor([0, 1000])
    scheme = Sinusoidal(context(d_model=width), d_head=0)
    table = scheme.embed(torch.zeros(2, 5, width, dtype=DOUBLE), start)
    for b in range(2):
        for t in range(5):
            expected = reference.sinusoid(start[b].item() + t, d_model=width)
            torch.testing.assert_close(table[b, t], expected, rtol=0, atol=1e-12)


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


def test_one_relative_table_for_the_network_or_one_a_layer_and_of_a_run_and_a_width():
    shared, own = two_layers("network"), two_layers("layer")
    assert shared[0].position.table is shared[1].position.table
    assert own[0].position.table is not own[1].position.table
    assert not torch.equal(own[0].position.table, own[1].position.table)
    tables = [[p for p in m.parameters() if p.shape == (6, 4)] for m in (shared, own)]
    assert [len(found) for found in tables] == [1, 2]
    with pytest.raises(ValueError, match=r"position\.share=heads: allowed are network, layer"):
        Relative(context(), d_head=4, share="heads")
    one, other = Case(position="relative"), Case(position="relative")
    assert one.build().position.table is not other.build().position.table
    whole = context()
    assert Relative(whole, d_head=4).table is Relative(whole, d_head=4).table
    assert Relative(whole, d_head=2).table.shape == (6, 2)
    assert not list(Relative(whole, d_head=0).parameters())


class Made(TorchDispatchMode):
    """What a forward pass calls, and every dtype that it makes."""

    def __init__(self):
        super().__init__()
        self.calls, self.dtypes = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.calls[str(function.overloadpacket)] += 1
        self.dtypes |= {tensor.dtype for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)}
        return found


@pytest.mark.parametrize("base", [10000.0, 0.5])
def test_angles_far_along_are_right_without_float64(base):
    rotary, at = Rotary(context(), d_head=16, base=base), torch.tensor([FAR, 3, FAR + 12345, -7])
    x = torch.zeros(4, 1, 5, 16)
    x[..., :8] = 1  # turned: the cosines, then the sines
    with Made() as made:
        found = rotary.rotate(x, at)
    assert torch.float64 not in made.dtypes
    angle = (at[:, None] + torch.arange(5)).double()[..., None] * rotary_frequencies(16, base)
    expected = torch.cat([angle.cos(), angle.sin()], dim=-1)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=0, atol=1e-6)
    scheme = Sinusoidal(context(), d_head=0)  # made on the host
    with Made() as made:
        table = scheme.embed(torch.zeros(4, 5, 8), at)
    assert torch.float64 not in made.dtypes
    angle = (at[:, None] + torch.arange(5)).double()[..., None] * rotary_frequencies(8, 10000.0)
    torch.testing.assert_close(table[..., 0::2].double(), angle.sin(), rtol=0, atol=1e-6)


def rotary_model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return model_of(Attention, scheme=Rotary, layers=layers)()


def test_tables_are_made_once_a_forward_and_go_with_it():
    calls, tokens = {}, torch.randint(31, (2, 8))
    for layers in (1, 4):
        model = rotary_model(layers)
        state = model(tokens).state
        for _ in range(2):  # the same state again: another pass
            with Made() as made:
                out = model(tokens, state)
            calls[layers] = made.calls["aten.cos"], made.calls["aten.sin"]
            assert calls[layers] == (2, 2), "of the start and of the places in the segment"
        tables = model.layers[0]["part0"].sublayer.position.tables
        assert len(tables._made) == 0, "nothing outlives a forward pass"
        again = copy.deepcopy(model)(tokens, state)
        assert torch.equal(again.logits, out.logits)
