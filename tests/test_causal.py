"""The whole triangle by torch's own attention, and what is none."""

from dataclasses import replace

import pytest

from tests.attention_case import assert_same
from tests.window_case import Case
from variants.kernels import causal, window
from variants.kernels.window import Window

TRIANGLE = Case(T=37, max_keys=(40, 37))
pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("case", [TRIANGLE, replace(TRIANGLE, T=1), replace(TRIANGLE, width=12)])
def test_it_is_plain(case):
    inputs = case.inputs()
    found = case.call(attend, inputs)
    assert_same(found, case.call(window.attend, inputs), named=inputs)


def attend(q, k, v, visible, *, dropout=0.0, seed=None, **same):
    assert causal.is_triangle(visible, rows=q.shape[2], keys=k.shape[2], **same)
    return causal.attend(q, k, v)


NONE = {
    "carried": replace(TRIANGLE, past=3),
    "not itself": replace(TRIANGLE, shift=1),
    "a window of 36": replace(TRIANGLE, max_keys=(40, 36)),
    "spans": replace(TRIANGLE, z=(40.0, 40.0)),
    "bias": replace(TRIANGLE, bias="column"),
    "vectors": replace(TRIANGLE, vectors=True),
    "persistent": replace(TRIANGLE, persistent=2),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_triangle(name):
    case = NONE[name]
    with pytest.raises(AssertionError):
        case.call(attend, case.inputs())


def test_a_ramp_alone_says_that_spans_are_soft():
    assert not causal.is_triangle(Window((8,), ramp=4), rows=8, keys=8)
    assert causal.is_triangle(Window((8,)), rows=8, keys=8)
