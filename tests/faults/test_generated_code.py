"""TorchInductor generates code for training and scoring of every shipped variant. No compiler for C++ or a GPU runs."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from harness.device.compiled import Compiled
from tests.small_configs import TINY, VARIANT_NAMES, plan, sized

pytestmark = pytest.mark.faults


@pytest.fixture
def generated(monkeypatch) -> Iterator[list[str]]:
    """The Python code that is generated for each graph of ``torch.compile``. The graphs themselves run uncompiled."""
    from torch._inductor import async_compile, compile_fx, config, graph  # slow imports

    codes, generate = [], graph.GraphLowering.codegen

    def codegen(lowering: graph.GraphLowering):
        code = generate(lowering)
        codes.append(code)
        return code

    def inner_compile(graph_module: nn.Module, inputs: list, **options) -> Callable:
        uncompiled = copy.deepcopy(graph_module)
        compile_fx.compile_fx_inner(graph_module, inputs, **options)
        run = lambda arguments: uncompiled(*arguments)  # noqa: E731
        run._boxed_call = True
        return run

    compiling = torch.compile
    backend = lambda module, inputs: compile_fx.compile_fx(module, inputs, inner_compile=inner_compile)  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda model: compiling(model, backend=backend))
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: None)
    monkeypatch.setattr(graph.GraphLowering, "codegen", codegen)
    torch.compiler.reset()
    with config.patch({"force_disable_caches": True, "compile_threads": 1, "cpp.vec_isa_ok": True, "cpp.simdlen": 256}):
        yield codes


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_inductor_generates_code_for_training_and_scoring_with_carried_state(variant, generated):
    model = plan(*TINY, *sized(variant)).make_model()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.no_grad():
        state = model(tokens, None).state
    compiled = Compiled(model)
    out = compiled(tokens, state)
    (out.logits.sum() + out.loss).backward()
    model.eval()
    with torch.no_grad():
        compiled(tokens, state)
    assert compiled.fully_compiled
    assert len(generated) >= 3, "forward and backward pass of a training step, and scoring"
