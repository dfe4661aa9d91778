"""``tests/gpu_first_run.sh``: its commands compose for a GPU, it stops at the first failure, and it checks rows."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.plan.build import plan_run
from tests import gpu_rows
from tests.command_line import ROOT
from tests.small_configs import CONF, VARIANT_NAMES, compose_config

STUB = """#!/bin/sh
case "$*" in *device_count*) echo 2; exit;; esac
echo "$(basename "$0") $*" >>calls
[ "$(wc -l <calls)" -ne "$FAIL_AT" ]
"""
"""A program that writes its command to ``calls``, fails at call ``FAIL_AT``, and reports two devices."""


def run_script(folder: Path, *, fail_at: int) -> tuple[int, list[str]]:
    """Exit code of the script and the commands that it called."""
    folder.mkdir()
    for name in ("nvidia-smi", "c++", "python", "torchrun"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "FAIL_AT": str(fail_at)}
    script = ["sh", str(ROOT / "tests" / "gpu_first_run.sh")]
    code = subprocess.run(script, cwd=folder, env=environment, check=False, capture_output=True).returncode
    return code, (folder / "calls").read_text().splitlines()


def test_the_script_stops_at_the_first_command_that_fails(tmp_path):
    code, commands = run_script(tmp_path / "all", fail_at=0)
    assert code == 0 and len(commands) == 13
    for call in range(1, len(commands) + 1):
        assert run_script(tmp_path / str(call), fail_at=call) == (1, commands[:call])


def test_the_commands_of_the_script_compose_for_a_gpu(tmp_path):
    _, commands = run_script(tmp_path / "all", fail_at=0)
    composed = []
    for words in (command.split() for command in commands):
        keys = [word for word in words if "=" in word and not word.startswith("-")]
        bench_command = next((word[6:] for word in words if word.startswith("bench.")), None)
        if "train.py" in words:
            assert plan_run(compose_config(*keys)).runtime.device == "cuda"
        elif bench_command:
            assert compose_config(*keys, name=bench_command).runtime.device == "cuda"
        composed += ["train"] * ("train.py" in words) + [bench_command] * bool(bench_command)
    assert composed == ["check", "fit", "train", "train", "train", "cost", "train"]


def test_sweeps_for_a_gpu_leave_out_comparisons_combinations_and_variants_without_a_kernel():
    lists = [OmegaConf.load(CONF / "sweep" / f"{name}.yaml").hydra.sweeper.params for name in ("smoke", "leaderboard")]
    assert lists[0].variant == lists[1].variant
    comparisons = {"all_attention_6", "all_attention_10", "linear_decay", "mhsa_8_layers", "mhsa_alibi"}
    comparisons |= {"performer_decay", "mhsa_memory_flops", "uniform_span", *(f"mhsa_span_{n}" for n in (8, 32, 128))}
    swept = set(lists[0].variant.split(","))
    combinations = set(OmegaConf.load(CONF / "evidence.yaml").combinations.split(",")) - swept
    without_kernel = {"dynamic_span"}
    assert swept == {*VARIANT_NAMES} - comparisons - combinations - without_kernel


@pytest.fixture
def rows(tmp_path):
    """A function that writes the files of a successful first run; its arguments change the file or row ``name``."""
    summary = {"valid_bits_per_byte": 3.0, "bytes_per_second": 200.0, "memory": {"peak_bytes": 100 * 2**20}}

    def write(name: str = "", **changes: object) -> Path:
        for run in ("compiled", "again", "eager"):
            folder = tmp_path / run / "latest"
            folder.mkdir(parents=True, exist_ok=True)
            speed = {"bytes_per_second": 100.0} if run == "eager" else {}
            (folder / "summary.json").write_text(json.dumps(summary | speed | (changes if run == name else {})))
        (tmp_path / "compiled.log").write_text("Recompiling function f\n" * (9 if name == "log" else 2))
        (tmp_path / "fit.txt").write_text(f"peak, MiB  {changes['peak'] if name == 'fit' else 110}  of a step\n")
        cost = {"status": "measured", "utilisation": {"share": 0.3}} | (changes if name == "cost" else {})
        (tmp_path / "cost.jsonl").write_text(json.dumps(cost) + "\n")
        return tmp_path

    return write


def test_rows_that_agree_pass(rows, capsys):
    gpu_rows.check(rows(), device="cuda")
    assert "recompilations: {'f': 2}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("again", {"valid_bits_per_byte": 3.0001}, "deterministic"),
        ("eager", {"valid_bits_per_byte": 3.1}, "rounding"),
        ("eager", {"bytes_per_second": 300.0}, "does not pay"),
        ("log", {}, "dynamo's limit"),
        ("fit", {"peak": 10}, "far from"),
        ("cost", {"utilisation": {"share": 1.2}}, "between 0 and 1"),
        ("cost", {"status": "failed", "reason": "out of memory"}, "out of memory"),
    ],
)
def test_rows_that_disagree_are_an_error(rows, name, changes, message):
    with pytest.raises(AssertionError, match=message):
        gpu_rows.check(rows(name, **changes), device="cuda")
