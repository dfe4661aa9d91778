"""``bench.check agree=true`` compares backends with float64 on a device; benchmarks measure the
selected backend."""

import pytest
import torch

from bench.cost_worker import CostWorker, Task
from bench.peer_workers import PeerWorker
from harness.check import select_backend
from harness.check.small import contract_plan
from harness.plan.build import replan
from tests.support.command_line import CommandOutcome, call
from tests.support.command_line import empty_folder as cwd  # noqa: F401 - a fixture
from tests.support.small_configs import TINY, plan
from variants.conformance import Finding
from variants.kernels import window

SMALL = (
    *TINY,
    "data=recall",
    "data.bytes=20000",
    "budget.steps=4",
    "eval.selection_bytes=400",
    "eval.bytes=400",
)
SMALL += ("optim=adamw",)
QUICK = (
    "runtime.precision=float32",
    "runtime.device=cpu",
    "runtime.threads=1",
    "model.d_model=32",
    "model.layers=1",
)
CHOICES = ("position=rotary", "model.cache=kv", "model.attend_self=true")


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    """Let checks of the contract pass without computation, and compare backends on short
    segments."""
    monkeypatch.setattr(
        "harness.check.conformance.findings",
        lambda plan: [Finding(plan.runtime.backend, True, "kept")],
    )
    monkeypatch.setattr("harness.check.admission.findings_at_sizes", lambda plan: [])
    monkeypatch.setattr(
        select_backend.agreement, "__kwdefaults__", {"segments": (30, 31), "tolerance": 1e-4}
    )


def check(*words: str) -> CommandOutcome:
    return call("bench/check.py", "-m", *QUICK, *CHOICES, *words)


def test_backends_agree_and_a_backend_that_cannot_run_is_refused(cwd):  # noqa: F811
    outcome = check("agree=true", "variant=adaptive_span", "runtime.backend=plain,kernel")
    assert outcome.code == 0, outcome.out + outcome.err
    lines = [line for line in outcome.out.splitlines() if "agrees" in line]
    assert [line.partition(":")[0] for line in lines] == [
        f"pass  agrees with float64 on cpu, {backend}, float32"
        for backend in ("plain", "kernel+plain")
    ]
    assert "at most 0.0001" in lines[1]
    outcome = check("agree=true", "variant=dynamic_span", "runtime.backend=fused")
    assert (
        outcome.code == 2
        and "runtime.backend=fused cannot run with spans that depend on the input" in outcome.err
    )


@pytest.mark.parametrize(
    "wrong, words", [("gradient", "query.weight, at"), ("value", "at most 0.0001")]
)
def test_a_wrong_output_or_gradient_fails(cwd, monkeypatch, wrong, words):  # noqa: F811
    """The backend is wrong on the device, except in float64. A run in bfloat16 is compared in
    float32."""

    def attend(q, *arguments, inner=window.attend, **keywords):
        change = None if q.dtype == torch.float64 else wrong
        y = inner(q.detach() if change == "gradient" else q, *arguments, **keywords)
        return y * 1.1 if change == "value" else y

    monkeypatch.setattr(window, "attend", attend)
    outcome = check(
        "agree=true", "variant=mhsa", "runtime.backend=plain", "runtime.precision=bfloat16"
    )
    lines = outcome.out.splitlines()
    (line,) = [
        line
        for line in lines
        if line.startswith("FAIL  agrees with float64 on cpu, plain, float32: ")
    ]
    assert outcome.code == 1 and words in line
    assert any(line.startswith("mhsa: FAILED: ") and words in line for line in lines)


def test_a_missing_device_is_refused_and_a_cpu_is_compared_on_request_only(cwd):  # noqa: F811
    outcome = call("bench/check.py", "variant=mhsa", "runtime.device=cuda:99")
    assert outcome.code == 2 and "runtime.device=cuda:99: " in outcome.err and not outcome.out
    assert "agrees" not in check("variant=mhsa", "runtime.backend=plain").out


def test_the_contract_of_a_run_on_a_gpu_is_checked_on_the_cpu_in_plain_pytorch():
    gpu_plan = plan(
        "variant=mhsa",
        "runtime.device=cuda",
        "runtime.backend=kernel",
        "runtime.precision=bfloat16",
    )
    checked = contract_plan(gpu_plan, "cuda").runtime
    assert (checked.backend, checked.device, checked.precision) == ("plain", "cpu", "float32")
    assert contract_plan(gpu_plan, "cpu") is gpu_plan


def test_cost_and_peers_measure_the_selected_backend_and_refuse_one_that_fails(monkeypatch):
    run_plan = plan("variant=mhsa", *SMALL)

    def select(run_plan, where):
        if run_plan.runtime.backend != "auto":
            raise ValueError("runtime.backend=kernel: kernel failed")
        return {"backend": "fused", "errors": {"fused": "1e-6"}}

    monkeypatch.setattr(select_backend, "TESTED_DEVICES", ())
    monkeypatch.setattr(select_backend, "select", select)
    facts = CostWorker(Task(config=run_plan.config)).build()
    assert facts["backend"] == "fused" and facts["backend_choice"]["errors"] == {"fused": "1e-6"}
    assert PeerWorker(Task(config=run_plan.config)).build()["backend"] == "fused"
    named = replan(run_plan, runtime={"backend": "kernel"}).config
    for worker in (CostWorker, PeerWorker):
        with pytest.raises(ValueError, match="kernel failed"):
            worker(Task(config=named))
    assert "FAIL" in check("agree=true", "variant=mhsa", "runtime.backend=kernel").out
