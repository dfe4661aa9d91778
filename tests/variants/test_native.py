"""C++ kernels, which are compiled at first use: the cache, failures to compile, threads, and
edge cases."""

import multiprocessing
import os
import platform
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.attention_case import gradients
from tests.support.window_case import SMALL_CASES, kernel
from variants.kernels import native, product_search, window_cpu
from variants.kernels.window import Window

pytestmark = pytest.mark.cpu_kernel


@pytest.fixture
def source(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "cache"))
    return 'extern "C" int seven() { return 7; }\n'


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_a_library_is_compiled_once_for_each_source_cpu_and_instruction_set(
    source, tmp_path, monkeypatch
):
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


def test_a_failed_compilation_returns_the_reason(source, tmp_path, monkeypatch):
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
        assert (
            native.load("seven", source)
            == "no C++ compiler (none of c++, g++, clang++ is on the PATH)"
        )
    (tmp_path / "file").touch()
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path / "file" / "kernels"))
    assert "cannot be built" in native.load("seven", source)


def test_several_processes_may_build_a_library_at_once(source, tmp_path):
    def build():
        # sys.exit would wait for threads that a forked process does not have.
        os._exit(0 if native.load("seven", source).seven() == 7 else 1)

    processes = [multiprocessing.get_context("fork").Process(target=build) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and len(
        libraries(tmp_path)
    ) == 1


def kernel_outputs(threads: int) -> list[torch.Tensor]:
    """Return outputs and gradients of the kernels in both precisions, at sizes that are not
    multiples of the vector width."""
    outputs = []
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.float64):
        case = replace(SMALL_CASES["persistent and everything"], T=50, width=5, dtype=dtype)
        inputs = case.inputs()
        y = case.call(kernel, inputs)
        scores = torch.randn(4, 9, 21, dtype=dtype, generator=torch.Generator().manual_seed(0))
        slots, sums = product_search.search(scores, 6)
        outputs += [
            y.detach(),
            *gradients(y, list(inputs.values())),
            slots.sort().values,
            sums.sort().values,
        ]
    return outputs


@pytest.mark.numeric
@pytest.mark.parametrize("threads", [3, 64])
def test_the_number_of_threads_changes_no_bit(threads):
    """64 threads are more than the heads of all streams (4) and the rows of scores (36)."""
    assert all(map(torch.equal, kernel_outputs(1), kernel_outputs(threads)))


def test_keys_that_no_query_sees_have_a_gradient_of_zero():
    """In a new thread the kernel reuses no memory of earlier calls, and memory that it does not
    write is NaN."""
    x, gradients_of_x = torch.ones(1, 1, 1, 4, requires_grad=True), []

    def first_call():
        y = window_cpu.attend(x, x, x, Window((3,), 1))
        gradients_of_x.extend(torch.autograd.grad(y.sum(), [x]))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        thread = threading.Thread(target=first_call)
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(before)
    assert gradients_of_x[0].tolist() == [[[[0.0] * 4]]]


@pytest.mark.numeric
@pytest.mark.parametrize("where", ["key", "query", "value"])
def test_nan_in_an_input_gives_nan_in_the_output(where):
    inputs = {name: torch.randn(1, 1, 20, 4) for name in ("query", "key", "value")}
    inputs[where][:, :, 9] = torch.nan
    nan_rows = window_cpu.attend(*inputs.values(), Window((5,))).isnan().all(-1)[0, 0]
    # other rows of the block may be NaN as well
    assert nan_rows[9 : 10 if where == "query" else 14].all()
