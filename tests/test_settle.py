"""``runtime.backend`` of a run on a device that was not tested: settled once, in processes of their own, and recorded."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.device import first_use, runtime
from harness.device.first_use import Answer, Choice, Verdict
from harness.device.processes import joined
from harness.loop.settle import Candidate, chosen, settled
from harness.plan.build import Plan, plan_run
from harness.record.rows import RECORD, read_rows
from tests.composing import TINY, compose_config
from tests.many import launch
from tests.runs import (
    make_job,
    own_folder,  # noqa: F401 - a fixture
    restored,  # noqa: F401 - a fixture
    run_job,
    stop,
)

PASSED = Verdict(passed=True, said="fine", case="a", error=1e-6, allowed=1e-4, cases=3)


def offering(*offered: str, **runtime_keys: object) -> Plan:
    """A plan whose attention offers these."""
    config = OmegaConf.to_container(compose_config("variant=mhsa", "data=recall", *TINY), resolve=True)
    config["variant"]["attention"] = {
        "_target_": "tests.candidates.Offering",
        "_partial_": True,
        "offered": list(offered),
    }
    config["runtime"] |= runtime_keys
    return plan_run(OmegaConf.create(config), trusted=("tests.candidates",))


def started(made: Plan, **same) -> runtime.Runtime:
    return runtime.start(made.runtime, **same)


def taking(backend: str, *seen: list):
    """Decides for that backend; what it was given is kept."""

    def choosing(made: Plan, where, *, recorded):
        for one in seen:
            one.append(recorded)
        return Choice(backend=backend, why=("it was told",), verdicts={"x": {"attention": PASSED}}, step_ms={"x": 1.0})

    return choosing


def test_the_cpu_is_left_as_it_is():
    made = offering("fused")
    assert settled(made, started(made)) is made
    plain = offering("fused", backend="plain")
    assert settled(plain, started(plain), choosing=taking("fused")) is plain


def test_candidates_are_proven_and_timed_in_processes_of_their_own(tmp_path, capfd):
    """The whole machinery, on a CPU: one is wrong, one crashes, one is right."""
    made = offering("kernel", "flex", "fused")
    choosing = partial(chosen, folder=tmp_path)
    done = settled(made, started(made), choosing=choosing)
    assert done.runtime.backend == "fused" and done.config == made.config
    choice = done.backend_choice
    assert {name: found["attention"]["passed"] for name, found in choice["verdicts"].items()} == {
        "kernel": False,
        "flex": False,
        "fused": True,
    }
    assert "the gradient of q" in choice["verdicts"]["kernel"]["attention"]["case"]
    assert "the process ended by SIGSEGV" in choice["verdicts"]["flex"]["attention"]["said"]
    assert choice["step_ms"]["fused"] > 0 and choice["verdicts"]["fused"]["attention"]["cases"] == 8
    assert len([line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]) == 2
    again = settled(made, started(made), choosing=choosing)
    assert again.backend_choice == choice and "proving" not in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"runtime.backend=kernel: asked for by name.*the gradient of q"):
        named = offering("kernel", "flex", "fused", backend="kernel")
        settled(named, started(named), choosing=choosing)


def test_a_candidate_is_proven_and_timed_at_the_shapes_of_the_run():
    def candidate(backend: str) -> Candidate:
        made = offering("sdpa")
        return Candidate(made.config, made.trust, replace(made.runtime, backend=backend), "attention", 1)

    assert all(proof.passed for proof in candidate("sdpa").prove()) and candidate("fused").step_ms() > 0
    with pytest.raises(RuntimeError, match="too long for it"):
        candidate("sdpa").step_ms()


def keys_of(made: Plan) -> tuple[str, str]:
    """Digests of what its verdict and its time are remembered under."""
    seen = []

    def ask(name, backend, **asked):
        return Answer(verdict=PASSED, step_ms=1.0)

    def choose(candidates, subjects, **options):
        seen.append(subjects["attention"])
        return Choice(backend="fused", why=(), verdicts={}, step_ms={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_use, "choose", choose)
        chosen(made, started(made), ask=ask)
    return first_use._digest(seen[0].key), first_use._digest(seen[0].shapes)


def test_verdicts_go_by_what_the_proof_depends_on(monkeypatch):
    def changed(**sections: dict) -> Plan:
        config = base.config | {name: base.config[name] | changes for name, changes in sections.items()}
        return plan_run(OmegaConf.create(config), trusted=base.trust)

    base = offering("fused")
    verdict, time = keys_of(base)
    longer = keys_of(changed(batch={"segment": 32}))
    assert longer[0] == verdict and longer[1] != time
    assert keys_of(changed(model={"heads": 4}))[0] != verdict
    for mode in ({"precision": "bfloat16"}, {"compile": True}, {"deterministic": False}):
        assert keys_of(changed(runtime=mode))[0] != verdict, mode
    assert keys_of(changed(optim={"lr": 0.5})) == (verdict, time)
    describe = runtime.Runtime.describe
    newer = lambda self: describe(self) | {"versions": {"driver": "2"}}  # noqa: E731
    monkeypatch.setattr(runtime.Runtime, "describe", newer)
    assert keys_of(base)[0] != verdict


def test_a_run_records_how_its_backend_was_chosen_and_goes_on_with_it(monkeypatch):
    def on_cpu(backend):
        seen = []
        monkeypatch.setattr("harness.loop.prepare.settled", partial(settled, choosing=taking(backend, seen)))
        return seen

    given = ("variant=mhsa", "budget.steps=6", "checkpoint.every_steps=2")
    seen = on_cpu("fused")
    job = make_job(*given)
    assert job.trainer.backend == "fused" and seen == [None]
    stop(job, step=3)
    (row,) = [row for row in read_rows(job.folder.path / RECORD) if row["kind"] == "provenance"]
    assert row["backend"] == "fused" and row["config"]["runtime"]["backend"] == "auto"
    assert row["backend_choice"]["backend"] == "fused" and row["backend_choice"]["why"] == ["it was told"]
    resumed = make_job(*given)
    assert seen[1]["backend"] == "fused" and resumed.folder.path == job.folder.path
    summary = run_job(resumed)
    assert summary["backend"] == "fused" and summary["backend_choice"]["step_ms"] == {"x": 1.0}


def test_a_run_goes_on_with_what_it_recorded_or_says_why_not(tmp_path):
    made = offering("fused", "kernel")
    where, asked = started(made), []

    def ask(name, backend, *, prove, timed, limit_seconds):
        asked.append((backend, timed))
        return Answer(verdict=PASSED if backend == "fused" else Verdict(passed=False, said="it is wrong"), step_ms=1.0)

    going_on = partial(chosen, made, where, ask=ask, folder=tmp_path)
    assert going_on(recorded={"backend": "fused"}).backend == "fused" and asked == [("fused", False)]
    assert going_on(recorded={"backend": "plain"}).backend == "plain" and len(asked) == 1
    with pytest.raises(ValueError, match=r"runtime.backend=kernel: this run has recorded it.*it is wrong"):
        going_on(recorded={"backend": "kernel"})
    with pytest.raises(ValueError, match=r"runtime.backend=flex: this run has recorded it.*force=true begins anew"):
        going_on(recorded={"backend": "flex"})


def decided(folder: str) -> tuple[str, int]:
    """The backend, and how often this process was asked."""
    made, asked = offering("fused"), []

    def ask(name, backend, **same):
        asked.append(backend)
        return Answer(verdict=PASSED, step_ms=1.0)

    with joined() as processes:
        choosing = partial(chosen, ask=ask, folder=Path(folder))
        done = settled(made, started(made, processes=processes), choosing=choosing)
    return done.runtime.backend, len(asked)


def test_of_several_processes_one_decides(tmp_path):
    assert sorted(launch(decided, str(tmp_path), number=2)) == [("fused", 0), ("fused", 1)]
