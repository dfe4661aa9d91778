"""Reformer: sizes, and the tensors saved for the backward pass."""

import pytest
import torch
from torch import Tensor

from tests.support.attention_case import Case, assert_near
from variants.reformer import Reformer

pytestmark = pytest.mark.numeric

H = 2


def build(**choices) -> Reformer:
    case, sizes = Case.split({"heads": H, "d_head": 4} | choices)
    return case.build(Reformer, **{"buckets": 4, "rounds": 3, "bucket_keys": 2} | sizes)


def inputs(length: int) -> Tensor:
    return Case(length=length).joined()


def test_a_query_sees_itself_only_if_it_sees_no_other_key():
    layer, x = build(attend_self=True), inputs(3)
    layer.rotations.zero_()  # all products are equal, so every vector is in bucket 0
    out, values = layer(x, collect_stats=True), layer.value(x)
    # the second byte sees the first only
    assert_near(out.y[:, :2], layer.output(torch.stack([values[:, 0]] * 2, 1)))
    assert layer.metrics(out.stats)["alone"].tolist() == [pytest.approx(1 / 3)] * H
    assert layer.metrics(out.stats)["keys"].tolist() == [1.0] * H
    assert build(attend_self=False)(x).y[:, 0].abs().max() == 0
    assert layer.metrics({}) == {}


def test_the_default_number_of_buckets_follows_the_span_of_the_model_but_not_a_later_one():
    for span, buckets in ((512, 8), (16, 2), (447, 6)):
        layer = build(span=span, buckets=None, bucket_keys=64)
        layer.set_span(span // 4)
        assert layer.buckets == 2 * layer.rotations.shape[-1] == buckets
    with pytest.raises(ValueError, match=r"eval\.span=0: allowed are 1 to"):
        layer.set_span(0)


def test_scores_are_recomputed_for_the_backward_with_the_same_dropout(monkeypatch):
    layer, x = build(dropout=0.5, span=40, bucket_keys=20).train(), inputs(60).requires_grad_()

    def saved_elements_and_gradients() -> tuple[int, tuple[Tensor, ...]]:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: sizes.append(saved.numel()) or saved, lambda x: x
        ):
            torch.manual_seed(1)
            y = layer(x).y
        return sum(sizes), torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    saved, gradients = saved_elements_and_gradients()
    monkeypatch.setattr(
        "torch.utils.checkpoint.checkpoint", lambda function, *arguments, **_: function(*arguments)
    )
    saved_without_recomputation, expected = saved_elements_and_gradients()
    assert saved < saved_without_recomputation / 3
    assert all(map(torch.equal, gradients, expected))
