"""``runtime.checkpoint=layers``: the same loss, gradients, state and statistics as without, for more FLOPs and less memory."""

import pytest
import torch

from harness.count.flops import count_flops
from harness.record.comparison import ground
from tests.bench_rows import cost_row
from tests.composing import plan
from tests.runs import CARRY, DROPOUT, MEMORY, MOVING, make_run, own_folder  # noqa: F401 - a fixture
from variants.attention import Attention
from variants.conformance.fixture import state_tensors

CASES = {
    "spans, keys and values carried": (*MOVING, *CARRY),
    "spans, inputs carried, dropout": (*MOVING, *CARRY, "position=relative", "model.cache=hidden", *DROPOUT),
    "memory, keys and values carried, dropout, in parts": (
        *("variant=product_key_memory", "batch.accumulate=2", *MEMORY, *CARRY, *DROPOUT),
    ),
}


def after_two_steps(*words: str, compiled: bool = False):
    """A run in float64 with the gradients of its second step, and that step's loss and state."""
    torch.manual_seed(7)
    run = make_run("optim=adamw", "model.head_zero_init=false", *words)
    run.model.double()
    if compiled:
        run.update.forward = torch.compile(run.model, backend="aot_eager")
    torch.manual_seed(8)
    run.step()
    run.optimizers.zero_grad = lambda: None
    run.step()
    return run


@pytest.mark.parametrize("case", CASES)
def test_the_same_loss_and_every_gradient(case, monkeypatch):
    calls, inner = [], Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda self, *a, **k: calls.append(self) or inner(self, *a, **k))
    plain = after_two_steps(*CASES[case])
    first, again = len(calls), after_two_steps(*CASES[case], "runtime.checkpoint=layers")
    assert len(calls) - first == 2 * first, "each layer is computed once more in every backward pass"
    assert again.train_row()["bits_per_byte"] == plain.train_row()["bits_per_byte"]
    for (name, one), other in zip(plain.model.named_parameters(), again.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-14)
        assert torch.equal(one, other), name
    assert all(map(torch.equal, state_tensors(plain.state), state_tensors(again.state)))


def test_compiled_it_is_the_same(monkeypatch):
    monkeypatch.setattr("harness.device.runtime.Runtime.forward", lambda self, model: model)
    torch.compiler.reset()
    words = (*MOVING, *CARRY, "runtime.checkpoint=layers")
    plain, compiled = (after_two_steps(*words, compiled=compiled) for compiled in (False, True))
    for one, other in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5)


def test_statistics_come_out_once():
    models = [make_run(*MOVING, *CARRY, f"runtime.checkpoint={how}").model for how in ("none", "layers")]
    tokens, collected = torch.randint(256, (2, 16)), []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        out = model.train()(tokens, collect_stats=True)
        flat = {(name, key): value for name, stats in out.stats.items() for key, value in stats.items()}
        collected.append({name: value.clone() for name, value in flat.items()})
        out.logits.sum().backward()
        assert flat and all(torch.equal(value, collected[-1][name]) for name, value in flat.items())
    assert collected[0].keys() == collected[1].keys()
    assert all(torch.equal(value, collected[1][name]) for name, value in collected[0].items())


def test_flops_have_the_second_forward_and_memory_is_less():
    """Numbers that the backward pass finds saved: of a layer its input alone."""
    flops, needed, saved = {}, {}, {}
    for how in ("none", "layers"):
        run, sizes = make_run("variant=mhsa", "runtime.backend=plain", f"runtime.checkpoint={how}"), []
        inputs, targets = torch.zeros(2, 4, 16, dtype=torch.int64)
        step = count_flops(lambda run=run, x=inputs, y=targets: run.update(x, y, None, fraction=0.0), gradients=True)
        flops[how], needed[how] = step.total, run.model.needed_flops(16, carried=0)
        with torch.no_grad():
            forward = count_flops(lambda run=run, x=inputs: run.model(x)).total
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()), lambda x: x):
            run.model.train()(torch.zeros(4, 64, dtype=torch.int64))
        saved[how] = sum(sizes)
    # A layer's last product has no reader in the backward pass, and the head is in no layer.
    last = [layer["feed_forward"].sublayer.leave.weight.numel() for layer in run.model.layers]
    once = 2 * inputs.numel() * (run.model.head.weight.numel() + sum(last))
    assert flops["layers"] - flops["none"] == forward - once
    assert needed["none"] == needed["layers"]
    assert saved["layers"] < saved["none"] / 4


def test_times_and_memory_of_both_do_not_pool_and_a_word_that_is_none_is_refused():
    one, other, unsaid = cost_row(recomputation="none"), cost_row(recomputation="layers"), cost_row()
    assert ground(one) == ground(unsaid) != ground(other)
    with pytest.raises(ValueError, match="runtime.checkpoint=blocks: allowed are none, layers"):
        plan("runtime.checkpoint=blocks")
