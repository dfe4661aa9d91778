"""``runtime.checkpoint=layers`` changes no loss, gradient, state or statistic, and needs more
FLOPs and less memory."""

from functools import partial

import pytest
import torch

from harness.count.flops import count_flops
from harness.loop.step import train_step
from harness.record.comparison import cost_conditions
from tests.support.bench_rows import cost_row
from tests.support.small_configs import plan
from tests.support.small_runs import (
    CARRY,
    DROPOUT,
    MEMORY,
    SPANS,
    make_trainer,
    temporary_cwd,  # noqa: F401 - a fixture
)
from variants.attention import Attention
from variants.conformance.fixture import state_tensors

CASES = {
    "spans, keys and values carried": (*SPANS, *CARRY),
    "spans, inputs carried, dropout": (
        *SPANS,
        *CARRY,
        "position=relative",
        "model.cache=hidden",
        *DROPOUT,
    ),
    "memory, keys and values carried, dropout, accumulated": (
        *("variant=product_key_memory", "batch.accumulate=2", *MEMORY, *CARRY, *DROPOUT),
    ),
}


def after_two_steps(*words: str, compiled: bool = False):
    """Return a trainer in float64 after two steps, with the gradients of the second step."""
    torch.manual_seed(7)
    trainer = make_trainer("optim=adamw", "model.head_zero_init=false", *words)
    trainer.model.double()
    if compiled:
        forward = torch.compile(trainer.model, backend="aot_eager")
        object.__setattr__(trainer.runtime, "forward", lambda model: forward)
    torch.manual_seed(8)
    trainer.step()
    trainer.optimizers.zero_grad = lambda: None
    trainer.step()
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_recomputation_changes_no_loss_gradient_or_state(case, monkeypatch):
    calls, inner = [], Attention.forward
    monkeypatch.setattr(
        Attention, "forward", lambda self, *a, **k: calls.append(self) or inner(self, *a, **k)
    )
    plain = after_two_steps(*CASES[case])
    n_calls, recomputed = len(calls), after_two_steps(*CASES[case], "runtime.checkpoint=layers")
    assert len(calls) - n_calls == 2 * n_calls, (
        "each layer must be computed once more in every backward pass"
    )
    assert recomputed.train_row().bits_per_byte == plain.train_row().bits_per_byte
    for (name, expected), actual in zip(
        plain.model.named_parameters(), recomputed.model.parameters(), strict=True
    ):
        assert (expected.grad is None) == (actual.grad is None), name
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)
        assert torch.equal(expected, actual), name
    assert all(map(torch.equal, state_tensors(plain.state), state_tensors(recomputed.state)))


def test_recomputation_changes_no_gradient_of_a_compiled_model(monkeypatch):
    monkeypatch.setattr("harness.device.runtime.Runtime.forward", lambda self, model: model)
    torch.compiler.reset()
    words = (*SPANS, *CARRY, "runtime.checkpoint=layers")
    plain, compiled = (after_two_steps(*words, compiled=compiled) for compiled in (False, True))
    for expected, actual in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-5)


def test_recomputation_does_not_count_statistics_twice():
    models = [
        make_trainer(*SPANS, *CARRY, f"runtime.checkpoint={mode}").model
        for mode in ("none", "layers")
    ]
    tokens, collected = torch.randint(256, (2, 16)), []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        out = model.train()(tokens, collect_stats=True)
        flat = {
            (name, key): value for name, stats in out.stats.items() for key, value in stats.items()
        }
        collected.append({name: value.clone() for name, value in flat.items()})
        out.logits.sum().backward()
        assert flat and all(torch.equal(value, collected[-1][name]) for name, value in flat.items())
    assert collected[0].keys() == collected[1].keys()
    assert all(torch.equal(value, collected[1][name]) for name, value in collected[0].items())


def test_recomputation_executes_a_second_forward_and_saves_only_the_inputs_of_layers():
    flops, needed, saved = {}, {}, {}
    for mode in ("none", "layers"):
        run, sizes = (
            make_trainer("variant=mhsa", "runtime.backend=plain", f"runtime.checkpoint={mode}"),
            [],
        )
        inputs, targets = torch.zeros(2, 4, 16, dtype=torch.int64)
        of_run = run.model, run.optimizers, run.runtime
        step = count_flops(partial(train_step, *of_run, inputs, targets, None), gradients=True)
        flops[mode], needed[mode] = step.total, run.model.needed_flops(16, carried=0)
        with torch.no_grad():
            forward = count_flops(lambda run=run, x=inputs: run.model(x)).total
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()), lambda x: x
        ):
            run.model.train()(torch.zeros(4, 64, dtype=torch.int64))
        saved[mode] = sum(sizes)
    # The last product of a layer is not needed in the backward pass, and the head is in no layer.
    last = [layer["feed_forward"].sublayer.leave.weight.numel() for layer in run.model.layers]
    once = 2 * inputs.numel() * (run.model.head.weight.numel() + sum(last))
    assert flops["layers"] - flops["none"] == forward - once
    assert needed["none"] == needed["layers"]
    assert saved["layers"] < saved["none"] / 4


def test_costs_with_and_without_recomputation_are_incomparable_and_other_values_are_refused():
    without, recomputed, default = (
        cost_row(recomputation="none"),
        cost_row(recomputation="layers"),
        cost_row(),
    )
    assert cost_conditions(without) == cost_conditions(default) != cost_conditions(recomputed)
    with pytest.raises(ValueError, match="runtime.checkpoint=blocks: allowed are none, layers"):
        plan("runtime.checkpoint=blocks")
