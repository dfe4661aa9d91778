"""C++ that is compiled where it runs: found again in the cache, and a reason in words where it cannot be had."""

import multiprocessing
import os
import platform
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.attention_case import gradients
from tests.window_case import UGLY, kernel
from variants.kernels import native, product_search, window_cpu
from variants.kernels.window import Window

pytestmark = pytest.mark.cpu_kernel


@pytest.fixture
def source(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "cache"))
    return 'extern "C" int seven() { return 7; }\n'


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_it_is_compiled_once_for_each_source(source, tmp_path, monkeypatch):
    assert native.load("seven", source).seven() == 7
    (built,) = libraries(tmp_path)
    before = built.stat().st_mtime_ns
    assert native.load("seven", source).seven() == 7
    assert built.stat().st_mtime_ns == before
    source = source.replace("7", "8")
    assert native.load("seven", source).seven() == 8
    monkeypatch.setattr(native, "_cpu", lambda: "another machine that shares the folder")
    assert native.load("seven", source).seven() == 8
    monkeypatch.setenv(native.MARCH, "x86-64-v2")
    if platform.machine() == "x86_64":
        assert native.load("seven", source).seven() == 8
        assert len(libraries(tmp_path)) == 4


def test_why_there_is_none_is_said(source, tmp_path, monkeypatch):
    assert "error" in native.load("seven", "seven\n")
    assert libraries(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(tmp_path / "nowhere"))
        assert "nowhere" in native.load("seven", source)
        patch.setenv("CXX", "false")
        assert "a C++ compiler that fails (false" in native.load("seven", source)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CXX", raising=False)
        assert native.load("seven", source) == "no C++ compiler (none of c++, g++, clang++ is on the PATH)"
    (tmp_path / "file").touch()
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "file" / "kernels"))
    assert "cannot be built" in native.load("seven", source)


def test_processes_that_build_at_once_do_not_meet(source, tmp_path):
    def built_here() -> None:
        """Without Python's end, which would wait for threads that a forked process does not have."""
        os._exit(0 if native.load("seven", source).seven() == 7 else 1)

    processes = [multiprocessing.get_context("fork").Process(target=built_here) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and len(libraries(tmp_path)) == 1


def computed(threads: int) -> list[torch.Tensor]:
    """Values and gradients of the kernels at ugly shapes in both precisions."""
    results = []
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.float64):
        case = replace(UGLY["persistent and everything"], T=50, width=5, dtype=dtype)
        inputs = case.inputs()
        y = case.call(kernel, inputs)
        scores = torch.randn(4, 9, 21, dtype=dtype, generator=torch.Generator().manual_seed(0))
        slots, sums = product_search.search(scores, 6)
        results += [y.detach(), *gradients(y, list(inputs.values())), slots.sort().values, sums.sort().values]
    return results


@pytest.mark.numeric
@pytest.mark.parametrize("threads", [3, 64])
def test_threads_change_no_bit(threads):
    """As with OMP_NUM_THREADS: also more threads than there are cores, heads or rows."""
    assert all(map(torch.equal, computed(1), computed(threads)))


def test_the_gradient_of_keys_that_nobody_meets_is_zero_from_the_first_call_on():
    """In a new thread, where the kernel has no memory yet; what it does not write is not a number."""
    x, made = torch.ones(1, 1, 1, 4, requires_grad=True), []

    def first_call() -> None:
        y = window_cpu.attend(x, x, x, Window((3,), 1))
        made.extend(torch.autograd.grad(y.sum(), [x]))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        thread = threading.Thread(target=first_call)
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(before)
    assert made[0].tolist() == [[[[0.0] * 4]]]


@pytest.mark.numeric
@pytest.mark.parametrize("where", ["key", "query", "value"])
def test_what_is_no_number_stays_none(where):
    inputs = {name: torch.randn(1, 1, 20, 4) for name in ("query", "key", "value")}
    inputs[where][:, :, 9] = torch.nan
    bad = window_cpu.attend(*inputs.values(), Window((5,))).isnan().all(-1)[0, 0]
    assert bad[9 : 10 if where == "query" else 14].all()  # others of a block may have met it too, with weight 0
