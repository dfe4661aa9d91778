"""Our kernels in odd circumstances: more threads than there are cores from the start, narrower vectors, sanitizers that must find
a fault, and the GPU's as the compiler takes them without a device."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from tests.attention_case import assert_near
from tests.command_line import ROOT
from tests.faults import sanitizer_runs
from tests.test_native import computed
from tests.timeouts import TIMEOUT_SECONDS
from variants.kernels import native

pytestmark = [pytest.mark.cpu_kernel, pytest.mark.faults]

SAVED = "import os, sys, torch; from tests.test_native import computed;"
SAVED += "torch.save(computed(int(os.environ['OMP_NUM_THREADS'])), sys.argv[1])"


def computed_by(file, **environment: str) -> list[torch.Tensor]:
    """What a process of its own computes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    subprocess.run([sys.executable, "-c", SAVED, str(file)], env=environment, check=True, cwd=ROOT)
    return torch.load(file)


def test_threads_of_the_environment_change_no_bit(tmp_path):
    one, many = (computed_by(tmp_path / threads, OMP_NUM_THREADS=threads) for threads in ("1", "64"))
    assert all(map(torch.equal, one, many))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="those CPUs are of x86-64")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v2"], ids=["AVX2", "SSE"])
def test_narrower_vectors_give_the_same(march, tmp_path):
    places = {"OMP_NUM_THREADS": "1", "WINDTUNNEL_KERNELS": str(tmp_path), native.MARCH: march}
    for narrow, wide in zip(computed_by(tmp_path / "saved", **places), computed(1), strict=True):
        if wide.dtype == torch.int64:
            assert torch.equal(narrow, wide)
        else:
            assert_near(narrow, wide, tolerance=1e-5 if wide.dtype == torch.float32 else 1e-12)


def test_no_complaint_of_the_sanitizers():
    """A hundred cases, or as many as ``CASES`` in the environment says."""
    march = [*filter(sanitizer_runs.runs, sanitizer_runs.INSTRUCTIONS)][-1]
    assert sanitizer_runs.sanitized(march, cases=int(os.environ.get("CASES", "100")), seed=1).returncode == 0


@pytest.mark.parametrize("fault", sanitizer_runs.FAULTS)
def test_a_planted_fault_is_found(fault):
    march = next(filter(sanitizer_runs.runs, sanitizer_runs.INSTRUCTIONS))
    ended = sanitizer_runs.sanitized(march, fault=fault, cases=20, seed=0, capture_output=True, text=True)
    assert ended.returncode != 0 and fault in ended.stderr


@pytest.mark.parametrize(
    ("what", "kernels"),
    [
        ("sm_80 bf16 K=64 soft dropout", 3),
        ("sm_90 bf16 K=64 soft+vectors dropout vector_gradient", 1),
        ("sm_100 bf16 K=64 soft dropout key_gradient", 1),
    ],
)
def test_tiles_in_use_compile_without_a_device_and_spill_nothing(tmp_path, what, kernels):
    """The interpreter takes Python that the compiler does not. ``tests/triton_spills.py`` compiles all of them."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.triton_spills", *what.split()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 bytes spilled") == kernels
