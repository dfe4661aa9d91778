"""``python -m bench.evidence``: its plan composes for a GPU, and its runner resumes, packs and stops in time."""

import json
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from bench.agree import AgreeSettings
from bench.baselines.lineup import HELD, PeerSettings
from bench.baselines.speed_cases import SpeedSettings
from bench.cost import CostSettings
from bench.evidence_calls import FAILED, OK, OUT_OF_TIME, PACK, Calls
from bench.evidence_plan import Command, commands, learned_spans
from bench.fake import build
from bench.fit import OWN as FIT_KEYS
from bench.planning import own_keys
from harness.plan.build import plan_run
from harness.plan.settings import parse
from tests.command import ROOT, call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import compose_config
from tests.needs import need
from tests.patience import PATIENCE_SECONDS, wait_for
from variants.kernels import triton_window

SETTINGS = {"agree": AgreeSettings, "cost": CostSettings, "peers": PeerSettings, "speed": SpeedSettings}
TRIED = ("adaptive_span", "replayed", "uniform-window")


def planned(*overrides: str, corpus: Path | None = Path("text")) -> list[Command]:
    config = OmegaConf.to_container(compose_config(*overrides, name="evidence"), resolve=True)
    return commands(config, corpus=corpus)


def every_stage() -> str:
    return f"stage=[{','.join(compose_config(name='evidence').stages)}]"


def put_spans(runs: Path, name: str, spans: list[list[float]]) -> None:
    """As a finished run has them in its summary."""
    folder = runs / name / "adaptive_span-s0-0"
    folder.mkdir(parents=True)
    metrics = {f"layers.{i}.attention.span": own for i, own in enumerate(spans)}
    (folder / "summary.json").write_text(json.dumps({"valid_metrics": metrics}))


# The plan


def test_every_command_for_a_gpu_composes_and_is_possible_there(tmp_path, monkeypatch):
    need(triton_window._installed(), "triton is not installed")
    put_spans(tmp_path, "adaptive_span", [[float(100 * head) for head in range(8)]] * 12)
    built, kinds = set(), {}
    for command in planned(every_stage()):  # of those that differ in a number or a precision only, the first
        kinds.setdefault((command.stage, re.sub(r"float32|bfloat16|true|false|[\d.]+$", "", command.name)), command)
    assert len(kinds) > 40
    for command in kinds.values():
        words = command.filled(tmp_path).words
        assert "<" not in "".join(words), command.name
        if command.run == "pytest":
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
            continue
        cfg = compose_config(*words, name=command.run)
        if command.run in SETTINGS:
            parse(SETTINGS[command.run], own_keys(cfg, *SETTINGS[command.run].__dataclass_fields__), key="")
        if command.run == "peers":
            assert not {word.partition("=")[0] for word in words} & set(HELD), command.name
        if command.run == "fit":
            own_keys(cfg, *FIT_KEYS)
        plan = plan_run(cfg)
        assert plan.runtime.device == ("auto" if command.run == "speed" else "cuda"), command.name
        key = (plan.variant, plan.model, plan.runtime.path)
        if command.stage in ("leaderboard", "controls") and key not in built:
            built.add(key)
            model = build(plan)
            assert {s.path(torch.device("cuda"), training=True) for _, s in model.sublayers()} <= {"plain", "kernel"}
            if command.stage == "leaderboard":
                assert 36e6 < model.touched_parameters() < 42e6, command.name
            if command.name == "replayed":
                assert learned_spans(tmp_path / "adaptive_span")[0] == pytest.approx(
                    next(iter(model.sublayers()))[1].reach.metrics({})["span"].tolist()
                )


def test_the_uniform_window_is_the_mean_and_the_controls_train_as_long():
    (control,) = planned("stage=controls", "only=[uniform-window]")
    assert "budget.seconds=60" in control.words and control.needs == {"adaptive_span"}
    assert {word for c in planned("stage=[leaderboard,controls]") for word in c.words if "budget" in word} == {
        "budget.seconds=60"
    }


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["stage=costs"], ["stage=costs", "checks, smoke"]),
        (["stage=cost", "only=[foo]"], ["only=['foo']", "utilisation-mhsa"]),
        (["stage=ten"], ["corpus=null", "ten-minutes"]),
        (["stage=ten", "corpus=nowhere.xz"], ["corpus=nowhere.xz", "no such file"]),
        (["stage=cost", "earlier=nowhere.tar.gz"], ["earlier=nowhere.tar.gz"]),
    ],
)
def test_a_mistake_ends_with_2(here, words, parts):  # noqa: F811
    ended = call("bench/evidence.py", *words)
    assert ended.code == 2 and all(part in ended.err for part in parts), ended.err


# The runner


@pytest.fixture
def in_this_process(monkeypatch):
    """Commands without a process of their own: a second each, not ten."""

    def process(self, command: Command, said: Path):
        script = "train.py" if command.run == "train" else f"bench/{command.run}.py"
        ended = call(script, *command.words)
        said.write_text(ended.out + ended.err)
        return (OK, None) if ended.code == 0 else (FAILED, ended.err.strip())

    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(Calls, "_process", process)


def test_stages_run_end_to_end_and_what_is_done_is_not_done_again(here, in_this_process):  # noqa: F811
    (here / "text").write_bytes(bytes(range(256)) * 200)
    words = ["stage=[leaderboard,controls]", "small=true", "device=cpu", f"only=[{','.join(TRIED)}]"]
    first = planned(*words, f"outputs={here}/out", corpus=here / "out" / "corpus" / "text")
    calls = Calls(here / "out", seconds=600, pack=here / "pack")
    calls.begin(earlier=None, corpus=here / "text", plain=here / "out" / "corpus" / "text")
    (here / "out/rows/cost/then").mkdir(parents=True)
    (here / "out/rows/cost/then/rows.jsonl").write_text("{}\n")
    assert calls.run(first, redo=set()) == 0, calls.entries()
    assert [entry["name"] for entry in calls.entries()] == [command.name for command in first]
    assert {command.name for command in first} == set(TRIED)
    replayed = json.loads(next((here / "out/runs/replayed").glob("*-s0-*/summary.json")).read_text())
    learned = learned_spans(here / "out/runs/adaptive_span")
    assert [s for own in learned_spans(here / "out/runs/replayed") for s in own] == pytest.approx(
        [s for own in learned for s in own], abs=0.01
    )
    assert replayed["variant"] == "replayed_spans"
    assert {path.name for path in (here / "out/runs").glob("*/*-s*-*/checkpoints/*")} == {"best.pt"}
    with tarfile.open(here / "pack" / PACK) as pack:
        names = pack.getnames()
    assert "log.jsonl" in names and not any("checkpoints" in name for name in names)
    assert sum(name.endswith("summary.json") for name in names) == 3 and "rows/cost/then/rows.jsonl" in names
    elsewhere = Calls(here / "other", seconds=600, pack=None)
    elsewhere.begin(earlier=str(here / "pack" / PACK), corpus=None, plain=None)
    assert elsewhere.run(first, redo={"adaptive_span"}) == 0
    assert [entry["name"] for entry in elsewhere.entries()][len(first) :] == ["adaptive_span"]


def test_spans_of_a_run_that_has_not_ended_fail_with_its_name(here):  # noqa: F811
    (control,) = planned("stage=controls", "only=[replayed]")
    calls = Calls(here, seconds=600, pack=None)
    calls.begin(earlier=None, corpus=None, plain=None)
    assert calls.run([control], redo=set()) == 1
    assert "adaptive_span: has no finished run" in calls.entries()[0]["reason"]


def slow(name: str, code: str, seconds: float) -> Command:
    """A process of Python code."""
    made = Command(name=name, stage="x", run="pytest", seconds=seconds, words=())
    object.__setattr__(made, "code", code)
    return made


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_killed_takes_its_command_along(here, how):  # noqa: F811
    """Left alone, training would go on unseen in the folder that the next call takes up."""
    need(sys.platform == "linux", "asks Linux to end the command of a killed call")
    command = "import os, signal, sys, time; from pathlib import Path\n"
    command += "def save(*_): Path('saved').write_text('x'); os._exit(1)\n"
    command += "signal.signal(signal.SIGTERM, save); Path('there').write_text('x'); time.sleep(600)"
    code = f"""
import signal, sys
from pathlib import Path
import bench.evidence_calls as calls
from bench.evidence import stop_on_request
from bench.evidence_plan import Command
class Slow(Command):
    arguments = ["-c", {command!r}]
calls.ROOT = Path({str(here)!r})
stop_on_request()
runner = calls.Calls(calls.ROOT, seconds=6000, pack=None)
runner.begin(earlier=None, corpus=None, plain=None)
runner.run([Slow(name="slow", stage="x", run="pytest", seconds=600, words=())], redo=set())
"""
    call_ = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for((here / "there").exists, "the command")
    call_.send_signal(how)
    call_.wait(PATIENCE_SECONDS)
    wait_for((here / "saved").exists, "what the command does when it is stopped")


def test_a_log_that_was_cut_short_is_gone_on_with(here, in_this_process):  # noqa: F811
    calls = Calls(here, seconds=600, pack=None)
    calls.begin(earlier=None, corpus=None, plain=None)
    calls.log.write_text('{"name": "a", "stage": "x", "status": "ok"}\n{"name": "b", "sta')
    made = Command(name="b", stage="x", run="agree", seconds=1, words=("settings=[no]", "variants=[mhsa]"))
    calls.run([made], redo=set())
    assert [entry["name"] for entry in calls.entries()] == ["a", "b"]


def test_a_failure_stops_nothing_and_the_late_are_ended(here, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Command, "arguments", property(lambda self: ["-c", self.code]))
    monkeypatch.setattr(Command, "filled", lambda self, runs: self)
    monkeypatch.setattr("bench.evidence_calls.GRACE_SECONDS", 0.5)
    woke = here / "woke"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    stubborn += f"; open({str(woke)!r}, 'w')"
    plan = [
        slow("bad", "print('so far'); raise ValueError('it broke')", PATIENCE_SECONDS),
        slow("late", stubborn, 1.0),
        slow("good", "print('fine')", PATIENCE_SECONDS),
    ]
    calls = Calls(here, seconds=6000, pack=None)
    calls.begin(earlier=None, corpus=None, plain=None)
    assert calls.run(plan, redo=set()) == 2 and not woke.exists()
    assert [(e["name"], e["status"]) for e in calls.entries()] == [("bad", FAILED), ("late", OUT_OF_TIME), ("good", OK)]
    assert calls.entries()[0]["reason"] == "ValueError: it broke"
    calls.run(plan, redo=set())
    assert [entry["name"] for entry in calls.entries()[3:]] == ["late", "bad"]  # what failed comes last
    over = Calls(here, seconds=10, pack=None)
    assert over.run(plan, redo=set()) == 2 and len(over.entries()) == 5
