"""C++ that is compiled where it runs: found again in the cache, and a reason in words where it cannot be had."""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.attention_case import assert_near
from variants.kernels import native, product_search, window_cpu
from variants.kernels.window import PastKV, Persistent, Window

ROOT = Path(__file__).resolve().parents[1]
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
    code = f"from variants.kernels import native; assert native.load('seven', {source!r}).seven() == 7"
    runs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ)) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert len(libraries(tmp_path)) == 1


def attended(threads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 4, 50, 8, requires_grad=True) for _ in range(3))
    z, p = torch.tensor([0.0, 3.5, 9.0, 20.0], requires_grad=True), torch.randn(31, 8, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = window_cpu.attend(q, k, v, Window((31,) * 4, z=z, ramp=10), vectors=p)
        return [y, *torch.autograd.grad(y.square().sum(), [q, k, v, z, p])]
    finally:
        torch.set_num_threads(before)


@pytest.mark.numeric
@pytest.mark.parametrize("threads", [3, 64])
def test_threads_change_no_bit(threads):
    """As with OMP_NUM_THREADS: also more threads than there are cores, heads or rows."""
    assert all(map(torch.equal, attended(1), attended(threads)))


def test_the_gradient_of_keys_that_nobody_meets_is_zero_from_the_first_call_on():
    """In a new thread, where the kernel has no memory yet; what it does not write is not a number."""
    x, found = torch.ones(1, 1, 1, 4, requires_grad=True), []

    def first_call() -> None:
        y = window_cpu.attend(x, x, x, Window((3,), 1))
        found.extend(torch.autograd.grad(y.sum(), [x]))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        thread = threading.Thread(target=first_call)
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(before)
    assert found[0].tolist() == [[[[0.0] * 4]]]


@pytest.mark.numeric
@pytest.mark.parametrize("where", ["one key", "all keys", "query", "value"])
def test_what_is_no_number_stays_none(where):
    q, k, v = (torch.randn(1, 1, 20, 4) for _ in range(3))
    if where == "all keys":
        k[:] = torch.nan
    else:
        {"one key": k, "query": q, "value": v}[where][:, :, 9] = torch.nan
    found = window_cpu.attend(q, k, v, Window((5,))).isnan().all(-1)[0, 0]
    rows = torch.arange(20)
    meet = {"all keys": rows >= 0, "query": rows == 9}.get(where, (rows >= 9) & (rows < 14))
    assert found[meet].all()  # others of a block may have met it too, with weight 0


NARROW = """
import sys, torch
from tests.test_native import mixed
torch.save(mixed(), sys.argv[1])
"""


def mixed() -> list[torch.Tensor]:
    """Values and gradients of ugly shapes in both precisions."""
    found = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        q, k, v, u = (torch.randn(2, 3, n, 5, dtype=dtype, generator=generator) for n in (21, 21, 21, 21))
        before = [torch.randn(2, 3, 37, 5, dtype=dtype, generator=generator) for _ in range(2)]
        e, w = (torch.randn(3, 5, 5, dtype=dtype, generator=generator) for _ in range(2))
        p, z = torch.randn(30, 5, dtype=dtype, generator=generator), torch.tensor([0.0, 3.5, 21.0], dtype=dtype)
        leaves = [x.requires_grad_() for x in (q, k, v, u, *before, e, w, p, z)]
        past = [PastKV((0, 1, 2), *before)]
        given = {"past": past, "vectors": p, "persistent": Persistent(u, e, w)}
        y = window_cpu.attend(q, k, v, Window((30,) * 3, 1, z, 8), **given)
        slots, sums = product_search.search(torch.randn(4, 9, 21, dtype=dtype, generator=generator), 6)
        found += [y, *torch.autograd.grad(y.square().sum(), leaves), slots.sort().values, sums.sort().values]
    return [x.detach() for x in found]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="those CPUs are of x86-64")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v2"], ids=["AVX2", "SSE"])
def test_narrower_vectors_give_the_same(march, tmp_path):
    command = [sys.executable, "-c", NARROW, str(tmp_path / "found.pt")]
    environment = os.environ | {native.MARCH: march, "WINDTUNNEL_KERNELS": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, check=True, env=environment)
    for narrow, own in zip(torch.load(tmp_path / "found.pt"), mixed(), strict=True):
        if own.dtype == torch.int64:
            assert torch.equal(narrow, own)
        else:
            assert_near(narrow, own, tolerance=1e-5 if own.dtype == torch.float32 else 1e-12)
