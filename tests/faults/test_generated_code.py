"""TorchInductor generates code for training and scoring of every shipped variant. No compiler
for C++ or a GPU runs."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses import fake_tensor

from harness.device.compiled import Compiled
from harness.model import LanguageModel
from tests.support.small_configs import TINY, VARIANT_NAMES, plan, sized
from variants import backends
from variants.backends import OnKernels

pytestmark = pytest.mark.faults


@pytest.fixture
def generated(monkeypatch) -> Iterator[list[str]]:
    """The Python code that is generated for each graph of ``torch.compile``. The graphs
    themselves run uncompiled."""
    # slow imports
    from torch._inductor import async_compile, compile_fx, config, cpu_vec_isa, graph

    codes, generate = [], graph.GraphLowering.codegen

    def codegen(lowering: graph.GraphLowering):
        code = generate(lowering)
        codes.append(code)
        return code

    def inner_compile(graph_module: nn.Module, inputs: list, **options) -> Callable:
        uncompiled = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        compile_fx.compile_fx_inner(graph_module, inputs, **options)
        run = lambda arguments: uncompiled(*arguments)  # noqa: E731
        run._boxed_call = True
        return run

    compiling = torch.compile
    backend = partial(compile_fx.compile_fx, inner_compile=inner_compile)
    monkeypatch.setattr(torch, "compile", lambda model: compiling(model, backend=backend))
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: None)
    monkeypatch.setattr(graph.GraphLowering, "codegen", codegen)
    # it would run the compiler; the code is scalar
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    torch.compiler.reset()
    with config.patch(
        {"force_disable_caches": True, "compile_threads": 1, "pattern_matcher": False}
    ):
        yield codes


def small_model(variant: str) -> LanguageModel:
    """Return a small model of the variant, with one layer of each kind."""
    model = plan(*TINY, *sized(variant)).make_model()
    model.layers = nn.ModuleList({repr(layer): layer for layer in model.layers}.values())
    return model


def trace_attention(model: LanguageModel, patched: pytest.MonkeyPatch):
    """Make attention a part of the graph, as on a GPU. On a CPU it runs between graphs."""
    patched.setattr(backends.Backend, "is_operation", True)
    for _, sublayer in model.sublayers():
        if isinstance(sublayer, OnKernels):
            fused = "fused" in sublayer.backends(torch.device("cpu"), training=True)
            patched.setattr(sublayer, "wanted_backend", "fused" if fused else "plain")


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_inductor_generates_code_for_training_as_on_a_gpu_and_scoring_as_on_a_cpu(
    variant, generated
):
    model, tokens = small_model(variant), torch.zeros(2, 16, dtype=torch.int64)
    with torch.no_grad():
        state = model(tokens, None).state
    with pytest.MonkeyPatch.context() as patched:
        trace_attention(model, patched)
        out = Compiled(model)(tokens, state)
        (out.logits.sum() + out.loss).backward()
    model.eval()
    with torch.no_grad():
        Compiled(model)(tokens, state)
    assert len(generated) >= 3, "forward and backward pass of a training step, and scoring"


@pytest.mark.parametrize("variant", ["linformer", "compressed", "forget_gate", "performer", "nsa"])
def test_inductor_generates_triton_code_for_variants_that_failed_on_a_gpu(
    variant, generated, monkeypatch
):
    """The forward pass, with fake tensors and answers of an H100. Torch's autograd would ask the
    driver."""
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("needs torch's wheel for CUDA, and a machine without a GPU")
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile, config
    from torch._inductor.fx_passes import joint_graph
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    model = small_model(variant)
    trace_attention(model, monkeypatch)
    torch._C._ensureCUDADeviceGuardSet()
    gpu = {"name": "H100", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32}
    gpu |= {
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024,
    }
    answers = dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0)
    answers |= {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": SimpleNamespace(**gpu),
    }
    answers |= {
        "get_device_capability": (9, 0),
        "get_compute_capability": 90,
        "get_device_name": "H100",
    }
    answers |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    places = [(place, answers) for place in (torch.cuda, CudaInterface, CudaInterface.Worker)]
    # would use the GPU
    places += [(joint_graph, {"lazy_init": None}), (fake_tensor, {"init_gpu_context": None})]
    places += [
        (torch.accelerator, {"is_available": False}),
        (async_compile.AsyncCompile, {"triton": None}),
    ]
    for place, functions in places:
        for name, answer in functions.items():
            monkeypatch.setattr(
                place, name, staticmethod(lambda *_, answer=answer, **__: answer), raising=False
            )
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with config.patch(joint_graph_constant_folding=False), fake, torch.no_grad():
        compiled, state = Compiled(model.to_empty(device="cuda")), None
        for _ in range(2):
            state = compiled(torch.zeros(2, 16, dtype=torch.int64, device="cuda"), state).state
    assert all("def triton_" in str(code) for code in generated)
