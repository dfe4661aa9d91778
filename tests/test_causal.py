"""The whole triangle by torch's own attention, and what is none."""

from dataclasses import replace

import pytest
import torch

from tests.attention_case import assert_same
from tests.window_case import Case
from variants.kernels import causal, window
from variants.kernels.window import Window

TRIANGLE = Case(T=37, max_keys=(40, 37))
pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("case", [TRIANGLE, replace(TRIANGLE, T=1), replace(TRIANGLE, width=12)])
def test_it_is_plain(case):
    inputs = case.inputs()
    assert_same(case.call(causal.attend, inputs), case.call(window.attend, inputs), named=inputs)


REFUSED = {
    "carried": replace(TRIANGLE, past=3),
    "attend_self": replace(TRIANGLE, shift=1),
    "36 keys on a segment of 37": replace(TRIANGLE, max_keys=(40, 36)),
    "spans": replace(TRIANGLE, z=(40.0, 40.0)),
    "adds to scores": replace(TRIANGLE, bias="column"),
    "position": replace(TRIANGLE, vectors=True),
    "persistent": replace(TRIANGLE, persistent=2),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_no_triangle_is_refused(word):
    case = REFUSED[word]
    with pytest.raises(ValueError, match=rf"^runtime\.backend=sdpa cannot run with .*{word}"):
        case.call(causal.attend, case.inputs())


def test_a_ramp_alone_says_that_spans_are_soft():
    assert causal.obstacle(Window((8,), ramp=4), rows=8, keys=8) == "learned spans"
    assert causal.obstacle(Window((8,)), rows=8, keys=8) is None


def test_dropped_weights_are_zero_and_the_rest_is_scaled():
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 200, 8)
    y = causal.attend(q, q, torch.eye(200)[None, None], Window((200,)), dropout=0.25)[0, 0]
    seen = torch.ones(200, 200).tril().bool()
    weights = y * torch.arange(1, 201)[:, None]  # of 1 / (t + 1) each
    assert not y[~seen].any()
    assert ((weights[seen] - 1 / 0.75).abs() < 1e-3).logical_or(weights[seen] == 0).all()
    assert (weights[seen] == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
