"""Which device a word means, and what ``auto`` means on it: on devices that are made up."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from harness.device import choice, random_state, runtime
from harness.device.choice import Abilities
from tests.composing import plan
from tests.pretended_device import pretend
from tests.runs import make_job, own_folder, restored  # noqa: F401 - fixtures

FAST, SLOW = Abilities("cuda", bfloat16=True, compiles=True), Abilities("cpu", bfloat16=False, compiles=False)
AUTO = ("runtime.precision=auto", "runtime.compile=auto")
TYPED = ("runtime.precision=float32", "runtime.compile=false")


def test_words_are_those_that_this_build_of_torch_has(monkeypatch):
    for kind in ("cuda", "xpu"):
        pretend(monkeypatch, kind, devices=2)
        assert choice.named(kind) == torch.device(kind) and choice.named(f"{kind}:1").index == 1
        assert choice.named("cpu").type == "cpu"
        assert choice.named("auto").type == ("cuda" if kind == "cuda" else "cpu"), "nothing that was never run, unasked"
        for wrong in ("tpu", f"{kind}:2"):
            allowed = f"sees 2 accelerators here; allowed are auto, cpu, {kind}, {kind}:N"
            with pytest.raises(ValueError, match=f"runtime.device={wrong}: .* {allowed}"):
                choice.named(wrong)
    pretend(monkeypatch, None)
    with pytest.raises(ValueError, match="runtime.device=cuda: .*; allowed are auto, cpu$"):
        choice.named("cuda")
    pretend(monkeypatch, "cuda", devices=0)  # a driver that is missing is no device
    assert choice.named("auto").type == "cpu"
    with pytest.raises(ValueError, match="sees 0 accelerators"):
        choice.named("cuda")


def test_bfloat16_is_what_a_device_multiplies_and_a_gpu_with_triton_compiles(monkeypatch):
    for capabilities, expected in (({"amx_bf16": True}, True), ({"avx512_bf16": False, "avx512_f": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert choice.abilities("cpu") == Abilities("cpu", bfloat16=expected, compiles=False)
    pretend(monkeypatch, "cuda")
    for real, triton in ((True, False), (False, True)):
        module = SimpleNamespace(
            is_bf16_supported=lambda including_emulation=True, real=real: including_emulation or real
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        monkeypatch.setattr(choice, "find_spec", lambda name, triton=triton: triton or None)
        assert choice.abilities("cuda") == Abilities("cuda", bfloat16=real, compiles=triton)


def test_a_run_is_what_auto_means_here(here, monkeypatch):
    """In its configuration, so that the same command finds it on such a machine, and begins another on one of another
    kind."""
    jobs = {}
    for precision in ("float32", "bfloat16"):
        device = Abilities("cpu", bfloat16=precision == "bfloat16", compiles=False)
        monkeypatch.setattr(choice, "abilities", lambda name, device=device: device)
        job = make_job(*AUTO)
        assert job.trainer.runtime.precision == job.plan.config["runtime"]["precision"] == precision
        typed = make_job(f"runtime.precision={precision}", "runtime.compile=false")
        assert typed.folder.path == job.folder.path, "what is typed is what auto means"
        jobs[precision] = job.folder.path
    assert jobs["float32"] != jobs["bfloat16"]


def test_tf32_is_for_cuda_where_it_is_asked_for(monkeypatch):
    with pytest.raises(ValueError, match="runtime.tf32=true: runtime.device=cpu has no such products"):
        runtime.start(plan("runtime.device=cpu", "runtime.tf32=true").runtime)
    settings = plan("runtime.device=cuda", *TYPED).runtime
    pretend(monkeypatch, "cuda")
    try:
        on = runtime.start(dataclasses.replace(settings, tf32=True))
        assert on.tf32 and torch.get_float32_matmul_precision() == "high"
    finally:
        off = runtime.start(settings)
    assert not off.tf32 and torch.get_float32_matmul_precision() == "highest"


def test_an_accelerator_is_waited_for_described_and_seeded_as_any(monkeypatch):
    pretend(monkeypatch, "xpu", devices=2)
    waited, generator = [], {"state": torch.tensor([1])}
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    module = SimpleNamespace(
        is_initialized=lambda: True,
        get_device_name=lambda device: f"made up {device}",
        get_rng_state=lambda: generator["state"],
        set_rng_state=lambda state: generator.update(state=state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    where = runtime.start(plan("runtime.device=xpu:1", *TYPED).runtime)
    where.synchronise()
    assert waited == [torch.device("xpu:1")]
    described = where.describe()
    assert (described["device"], described["device_kind"], described["tf32"]) == ("made up xpu:1", "xpu", False)
    state = random_state.random_state()
    generator["state"] = torch.tensor([2])
    random_state.set_random_state(state)
    assert generator["state"].tolist() == [1]
    module.is_initialized = lambda: False
    assert random_state.random_state()["accelerator"] is None, "a process that has not used it has no state of it"
