"""Weights that are measured: shaken, so that no gradient is zero, the same at every call; spans at lists of keys."""

import pytest
import torch
from torch import nn

from bench.cost_worker import LEARNED, Subject, Task, learned_spans, place_spans, shake_
from bench.peer_workers import INSTALL, PACKAGES, Worker, version
from harness.plan.build import Plan
from tests.requirements import require
from tests.small_configs import plan, small

SMALL = ("model.d_model=32", "model.layers=2", "model.heads=2", "model.span=64", "batch.streams=2", "batch.segment=64")
SMALL += ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")
SMALL += ("data=synthetic_text", "data.bytes=40000")


def made(variant: str, *words: str) -> Plan:
    return plan(f"variant={variant}", *SMALL, *small(variant), *words)


def without_gradient(model: nn.Module, step) -> list[str]:
    """Parameters that got none, or one of zeros, in one training step."""
    moved = set()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: moved.add(name) if p.grad.to_dense().any() else None
        )
    step()
    return [name for name, _ in model.named_parameters() if name not in moved]


def task(variant: str, *words: str, **more) -> Task:
    return Task(config=made(variant, *words).config, **more)


def subject(variant: str, *words: str) -> Subject:
    """What ``bench.cost`` measures."""
    measured = Subject(task(variant, *words, spans="learned"))
    measured.build()
    return measured


@pytest.mark.parametrize("variant", ["all_attention", "product_key_memory"])
def test_every_parameter_gets_a_gradient_in_the_step_that_bench_cost_times(variant):
    measured = subject(variant)
    measured.train_memory()
    assert not without_gradient(measured.model, lambda: measured.times("train", seconds=0))


@pytest.mark.parametrize("name", PACKAGES)
def test_and_in_that_of_a_peer(name):
    require(version(PACKAGES[name]), f"{PACKAGES[name]}: {INSTALL}")
    measured = Worker(task("mhsa", peer=name))
    measured.build()
    measured.train_memory()
    assert not without_gradient(measured.model, measured._train)


def test_without_shaking_most_parameters_get_none(monkeypatch):
    monkeypatch.setattr("bench.cost_worker.shake_", lambda model: None)
    measured = subject("adaptive_span")
    measured.train_memory()
    assert len(without_gradient(measured.model, measured._train)) > 20


def test_shaking_is_the_same_at_every_call_and_leaves_spans_alone(monkeypatch):
    models = [made("all_attention").make_model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = [part.fraction.clone() for part in learned_spans(models[0])]
    for model in models:
        shake_(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(part.fraction, old) for part, old in zip(learned_spans(models[0]), before, strict=True))
    table = nn.Embedding(40, 8, _weight=torch.zeros(40, 8))
    monkeypatch.setattr("bench.cost_worker.ONCE", 64)  # a large table is drawn in pieces
    shake_(table)
    assert 0.015 < table.weight.std() < 0.025 and (table.weight != 0).all()


def spans(model) -> list[list[float]]:
    return [part.metrics({})["span"].tolist() for part in learned_spans(model)]


@pytest.mark.parametrize(("layers", "heads", "span"), [(4, 4, 64), (6, 2, 512)])
def test_spans_stay_what_they_are_in_keys_and_lists_are_read_in_a_circle(layers, heads, span):
    model = made("adaptive_span", f"model.span={span}", f"model.layers={layers}", f"model.heads={heads}").make_model()
    place_spans(model, heads=heads)
    for placed, asked in zip(spans(model), LEARNED * 2, strict=False):
        assert placed == pytest.approx([min(span, asked[head % 4]) for head in range(heads)], abs=1e-3)
    assert not any(learned_spans(made(other).make_model()) for other in ("mhsa", "all_attention_fixed"))
