"""Fixtures and settings of all tests: no deadlines, no W&B, temporary caches, few causality
checks, and the corpus."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.requirements import require

os.environ.setdefault("MPLBACKEND", "agg")

settings.register_profile(
    "any load", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any load")

ENWIK8_4M = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "enwik8_4m.xz"


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory) -> Iterator[None]:
    """Disable W&B and set temporary cache folders. All test processes share one cache of
    compiled code."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(base / "cache"))
        patched.setenv("WINDTUNNEL_KERNELS", str(shared / "kernels"))
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patched.delenv(name)
        patched.setenv("WANDB_MODE", "disabled")
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "torchinductor"))
        if shared != base:
            from variants.kernels import product_search, window_cpu

            # the first process compiles while the others wait
            with open(shared / "compiling", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                window_cpu.obstacle(), product_search.obstacle()
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    # at the top of the file it would delay collection by seconds
    from tests.support.rank_processes import one_server

    with one_server():
        yield


@pytest.fixture(scope="session", autouse=True)
def few_causality_checks() -> Iterator[None]:
    """Check final scores at 6 to 32 cuts: 64 would take a third of a small run. See also
    ``server_preload.py``. Admission reads windows of 256 bytes: 512 places in 1,024 take
    seconds."""
    from harness.check import admission
    from harness.objective import scoring

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "MIN_CUTS", 6)
        patched.setattr(scoring, "CUTS", 32)
        patched.setattr(admission, "WINDOWS", (4, 256))
        yield


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    """Restore the settings that a run changes for the whole process."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def enwik8_4m() -> Path:
    """The compressed first 4,000,000 bytes of enwik8. If the file does not exist, the test
    skips, or fails in CI."""
    require(ENWIK8_4M.exists(), "the corpus ../shared/data/enwik8_4m.xz does not exist")
    return ENWIK8_4M


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage_collector():
    """Exempt all objects that exist so far from the ``gc.collect`` with which every run starts."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item):
    if item.get_closest_marker("cpu_kernel"):
        from variants.kernels import window_cpu

        require(
            window_cpu.obstacle() is None,
            f"the CPU kernel is not available: {window_cpu.obstacle()}",
        )
