"""No number moves by accident: every shipped variant computes what its golden file says, by plain PyTorch and by the kernel."""

import os
import subprocess
import sys

import pytest

from tests import golden
from tests.golden import BACKENDS, CASES, VARIANTS, differences, explained, measure, numerics, path_of, read
from tests.golden import __main__ as command
from tests.needs import need
from variants.kernels import window_cpu

TELLING = "adaptive_span_far compressed_top_k linear_decay mhsa_relative performer product_key_memory reformer"
"""Cases that have all kinds of arithmetic between them; the others combine these."""


@pytest.mark.parametrize("case", CASES)
def test_every_variant_has_a_golden_file_of_its_numerics(case):
    assert path_of(case).exists(), (
        f"tests/golden/{case}.json is missing: raise or set numerics, run python -m tests.golden"
    )
    current, file = numerics(case), read(case)
    assert current["variant"] is not None, (
        f"conf/variant/{CASES[case][0]}.yaml has no numerics: every shipped variant has one"
    )
    assert file["numerics"] == current, (
        f"tests/golden/{case}.json is of other numerics than now: run python -m tests.golden"
    )
    assert file.get("tolerance", golden.TOLERANCE) == golden.TOLERANCE or file["why"]


def test_no_golden_file_is_of_nothing():
    assert {path.stem for path in golden.FOLDER.glob("*.json")} == set(CASES) >= set(VARIANTS)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_golden(case):
    """Both backends in one test, which composes once; the kernel last, because it may not be here."""
    file = read(case)
    for backend in sorted(BACKENDS, reverse=True):
        need(backend != "kernel" or window_cpu.obstacle() is None, "the CPU's kernel is not available")
        numbers = measure(case, backend=backend)
        assert (numbers is not None) == (backend in file["executed_flops_per_byte"]), f"{case}: has it a {backend}?"
        moved = differences(file, numbers or {})
        assert not moved, explained(case, moved)


def test_numbers_are_golden_by_the_plainest_instructions_as_well():
    """Of a child process: torch and MKL read the variables when they begin."""
    plainest = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.golden", "check", "plain", *TELLING.split()],
        cwd=golden.FOLDER.parents[1],
        env=os.environ | plainest,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_who_moves_a_number_is_told_file_key_both_numbers_and_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "measure", lambda case, *, backend: _measured(backend, loss=2.0))
    assert command.main(["mhsa"]) == 0 and not differences(read("mhsa"), _measured("plain", loss=2.0 + 1e-9))
    before = path_of("mhsa").read_text()
    monkeypatch.setattr(command, "measure", lambda case, *, backend: _measured(backend, loss=2.0 + 1e-8))
    capsys.readouterr()
    assert command.main(["mhsa"]) == 1 and path_of("mhsa").read_text() == before
    printed = capsys.readouterr().out
    for word in (
        "tests/golden/mhsa.json",
        "adamw.losses.1 is 2.0 in the file, 2.00000001 now",
        "conf/variant/mhsa.yaml",
    ):
        assert word in printed
    assert "NUMERICS in harness/model.py" in printed and "python -m tests.golden" in printed
    monkeypatch.setattr(golden, "NUMERICS", golden.NUMERICS + 1)
    assert command.main(["mhsa"]) == 0 and not differences(read("mhsa"), _measured("plain", loss=2.0 + 1e-8))
    assert command.main(["mhsa", "check"]) == 0


def _measured(backend: str, *, loss: float) -> dict:
    return {"state_bytes": {backend: 8}, "executed_flops_per_byte": {backend: 7.0}, "adamw": {"losses": [1.0, loss]}}


def test_a_missing_number_is_a_difference():
    assert differences({}, {"a": 1}) == ["a is None in the file, 1 now"]
    assert differences({"a": 1.0}, {"a": float("nan")}) and not differences({"a": 1, "b": 2}, {"a": 1})
    assert len(BACKENDS) == 2
