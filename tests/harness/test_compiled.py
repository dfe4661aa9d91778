"""Compiled steps have the gradients of uncompiled ones and few graphs. Most tests use torch's
backend ``eager``."""

from functools import partial
from random import Random

import pytest
import torch

from harness.device.compiled import MAX_GRAPHS
from tests.support import small_runs
from tests.support.attention_case import Case, starts
from tests.support.small_runs import (
    CARRY,
    MEMORY,
    evaluate,
    make_run,
    make_trainer,
    run_to_end,
    temporary_cwd,  # noqa: F401 - a fixture
    tensors,
    whole_run,
)
from variants.attention import Attention
from variants.attention_span import AttentionSpan

SMALL = ("model.layers=1", *CARRY, "optim=adamw")
PLAIN = ("runtime.backend=plain",)
VARIANTS = {
    "all_attention": ("position=rotary", "runtime.backend=fused"),
    "adaptive_span": ("position=relative", "model.cache=hidden", *PLAIN),
    "product_key_memory": ("position=rotary", "model.cache=kv", *MEMORY, "model.layers=2", *PLAIN),
}
SLOW = [
    pytest.param(name, marks=pytest.mark.faults) for name in ("adaptive_span", "product_key_memory")
]


@pytest.mark.parametrize("variant", ["all_attention", *SLOW])
def test_a_compiled_variant_has_the_losses_gradients_states_and_scores_of_the_uncompiled_one(
    variant, monkeypatch
):
    """The carried past grows from step to step. With the fused backend the whole model is one
    graph."""
    backend = "fused" if variant == "all_attention" else "plain"
    compiling = partial(torch.compile, backend="eager", fullgraph=backend == "fused")
    monkeypatch.setattr(torch, "compile", compiling)
    trainers, bits, scores = [], [], []
    for compiled in (False, True):
        torch.compiler.reset()
        trainer = make_trainer(
            f"variant={variant}", *SMALL, *VARIANTS[variant], f"runtime.compile={compiled}"
        )
        trainer.optimizers.zero_grad = lambda: None
        for _ in range(2):
            trainer.step()
            bits.append(trainer.train_row().bits_per_byte)
        assert trainer.backend == trainer.evaluation_backend == backend + ", compiled" * compiled
        scores.append(evaluate(trainer, trainer.objective.reported_part("valid")[:191]))
        trainers.append(trainer)
    assert bits[2:] == pytest.approx(bits[:2], abs=1e-4)
    uncompiled, compiled = trainers
    for (name, p), expected in zip(
        compiled.model.named_parameters(), uncompiled.model.parameters(), strict=True
    ):
        assert p.grad is not None and torch.allclose(p.grad, expected.grad, rtol=1e-3, atol=1e-5), (
            name
        )
    shapes = [[tuple(x.shape) for x in tensors(trainer.state.carried)] for trainer in trainers]
    assert shapes[0] == shapes[1]
    torch.testing.assert_close(scores[1].nats, scores[0].nats, rtol=0, atol=1e-4)
    assert scores[1].stats.keys() == scores[0].stats.keys()


THREE_LAYERS = pytest.param(("model.layers=3", "budget.steps=400"), marks=pytest.mark.faults)
HIDDEN_CACHE = pytest.param(
    ("model.layers=3", "budget.steps=400", "model.cache=hidden"), marks=pytest.mark.faults
)


@pytest.mark.parametrize(
    "words", [("model.layers=1", "budget.steps=24"), THREE_LAYERS, HIDDEN_CACHE]
)
def test_a_run_needs_few_graphs_though_its_spans_change(words, monkeypatch):
    """The run trains with carried state and random spans at every step, validates and scores."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    words += (
        "model.span=256",
        "runtime.backend=fused",
        "runtime.compile=true",
        "eval.windows=true",
    )
    run = make_run(*small_runs.VARIANTS["adaptive_span"], *CARRY, *words)
    graphs, step, spans, random = [], run.step, set(), Random(0)

    def step_with_random_spans():
        for _, sublayer in run.trainer.model.sublayers():
            if isinstance(sublayer, Attention):
                sublayer.span.place_([random.randint(1, 256) for _ in range(2)])
                spans.add(sublayer.span.max_keys)
        step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    run.step = step_with_random_spans
    summary = run_to_end(run)
    assert (
        len(spans) > MAX_GRAPHS
        and summary["backend"] == summary["evaluation_backend"] == "fused, compiled"
    )
    assert graphs[-1] == graphs[len(graphs) // 2]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= MAX_GRAPHS
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_run_that_needs_too_many_graphs_continues_uncompiled_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("harness.device.compiled.MAX_GRAPHS", 1)
    torch.compiler.reset()
    _, summary = whole_run(
        *SMALL, "runtime.backend=fused", "runtime.compile=true", "budget.steps=4"
    )
    assert summary["status"] == "finished" and summary["backend"] == "fused, compiled in part"
    assert capsys.readouterr().out.count("more than 1 graphs would be needed") == 1


@pytest.mark.parametrize("backend", [pytest.param("kernel", marks=pytest.mark.cpu_kernel), "fused"])
def test_heads_of_unequal_spans_can_run_outside_of_the_graphs(backend, monkeypatch):
    """The CPU's kernel is never part of a graph, and the fused backend is not if too many graphs
    would be needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    if backend == "fused":
        monkeypatch.setattr("harness.device.compiled.MAX_GRAPHS", 1)
    torch.compiler.reset()
    trainers = []
    for compiled in (False, True):
        words = (
            *small_runs.VARIANTS["adaptive_span"],
            *SMALL,
            "model.span=256",
            f"runtime.backend={backend}",
        )
        trainer = make_trainer(*words, f"runtime.compile={compiled}")
        for _ in range(9):
            trainer.model.layers[0]["attention"].sublayer.span.place_([3, 200])
            trainer.step()
        trainers.append(trainer)
    assert len({x.shape[2] for x in tensors(trainer.state.carried) if x.dim() == 4}) == 2
    uncompiled, compiled = (
        evaluate(trainer, trainer.objective.reported_part("valid")) for trainer in trainers
    )
    torch.testing.assert_close(compiled.nats, uncompiled.nats, rtol=0, atol=1e-4)


@pytest.mark.faults
def test_generated_code_takes_the_same_step_as_eager_code():
    from torch._inductor import config as inductor  # a slow import

    words = ("variant=adaptive_span", "variant.layers=[attention]", *SMALL)
    eager, compiled = (make_trainer(*words, f"runtime.compile={on}") for on in ("false", "true"))
    # saves the search for the instruction set
    with inductor.patch({"cpp.vec_isa_ok": True, "cpp.simdlen": 256}):
        eager.step(), compiled.step()
    for (name, x), y in zip(
        eager.model.named_parameters(), compiled.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            x, y, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert eager.train_row().bits_per_byte == pytest.approx(
        compiled.train_row().bits_per_byte, abs=1e-4
    )


class ShortSpan(AttentionSpan):
    """A span of three keys with a hard edge, whatever the model's span is."""

    def __init__(self, context):
        super().__init__(context)
        self.set_keys((3,) * context.heads)


def test_a_hard_window_shorter_than_the_span_compiles_to_one_graph():
    case = Case(length=20, span=32, backend="fused")
    attention = Attention(case.context(), d_head=8, span=ShortSpan, zero_init=False).eval()
    x, graphs = torch.randn(2, 20, attention.query.in_features), []
    torch.compiler.reset()
    keep = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    y = torch.compile(attention, backend=keep, fullgraph=True)(x, None, starts(0)).y
    assert torch.allclose(y, attention(x, None, starts(0)).y, atol=1e-6)
    # these become C++ code, even on a GPU
    constants = [n for n in graphs[0].graph.nodes if n.target is torch.tensor]
    assert len(graphs) == 1 and not constants
