"""Weights of models that bench commands measure: noise makes gradients nonzero; spans are of a
trained run."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from bench.cost_worker import (
    LEARNED_SPANS,
    CostWorker,
    Task,
    add_noise_,
    learned_spans,
    place_spans,
)
from bench.peer_workers import INSTALL, PACKAGES, PeerWorker, version
from harness.count.flops import ForwardFlops
from harness.count.memory import Peak
from harness.loop import summary
from harness.plan.build import Plan
from tests.support.requirements import require
from tests.support.small_configs import plan, small
from tests.support.small_runs import make_trainer

SIZES = (
    "model.d_model=32",
    "model.layers=2",
    "model.heads=2",
    "model.span=64",
    "batch.streams=2",
    "batch.segment=64",
)
SIZES += ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
SIZES += ("data=synthetic_text", "data.bytes=40000")


def plan_of(variant: str, *words: str) -> Plan:
    return plan(f"variant={variant}", *SIZES, *small(variant), *words)


def without_gradient(model: nn.Module, step) -> list[str]:
    """Return the names of the parameters whose gradient in one training step is missing or zero."""
    with_gradient = set()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: with_gradient.add(name) if p.grad.to_dense().any() else None
        )
    step()
    return [name for name, _ in model.named_parameters() if name not in with_gradient]


def task(variant: str, *words: str, **more) -> Task:
    return Task(config=plan_of(variant, *words).config, **more)


def cost_worker(variant: str, *words: str) -> CostWorker:
    """Return a worker of ``bench.cost`` that has built its model, with learned spans."""
    worker = CostWorker(task(variant, *words, spans="learned"))
    worker.build()
    return worker


@pytest.mark.parametrize("variant", ["all_attention", "product_key_memory"])
def test_every_parameter_has_a_gradient_in_the_step_that_bench_cost_measures(variant):
    worker = cost_worker(variant)
    worker.train_memory()
    assert not without_gradient(worker.model, lambda: worker.times("train", seconds=0))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_parameter_has_a_gradient_in_the_step_that_bench_peers_measures(name):
    require(version(PACKAGES[name]), f"{PACKAGES[name]}: {INSTALL}")
    worker = PeerWorker(task("mhsa", peer=name))
    worker.build()
    worker.train_memory()
    assert not without_gradient(worker.model, worker._train)


def test_flops_of_rows_are_counted_on_bytes_of_valid(monkeypatch):
    trainer, worker = make_trainer(), cost_worker("mhsa")
    count = Mock(return_value=ForwardFlops(1.0, {}, 1, True))
    for module in ("harness.loop.summary", "bench.cost_worker"):
        monkeypatch.setattr(f"{module}.forward_flops_per_byte", count)
    summary.costs(trainer, peak=Peak(None, approximate=False))
    worker.train_memory()
    worker.flops()
    first, second = (call.kwargs["text"] for call in count.call_args_list)
    assert torch.equal(first, trainer.objective.reported_part("valid"))
    assert torch.equal(second, worker.corpus.splits["valid"])


def test_without_noise_many_parameters_have_no_gradient(monkeypatch):
    monkeypatch.setattr("bench.cost_worker.add_noise_", lambda model: None)
    worker = cost_worker("adaptive_span")
    worker.train_memory()
    assert len(without_gradient(worker.model, worker._train)) > 20


def test_the_noise_is_the_same_at_every_call_and_does_not_change_spans(monkeypatch):
    models = [plan_of("all_attention").make_model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = [part.fraction.clone() for part in learned_spans(models[0])]
    for model in models:
        add_noise_(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, before, [part.fraction for part in learned_spans(models[0])]))
    table = nn.Embedding(40, 8, _weight=torch.zeros(40, 8))
    # noise for a large table is drawn in pieces
    monkeypatch.setattr("bench.cost_worker.NOISE_CHUNK", 64)
    add_noise_(table)
    assert 0.015 < table.weight.std() < 0.025 and (table.weight != 0).all()


def spans(model) -> list[list[float]]:
    return [part.metrics({})["span"].tolist() for part in learned_spans(model)]


@pytest.mark.parametrize("layers, heads, span", [(4, 4, 64), (6, 2, 512)])
def test_spans_are_set_to_learned_lengths_which_repeat_over_layers_and_heads(layers, heads, span):
    sizes = (f"model.span={span}", f"model.layers={layers}", f"model.heads={heads}")
    model = plan_of("adaptive_span", *sizes).make_model()
    place_spans(model, heads=heads)
    for lengths, expected in zip(spans(model), LEARNED_SPANS * 2, strict=False):
        assert lengths == pytest.approx(
            [min(span, expected[head % 4]) for head in range(heads)], abs=1e-3
        )
    assert not any(
        learned_spans(plan_of(variant).make_model()) for variant in ("mhsa", "all_attention_fixed")
    )
