"""Local attention: the paper's sums at every phase and length, its limits, its state, and what it says of itself."""

import pytest
import torch
from torch import Tensor

from tests.attention_case import DOUBLE, Case, D, assert_near, assert_same, covering, matrices
from tests.reference.local import local_attention
from variants.attention import Attention
from variants.contract import cat_streams
from variants.kernels import window_cpu
from variants.local import LocalAttention

BACKENDS = ["plain", "chunked", "fused"] + ([] if window_cpu.available() else ["kernel"])
BLOCK = 5
PASTS = [0, 1, 4, 5, 13]
"""Bytes behind each stream: no two at the same phase but those at 0, and some have several blocks behind them."""


def build(*, block: int | None = BLOCK, **choices) -> LocalAttention:
    torch.manual_seed(0)
    return LocalAttention(Case(**choices).context(), block=block, d_head=2).to(DOUBLE)


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def behind(attention: LocalAttention, lengths: list[int]) -> tuple[list[Tensor], tuple, Tensor]:
    """Past inputs of streams that are so long, the state that these left, and where the streams stand."""
    pasts = [inputs(n, seed=10 + n).detach() for n in lengths]
    # Of a stream that has nothing behind it yet, the state is that of one whole block.
    fed = [past if len(past) else inputs(attention.block, seed=9).detach() for past in pasts]
    began = (torch.tensor([n - len(past)]) for n, past in zip(lengths, fed, strict=True))
    states = [attention(past[None], None, start).state for past, start in zip(fed, began, strict=True)]
    return pasts, cat_streams(states), torch.tensor(lengths)


def by_reference(attention: LocalAttention, x: Tensor, *, position: str, past: list[Tensor] | None = None) -> Tensor:
    table = getattr(attention.position, "table", None)
    choices = {"heads": 3, "block": attention.block, "attend_self": attention.shift == 0, "position": position}
    past = [x[0, :0]] * len(x) if past is None else past
    constant = attention.cache == "kv"
    return local_attention(x, **matrices(attention), **choices, table=table, past=past, past_is_constant=constant)


CASES = covering(
    {
        "position": ["none", "rotary", "relative", "alibi"],
        "cache": ["kv", "hidden"],
        "attend_self": [True, False],
        "backend": BACKENDS,
        "length": [1, 2, 5, 12, 23],
        "begun": [True, False],
    },
    strength=2,
)


@pytest.fixture(params=[True, False], ids=["host", "device"])
def known(request, monkeypatch):
    """Phases that the host can read, and ones that it cannot, as on a GPU."""
    monkeypatch.setattr(LocalAttention, "_go_by_phase", staticmethod(lambda count, length: request.param))


@pytest.mark.numeric
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_sums_of_the_paper(case):
    """Where streams begin, and where they stand at phases of their own; blocks of 5 among segments that they do not divide."""
    choices = {name: case[name] for name in ("position", "cache", "attend_self")}
    if case["position"] == "relative" and case["backend"] == "fused":
        choices["position"] = "alibi"  # fused takes no bias that depends on the query
    attention = build(**choices, backend=case["backend"])
    x = inputs(len(PASTS), case["length"])
    pasts, state, start = behind(attention, PASTS) if case["begun"] else (None, None, None)
    named = {"x": x} | dict(attention.named_parameters())
    expected = by_reference(attention, x, position=choices["position"], past=pasts)
    assert_same(attention(x, state, start).y, expected, named=named)


@pytest.mark.numeric
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_blocks_in_pieces(backend):
    """300 rows of a block are more than any backend takes at once, cold and 7 bytes into a block."""
    attention = build(block=300, span=300, heads=3, position="alibi", backend=backend)
    mhsa = Attention(Case(span=300, position="alibi").context(), d_head=2).to(DOUBLE)
    mhsa.load_state_dict(attention.state_dict())
    x, named = inputs(2, 290), dict(attention.named_parameters())
    for first in (0, 7):
        for length in (283, 140):  # realigned, and each query by itself
            past, own = x[:, :first].detach(), x[:, first : first + length]
            states = [made(past).state if first else None for made in (attention, mhsa)]
            start = torch.full((2,), first)
            one, other = attention(own, states[0], start).y, mhsa(own, states[1], start).y
            assert_near(one, other)
            upstream = torch.randn(one.shape, dtype=DOUBLE)
            mine = torch.autograd.grad(one, [x, *named.values()], upstream)
            theirs = torch.autograd.grad(other, [x, *mhsa.parameters()], upstream)
            for name, a, b in zip(["x", *named], mine, theirs, strict=True):
                assert_near(a, b, what=name)


def test_a_state_of_other_blocks_is_taken():
    x = inputs(2, 9).detach()
    for made, taken in ((5, 8), (8, 5), (8, 1)):
        one, other = build(block=made), build(block=taken)
        other.load_state_dict(one.state_dict())
        state = one(x).state  # in a block of 5 four bytes are open, of 8 one
        begun = state[0][0].item() % taken
        expected = other(torch.cat([x[:, 9 - begun :], x[:, :6]], dim=1)).y[:, begun:]
        assert_near(other(x[:, :6], state, torch.tensor([9, 9])).y, expected)


def test_blocks_that_follow_the_span_and_ones_that_cannot():
    attention = build()
    attention.set_span(6)
    assert attention.block == 5
    with pytest.raises(ValueError, match=r"eval\.span=4: allowed are integers from 5"):
        attention.set_span(4)
    follows = build(block=None)
    assert follows.block == 2
    follows.set_span(4)
    assert follows.block == 1
    assert build(block=None, attend_self=False, span=4).block == 2


def test_flops_by_hand():
    attention = build(block=4)
    matrices, pair = 4 * 2 * D * 6, 3 * 2 * 2 * 2  # three heads of width 2, scores and values
    assert attention.ideal_flops() == matrices + pair * 2.5
    assert build(block=4, attend_self=False).ideal_flops() == matrices + pair * 1.5
    # Six bytes after seven, in blocks of 4: 4 | 1 2 3 4 | 1 keys, of which 3 are past.
    needed = attention.needed_flops(6, carried=7)
    assert needed.forward == pytest.approx(matrices + pair * 15 / 6)
    assert needed.backward == pytest.approx(2 * needed.forward - pair * 3 / 6)
    other = build(block=4, attend_self=False).needed_flops(
        6, carried=7
    )  # one key fewer each, of which as many are past
    assert other.forward == pytest.approx(matrices + pair * 9 / 6)
    hidden = build(block=4, cache="hidden").needed_flops(6, carried=7)
    again = 3 * 2 * (2 * D * 6) / 6  # keys and values of three inputs
    assert hidden.forward == pytest.approx(matrices + pair * 15 / 6 + again)
    assert hidden.backward == pytest.approx(2 * (matrices + pair * 15 / 6) + again)
