"""What a run takes from the machine it is on, and what it says of it: OpenMP's threads, the folder of compiled graphs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.device import machine, runtime
from tests.composing import plan
from tests.forked import run
from tests.needs import need
from tests.runs import restored  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux only")
@pytest.mark.parametrize(
    ("module", "own", "expected"),
    [
        ("train", {}, "10000"),
        ("bench", {}, "10000"),
        ("bench", {"GOMP_SPINCOUNT": "77"}, "77"),
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
    described = runtime.start(plan("runtime.device=cpu", "runtime.threads=1").runtime).describe()
    assert described["environment"] == machine.environment()
    assert described["instruction_set"] == torch.backends.cpu.get_cpu_capability()


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


NORM = """
import torch
from torch._inductor import config
from harness.device import runtime
print(torch.backends.cpu.get_cpu_capability())
config.cpp.vec_isa_ok = True  # or the compiler tries out all kinds of CPU first
from tests.composing import plan
settings = plan("runtime.compile=true", "runtime.device=cpu", "runtime.threads=1").runtime
norm, x = torch.nn.RMSNorm(48), torch.randn(7, 33, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
for compiled in (norm, runtime.start(settings).forward(norm)):
    y = compiled(x)
    print(y.abs().sum().item(), *[g.abs().sum().item() for g in torch.autograd.grad(y.sin().sum(), (x, norm.weight))])
"""


def test_a_folder_of_compiled_graphs_may_be_shared_by_cpus(tmp_path):
    """What was compiled for the widest vectors of this CPU, then run with narrower ones, which is another machine to torch."""
    need(shutil.which("c++") or shutil.which("clang++"), "there is no C++ compiler for torch.compile")
    (tmp_path / "norm.py").write_text(NORM)
    capabilities = set()
    for narrow in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}):
        environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"} | narrow
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        ended = run(tmp_path / "norm.py", folder=ROOT, environment=environment)
        capability, eager, compiled = ended.out.splitlines()
        assert [float(n) for n in compiled.split()] == pytest.approx([float(n) for n in eager.split()], rel=1e-4), ended
        capabilities.add(capability)
    assert capability == "AVX2" or "avx2" not in torch.cpu.get_capabilities(), capabilities
