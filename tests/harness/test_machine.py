"""Settings and description of the machine: OpenMP, allocator, environment, names of CPU and GPU,
compiled graphs."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness.device import machine
from harness.device.runtime import Runtime
from harness.device.torch_settings import configure_torch
from tests.support.command_line import ROOT
from tests.support.requirements import require
from tests.support.small_configs import plan

ON_CPU = ("runtime.device=cpu", "runtime.precision=float32", "runtime.threads=1")

CHILD = """
import json, sys, bench, train
assert "torch" not in sys.modules
import resource, torch
from harness.device.machine import set_allocator
def faults(setting):
    assert set_allocator(setting) == setting
    counts = []
    for _ in range(3):  # the smallest count, because pages that the system reclaims add faults
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(2**24).sum().item()  # 64 MiB, freed at once
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)
counts = [faults("return"), faults("keep")]
import harness.loop.prepare
unwanted = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"}
print(json.dumps([*counts, len(unwanted & sys.modules.keys())]))
"""


def sets_allocator(name: str, value: str) -> bool:
    return name.startswith(("MALLOC_", "GLIBC_TUNABLES")) or (
        name == "LD_PRELOAD" and "malloc" in value
    )


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux only")
def test_a_process_sets_openmp_and_the_allocator_and_imports_no_modules_for_sharding():
    """With OMP_DISPLAY_ENV OpenMP prints the settings that it has read."""
    require(hasattr(ctypes.CDLL(None), "mallopt"), "the C library has no mallopt")
    chosen = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {
        k: v for k, v in os.environ.items() if k not in chosen and not sets_allocator(k, v)
    }
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"}
    command = [sys.executable, "-c", CHILD]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and "GOMP_SPINCOUNT = '10000'" in process.stderr, process
    faults_with_return, faults_with_keep, n_unwanted = json.loads(process.stdout)
    assert faults_with_keep < faults_with_return / 20 and n_unwanted == 0
    command[-1] = "import os, train; assert 'GOMP_SPINCOUNT' not in os.environ"
    subprocess.run(command, cwd=ROOT, env=environment | {"OMP_WAIT_POLICY": "passive"}, check=True)


def test_environment_variables_that_change_times_are_recorded(monkeypatch):
    ignored = {
        "OMP_NUM_THREADS": "3",
        "WANDB_API_KEY": "secret",
        "MALLOCS": "no library",
        "CUDA_HOME": "/anywhere",
    }
    recorded = {"MALLOC_MMAP_MAX_": "0", "OMP_WAIT_POLICY": "passive", "WINDTUNNEL_MARCH": "native"}
    before = machine.environment()
    for name, text in {
        **ignored,
        **recorded,
        "LD_PRELOAD": "/a/b/libjemalloc.so.2:/c/libtc.so",
    }.items():
        monkeypatch.setenv(name, text)
    assert machine.environment() == before | recorded | {"LD_PRELOAD": "libjemalloc.so.2:libtc.so"}
    described = configure_torch(plan(*ON_CPU).runtime).describe()
    assert described["environment"] == machine.environment()
    assert described["instruction_set"] == torch.backends.cpu.get_cpu_capability()
    assert described["machine"] == {"cpu": machine.cpu_name(), "cores": os.cpu_count()}


def test_the_name_of_a_cpu_has_its_family_model_and_stepping(monkeypatch, tmp_path):
    cloud = (
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) "
        "Processor\nstepping\t: 8\n"
    )
    (tmp_path / "cpuinfo").write_text(f"{cloud}\nprocessor\t: 1\nmodel\t\t: 999\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert (
        machine.cpu_name.__wrapped__()
        == "Intel(R) Xeon(R) Processor (family 6 model 143 stepping 8)"
    )


def test_the_name_and_driver_of_a_gpu_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    gpu = Runtime(device=torch.device("cuda"), precision="float32", compile=False)
    assert "driver" not in gpu.describe()["versions"]
    (tmp_path / "version").write_text("550.54.15\n")
    described = gpu.describe()
    assert (
        described["device"] == "A GPU"
        and described["versions"].items() >= {"driver": "550.54.15"}.items()
    )
    assert described["versions"]["cudnn"] == "91002"


def test_each_type_of_cpu_and_number_of_threads_has_its_own_folder_of_compiled_graphs(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def folder(owner: object = torch, **differs: object) -> Path:
        with monkeypatch.context() as patched:
            for name, value in differs.items():
                patched.setattr(owner, name, lambda value=value: value)
            machine.set_graph_folder()
            return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    default = folder()
    changed = [
        folder(torch.backends.cpu, get_cpu_capability="ANOTHER"),
        folder(get_num_threads=99),
        folder(machine, cpu_capabilities={"amx_tile": "another"}),
    ]
    assert len({default, *changed}) == 4 and {path.parent for path in (default, *changed)} == {
        tmp_path
    }
    assert folder() == default, "the folder must not depend on earlier calls"


@pytest.mark.parametrize(
    "name, value, effective",
    [
        ("MALLOC_MMAP_MAX_", "0", None),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=4096", "keep"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", None),
    ],
)
def test_the_allocator_is_set_only_if_the_user_did_not(monkeypatch, name, value, effective):
    for variable in [
        variable for variable, text in os.environ.items() if sets_allocator(variable, text)
    ]:
        monkeypatch.delenv(variable)
    library = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv(name, value)
    assert machine.set_allocator("keep") == effective and library.mallopt.called is (
        effective is not None
    )
