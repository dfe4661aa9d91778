"""``bench.check`` on a device that is no CPU, by a made-up one: proofs as a table, and whether the fast mode learns alike."""

import re
from functools import partial

import pytest
import torch

import bench.on_device
from bench.cost_worker import Subject
from bench.cost_worker import Task as CostTask
from bench.on_device import learns_alike, proofs
from bench.peer_workers import Task, Worker
from harness.device.first_use import Choice, Verdict
from harness.loop.settle import settled
from harness.plan.build import varied
from harness.plan.small import of_mechanism
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import TINY, plan
from tests.runs import restored  # noqa: F401 - a fixture
from variants.conformance import Finding

SMALL = (
    *TINY,
    "data=recall",
    "data.bytes=20000",
    "budget.steps=4",
    "eval.selection_bytes=400",
    "eval.bytes=400",
    "optim=adamw",
)
RIGHT = Verdict(
    passed=True, said="fine", case="300 queries: the value", error=3e-6, allowed=1e-4, cases=24, seconds=7.0
)
WRONG = Verdict(passed=False, said="it hung: not done after 120 s", seconds=120.0)


def a_choice(*verdicts: Verdict, late: bool = False) -> Choice:
    """``fused`` and then ``kernel``, which may have passed and not run at the plan's shapes."""
    found = dict(zip(("fused", "kernel"), ({"attention": verdict} for verdict in verdicts), strict=False))
    step_ms = {name: 2.5 for name, own in found.items() if own["attention"].passed and not (late and name == "kernel")}
    best = next(iter(step_ms), "plain")
    return Choice(backend=best, why=(f"{best} it is",), verdicts=found, step_ms=step_ms)


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


def test_a_fast_mode_that_learns_something_else_is_found():
    made = plan(*SMALL, "runtime.compile=false", "budget.steps=12", "optim.lr=0.01")
    good, said = learns_alike(made, seeds=[0, 1, 2])
    assert good and "in plain float32" in said and "float32)" in said

    def stuck(given, where):
        return varied(given, optim={"lr": 1e-9})

    good, said = learns_alike(made, seeds=[0, 1, 2], settle=stuck)
    assert not good, said
    with pytest.raises(ValueError, match=r"agree.seeds=\[0\]: must be a list of two integers"):
        learns_alike(made, seeds=[0])


@pytest.fixture
def made_up(monkeypatch):
    """The CPU as a device of another kind, whose candidates are decided by the test; the mechanisms keep the contract."""

    def device(*verdicts: Verdict, learns: bool = True) -> list:
        asked = []

        def learning(made, *, seeds):
            asked.append((made, seeds))
            return learns, "so many bits"

        table = partial(proofs, choosing=lambda made, where: asked.append(made) or a_choice(*verdicts))
        monkeypatch.setattr(bench.on_device, "proofs", table)
        monkeypatch.setattr(bench.on_device, "learns_alike", learning)
        monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding(plan.runtime.backend, True, "kept")])
        monkeypatch.setattr("bench.conformance.named_kind", lambda device: "made up")
        monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])
        return asked

    return device


WORDS = ("variant=mhsa", "position=rotary", "model.cache=kv", "model.attend_self=true", "verbose=true")
WORDS += ("agree.settings=[rotary-kv]", "agree.backends=[plain]", "agree.precisions=[float32]", "agree.steps=3")
WORDS += ("runtime.device=cpu", "runtime.threads=1")


def test_the_command_shows_proofs_agreement_and_training(here, made_up):  # noqa: F811
    asked = made_up(RIGHT, RIGHT)
    ended = call("bench/check.py", *WORDS)
    assert ended.code == 0, ended.out + ended.err
    table, agreed, learnt = (ended.out.index(word) for word in ("fused it is", "agrees with float64", "so many bits"))
    assert table < agreed < learnt and "pass  3 steps of training: so many bits" in ended.out
    assert "plain  kept" in ended.out or "plain: 1 promises" in ended.out, "the CPU's kernels are not the device's"
    shown, (trained, seeds) = asked
    assert seeds == [0, 1, 2] and trained.budget.amount == 3
    assert trained.runtime.precision == "bfloat16"
    assert shown.model.d_model == 64, "in the sizes that are compared, here a CPU's"


def test_sizes_that_are_typed_are_those_that_are_proven(here, made_up):  # noqa: F811
    asked = made_up(RIGHT)
    assert call("bench/check.py", *WORDS, "model.d_model=48", "model.heads=3", "runtime.precision=float32").code == 0
    shown, (trained, _) = asked
    assert (shown.model.d_model, shown.model.heads, trained.model.d_model) == (48, 3, 48)
    assert trained.runtime.precision == "float32"


@pytest.mark.parametrize("spoilt", ["a candidate", "training"])
def test_the_command_fails_with_them(here, made_up, spoilt):  # noqa: F811
    made_up(RIGHT, WRONG if spoilt == "a candidate" else RIGHT, learns=spoilt != "training")
    ended = call("bench/check.py", *WORDS)
    assert ended.code == 1
    assert re.search(
        {"a candidate": "FAIL  proof of kernel, attention: it hung", "training": "FAIL  3 steps"}[spoilt], ended.out
    )


def test_on_a_cpu_nothing_is_proven_at_first_use(here, monkeypatch):  # noqa: F811
    monkeypatch.setattr(bench.on_device, "proofs", None)
    monkeypatch.setattr(bench.on_device, "learns_alike", None)
    monkeypatch.setattr("bench.conformance.findings", lambda plan: [Finding(plan.runtime.backend, True, "kept")])
    monkeypatch.setattr("harness.loop.admission.findings_at_sizes", lambda plan: [])
    assert call("bench/check.py", *WORDS, "agree.run=true").code == 0


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

    for module in ("bench.cost_worker", "bench.peer_workers"):
        monkeypatch.setattr(f"{module}.settled", partial(settled, choosing=choosing))
    same = {"trusted": (), "warm": False, "weights": None, "span": 16, "spans": "initial", "command": ""}
    subject = Subject(CostTask(config=made.config, **same))
    subject.build()
    facts = subject.facts()
    assert facts["backend"] == "fused" and facts["backend_choice"]["backend"] == "fused"
    batches = torch.zeros(2, 2, 17, dtype=torch.uint8)
    worker = Worker(Task(config=made.config, trusted=(), batches=batches))
    assert worker.backend == "fused"
    named = varied(made, runtime={"backend": "kernel"}).config
    for refused in (
        lambda: Subject(CostTask(config=named, **same)),
        lambda: Worker(Task(config=named, trusted=(), batches=batches)),
    ):
        with pytest.raises(ValueError, match="kernel failed"):
            refused()
