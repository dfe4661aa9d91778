"""``docs/gpu.md``: every command composes, takes a backend that a GPU has, and trains at a small size on a CPU."""

import itertools
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from bench.check import OWN as CHECK_KEYS
from bench.cost import CostSettings
from bench.fit import OWN as FIT_KEYS
from bench.fit import build
from bench.on_device import AgreementSettings
from bench.peers import PeerSettings
from bench.planning import own_keys
from harness.plan.build import Plan, plan_run
from harness.plan.settings import parse
from tests.command import MADE, ROOT, TINY, call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from tests.composing import CONF, compose_config, one_step, recall
from tests.composing import small as fitting
from tests.needs import need
from variants.kernels import triton_window

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SETTINGS = {"cost": CostSettings, "peers": PeerSettings}
KEYS = {verb: tuple(kind.__dataclass_fields__) for verb, kind in SETTINGS.items()}
KEYS |= {"check": CHECK_KEYS, "fit": FIT_KEYS}
CONTROLS = (
    "all_attention_6",
    "all_attention_10",
    "linear_decay",
    "mhsa_8_layers",
    "mhsa_alibi",
    "mhsa_memory_flops",
    "mhsa_span_8",
)
CONTROLS += (
    "mhsa_span_32",
    "mhsa_span_128",
    "performer_decay",
    "uniform_span",
)  # other sizes and positions of the same classes
VARIANTS = {path.stem for path in (CONF / "variant").glob("*.yaml")} - {*CONTROLS}
GPU_BACKENDS = {"plain", "chunked", "fused", "kernel"}
NOT_COMPOSED = ("pip", "pytest", "bench.report")
SMALL = (*TINY, "budget.seconds=null", "eval.streams=2", "runtime.backend=auto", "runtime.precision=float32")
SMALL += ("runtime.compile=false",)
SMALL_MEMORY = ("variant.memory.half_keys=16", "variant.memory.top_k=4", "variant.memory.d_query=8")
LEARNED = [[float(100 * head) for head in range(8)]] * 12
"""Spans as a run of the page's size may have them."""
SHELL = """
python() {
  if [ "$1" = -c ]; then "$PYTHON" "$@"; return; fi
  printf '%s\\n' "$@" '' >>typed
}
"""
"""Notes what a shell makes of the page's commands, in place of running them; they stand in lines, then an empty one."""


def typed(folder: Path) -> list[list[str]]:
    """Words of every command that the page's blocks come to in that folder, after ``python``."""
    script = SHELL + "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    (folder / "typed").unlink(missing_ok=True)
    subprocess.run(["sh", "-e", "-c", script], cwd=folder, check=True, env=os.environ | {"PYTHON": sys.executable})
    return [command.splitlines() for command in (folder / "typed").read_text().split("\n\n") if command]


def learned(folder: Path, spans: list[list[float]]) -> Path:
    """The folder with a finished run of the leaderboard in it."""
    run = folder / "outputs" / "leaderboard" / "adaptive_span-s0-0"
    run.mkdir(parents=True)
    metrics = {f"layers.{i}.attention.span": own for i, own in enumerate(spans)}
    (run / "summary.json").write_text(json.dumps({"valid_metrics": {"layers.0.attention.other": 1.0} | metrics}))
    return folder


def jobs(words: list[str]) -> list[list[str]]:
    """The jobs of one training command, as Hydra's sweeper makes them."""
    sweeps = [word.partition("=")[2] for word in words if word.startswith("sweep=")]
    if not sweeps:
        return [words]
    params = OmegaConf.load(CONF / "sweep" / f"{sweeps[0]}.yaml").hydra.sweeper.params
    return grid([*(f"{key}={value}" for key, value in params.items()), *words])


def grid(words: list[str]) -> list[list[str]]:
    """Every combination of values that commas divide."""
    overrides = OverridesParser.create().parse_overrides(words)
    return [list(job) for job in BasicSweeper.split_arguments(overrides, None)[0]]


def trainings(folder: Path) -> list[list[str]]:
    """The words of all training commands; the others are left out."""
    return [words for script, *words in typed(folder) if script == "train.py"]


def placed(words: list[str]) -> bool:
    """Whether a run goes elsewhere than those that are compared."""
    return any(word.startswith("outputs=") for word in words)


def distinct(commands: list[list[str]]) -> list[list[str]]:
    """One job of those that differ in seed, trial, precision or compilation only."""
    found = {}
    for job in (job for words in commands for job in jobs(words)):
        kind = [word for word in job if not re.match(r"(seed|trial|runtime\.(precision|compile))=", word)]
        found.setdefault(tuple(kind), job)
    return list(found.values())


def on_gpu(plan: Plan, built: set[tuple]) -> None:
    """Every sublayer takes a backend that a GPU has; ``built`` are models that were looked at."""
    key = (plan.variant, plan.model, plan.runtime.backend, json.dumps(plan.config["variant"]))
    if key in built:
        return
    built.add(key)
    model = build(plan)
    assert {s.backend(torch.device("cuda"), training=True) for _, s in model.sublayers()} <= GPU_BACKENDS


def test_every_training_is_possible_on_a_gpu(tmp_path):
    need(triton_window._installed(), "triton is not installed")
    built = set()
    for job in distinct(trainings(learned(tmp_path, LEARNED))):
        plan = plan_run(compose_config(*job), sweeping=True)
        assert plan.runtime.device == "cuda", job
        on_gpu(plan, built)
    assert len(built) > 15


def test_every_other_command_composes_and_is_possible_on_a_gpu(tmp_path):
    need(triton_window._installed(), "triton is not installed")
    commands = [words for flag, *words in typed(learned(tmp_path, LEARNED)) if flag == "-m"]
    assert {module for module, *_ in commands} == {*NOT_COMPOSED, *(f"bench.{verb}" for verb in KEYS)}
    assert all(find_spec(module) for module, *_ in commands)
    built = set()
    verbs = [(module.removeprefix("bench."), line) for module, *line in commands if module not in NOT_COMPOSED]
    for verb, words in [(verb, job) for verb, line in verbs for job in grid([word for word in line if "=" in word])]:
        words = [*words, *(fitted(words) if verb == "check" else [])]  # as its own small model has them
        composed = compose_config(*words, name=verb)
        own = own_keys(composed, *KEYS[verb])
        if verb in SETTINGS:
            parse(SETTINGS[verb], own, key="")
        if verb == "check":
            assert parse(AgreementSettings, own["agree"], key="agree").run is None
        for variant, backend in itertools.product(own.get("variants") or [None], own.get("backends") or [None]):
            cfg = composed
            if (variant, backend) != (None, None):
                chosen = [f"variant={variant}"] * (variant is not None)
                chosen += [f"runtime.backend={backend}"] * (backend is not None)
                cfg = compose_config(*words, *chosen, name=verb)
                own_keys(cfg, *KEYS[verb])
            cfg.model.dropout = 0.0 if verb == "peers" else cfg.model.dropout  # of its job, and may not be typed
            plan = plan_run(cfg)
            assert plan.runtime.device == "cuda", words
            on_gpu(plan, built)


def test_every_variant_is_checked_and_trained(tmp_path):
    commands = typed(learned(tmp_path, LEARNED))
    checked = next(grid(words[3:]) for words in commands if words[1:3] == ["bench.check", "-m"])
    assert {word for job in checked for word in job if word.startswith("variant=")} == {
        f"variant={v}" for v in VARIANTS
    }
    smoke = [job for script, *words in commands if words[0] == "sweep=smoke" for job in jobs(words)]
    how = ("variant=", "runtime.precision=", "runtime.compile=")
    trained = {tuple(word for word in job if word.startswith(how)) for job in smoke}
    assert len(trained) == len(smoke) == 4 * (len(VARIANTS) - 1) + 1
    assert {words[0] for words in trained} == {f"variant={name}" for name in VARIANTS}


def test_the_leaderboard_is_of_one_size_and_its_controls_train_as_long(tmp_path):
    runs = [words for words in trainings(learned(tmp_path, LEARNED)) if words[0] == "sweep=leaderboard"]
    runs = [words for words in runs if not placed(words)]
    plans = [plan_run(compose_config(*job)) for words in runs for job in jobs(words) if "seed=0" in job]
    assert {(plan.budget.unit, plan.budget.amount) for plan in plans} == {("seconds", 60)} and len(plans) == 9
    assert {plan.protocol()["bytes"] for plan in plans} == {None} and {str(plan.outputs) for plan in plans} == {
        "outputs/leaderboard"
    }
    assert all(36e6 < build(plan).touched_parameters() < 42e6 for plan in plans[:4])
    replayed, uniform = plans[4:6]
    spans = [
        sublayer.span.metrics({})["span"].tolist()
        for _, sublayer in build(replayed).sublayers()
        if hasattr(sublayer, "span")
    ]
    assert replayed.variant == "replayed_spans" and spans == [pytest.approx(own) for own in LEARNED]
    assert uniform.variant == "mhsa" and uniform.model.span == 350


def test_every_model_is_compiled_before_it_is_timed(tmp_path):
    """The same words but for those that change no graph."""
    commands = [words for words in trainings(learned(tmp_path, LEARNED)) if words[0] == "sweep=leaderboard"]
    warm = [words for words in commands if "outputs=outputs/warm" in words]
    timed = [words for words in commands if not placed(words)]
    assert len(warm) == len(timed) > 8
    for before, after in zip(warm, timed, strict=True):
        assert before[: len(after)] == after
        assert {w.partition("=")[0] for w in before[len(after) :]} == {
            *("seed", "budget.seconds", "budget.steps", "eval.bytes", "eval.windows", "outputs")
        }


def fitted(words: list[str]) -> list[str]:
    """Words with which the variant that is named fits a small model."""
    return [word for name in words if name.startswith("variant=") for word in fitting(name.partition("=")[2])]


def small(job: list[str]) -> list[str]:
    """The same training of a second on a CPU."""
    memory = any(word.startswith("variant=") and "_memory" in word for word in job)
    return [*job, *SMALL, *fitted(job), *(SMALL_MEMORY if memory else ())]


def test_every_training_takes_a_step_at_a_small_size(tmp_path):
    corpus, taken = recall(), set()
    for job in distinct(trainings(learned(tmp_path, [[4.0, 8.5]] * 2))):
        plan = plan_run(compose_config(*small(job), "outputs=outputs"))
        key = json.dumps([plan.config["variant"], plan.config["batch"]])
        if key not in taken:
            taken.add(key)
            assert one_step(plan, corpus)["step"] == 1
    assert len(taken) > 8


def test_spans_that_were_learned_are_replayed(here):  # noqa: F811
    """The page's own words, at a small size: what its shell reads out of one run is what the next one has."""

    def trained(variant: str, words: list[list[str]]) -> list[float]:
        chosen = next(
            own for own in words if own[:2] == ["sweep=leaderboard", f"variant={variant}"] and not placed(own)
        )
        ended = call("train.py", *small(chosen), *MADE, "seed=0")
        assert ended.code == 0, ended.err
        (summary,) = (here / "outputs" / "leaderboard").glob(f"{variant}-s0-*/summary.json")
        metrics = json.loads(summary.read_text())["valid_metrics"]
        return [span for name, own in metrics.items() if name.endswith(".attention.span") for span in own]

    spans = trained("adaptive_span", trainings(learned(here / "elsewhere", LEARNED)))
    assert len(spans) == 4 and trained("replayed_spans", trainings(here)) == pytest.approx(spans, abs=0.01)
