"""Weights that are measured: shaken, so that no gradient is zero, the same at every call; spans at lists of keys."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.cost_worker import Subject
from bench.cost_worker import Task as CostTask
from bench.peer_workers import INSTALL, MEMORY, PACKAGES, Task, Worker, version
from bench.weights import LEARNED, learned_spans, place_spans, shake_, spans_of
from harness.data import corpora
from harness.plan.build import Plan
from tests.composing import CONF, plan, small
from tests.needs import need
from tests.runs import restored  # noqa: F401 - a fixture
from variants.product_key_memory import ProductKeyMemory

pytestmark = pytest.mark.usefixtures("restored")
VARIANTS = sorted(path.stem for path in (CONF / "variant").glob("*.yaml"))
SMALL = ("model.d_model=32", "model.layers=2", "model.heads=2", "model.span=64", "batch.streams=2", "batch.segment=64")
SMALL += (
    "runtime.device=cpu",
    "runtime.precision=float32",
    "runtime.threads=1",
    "data=synthetic_text",
    "data.bytes=40000",
)


def made(variant: str, *words: str) -> Plan:
    return plan(f"variant={variant}", *SMALL, *small(variant), *words)


def without_gradient(model: nn.Module, step) -> list[str]:
    """Parameters that got none, or one of zeros, in one training step."""
    moved = set()
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: moved.add(name) if p.grad.to_dense().any() else None
        )
        for name, parameter in model.named_parameters()
    ]
    step()
    for hook in hooks:
        hook.remove()
    return [name for name, _ in model.named_parameters() if name not in moved]


def subject(variant: str, *words: str, spans: str = "learned") -> Subject:
    own = made(variant, *words)
    task = {"trusted": (), "warm": False, "weights": None, "span": own.model.span, "command": ""}
    found = Subject(CostTask(config=own.config, spans=spans, **task))
    found.build()
    return found


def task(variant: str, *words: str, **more) -> Task:
    own = made(variant, *words)
    train, b = corpora.load(**own.data).splits["train"], own.batch
    batches = train[: 3 * b.streams * (b.segment + 1)].view(3, b.streams, b.segment + 1)
    return Task(config=own.config, trusted=(), batches=batches, **more)


def weighed(worker: Worker) -> Worker:
    worker.weigh()
    return worker


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient_in_the_step_that_bench_cost_times(variant):
    found = subject(variant)
    found.train_memory()
    assert not without_gradient(found.model, lambda: found.times("train", seconds=0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_and_in_the_step_of_an_entry_of_ours(variant):
    worker = weighed(Worker(task(variant)))
    assert not without_gradient(worker.model, worker.train)


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != MEMORY])
def test_and_in_that_of_a_package(name):
    need(version(PACKAGES[name]), f"{PACKAGES[name]}: {INSTALL}")
    worker = weighed(Worker(task("mhsa", peer=name)))
    assert not without_gradient(worker.model, worker.train)


def test_and_in_that_of_a_layer_alone():
    layer = {"layer": "memory"}
    small = ("variant.memory.half_keys=32", "variant.memory.top_k=4")
    worker = weighed(Worker(task("product_key_memory", *small, **layer)))
    assert not without_gradient(worker.model, worker.train)
    need(version(MEMORY), f"{MEMORY}: {INSTALL}")
    worker = weighed(Worker(task("product_key_memory", *small, peer=MEMORY, **layer)))
    assert not without_gradient(worker.model, worker.train)


def test_without_shaking_most_parameters_get_none():
    found = Worker(task("adaptive_span"))
    assert len(without_gradient(found.model, found.train)) > 20


def test_shaking_is_the_same_at_every_call_and_leaves_spans_alone():
    models = [made("all_attention").make_model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = [part.fraction.clone() for part in learned_spans(models[0])]
    for model in models:
        shake_(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(part.fraction, old) for part, old in zip(learned_spans(models[0]), before, strict=True))
    placed = spans(models[0])
    placed[0][0] = 0.0  # noise would leave every other such span where it is, at a kink
    place_spans(models[0], placed, heads=len(placed[0]))
    shake_(models[0], spans=True)
    assert spans(models[0]) == [[keys + 0.5 for keys in own] for own in placed]


def test_the_noise_of_a_large_table_is_the_same_however_it_is_drawn(monkeypatch):
    tables = [nn.Embedding(40, 8, _weight=torch.zeros(40, 8)) for _ in range(2)]
    shake_(tables[0])
    monkeypatch.setattr("bench.weights.ONCE", 64)
    shake_(tables[1])
    for table in tables:
        assert 0.015 < table.weight.std() < 0.025
        assert (table.weight != 0).all()


# Spans


def spans(model) -> list[list[float]]:
    return [part.metrics({})["span"].tolist() for part in learned_spans(model)]


@pytest.mark.parametrize("span", [64, 4096])
def test_spans_stay_what_they_are_in_keys_and_a_shorter_context_cuts_them(span):
    model = made("adaptive_span", f"model.span={span}", "model.layers=4", "model.heads=4").make_model()
    place_spans(model, LEARNED["spans"], heads=4)
    for found, asked in zip(spans(model), LEARNED["spans"], strict=True):
        assert found == pytest.approx([min(span, z) for z in asked], abs=1e-3)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 8), (6, 2)])
def test_other_numbers_of_layers_and_heads_read_the_lists_in_a_circle(layers, heads):
    sizes = (f"model.layers={layers}", f"model.heads={heads}", "model.span=512")
    model = made("all_attention", *sizes).make_model()
    place_spans(model, spans_of("learned", span=512), heads=heads)
    expected = [[sorted(LEARNED["spans"][i % 4], reverse=True)[h % 4] for h in range(heads)] for i in range(layers)]
    assert [pytest.approx(own, abs=1e-3) for own in expected] == spans(model)


def test_one_long_head_in_each_layer():
    model = made("adaptive_span", "model.layers=4", "model.heads=4", "model.span=512").make_model()
    place_spans(model, spans_of("one_long", span=512), heads=4)
    for found in spans(model):
        assert found[0] == 512 and max(found[1:]) < 13


def test_only_spans_with_a_length_of_their_own_are_placed():
    for variant in ("mhsa", "dynamic_span", "replayed_spans", "all_attention_fixed"):
        assert not learned_spans(made(variant).make_model())


def test_the_list_is_that_of_the_run_it_names():
    folder = Path(__file__).resolve().parents[1] / "bench/results" / LEARNED["run"]["folder"]
    summary = json.loads((folder / "summary.json").read_text())
    for layer, own in enumerate(LEARNED["spans"]):
        assert own == pytest.approx(summary["valid_metrics"][f"layers.{layer}.attention.span"], abs=0.006)
    told = LEARNED["run"]
    assert (told["data"], told["commit"]) == (summary["data"], summary["commit"])
    assert told["seeds"] == [summary["seed"]] and told["budget"] == summary["budget"]


# Bytes


def test_a_memory_sees_as_many_queries_as_bytes():
    def queries(found: Subject) -> int:
        (memory,) = (s for _, s in found.model.sublayers() if isinstance(s, ProductKeyMemory))
        seen = []
        memory.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, 1)))
        with torch.no_grad():
            found.model(found.batches.batch(0)[0])
        return len(torch.unique(seen[0].round(decimals=5), dim=0))

    words = ("model.span=512", "batch.segment=512", "batch.streams=1")
    assert queries(subject("product_key_memory", *words)) > 500
