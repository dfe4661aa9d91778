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

VARIANTS = {"adaptive_span": "kv", "product_key_memory": "hidden"}
PATHS = {"kv": ("position=rotary", "model.cache=kv"), "hidden": ("position=relative", "model.cache=hidden")}


@pytest.mark.parametrize(("variant", "cache"), VARIANTS.items())
def test_a_compiled_variant_has_the_gradients_of_the_uncompiled_one(variant, cache, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    memory = MEMORY if "memory" in variant else ()
    words = (f"variant={variant}", *memory, *PATHS[cache], *CARRY, "optim=adamw", "runtime.backend=plain")
    found = {}
    for compiled in (False, True):
        torch.compiler.reset()
        run = make_run(*words, f"runtime.compile={compiled}")
        run.optimizers.zero_grad = lambda: None
        for _ in range(2):
            run.step()
        found[compiled] = {name: p.grad for name, p in run.model.named_parameters()}
    for name, gradient in found[False].items():
        assert found[True][name] is not None and torch.allclose(found[True][name], gradient, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("variant", ["adaptive_span", "all_attention", "mhsa"])
def test_the_whole_model_is_one_graph_where_attention_is_one_operation(variant, monkeypatch):
    """Steps with carried state, the past growing: losses and states are the uncompiled ones', and nothing breaks the graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    words = (f"variant={variant}", *CARRY, "position=rotary", "optim=adamw", "runtime.backend=fused")
    found = {}
    for compiled in (False, True):
        torch.compiler.reset()
        run = make_run(*words, f"runtime.compile={compiled}")
        nats = [0.0] * 4
        for step in range(4):
            run.step()
            nats[step] = run.train_row()["bits_per_byte"]
        found[compiled] = nats, [tuple(x.shape) for x in leaves(run.state)]
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-4)
    assert found[True][1] == found[False][1]


def leaves(state) -> list[torch.Tensor]:
    return [x for part in state for x in leaves(part)] if isinstance(state, tuple) else [] if state is None else [state]


def test_a_compiled_run_is_scored_by_compiled_code(monkeypatch):
    """In segments of two lengths, with statistics and without, to the same bits."""
    given = ("variant=adaptive_span", *PATHS["kv"], "runtime.backend=plain", "model.head_zero_init=false")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found, calls, forward = {}, [], Runtime.forward

    def counted(runtime: Runtime, model: torch.nn.Module):
        inner = forward(runtime, model)
        return lambda *args, **keywords: calls.append(runtime.compile) or inner(*args, **keywords)

    monkeypatch.setattr(Runtime, "forward", counted)
    for compiled in (False, True):
        run = make_run(*given, f"runtime.compile={compiled}")
        calls.clear()
        found[compiled] = run.score(run.reported("valid")[:200])
        assert len(calls) >= 2 and set(calls) == {compiled}
        assert run.evaluation_backend == ("plain, compiled" if compiled else "plain")
    torch.testing.assert_close(found[True].nats, found[False].nats, rtol=0, atol=1e-5)
    assert found[True].stats.keys() == found[False].stats.keys()


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
    found = torch.compile(attention, backend="eager", fullgraph=True)(x, None, starts(0)).y
    assert torch.allclose(found, attention(x, None, starts(0)).y, atol=1e-6)
