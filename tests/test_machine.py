"""What a run takes from the machine it is on, and what it says of it: OpenMP's threads, the folder of compiled graphs."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
import torch

from harness.device import machine, runtime
from tests.composing import plan
from tests.runs import restored  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux only")
@pytest.mark.parametrize(
    ("module", "own", "expected"),
    [
        ("train", {}, "10000"),
        ("bench", {}, "10000"),
        ("bench", {"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_threads_wait_without_keeping_a_core_for_long(module, own, expected):
    """OpenMP itself says what it has read; what the user has chosen stays."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = f"import {module}, sys; assert 'torch' not in sys.modules; import torch"
    command = [sys.executable, "-c", code]
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | own
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and f"GOMP_SPINCOUNT = '{expected}'" in ended.stderr, ended


def test_what_changes_a_time_is_in_every_row(monkeypatch):
    apart = {"OMP_NUM_THREADS": "3", "WANDB_API_KEY": "secret", "MALLOCS": "no such library", "CUDA_HOME": "/anywhere"}
    inside = {
        "MALLOC_MMAP_MAX_": "0",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "1",
        "WINDTUNNEL_MARCH": "native",
    }
    before = machine.environment()
    for name, value in {**apart, **inside, "LD_PRELOAD": "/a/b/libjemalloc.so.2:/c/libtc.so"}.items():
        monkeypatch.setenv(name, value)
    assert machine.environment() == before | inside | {"LD_PRELOAD": "libjemalloc.so.2:libtc.so"}
    described = runtime.start(
        plan("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1").runtime
    ).describe()
    assert described["environment"] == machine.environment()
    assert described["instruction_set"] == torch.backends.cpu.get_cpu_capability()


def answering(monkeypatch, folder: Path, name: str, script: str) -> None:
    """A command of that name is found before all others."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def forgotten():
    """What was asked of this machine before is asked again, before and after."""
    machine.cpu_name.cache_clear(), machine.gpu_facts.cache_clear()
    yield
    machine.cpu_name.cache_clear(), machine.gpu_facts.cache_clear()


CLOUD = """processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {}
model name\t: Intel(R) Xeon(R) Processor\nstepping\t: 8\n\nprocessor\t: 1\nmodel\t\t: 999\n"""


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (CLOUD.format(143), "Intel(R) Xeon(R) Processor (family 6 model 143 stepping 8)"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "Apple M9 (implementer 0x41 part 0xd40)"),
        (None, "Apple M9"),
    ],
)
def test_cpus_of_one_name_are_told_apart(monkeypatch, tmp_path, forgotten, info, name):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    answering(monkeypatch, tmp_path, "sysctl", "echo Apple M9")
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    assert machine.cpu_name() == name


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 550.54.15, 700.00, 1980", ("550.54.15", 700.0, 1980.0)),
        ("echo '470.1, [N/A], [Not Supported]'", ("470.1", None, None)),
        ("echo 550.54.15, 700.00, 1980; exit 9", (None, None, None)),
    ],
)
def test_a_gpus_driver_and_limits_are_in_every_row(monkeypatch, tmp_path, forgotten, script, found):
    """As ``nvidia-smi`` says of the very GPU that the run has; the GPU is pretended."""
    answering(monkeypatch, tmp_path, "nvidia-smi", f'echo "$@" > {tmp_path}/asked; {script}')
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(uuid="12-ab"))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    where = runtime.Runtime(device=torch.device("cuda"), precision="float32", compile=False)
    driver, watts, mhz = found
    for described in (where.describe(), where.describe()):
        assert described["device"] == "A GPU" and described["versions"]["cudnn"] == "91002"
        assert described["versions"].get("driver") == driver
        limits = {"power_limit_w": watts, "clock_limit_mhz": mhz}
        assert described["machine"] == {"cpu": machine.cpu_name(), "cores": os.cpu_count()} | limits
    assert "--id=GPU-12-ab" in (tmp_path / "asked").read_text()


# The folder of compiled graphs


@pytest.fixture(autouse=True)
def same_folder_after(monkeypatch):
    """Runs set it for their process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))


def folder_of(monkeypatch, **differs) -> Path:
    with monkeypatch.context() as patched:
        for name, value in differs.items():
            owner = torch.backends.cpu if name == "get_cpu_capability" else torch.cpu if "cap" in name else torch
            patched.setattr(owner, name, lambda value=value: value)
        machine.use_own_compiled_graphs()
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_compiled_graphs_lie_apart_for_each_kind_of_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    own = folder_of(monkeypatch)
    capabilities = dict(torch.cpu.get_capabilities()) | {"amx_tile": "another"}
    others = [
        folder_of(monkeypatch, get_cpu_capability="ANOTHER"),
        folder_of(monkeypatch, get_num_threads=99),
        folder_of(monkeypatch, get_capabilities=capabilities),
    ]
    assert len({own, *others}) == 4 and {path.parent for path in (own, *others)} == {tmp_path}
    assert folder_of(monkeypatch) == own  # also after others, and in a process that was started by this one
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert folder_of(monkeypatch).name == own.name and folder_of(monkeypatch).parent != tmp_path
