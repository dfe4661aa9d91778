"""Variants compiled: steps with carried state give every gradient of the uncompiled ones.

What breaks from one version of torch to the next is how Python is followed, so the graphs are run as they are (backend
``eager``); ``test_step.py`` generates code for one variant.
"""

from functools import partial

import pytest
import torch

from harness.device.runtime import Runtime
from tests.attention_case import Case, starts
from tests.runs import CARRY, MEMORY, make_run, own_folder, restored  # noqa: F401 - fixtures
from variants.attention import Attention
from variants.attention_parts import AttentionSpan
from variants.conformance.fixture import leaves

ROTARY, RELATIVE = ("position=rotary", "model.cache=kv"), ("position=relative", "model.cache=hidden")
SPANS = ("variant=adaptive_span", *ROTARY, "runtime.backend=plain")
CASES = {
    "memory": ("variant=product_key_memory", *RELATIVE, *MEMORY, *CARRY, "runtime.backend=plain"),
    "spans, one operation": ("variant=adaptive_span", *CARRY, "position=rotary", "runtime.backend=fused"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_variant_steps_as_the_uncompiled_one(case, monkeypatch):
    """The past grows. Where attention is one operation, nothing breaks the graph of the whole model."""
    whole = case.endswith("one operation")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=whole))
    outcomes = []
    for compiled in (False, True):
        torch.compiler.reset()
        run, nats = make_run(*CASES[case], "optim=adamw", f"runtime.compile={compiled}"), []
        run.optimizers.zero_grad = lambda: None
        for _ in range(3):
            run.step()
            nats.append(run.train_row()["bits_per_byte"])
        outcomes.append((nats, [x.shape for x in leaves(run.state)], [p.grad for p in run.model.parameters()]))
    (nats, shapes, gradients), (expected, other_shapes, others) = outcomes
    assert nats == pytest.approx(expected, abs=1e-4) and shapes == other_shapes
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_compiled_run_is_scored_by_compiled_code(monkeypatch):
    """In segments of two lengths, with statistics and without, to the same bits."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    scores, calls, forward = [], [], Runtime.forward

    def counted(runtime: Runtime, model: torch.nn.Module):
        inner = forward(runtime, model)
        return lambda *args, **keywords: calls.append(runtime.compile) or inner(*args, **keywords)

    monkeypatch.setattr(Runtime, "forward", counted)
    for compiled in (False, True):
        run = make_run(*SPANS, "model.head_zero_init=false", f"runtime.compile={compiled}")
        calls.clear()
        scores.append(run.score(run.reported("valid")[:200]))
        assert len(calls) >= 2 and set(calls) == {compiled}
        assert run.evaluation_backend == ("plain, compiled" if compiled else "plain")
    torch.testing.assert_close(scores[1].nats, scores[0].nats, rtol=0, atol=1e-5)
    assert scores[1].stats.keys() == scores[0].stats.keys()


class ShortSpan(AttentionSpan):
    """An outsider's: three keys with a hard edge, wherever the span ends."""

    def __init__(self, context):
        super().__init__(context)
        self.max_keys = (3,) * context.heads


def test_a_hard_window_shorter_than_the_span_stays_so():
    case = Case(length=20, span=32, backend="fused")
    attention = Attention(case.context(), d_head=8, span=ShortSpan).eval()
    x = torch.randn(2, 20, attention.query.in_features)
    torch.compiler.reset()
    y = torch.compile(attention, backend="eager", fullgraph=True)(x, None, starts(0)).y
    assert torch.allclose(y, attention(x, None, starts(0)).y, atol=1e-6)
