"""The device that ``runtime.device`` selects and the meaning of ``auto`` on it, with simulated
GPUs."""

import dataclasses

import pytest
import torch

from harness.device import machine, selection
from harness.device.machine import has_native_bfloat16, missing_for_compile
from harness.device.processes import ProcessGroup
from harness.device.selection import device_of, resolve_auto
from harness.device.torch_settings import configure_torch
from harness.loop.state import random_state, set_random_state
from tests.support.small_configs import plan
from tests.support.small_runs import make_run, temporary_cwd  # noqa: F401 - a fixture

AUTO = ("runtime.precision=auto", "runtime.compile=auto")
EXPLICIT = ("runtime.precision=float32", "runtime.compile=false")


def simulate_gpus(
    patch: pytest.MonkeyPatch, *, devices: int, listed=selection.NVIDIA_DEVICES / "absent"
) -> list[int]:
    """Let torch report GPUs that cannot compute. Returns a list to which
    ``torch.cuda.set_device`` appends devices."""
    chosen: list[int] = []
    # set here so that it is undone; configure_torch leaves it set
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    patch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    # the machine that runs the tests may list a GPU
    patch.setattr(selection, "NVIDIA_DEVICES", listed)
    patch.setattr(torch.cuda, "device_count", lambda: devices)
    patch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_devices_are_the_cpu_and_the_existing_gpus(monkeypatch):
    simulate_gpus(monkeypatch, devices=2)
    assert device_of("auto") == device_of("cuda") == torch.device("cuda")
    assert device_of("cuda:1").index == 1
    for wrong in ("tpu", "xpu", "cuda:2"):
        with pytest.raises(
            ValueError, match=f"runtime.device={wrong}: .* sees 2 .* are auto, cpu, cuda, cuda:N$"
        ):
            device_of(wrong)
    simulate_gpus(monkeypatch, devices=0)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(
        ValueError, match="runtime.device=cuda: .* sees 0 CUDA devices; allowed are auto, cpu$"
    ):
        device_of("cuda")


def test_auto_is_refused_where_torch_cannot_use_an_existing_gpu(monkeypatch, tmp_path):
    simulate_gpus(monkeypatch, devices=0, listed=tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_of("auto").type == "cpu", "a driver without a device"
    (tmp_path / "0000:01:00.0").mkdir()
    with pytest.raises(
        ValueError,
        match="runtime.device=auto: .* cannot use the NVIDIA device .* runtime.device=cpu",
    ):
        device_of("auto")
    assert device_of("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_of("auto").type == "cpu", "hidden on purpose"


def test_a_requirement_of_compilation_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    assert missing_for_compile() == "Python.h"
    (tmp_path / "Python.h").touch()
    assert missing_for_compile() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_for_compile() == "a C++ compiler"
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert missing_for_compile() == "triton"


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    chosen = simulate_gpus(monkeypatch, devices=2)
    # the second of its machine
    rank_3 = ProcessGroup(rank=3, world_size=4, local_rank=1, local_world_size=2)
    for name in ("auto", "cuda"):
        assert (
            configure_torch(
                plan(f"runtime.device={name}", *EXPLICIT).runtime, processes=rank_3
            ).device.index
            == 1
        )
    assert chosen == [1, 1]
    assert (
        configure_torch(plan("runtime.device=cpu").runtime, processes=rank_3).device.type == "cpu"
    )
    with pytest.raises(ValueError, match="runtime.device=cuda:1 with 4 processes"):
        configure_torch(plan("runtime.device=cuda:1").runtime, processes=rank_3)
    with pytest.raises(ValueError, match="3 processes need as many CUDA devices, torch sees 2"):
        configure_torch(
            plan().runtime,
            processes=ProcessGroup(rank=0, world_size=3, local_rank=0, local_world_size=3),
        )


def test_auto_is_bfloat16_if_native_and_compiles_on_a_gpu_with_the_requirements(
    monkeypatch, capsys
):
    for capabilities, expected in (
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": False, "avx512_f": True}, False),
    ):
        monkeypatch.setattr(
            machine, "cpu_capabilities", lambda capabilities=capabilities: capabilities
        )
        assert has_native_bfloat16(torch.device("cpu")) is expected
    simulate_gpus(monkeypatch, devices=1)
    for native, missing in ((True, "Python.h"), (False, None)):

        def is_supported(including_emulation: bool, native: bool = native) -> bool:
            return including_emulation or native

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
        monkeypatch.setattr(machine, "missing_for_compile", lambda missing=missing: missing)
        settings = resolve_auto(plan("runtime.device=cpu").runtime)
        on_gpu = dataclasses.replace(settings, device="cuda", precision="auto", compile="auto")
        word = "bfloat16" if native else "float32"
        assert resolve_auto(on_gpu) == dataclasses.replace(
            on_gpu, precision=word, compile=missing is None
        )
        assert ("Python.h is not installed" in capsys.readouterr().out) == (missing is not None)


def test_the_value_of_auto_is_part_of_the_identity_of_a_run(cwd, monkeypatch):
    """The same command continues its run on a machine where ``auto`` has the same value."""
    folders = set()
    for precision in ("float32", "bfloat16"):
        monkeypatch.setattr(
            machine, "has_native_bfloat16", lambda device, word=precision: word == "bfloat16"
        )
        run = make_run(*AUTO)
        assert run.trainer.runtime.precision == run.plan.config["runtime"]["precision"] == precision
        explicit = make_run(f"runtime.precision={precision}", "runtime.compile=false")
        assert explicit.folder.path == run.folder.path, (
            "explicit values must identify the same run as auto"
        )
        folders.add(run.folder.path)
    assert len(folders) == 2


def test_tf32_is_set_on_cuda_only_where_it_is_requested(monkeypatch):
    with pytest.raises(
        ValueError, match="runtime.tf32=true: runtime.device=cpu does not support TF32"
    ):
        configure_torch(plan("runtime.device=cpu", "runtime.tf32=true").runtime)
    simulate_gpus(monkeypatch, devices=1)
    settings = plan("runtime.device=cuda", *EXPLICIT).runtime
    try:
        on = configure_torch(dataclasses.replace(settings, tf32=True))
        assert on.tf32 and torch.get_float32_matmul_precision() == "high"
    finally:
        off = configure_torch(settings)
    assert not off.tf32 and torch.get_float32_matmul_precision() == "highest"


def test_the_random_state_of_a_gpu_is_saved_if_cuda_is_initialized(monkeypatch):
    generator = {"state": torch.tensor([1])}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert random_state()["accelerator"] is None, "an unused GPU has no random state"
    simulate_gpus(monkeypatch, devices=1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: generator["state"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: generator.update(state=state))
    state = random_state()
    generator["state"] = torch.tensor([2])
    set_random_state(state)
    assert generator["state"].tolist() == [1]
