"""Selection of the backend on an untested device: candidates are compared with float64, each in
a process."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from harness import source
from harness.check import select_backend
from harness.check.select_backend import agreement, select, with_backend
from harness.device.torch_settings import configure_torch
from harness.device.worker_process import WorkerError
from harness.plan.build import Plan, plan_run
from harness.record.rows import RECORD, read_rows
from tests.support.small_configs import TINY, compose_config, plan
from tests.support.small_runs import (
    make_run,
    run_to_end,
    stop,
    temporary_cwd,  # noqa: F401 - a fixture
)
from variants.kernels import chunked

PASSED = (True, "1e-6 of the gradient of x")


@pytest.fixture(autouse=True)
def untested_cpu(monkeypatch, tmp_path_factory):
    """Make the CPU an untested device without cached comparisons."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(select_backend, "TESTED_DEVICES", ())
    monkeypatch.setattr(select_backend, "_comparisons", {})


@pytest.fixture
def compared(monkeypatch) -> list[str]:
    """Names of the compared backends. In a fake worker ``fused`` passes, ``chunked`` hangs, and
    others fail."""
    names = []

    class FakeWorker:
        def __init__(self, make, config, trusted):
            self.backend = config["runtime"]["backend"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def call(self, method, *, limit_seconds):
            names.append(self.backend)
            if self.backend == "chunked":
                raise WorkerError("failed", "the process hung: not done after 120 s")
            return (
                PASSED
                if self.backend == "fused"
                else (False, "2e-2 of the gradient of y, at most 1e-4")
            )

    monkeypatch.setattr(select_backend, "WorkerProcess", FakeWorker)
    return names


def offering(*offered: str, **runtime_keys: object) -> Plan:
    """Return a plan whose attention offers these backends."""
    config = OmegaConf.to_container(
        compose_config("variant=mhsa", "data=recall", *TINY), resolve=True
    )
    target = {
        "_target_": "tests.support.candidate_attention.CandidateAttention",
        "_partial_": True,
        "offered": list(offered),
    }
    config["variant"]["attention"] = target
    config["runtime"] |= runtime_keys
    return plan_run(OmegaConf.create(config), trusted=("tests.support.candidate_attention",))


def select_for(run_plan: Plan) -> dict | None:
    return select(run_plan, configure_torch(run_plan.runtime))


def test_a_wrong_and_a_crashing_candidate_are_rejected_and_a_correct_one_is_selected():
    run_plan = offering("kernel", "chunked", "fused")
    selected = with_backend(run_plan, configure_torch(run_plan.runtime))
    choice = selected.backend_choice
    assert (
        selected.runtime.backend == choice["backend"] == "fused"
        and selected.config == run_plan.config
    )
    assert list(choice["errors"]) == ["kernel", "chunked", "fused"]
    assert "of the gradient of layers.0.attention" in choice["errors"]["kernel"]
    assert "the process ended by SIGSEGV" in choice["errors"]["chunked"]
    json.dumps(choice, allow_nan=False)


def test_on_a_tested_device_or_with_the_plain_backend_nothing_is_compared(monkeypatch, compared):
    plain = offering("fused", backend="plain")
    assert with_backend(plain, configure_torch(plain.runtime)) is plain
    monkeypatch.setattr(select_backend, "TESTED_DEVICES", ("cpu",))
    run_plan = offering("fused")
    assert with_backend(run_plan, configure_torch(run_plan.runtime)) is run_plan and not compared


def test_a_comparison_is_cached_for_the_jobs_of_a_process_but_a_timeout_is_not(
    compared, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no folder
    run_plan = offering("kernel", "chunked", "fused")
    assert select_for(run_plan)["backend"] == "fused" and compared == ["kernel", "chunked", "fused"]
    assert select_for(run_plan)["errors"]["kernel"].startswith("2e-2 of") and compared[3:] == [
        "chunked"
    ]
    for section, keys in {"model": {"heads": 4}, "runtime": {"precision": "bfloat16"}}.items():
        del compared[:]
        config = run_plan.config | {section: run_plan.config[section] | keys}
        assert (
            select_for(plan_run(OmegaConf.create(config), trusted=run_plan.trust))
            and len(compared) == 3
        ), section


def test_only_a_passed_comparison_of_the_same_source_is_cached_for_later_processes(
    compared, monkeypatch
):
    run_plan = offering("kernel", "fused")
    first = select_for(run_plan)
    monkeypatch.setattr(select_backend, "_comparisons", {})  # as in a new process
    assert select_for(run_plan) == first and compared == ["kernel", "fused", "kernel"]
    monkeypatch.setattr(source, "digest", lambda *_, **__: "another")
    assert select_for(run_plan) == first and compared[3:] == ["kernel", "fused"]


def test_without_a_correct_candidate_plain_is_selected_with_a_warning(compared, capsys):
    choice = select_for(offering("kernel", "chunked"))
    assert choice["backend"] == "plain" and list(choice["errors"]) == ["kernel", "chunked"]
    first, second, last = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")
    ]
    assert (
        "kernel failed: 2e-2 of the gradient of y" in first
        and "hung: not done after 120 s" in second
    )
    assert "plain runs, which is slow" in last


def test_a_backend_set_by_name_is_compared_and_its_failure_is_an_error(compared):
    assert select_for(offering("kernel", "fused", backend="fused"))[
        "backend"
    ] == "fused" and compared == ["fused"]
    with pytest.raises(
        ValueError, match=r"runtime.backend=kernel: failed with 2e-2 of.*allowed are auto, plain"
    ):
        select_for(offering("kernel", "fused", backend="kernel"))


def test_a_run_records_the_selection_of_its_backend_and_resumes_with_it(compared):
    words = ("variant=mhsa", "budget.steps=6", "checkpoint.every_steps=2")
    run = make_run(*words)
    assert run.trainer.backend == "fused"
    stop(run, step=3)
    (row,) = [row for row in read_rows(run.folder.path / RECORD) if row["kind"] == "provenance"]
    assert row["config"]["runtime"]["backend"] == "auto"
    assert row["backend_choice"]["backend"] == row["backend"] == "fused"
    del compared[:]
    resumed = make_run(*words)
    assert resumed.folder.path == run.folder.path and not compared
    summary = run_to_end(resumed)
    assert (
        not compared
        and summary["backend"] == "fused"
        and summary["backend_choice"] == row["backend_choice"]
    )


# Agreement

SMALL = ("data=recall", *TINY, "model.span=24", "batch.streams=2", "position=relative")
SEGMENTS = (30, 31, 1)


def compare_with_float64(*words: str) -> tuple[bool, str]:
    run_plan = plan(*SMALL, *words)
    return agreement(run_plan, configure_torch(run_plan.runtime), segments=SEGMENTS)


def test_a_correct_backend_passes_the_comparison_also_with_dropout():
    passed, detail = compare_with_float64("variant=adaptive_span", "runtime.backend=chunked")
    assert passed, detail
    attention = ("variant.layers=[attention]", "runtime.backend=chunked", "model.dropout=0.2")
    passed, detail = compare_with_float64("variant=mhsa", *attention, "runtime.precision=bfloat16")
    assert passed, detail


@pytest.mark.parametrize(
    ("wrong", "words_of_detail"), [("seed", ""), ("nan", "inf of "), ("one number", "")]
)
def test_a_wrong_seed_a_nan_or_a_wrong_number_fails_the_comparison(
    monkeypatch, wrong, words_of_detail
):
    correct = chunked.attend

    def attend(q, *arguments, seed, **keywords):
        y = correct(
            q,
            *arguments,
            seed=seed + 1 if wrong == "seed" and q.dtype == torch.float32 else seed,
            **keywords,
        )
        if wrong == "nan":
            y = torch.where(torch.arange(y.shape[2])[:, None] == y.shape[2] - 1, torch.nan, y)
        if wrong == "one number" and q.dtype == torch.float32:
            y = y + torch.nn.functional.one_hot(torch.tensor(0), y.shape[2])[:, None]
        return y

    monkeypatch.setattr(chunked, "attend", attend)
    words = (
        "variant=mhsa",
        "variant.layers=[attention]",
        "runtime.backend=chunked",
        "model.dropout=0.2",
    )
    passed, detail = compare_with_float64(*words)
    assert not passed and words_of_detail in detail, detail
