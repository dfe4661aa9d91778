"""Our kernels in odd circumstances: more threads than there are cores from the start, and sanitizers that must find a fault."""

import os
import subprocess
import sys

import pytest

from tests.command import ROOT
from tests.faults import sanitize

pytestmark = [pytest.mark.cpu_kernel, pytest.mark.faults]

DIGESTS = """
import hashlib, os
from tests.test_native import attended, mixed
for tensor in (*mixed(), *attended(int(os.environ["OMP_NUM_THREADS"]))):  # torch's own choice, then so many
    print(hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest())
"""


def test_threads_of_the_environment_change_no_bit():
    told = []
    for threads in ("1", "64"):
        own = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([sys.executable, "-c", DIGESTS], env=own, capture_output=True, text=True, check=True)
        told.append(ran.stdout.split())
    assert told[0] == told[1] and len(told[0]) > 6


def test_no_complaint_of_the_sanitizers():
    """Ten thousand for each instruction set: the script."""
    march = [*filter(sanitize.runs, sanitize.INSTRUCTIONS)][-1]
    assert sanitize.sanitized(march, cases=100, seed=1).returncode == 0


@pytest.mark.parametrize("fault", sanitize.FAULTS)
def test_a_planted_fault_is_found(fault):
    assert sanitize.finds(fault, march=next(filter(sanitize.runs, sanitize.INSTRUCTIONS)))
