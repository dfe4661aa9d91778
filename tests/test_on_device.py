"""``bench.check`` on a device: what agrees passes, what cannot run is refused, a wrong number fails. On one that is no CPU, made
up here, also proofs as a table."""

from functools import partial

import pytest
import torch

import bench.on_device
from bench.cost_worker import Subject, Task
from bench.on_device import proofs
from bench.peer_workers import Worker
from harness.device.first_use import Choice, Verdict
from harness.loop.settle import settled
from harness.plan.build import varied
from harness.plan.small import of_mechanism
from tests.command import Ended, call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import TINY, plan
from variants.conformance import Finding
from variants.kernels import fused, window

SMALL = (*TINY, "data=recall", "data.bytes=20000", "budget.steps=4", "eval.selection_bytes=400", "eval.bytes=400")
SMALL += ("optim=adamw",)
QUICK = ("agree.settings=[rotary-kv]", "agree.precisions=[float32]", "runtime.device=cpu", "runtime.threads=1")
PLACE = ("position=rotary", "model.cache=kv", "model.attend_self=true")
WORDS = ("variant=mhsa", *PLACE, *QUICK, "verbose=true", "agree.backends=[plain]")
RIGHT = Verdict(
    passed=True, said="fine", case="300 queries: the value", error=3e-6, allowed=1e-4, cases=24, seconds=7.0
)
WRONG = Verdict(passed=False, said="it hung: not done after 120 s", seconds=120.0)


@pytest.fixture(autouse=True)
def contract_kept(monkeypatch):
    """The contract is not what is tested."""
    monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding(plan.runtime.backend, True, "kept")])
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])


def check(*words: str) -> Ended:
    flags = [word for word in words if "=" not in word]
    return call("bench/check.py", *flags, "agree.run=true", *QUICK, *(word for word in words if "=" in word))


def of_device(ended: Ended) -> list[str]:
    """Lines about the device, after those about the contract and before what the check cannot see."""
    return ended.out.partition(" keeps the contract in ")[2].splitlines()[1:-1]


# Agreement with float64.


def test_variants_agree_and_what_cannot_run_is_refused(here):  # noqa: F811
    ended = check("-m", "variant=adaptive_span,dynamic_span", "agree.backends=[plain,fused]", *PLACE)
    assert ended.code == 0, ended.out + ended.err
    cases = [line for line in ended.out.splitlines() if ", float32, eager: " in line]
    assert [line.split()[0] for line in cases] == ["pass", "pass", "pass", "refused"]
    assert cases[1].startswith("pass  rotary, kv, fused, float32, eager: ") and "at most 0.001" in cases[1]
    assert "adaptive_span: agrees with float64 on cpu in 2 of 2 cases\n" in ended.out
    assert "dynamic_span: agrees with float64 on cpu in 1 of 1 cases, 1 refused\n" in ended.out


@pytest.mark.parametrize("wrong", [1.0, 1.1])
def test_bfloat16_may_err_twice_what_plain_does(here, monkeypatch, wrong):  # noqa: F811
    inner = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *arguments, **keywords: inner(*arguments, **keywords) * wrong)
    ended = check("variant=mhsa", "runtime.backend=fused", "agree.precisions=[bfloat16]", *PLACE)
    case, _ = of_device(ended)
    assert case.startswith(f"{'pass' if wrong == 1 else 'FAIL'}  rotary, kv, fused, bfloat16, eager: "), case
    assert ended.code == (wrong != 1) and float(case.rpartition("at most ")[2]) < 0.15


def test_what_is_typed_is_not_varied(here):  # noqa: F811
    varying = ("agree.settings=[rotary-kv,relative-hidden,relative-kv]", "agree.precisions=[float32,bfloat16]")
    typed = ("position=alibi", "runtime.backend=plain", "runtime.precision=float32", "model.attend_self=true")
    labels = [line.partition(": ")[0] for line in of_device(check("variant=mhsa", *varying, *typed))[:-1]]
    assert labels == [f"pass  alibi, {cache}, plain, float32, eager" for cache in ("kv", "hidden")]


@pytest.mark.parametrize("wrong", ["gradient", "value", "not finite"])
def test_a_wrong_number_fails(here, monkeypatch, wrong):  # noqa: F811
    inner = window.attend

    def attend(q, k, v, *arguments, **keywords):
        on_device = q.dtype == torch.float32  # all else is in float64
        y = inner(q.detach() if on_device and wrong == "gradient" else q, k, v, *arguments, **keywords)
        return y * {"value": 1.01, "not finite": torch.nan}.get(wrong, 1.0) if on_device else y

    monkeypatch.setattr(window, "attend", attend)
    ended = check("variant=mhsa", "runtime.backend=plain", *PLACE)
    case, last = of_device(ended)
    assert ended.code == 1 and case.startswith("FAIL  rotary, kv, plain, float32, eager: ")
    assert {"gradient": "query.weight", "value": "at most 0.001", "not finite": "inf of "}[wrong] in case
    assert last == "mhsa: agrees with float64 on cpu in 0 of 1 cases"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runtime.device=cuda:99"], "runtime.device=cuda:99: "),
        (["agree.run=often"], "agree.run=often: must be a valid boolean"),
        (["agree.models=3"], "agree.models=3: no such key"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_is_checked(here, words, message):  # noqa: F811
    ended = call("bench/check.py", "variant=mhsa", *words)
    assert ended.code == 2 and message in ended.err and not ended.out


def test_where_every_case_is_refused_the_command_was_a_mistake(here):  # noqa: F811
    ended = check("variant=dynamic_span", "agree.backends=[fused]", *PLACE)
    assert ended.code == 2 and "runtime.backend=fused cannot run with spans that depend on the input" in ended.err


# Proofs.


def a_choice(*verdicts: Verdict, late: bool = False) -> Choice:
    """``fused`` and then ``kernel``, which may have passed and not run at the plan's shapes."""
    proven = dict(zip(("fused", "kernel"), ({"attention": verdict} for verdict in verdicts), strict=False))
    step_ms = {name: 2.5 for name, own in proven.items() if own["attention"].passed and not (late and name == "kernel")}
    best = next(iter(step_ms), "plain")
    return Choice(backend=best, why=(f"{best} it is",), verdicts=proven, step_ms=step_ms)


def test_every_candidate_has_a_line_and_failures_are_counted():
    lines, failed = proofs(plan(*SMALL), choosing=lambda made, where: a_choice(RIGHT, WRONG))
    assert failed == 1 and lines[2:] == ["fused it is"]
    told = "300 queries: the value, errs 3.0e-06 of 1.0e-04, 24 cases in 7 s; 2.5 ms in all layers"
    assert lines[0] == f"pass  proof of fused, attention: {told}"
    assert lines[1].startswith(f"FAIL  proof of kernel, attention: {WRONG.said}, 0 cases in 120 s; does not run")
    _, failed = proofs(plan(*SMALL), choosing=lambda made, where: a_choice(RIGHT, RIGHT, late=True))
    assert failed == 1, "what does not run at the plan's shapes has failed"
    asked = []
    (line,), failed = proofs(plan(*SMALL, "runtime.backend=plain"), choosing=lambda made, where: asked.append(made))
    assert "has no candidates" in line and not failed and asked[0].runtime.backend == "auto"


@pytest.fixture
def made_up(monkeypatch):
    """The CPU as a device of another kind, whose candidates are decided by the test."""

    def device(*verdicts: Verdict) -> list:
        asked = []
        table = partial(proofs, choosing=lambda made, where: asked.append(made) or a_choice(*verdicts))
        monkeypatch.setattr(bench.on_device, "proofs", table)
        monkeypatch.setattr("bench.conformance.named_kind", lambda device: "made up")
        return asked

    return device


def test_the_command_shows_proofs_and_agreement(here, made_up):  # noqa: F811
    asked = made_up(RIGHT, RIGHT)
    ended = call("bench/check.py", *WORDS)
    assert ended.code == 0, ended.out + ended.err
    assert ended.out.index("fused it is") < ended.out.index("agrees with float64")
    assert "plain: 1 promises" in ended.out, "the CPU's kernels are not the device's"
    assert asked.pop().model.d_model == 64, "in the sizes that are compared, here a CPU's"
    made_up(RIGHT, WRONG)
    ended = call("bench/check.py", *WORDS)
    assert ended.code == 1 and "FAIL  proof of kernel, attention: it hung" in ended.out


def test_sizes_that_are_typed_are_those_that_are_proven(here, made_up):  # noqa: F811
    asked = made_up(RIGHT)
    assert call("bench/check.py", *WORDS, "model.d_model=48", "model.heads=3", "runtime.precision=float32").code == 0
    (shown,) = asked
    assert (shown.model.d_model, shown.model.heads) == (48, 3)


def test_on_a_cpu_nothing_is_proven_nor_compared_unasked(here, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bench.on_device, "proofs", None)
    assert call("bench/check.py", *WORDS, "agree.run=true").code == 0
    ended = call("bench/check.py", "variant=mhsa", "runtime.device=cpu", "runtime.backend=plain", *PLACE)
    assert ended.code == 0 and ended.out.count("\n") == 4


# Cost and peers.


def test_the_contract_of_what_runs_elsewhere_is_checked_in_plain_pytorch():
    asked = plan("variant=mhsa", "runtime.device=cuda", "runtime.backend=kernel", "runtime.precision=bfloat16")
    made = of_mechanism(asked, "cuda").runtime
    assert (made.backend, made.device, made.precision) == ("plain", "cpu", "float32")
    assert of_mechanism(asked, "cpu") is asked


def test_what_is_measured_obeys_the_proof(monkeypatch):
    """Both verbs' workers take what was settled, and refuse what was asked for by name and fails."""
    made = plan("variant=mhsa", *SMALL)

    def choosing(asked, where, *, recorded):
        if asked.runtime.backend != "auto":
            raise ValueError("runtime.backend=kernel: asked for by name; kernel failed")
        return a_choice(RIGHT, WRONG)

    monkeypatch.setattr("bench.cost_worker.settled", partial(settled, choosing=choosing))
    subject = Subject(Task(config=made.config, span=16))
    subject.build()
    facts = subject.facts()
    assert facts["backend"] == "fused" and facts["backend_choice"]["backend"] == "fused"
    assert Worker(Task(config=made.config, span=16)).weigh()["backend"] == "fused"
    named = varied(made, runtime={"backend": "kernel"}).config
    for refused in (Subject, Worker):
        with pytest.raises(ValueError, match="kernel failed"):
            refused(Task(config=named, span=16))
