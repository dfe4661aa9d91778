"""Which device a word means, and what ``auto`` means on it: on devices that are made up."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from harness.device import choice, runtime
from harness.device.choice import Abilities
from tests.composing import plan
from tests.pretended_device import pretend
from tests.runs import make_job, own_folder, restored  # noqa: F401 - fixtures

FAST, SLOW = Abilities("cuda", bfloat16=True, compiles=True), Abilities("cpu", bfloat16=False, compiles=False)
AUTO = ("runtime.precision=auto", "runtime.compile=auto")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_words_are_those_that_this_build_of_torch_has(kind, monkeypatch):
    pretend(monkeypatch, kind, devices=2)
    allowed = f"allowed are auto, cpu, {kind}, {kind}:N"
    assert choice.named(kind) == torch.device(kind) and choice.named(f"{kind}:1").index == 1
    assert choice.named("cpu").type == "cpu"
    assert choice.named("auto").type == ("cuda" if kind == "cuda" else "cpu"), "nothing that was never run, unasked"
    with pytest.raises(ValueError, match=f"runtime.device=tpu: {allowed}"):
        choice.named("tpu")
    other = "hpu"
    with pytest.raises(
        ValueError, match=rf"runtime.device=hpu: this build of torch .* has no {other.upper()}; {allowed}"
    ):
        choice.named(other)
    with pytest.raises(
        ValueError, match=f"runtime.device={kind}:2: there are 2 {kind.upper()} devices here; {allowed}"
    ):
        choice.named(f"{kind}:2")


def test_a_build_for_cpus_allows_cpus_and_a_driver_that_is_missing_is_no_device(monkeypatch):
    pretend(monkeypatch, None)
    with pytest.raises(ValueError, match="has no CUDA; allowed are auto, cpu$"):
        choice.named("cuda")
    pretend(monkeypatch, "cuda", devices=0)
    assert choice.named("auto").type == "cpu"
    with pytest.raises(ValueError, match="there are 0 CUDA devices"):
        choice.named("cuda")


@pytest.mark.parametrize(
    ("has", "expected"),
    [({"amx_bf16": True}, True), ({"avx512_bf16": True}, True), ({"avx512_bf16": False, "avx512_f": True}, False)],
)
def test_a_cpu_multiplies_bfloat16_where_it_has_the_instruction(has, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert choice.abilities("cpu") == Abilities("cpu", bfloat16=expected, compiles=False)


@pytest.mark.parametrize(("real", "triton"), [(True, False), (False, True)])
def test_a_gpu_takes_bfloat16_that_is_not_emulated_and_compiles_with_triton(real, triton, monkeypatch):
    pretend(monkeypatch, "cuda")
    says = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation or real)
    monkeypatch.setattr(torch, "get_device_module", lambda device: says)
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if triton else None)
    assert choice.abilities("cuda") == Abilities("cuda", bfloat16=real, compiles=triton)
    pretend(monkeypatch, "mps")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert choice.abilities("mps") == Abilities("mps", bfloat16=False, compiles=False)


@pytest.mark.parametrize(("of", "precision", "compiled"), [(FAST, "bfloat16", True), (SLOW, "float32", False)])
def test_auto_is_settled_by_what_the_device_can_do(of, precision, compiled, monkeypatch):
    monkeypatch.setattr(choice, "abilities", lambda device: of)
    settings = plan(*AUTO).runtime
    found = choice.settled(settings)
    assert (found.precision, found.compile) == (precision, compiled)
    assert dataclasses.replace(found, precision="auto", compile="auto") == settings, "nothing else"
    half = plan("runtime.precision=float32", "runtime.compile=auto").runtime
    assert choice.settled(half).precision == "float32"
    monkeypatch.setattr(choice, "abilities", lambda device: pytest.fail("asked"))
    typed = plan("runtime.precision=float32", "runtime.compile=false").runtime
    assert choice.settled(typed) == typed


def test_a_run_is_what_auto_means_here(here, monkeypatch):
    """In its configuration, so that the same command finds it on such a machine, and begins another on one of another kind."""
    jobs = {}
    for bfloat16 in (True, False):
        monkeypatch.setattr(choice, "abilities", lambda name, b=bfloat16: Abilities("cpu", bfloat16=b, compiles=False))
        found, again = (make_job(*AUTO) for _ in range(2))
        assert found.folder.path == again.folder.path
        assert found.training.runtime.precision == found.plan.config["runtime"]["precision"]
        typed = make_job(f"runtime.precision={found.training.runtime.precision}", "runtime.compile=false")
        assert typed.folder.path == found.folder.path, "what is typed is what auto means"
        jobs[found.training.runtime.precision] = found.folder.path
    assert set(jobs) == {"float32", "bfloat16"} and jobs["float32"] != jobs["bfloat16"]


def test_tf32_is_for_cuda_where_it_is_asked_for(monkeypatch):
    with pytest.raises(ValueError, match="runtime.tf32=true: runtime.device=cpu has no such products"):
        runtime.start(plan("runtime.device=cpu", "runtime.tf32=true").runtime)
    settings = plan("runtime.device=cuda", "runtime.precision=float32", "runtime.compile=false").runtime
    pretend(monkeypatch, "cuda")
    try:
        on = runtime.start(dataclasses.replace(settings, tf32=True))
        assert on.tf32 and torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32 is True, "read by torch's compiler, which must not raise"
    finally:
        off = runtime.start(settings)
    assert not off.tf32 and torch.get_float32_matmul_precision() == "highest"


def test_an_accelerator_is_waited_for_described_and_seeded_as_any(monkeypatch):
    pretend(monkeypatch, "xpu", devices=2)
    waited, drawn = [], {"state": torch.tensor([1])}
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    begun = SimpleNamespace(
        is_initialized=lambda: True,
        get_device_name=lambda device: f"made up {device}",
        get_rng_state=lambda: drawn["state"],
        set_rng_state=lambda state: drawn.update(state=state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: begun)
    where = runtime.start(plan("runtime.device=xpu:1", "runtime.precision=float32", "runtime.compile=false").runtime)
    where.synchronise()
    assert waited == [torch.device("xpu:1")]
    described = where.describe()
    assert (described["device"], described["device_kind"], described["tf32"]) == ("made up xpu:1", "xpu", False)
    state = runtime.random_state()
    drawn["state"] = torch.tensor([2])
    runtime.set_random_state(state)
    assert drawn["state"].tolist() == [1]
    begun.is_initialized = lambda: False
    assert runtime.random_state()["accelerator"] is None, "a process that has not used it has no state of it"
    del begun.get_device_name
    assert where.describe()["device"].endswith("(xpu)")
