"""``tests/gpu_first_run.sh``: its commands compose for a GPU, none stops the others, and its
rows become tables."""

import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bench.published import gpu_sections
from harness.plan.build import plan_run
from harness.record.rows import append_row, read_rows
from tests.support import gpu_rows
from tests.support.bench_rows import cost_row
from tests.support.command_line import ROOT
from tests.support.gpu_profile import profile_step
from tests.support.small_configs import CONF, TINY, VARIANT_NAMES, compose_config

STUB = """#!/bin/sh
case "$*" in -c*) echo 2; exit;; esac
echo "$*" >>"$CALLS"
case "$*" in *"$FAIL"*) exit 3;; esac
"""
"""A Python that writes its arguments to ``CALLS``, fails for those with ``FAIL``, and reports
two devices."""


def run_script(folder: Path, *words: str, fail: str = "none") -> tuple[int, list[list[str]], str]:
    """Return the exit code of the script, the arguments of the commands that it ran, and what it
    printed."""
    stub, calls = folder / "python", folder / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    calls.write_text("")
    environment = {"PYTHON": str(stub), "CALLS": str(calls), "FAIL": fail, "CORPUS": ""}
    environment |= {name: str(folder / name) for name in ("ROWS", "RUNS")}
    script = ["sh", str(ROOT / "tests" / "gpu_first_run.sh"), *words]
    outcome = subprocess.run(
        script, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return (
        outcome.returncode,
        [line.split() for line in calls.read_text().splitlines()],
        outcome.stdout,
    )


def test_a_failure_stops_no_other_command_and_only_what_failed_runs_again(tmp_path):
    code, failed, out = run_script(tmp_path, "kernels", "profile", fail="-m gpu")
    assert code == 1 and "kernels: FAILED with exit code 3" in out
    assert [call[1] for call in failed] == ["pytest", *["tests.support.gpu_profile"] * 4]
    code, again, out = run_script(tmp_path, "kernels", "profile", "costs")
    assert [call[1] for call in again] == ["pytest", *["bench.cost"] * 5] and out.count(
        "done before"
    ) == 4
    assert run_script(tmp_path, "kernels")[1] == []


def test_the_commands_of_the_script_compose_for_a_gpu(tmp_path):
    code, calls, _ = run_script(tmp_path)
    measured = set()
    for module, words in ((call[1] if call[0] == "-m" else call[0], call) for call in calls):
        keys = [word for word in words if "=" in word and not word.startswith("-")]
        if "train.py" in words or module == "tests.support.gpu_profile":
            assert plan_run(compose_config(*keys)).runtime.device == "cuda"
        elif module.startswith("bench."):
            config = compose_config(*keys, name=module[6:])
            assert config.runtime.device == "cuda"
            measured |= {*(config.get("variants") or ())}
    assert code == 0 and {*VARIANT_NAMES} - measured == {f"mhsa_span_{n}" for n in (8, 32, 128)}
    code, calls, plan = run_script(tmp_path, "--plan")
    assert (code, calls) == (0, []) and "at most 1220 s in all" in plan


def test_sweeps_for_a_gpu_leave_out_comparisons_combinations_and_variants_without_a_kernel():
    lists = [
        OmegaConf.load(CONF / "sweep" / f"{name}.yaml").hydra.sweeper.params
        for name in ("smoke", "leaderboard")
    ]
    assert lists[0].variant == lists[1].variant
    comparisons = {
        "all_attention_6",
        "all_attention_10",
        "linear_decay",
        "mhsa_8_layers",
        "mhsa_alibi",
    }
    comparisons |= {
        "performer_decay",
        "mhsa_memory_flops",
        "uniform_span",
        *(f"mhsa_span_{n}" for n in (8, 32, 128)),
    }
    comparisons |= {"mhsa_relative", "adaptive_span_alibi", "longformer_alibi"}
    comparisons |= {"gated_delta_softmax_alibi", "gated_delta_softmax_rotary"}
    swept = set(lists[0].variant.split(","))
    combinations = set(OmegaConf.load(CONF / "evidence.yaml").combinations.split(",")) - swept
    without_kernel = {"dynamic_span"}
    assert swept == {*VARIANT_NAMES} - comparisons - combinations - without_kernel


RUN = {"valid_bits_per_byte": 3.0, "bytes_per_second": 200.0, "memory": {"peak_bytes": 100}}
RUNS = {"compiled": RUN, "again": RUN, "eager": RUN | {"bytes_per_second": 100.0}}


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("again", {"valid_bits_per_byte": 3.0001}, "deterministic"),
        ("eager", {"valid_bits_per_byte": 3.1}, "rounding"),
        ("eager", {"bytes_per_second": 300.0}, "does not pay"),
        ("eager", {"memory": {"peak_bytes": 10}}, "far from"),
    ],
)
def test_only_runs_that_disagree_are_an_error(name, changes, message):
    gpu_rows.check(RUNS, predicted=110, device="cuda")
    with pytest.raises(AssertionError, match=message):
        gpu_rows.check(RUNS | {name: RUNS[name] | changes}, predicted=110, device="cuda")


def test_published_rows_become_tables(tmp_path):
    file = tmp_path / "gpu.jsonl"
    file.write_text((ROOT / "bench" / "results" / "gpu.jsonl").read_text())
    run = read_rows(file)[0]
    run["summary"]["budget"] = {"bytes": 16e6}
    append_row(tmp_path / "training.jsonl", run)
    append_row(tmp_path / "cost.jsonl", cost_row(compile=True, utilisation={"share": 0.3}))
    profiled = profile_step("variant=mhsa", *TINY, "data=synthetic_text", "data.bytes=20000")
    assert 0 < profiled["busy_ms"] < profiled["step_ms"]
    append_row(tmp_path / "profile.jsonl", profiled | {"launches": 1234})
    for _ in range(2):  # rows of an earlier call are replaced
        gpu_rows.publish(tmp_path, file=file)
        assert len(read_rows(file)) == 4 + 3
    tables = gpu_sections(file)
    assert (
        "### Equal bytes" in tables
        and "| mechanism | 512 compiled |" in tables
        and "| `mhsa` | 30 |" in tables
    )
    assert (
        "### Launches of kernels\n\n| mechanism | 16 |\n| --- | --: |\n| `mhsa` | 1,234 |" in tables
    )
    append_row(tmp_path / "cost.jsonl", cost_row(utilisation={"share": 1.2}))
    with pytest.raises(AssertionError, match="between 0 and 1"):
        gpu_rows.publish(tmp_path, file=file)
