"""The allocator's setting: what it does to the pages of a process, when it can do nothing, and where it is said."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.device import allocator
from tests.needs import need
from tests.runs import restored  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]
FAULTS = """
import resource, sys, torch
from harness.device import runtime
from tests.composing import plan
torch.set_num_threads(1)
def faults(setting):
    described = runtime.start(plan("runtime.device=cpu", f"runtime.allocator={setting}").runtime).describe()
    assert described["allocator"] == setting, described
    def work():
        return torch.ones(2**24).sum().item()  # 64 MiB, freed at once
    for _ in range(3):
        work()
    counts = []
    for _ in range(5):  # a system that takes idle pages back adds to some of them
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            work()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)
print(faults("return"), faults("keep"))
"""


def without_own(**more: str) -> dict[str, str]:
    """The environment of a user who leaves the allocator alone, with ``more`` in it."""
    kept = {name: value for name, value in os.environ.items() if not allocator.is_users_own({name: value})}
    return kept | more


def test_a_process_that_keeps_its_pages_takes_hardly_any_from_the_system():
    need(hasattr(ctypes.CDLL(None), "mallopt"), "the C library has no mallopt")
    ended = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, env=without_own(), capture_output=True, text=True, check=True
    )
    returned, kept = map(int, ended.stdout.split())
    assert kept < returned / 20, ended.stdout


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("MALLOC_MMAP_MAX_", "0", True),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=4096", False),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", True),
        ("LD_PRELOAD", "/usr/lib/libomp.so", False),
    ],
)
def test_what_the_user_has_chosen_stays(monkeypatch, name, value, own):
    for other in set(os.environ) - set(without_own()):
        monkeypatch.delenv(other)
    library = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv(name, value)
    assert allocator.use("keep") == (None if own else "keep")
    assert library.mallopt.called is not own
