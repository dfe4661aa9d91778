"""Position schemes: against the references, at stream position 10**7, and in numbers that can be worked out."""

import copy
import math
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
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
    scheme = Sinusoidal(context(d_model=width), d_head=0)
    table = scheme.embed(torch.zeros(2, 5, width, dtype=DOUBLE), start)
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


def test_streams_at_other_places_have_other_tables():
    model, tokens = rotary_model(2), torch.randint(31, (2, 8))
    shared = model.layers[0]["part0"].sublayer.position.tables
    assert shared is model.layers[1]["part0"].sublayer.position.tables
    one, other = torch.tensor([0, 5]), torch.tensor([1, 5])
    found = [shared(at, length, dtype) for at in (one, other) for length in (3, 4) for dtype in (DOUBLE, F32)]
    assert len({id(cos) for cos, _ in found}) == 8
    assert {(cos.shape[2], cos.dtype) for cos, _ in found} == {(n, d) for n in (3, 4) for d in (DOUBLE, F32)}
    assert shared(one, 3, F32)[0] is found[1][0]
    assert model(tokens).logits.isfinite().all()


def test_compiled_layers_compute_the_cosines_once():
    """The model's own tables are for eager passes; the compiler merges what is equal, and no dictionary is in its way."""
    own = context()
    rotary = [Rotary(own, d_head=4) for _ in range(3)]
    targets = []

    def count(graph, _):
        targets.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    def turned(x, start):
        for scheme in rotary:
            x = scheme.rotate(x, start)
        return x

    x, start = normal(2, 2, 5, 4).float().requires_grad_(), torch.tensor([3, FAR])
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    y = torch.compile(turned, fullgraph=True, backend=backend)(x, start)
    torch.testing.assert_close(y, turned(x, start))
    torch.testing.assert_close(gradients(y, [x]), gradients(turned(x, start), [x]))
    forward = targets[0]
    assert forward.count("aten.cos.default") == forward.count("aten.sin.default") == 2
