"""The plain computation in chunks: the same in value and in every gradient, in a chunk's memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.count.flops import count_flops
from tests.attention_case import assert_near, assert_same, gradients
from tests.window_case import AWKWARD, Case
from variants.kernels import chunked, window
from variants.kernels.given import Given

pytestmark = pytest.mark.numeric
MORE = AWKWARD | {
    "a span for each query": Case(T=150, past=20, max_keys=(64, 64), z="query", ramp=7),
    "a bias for each query": Case(T=70, past=9, shift=1, max_keys=(24, 64, 24), z=(12.0, 60.0, 3.0), bias="query"),
    "vectors": Case(T=70, past=9, shift=1, max_keys=(24, 64, 24), z=(12.0, 60.0, 3.0), vectors=True),
    "dropout": Case(T=150, past=20, max_keys=(24, 64, 24), z=(12.0, 60.0, 3.0), dropout=0.3, persistent=5),
    "dropout, blind": Case(T=3, shift=1, max_keys=(4, 4), dropout=0.5, persistent=3),
    "everything": Case(
        T=140, past=33, shift=1, max_keys=(50, 50, 50), z="query", dropout=0.2, persistent=7, bias="query"
    ),
}
CASES = pytest.mark.parametrize("case", MORE.values(), ids=list(MORE))


@CASES
def test_it_is_plain(case):
    inputs = case.inputs()
    named = {name: x for name, x in inputs.items() if x.requires_grad}
    assert_same(case.call(chunked.attend, inputs), case.call(window.attend, inputs), named=named)


@CASES
def test_what_is_wanted_and_own_keys_alone(case):
    """As ``backward`` is called inside an operation, where autograd records nothing."""
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    given, seen = Given(**inputs, dropout=case.dropout, seed=torch.tensor(7)), case.hard()
    names = frozenset(inputs)
    with torch.inference_mode():
        y, saved = chunked.forward(given, seen)
        g = torch.ones_like(y)
        whole = chunked.backward(g, y, saved, given, seen, names)
        own = chunked.backward(g, y, saved, given, seen, frozenset("qkv"), own_only=True)
    assert whole.keys() == names and own.keys() == set("qkv")
    assert all(whole[name].shape == inputs[name].shape for name in names)
    assert_near(own["q"], whole["q"])
    for name in "kv":
        assert_near(own[name], whole[name][:, :, case.past :])
        assert own[name].shape == given.q.shape


@CASES
def test_executed_flops_are_those_of_its_products(case):
    inputs = {name: x.detach() for name, x in case.inputs().items()}
    given, seen = Given(**inputs, dropout=case.dropout, seed=torch.tensor(7)), case.hard()
    arguments = {"streams": case.streams, "rows": case.T, "keys": case.T + case.past, "width": case.width}
    said = chunked.executed_flops(seen, **arguments, persistent=case.persistent, vectors=case.vectors)
    y, saved = chunked.forward(given, seen)
    calls = (
        lambda: chunked.forward(given, seen),
        lambda: chunked.backward(torch.ones_like(y), y, saved, given, seen, frozenset(inputs)),
    )
    assert tuple(count_flops(call).total for call in calls) == said


def test_sums_over_chunks_are_rounded_once():
    """Thirty chunks in bfloat16: errors are those of plain attention in bfloat16, and do not grow with the chunks."""
    case = Case(T=1900, max_keys=(64,), streams=1, vectors=True, persistent=8)
    exact = case.inputs()
    found = {}
    for name, attend, dtype in (
        ("exact", window.attend, torch.float64),
        ("plain", window.attend, torch.bfloat16),
        ("chunked", chunked.attend, torch.bfloat16),
    ):
        inputs = {n: x.detach().to(dtype).requires_grad_() for n, x in exact.items()}
        shared = [inputs[n] for n in ("vectors", "extra_k", "extra_v")]
        found[name] = [x.double() for x in gradients(case.call(attend, inputs), shared)]
    for exactly, plain, mine in zip(*found.values(), strict=True):
        assert (mine - exactly).norm() <= 1.3 * (plain - exactly).norm()


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.mark.parametrize("added", [{}, {"vectors": True}, {"persistent": 8}, {"dropout": 0.1}])
def test_scores_of_a_chunk_at_a_time(added):
    """Sixteen times the length is sixteen times the memory, and not 256: nothing is as large as all scores."""
    for T, past in ((256, 256), (1024, 1024)):
        case = replace(Case(T=T, past=past, max_keys=(200, 40), z=(150.0, 9.0), streams=1), **added)
        inputs = case.inputs()
        with Largest() as largest:
            case.call(chunked.attend, inputs).sum().backward()
        states, chunk = 2 * (T + past) * case.width, 128 * (128 + 200 + 8)
        assert largest.numbers <= max(states, 2 * chunk)
        assert largest.numbers < 2 * T * (T + past) / 4
