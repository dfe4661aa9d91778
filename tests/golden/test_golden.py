"""Every shipped variant computes the numbers in its golden file with each backend that the file
names."""

import os
import subprocess
import sys

import pytest

from tests import golden
from tests.golden import BACKENDS, CASES, differences, explanation, measure, numerics, path_of, read
from tests.golden import __main__ as command
from tests.support.requirements import require
from variants.kernels import window_cpu

REPRESENTATIVE = (
    "adaptive_span_far compressed_top_k linear_decay mhsa_relative performer "
    "product_key_memory reformer"
)
"""Cases that together cover the arithmetic of all others."""


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_golden_file_with_the_current_numerics(case):
    path, variant = f"tests/golden/{case}.json", f"conf/variant/{CASES[case][0]}.yaml"
    assert path_of(case).exists(), (
        f"{path} is missing: set numerics in {variant}, run python -m tests.golden"
    )
    current, file = numerics(case), read(case)
    assert current["variant"] is not None, (
        f"{variant} has no numerics: every shipped variant must have one"
    )
    assert file["numerics"] == current, (
        f"{path} has other numerics than the code: run python -m tests.golden"
    )
    if file.get("tolerance", golden.TOLERANCE) != golden.TOLERANCE:
        assert file["why"], f"{path} must explain its tolerance"


def test_every_golden_file_has_a_case():
    assert {path.stem for path in golden.FOLDER.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_both_backends_compute_the_golden_numbers(case):
    file = read(case)
    # the kernel last, because it may not be available
    for backend in sorted(BACKENDS, reverse=True):
        require(
            backend != "kernel" or window_cpu.obstacle() is None,
            "the CPU's kernel is not available",
        )
        numbers = measure(case, backend=backend)
        listed = backend in file["executed_flops_per_byte"]
        assert (numbers is not None) == listed, (
            f"{case}: {backend} is {'' if listed else 'not '}in the file"
        )
        changes = differences(file, numbers) if numbers else []
        assert not changes, explanation(case, changes)


def test_the_golden_numbers_do_not_depend_on_the_instruction_set():
    """A child process is needed because torch and MKL read the variables when they start."""
    variables = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.golden", "check", "plain", *REPRESENTATIVE.split()],
        cwd=golden.FOLDER.parents[1],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_a_changed_or_missing_number_is_reported_with_file_key_and_instructions(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "measure", lambda case, *, backend: _measured(backend, loss=2.0))
    assert command.main(["mhsa"]) == 0 and not differences(
        read("mhsa"), _measured("plain", loss=2.0 + 1e-9)
    )
    before = path_of("mhsa").read_text()
    monkeypatch.setattr(
        command, "measure", lambda case, *, backend: _measured(backend, loss=2.0 + 1e-8)
    )
    capsys.readouterr()
    assert command.main(["mhsa"]) == 1 and path_of("mhsa").read_text() == before
    printed = capsys.readouterr().out
    words = (
        "tests/golden/mhsa.json",
        "adamw.losses.1 is 2.0 in the file, 2.00000001 now",
        "conf/variant/mhsa.yaml",
    )
    assert all(
        word in printed
        for word in (*words, "NUMERICS in harness/model.py", "python -m tests.golden")
    )
    monkeypatch.setattr(golden, "NUMERICS", golden.NUMERICS + 1)
    assert command.main(["mhsa"]) == 0 and not differences(
        read("mhsa"), _measured("plain", loss=2.0 + 1e-8)
    )
    assert command.main(["mhsa", "check"]) == 0
    monkeypatch.setattr(command, "measure", lambda case, *, backend: None)
    assert (
        command.main(["mhsa", "check", "kernel"]) == 1
        and "kernel is not measured now" in capsys.readouterr().out
    )


def _measured(backend: str, *, loss: float) -> dict:
    return {
        "state_bytes": {backend: 8},
        "executed_flops_per_byte": {backend: 7.0},
        "adamw": {"losses": [1.0, loss]},
    }


def test_nan_and_a_number_that_only_the_file_or_only_the_measurement_has_are_differences():
    assert differences({"a": 1.0}, {"a": float("nan")})
    assert differences({}, {"a": 1}) == ["a is None in the file, 1 now"]
    assert differences({"a": 1, "b": [2]}, {"a": 1}) == ["b.0 is 2 in the file, None now"]
    both = {"numerics": {"shared": 1}, "tolerance": 1e-6, "state_bytes": dict.fromkeys(BACKENDS, 8)}
    assert not differences(both, {"state_bytes": {"plain": 8}}), "the numbers of the other backend"
