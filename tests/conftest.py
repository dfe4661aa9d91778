"""What all tests share: few threads, patience, no W&B of the user's, caches of their own, and the corpus beside the checkout."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import need

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes run tests as there are cores

settings.register_profile("any load", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

ENWIK8_4M = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "enwik8_4m.xz"


@pytest.fixture(scope="session", autouse=True)
def sealed_off(tmp_path_factory) -> Iterator[None]:
    """No W&B. What is compiled is so once for all processes of these tests, and not kept in the user's caches."""
    base = tmp_path_factory.getbasetemp()
    together = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(base / "cache"))
        patched.setenv("WINDTUNNEL_KERNELS", str(together / "kernels"))
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patched.delenv(name)
        patched.setenv("WANDB_MODE", "disabled")
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(together / "torchinductor"))
        if together != base:
            from variants.kernels import product_search, window_cpu

            with open(together / "compiling", "w") as lock:  # the first process compiles, and the others wait
                fcntl.flock(lock, fcntl.LOCK_EX)
                window_cpu.obstacle(), product_search.obstacle()
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_from_one_server() -> Iterator[None]:
    from tests.many import one_server  # what it imports takes seconds, which collecting need not wait for

    with one_server():
        yield


@pytest.fixture(scope="session", autouse=True)
def few_places() -> Iterator[None]:
    """A final score predicts few places again: 64 would be a third of a small run. ``tests/ahead.py`` has it for processes."""
    from harness.loop import scoring

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "PLACES", 6)
        yield


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a run sets for its whole process is as before at the end."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def enwik8_4m() -> Path:
    """The first 4,000,000 bytes of enwik8, packed; a run without them skips, but CI must have them."""
    need(ENWIK8_4M.exists(), "the corpus shared/data/enwik8_4m.xz does not lie beside this checkout")
    return ENWIK8_4M


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_is_no_garbage() -> None:
    """Every job begins with a collection, which need not look at all that tests import."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cpu_kernel"):
        from variants.kernels import window_cpu

        need(window_cpu.obstacle() is None, f"the CPU's kernel cannot be had: {window_cpu.obstacle()}")
