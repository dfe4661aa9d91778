"""TorchInductor generates code for training and scoring of every shipped variant. No compiler for C++ or a GPU runs."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from harness.device.compiled import Compiled
from harness.model import LanguageModel
from tests.small_configs import TINY, VARIANT_NAMES, plan, sized
from variants import backends
from variants.backends import OnKernels

pytestmark = pytest.mark.faults


@pytest.fixture
def generated(monkeypatch) -> Iterator[list[str]]:
    """The Python code that is generated for each graph of ``torch.compile``. The graphs themselves run uncompiled."""
    from torch._inductor import async_compile, compile_fx, config, cpu_vec_isa, graph  # slow imports

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
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # it would run the compiler; the code is scalar
    torch.compiler.reset()
    with config.patch({"force_disable_caches": True, "compile_threads": 1, "pattern_matcher": False}):
        yield codes


def small_model(variant: str) -> LanguageModel:
    """A small model of the variant, with one layer of each kind."""
    model = plan(*TINY, *sized(variant)).make_model()
    model.layers = nn.ModuleList({repr(layer): layer for layer in model.layers}.values())
    return model


def trace_attention(model: LanguageModel, patched: pytest.MonkeyPatch) -> None:
    """Make attention a part of the graph, as on a GPU. On a CPU it runs between graphs."""
    patched.setattr(backends, "is_operation", lambda *_: True)
    for _, sublayer in model.sublayers():
        if isinstance(sublayer, OnKernels):
            fused = "fused" in sublayer.backends(torch.device("cpu"), training=True)
            patched.setattr(sublayer, "wanted_backend", "fused" if fused else "plain")


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_inductor_generates_code_for_training_as_on_a_gpu_and_scoring_as_on_a_cpu(variant, generated):
    model, tokens = small_model(variant), torch.zeros(2, 16, dtype=torch.int64)
    with torch.no_grad():
        state = model(tokens, None).state
    with pytest.MonkeyPatch.context() as patched:
        trace_attention(model, patched)
        training = Compiled(model)
        out = training(tokens, state)
        (out.logits.sum() + out.loss).backward()
    model.eval()
    scoring = Compiled(model)
    with torch.no_grad():
        scoring(tokens, state)
    assert training.fully_compiled and scoring.fully_compiled
    assert len(generated) >= 3, "forward and backward pass of a training step, and scoring"
