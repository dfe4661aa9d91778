"""Slow tests of the kernels: narrower vectors, sanitizers, and Triton's compiler without a
device."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from tests.faults import sanitizer_runs
from tests.support.attention_case import assert_near
from tests.support.command_line import ROOT
from tests.support.timeouts import TIMEOUT_SECONDS
from tests.variants.test_native import kernel_outputs
from variants.kernels import native

pytestmark = [pytest.mark.cpu_kernel, pytest.mark.faults]

SPILLED_BEFORE_3_7 = "sm_80 bf16 K=64 soft dropout"
"""Here Triton 3.6 spills 80 bytes in ``key_gradient`` (docs/gpu.md), and more with one stage or a
later load of ``g_t``; 3.7 spills none."""
PROGRAM = "import os, sys, torch; from tests.variants.test_native import kernel_outputs;"
PROGRAM += "torch.save(kernel_outputs(int(os.environ['OMP_NUM_THREADS'])), sys.argv[1])"


def kernel_outputs_of_process(file, **environment: str) -> list[torch.Tensor]:
    """Return the values of ``test_native.kernel_outputs`` in a new process, which saves them to
    ``file``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], env=environment, check=True, cwd=ROOT
    )
    return torch.load(file)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the instruction sets are those of x86-64"
)
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v2"], ids=["AVX2", "SSE"])
def test_narrower_vector_instructions_compute_the_same_values(march, tmp_path):
    variables = {"OMP_NUM_THREADS": "1", "WINDTUNNEL_KERNELS": str(tmp_path), native.MARCH: march}
    for narrow, wide in zip(
        kernel_outputs_of_process(tmp_path / "saved", **variables), kernel_outputs(1), strict=True
    ):
        if wide.dtype == torch.int64:
            assert torch.equal(narrow, wide)
        else:
            assert_near(narrow, wide, tolerance=1e-5 if wide.dtype == torch.float32 else 1e-12)


def test_the_sanitizers_report_no_fault():
    """Runs as many random cases as the environment variable ``CASES`` says, by default 100."""
    march = [*filter(sanitizer_runs.is_supported, sanitizer_runs.INSTRUCTIONS)][-1]
    assert (
        sanitizer_runs.sanitized(
            march, cases=int(os.environ.get("CASES", "100")), seed=1
        ).returncode
        == 0
    )


@pytest.mark.parametrize("fault", sanitizer_runs.FAULTS)
def test_the_sanitizers_report_a_planted_fault(fault):
    march = next(filter(sanitizer_runs.is_supported, sanitizer_runs.INSTRUCTIONS))
    process = sanitizer_runs.sanitized(
        march, fault=fault, cases=20, seed=0, capture_output=True, text=True
    )
    assert process.returncode != 0 and fault in process.stderr


@pytest.mark.parametrize(
    "words, kernels",
    [
        ("sm_80 bf16 K=64 soft dropout", 3),
        ("sm_90 bf16 K=64 soft+vectors dropout vector_gradient", 1),
        ("sm_100 bf16 K=64 soft dropout key_gradient", 1),
    ],
)
def test_triton_kernels_compile_without_a_device_and_spill_no_register(tmp_path, words, kernels):
    """Triton's interpreter accepts code that its compiler refuses.
    ``tests/support/triton_spills.py`` compiles all kernels."""
    triton = pytest.importorskip("triton")
    spilling = words == SPILLED_BEFORE_3_7 and triton.__version__ < "3.7"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.triton_spills", *words.split()]
    output = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS}
    process = subprocess.run(command, env=environment, cwd=ROOT, **output)
    assert process.returncode == spilling, process.stdout + process.stderr
    assert process.stdout.count(" 0 bytes spilled") == kernels - spilling
    assert process.stdout.count(" 80 bytes spilled") == spilling
