"""``runtime.checkpoint=layers``: the same loss, gradients, state and statistics as without, for more FLOPs and less memory."""

import itertools

import pytest
import torch

from bench.fit import predict
from harness.count.flops import count_flops
from harness.record.comparison import ground
from tests.bench_rows import cost_row
from tests.composing import TINY, plan
from tests.runs import CARRY, DROPOUT, MEMORY, MOVING, make_run, own_folder, restored  # noqa: F401 - fixtures
from variants.attention import Attention
from variants.conformance.fixture import leaves

RELATIVE = ("position=relative", "model.cache=hidden")
CASES = {
    "spans, keys and values carried": (*MOVING, *CARRY),
    "spans, inputs carried, dropout": (*MOVING, *CARRY, *RELATIVE, *DROPOUT),
    "keys and values carried, dropout, in parts": ("variant=mhsa", *CARRY, *DROPOUT, "batch.accumulate=2"),
    "memory, dropout": ("variant=product_key_memory", *MEMORY, *DROPOUT),
    "persistent vectors": ("variant=all_attention", "variant.attention.persistent.number=8", *CARRY),
}


def after_two_steps(*words: str):
    """A run in float64 with the gradients of its second step, and that step's loss and state."""
    torch.manual_seed(7)
    run = make_run("optim=adamw", "model.head_zero_init=false", *words)
    run.model.double()
    torch.manual_seed(8)
    run.step()
    run.optimizers.zero_grad = lambda: None
    run.step()
    return run


@pytest.mark.parametrize("case", CASES)
def test_the_same_loss_and_every_gradient(case, monkeypatch):
    calls, inner = [], Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda self, *a, **k: calls.append(self) or inner(self, *a, **k))
    kept = after_two_steps(*CASES[case])
    first, again = len(calls), after_two_steps(*CASES[case], "runtime.checkpoint=layers")
    assert len(calls) - first == 2 * first, "each layer is computed once more in every backward pass"
    assert again.train_row()["bits_per_byte"] == kept.train_row()["bits_per_byte"]
    for (name, one), other in zip(kept.model.named_parameters(), again.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        torch.testing.assert_close(
            other.grad, one.grad, rtol=1e-12, atol=1e-14, msg=lambda t, name=name: f"{name}: {t}"
        )
        assert torch.equal(one, other), name
    for one, other in zip(leaves(kept.state), leaves(again.state), strict=True):
        assert torch.equal(one, other)


def test_statistics_come_out_once():
    models = [make_run(*MOVING, *CARRY, f"runtime.checkpoint={how}").model for how in ("none", "layers")]
    tokens = torch.randint(256, (2, 16))
    found = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        out = model.train()(tokens, collect_stats=True)
        before = {name: {key: value.clone() for key, value in stats.items()} for name, stats in out.stats.items()}
        out.logits.sum().backward()
        assert all(
            torch.equal(value, before[name][key]) for name, own in out.stats.items() for key, value in own.items()
        )
        found.append(before)
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(v, found[1][name][key]) for name, own in found[0].items() for key, v in own.items())


def test_executed_flops_have_the_second_forward_and_needed_ones_do_not():
    flops, needed = {}, {}
    for how in ("none", "layers"):
        run = make_run("variant=mhsa", "runtime.backend=plain", f"runtime.checkpoint={how}")
        inputs, targets = torch.zeros(2, 4, 16, dtype=torch.int64)
        step = count_flops(
            lambda run=run, x=inputs, y=targets: run.trainer.step(x, y, None, fraction=0.0), gradients=True
        )
        flops[how], needed[how] = step.total, run.model.needed_flops(16, carried=0)
        with torch.no_grad():
            forward = count_flops(lambda run=run, x=inputs: run.model(x)).total
    # A layer's last product has no reader in the backward pass, and the head is in no layer.
    last = [layer["feed_forward"].sublayer.leave.weight.numel() for layer in run.model.layers]
    once = 2 * inputs.numel() * (run.model.head.weight.numel() + sum(last))
    assert flops["layers"] - flops["none"] == forward - once
    assert needed["none"] == needed["layers"]


def test_memory_is_less():
    words = (*TINY[:-2], *CARRY, "runtime.backend=plain", "batch.streams=16", "batch.segment=64", "model.span=128")
    peaks = {}
    for how, layers in itertools.product(("none", "layers"), (2, 4)):
        peaks[how, layers] = predict(
            plan(*words, f"model.layers={layers}", f"runtime.checkpoint={how}", "runtime.device=cpu")
        )
    # Two layers more: their inputs, and what they have whether or not (weights and moments, the old state and the new).
    key = "predicted_peak_bytes"
    more = {how: peaks[how, 4][key] - peaks[how, 2][key] for how in ("none", "layers")}
    kept = {
        name: peaks["none", 4]["split"][name] - peaks["none", 2]["split"][name]
        for name in ("parameters", "optimizer", "state")
    }
    assert more["layers"] == pytest.approx(2 * 16 * 64 * 32 * 4 + sum(kept.values()) + kept["state"], rel=0.01)
    assert more["layers"] < more["none"] / 5


def test_compiled_it_is_the_same(monkeypatch):
    found = {}
    for compiled in (False, True):
        torch.compiler.reset()
        monkeypatch.setattr("harness.device.runtime.Runtime.forward", lambda self, model: model)
        torch.manual_seed(7)
        run = make_run("optim=adamw", "model.head_zero_init=false", *MOVING, *CARRY, "runtime.checkpoint=layers")
        if compiled:
            run.trainer.forward = torch.compile(run.model, backend="aot_eager")
        run.step()
        run.optimizers.zero_grad = lambda: None
        run.step()
        found[compiled] = {name: p.grad for name, p in run.model.named_parameters()}
    for name, gradient in found[False].items():
        torch.testing.assert_close(
            found[True][name], gradient, rtol=1e-3, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}"
        )


def test_times_and_memory_of_both_do_not_pool():
    one, other, unsaid = cost_row(recomputation="none"), cost_row(recomputation="layers"), cost_row()
    assert ground(one) == ground(unsaid) != ground(other)


def test_a_word_that_is_none_is_refused():
    with pytest.raises(ValueError, match="runtime.checkpoint=blocks: allowed are none, layers"):
        plan("runtime.checkpoint=blocks")
