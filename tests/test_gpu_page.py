"""``docs/gpu.md``: every command composes and takes a backend that a GPU has, and every variant is checked and trained."""

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
from bench.peers import PeerSettings
from bench.planning import own_keys
from harness.plan.build import plan_run
from harness.plan.settings import parse
from tests.command import ROOT
from tests.composing import CONF, compose_config
from tests.composing import small as fitting
from tests.needs import need
from tests.test_recipes import Unset
from variants.kernels import triton_window

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SETTINGS = {"cost": CostSettings, "peers": PeerSettings}
KEYS = {verb: tuple(kind.__dataclass_fields__) for verb, kind in SETTINGS.items()}
KEYS |= {"check": CHECK_KEYS, "fit": FIT_KEYS}
CONTROLS = {  # other sizes and positions of the same classes
    *("all_attention_6", "all_attention_10", "linear_decay", "mhsa_8_layers", "mhsa_alibi", "mhsa_memory_flops"),
    *("mhsa_span_8", "mhsa_span_32", "mhsa_span_128", "performer_decay", "uniform_span"),
}
VARIANTS = {path.stem for path in (CONF / "variant").glob("*.yaml")} - CONTROLS
NOT_COMPOSED = ("pip", "pytest", "bench.report")
LEARNED = [[float(100 * head) for head in range(8)]] * 12
"""Spans as a run of the page's size may have them."""
SHELL = """
python() {
  if [ "$1" = -c ]; then "$PYTHON" "$@"; return; fi
  printf '%s\\n' "$@" '' >>typed
}
"""
"""Notes what a shell makes of the page's commands, in place of running them; they stand in lines, then an empty one."""


@pytest.fixture(scope="module", name="typed")
def typed_commands(tmp_path_factory) -> list[list[str]]:
    """Words of every command that the page comes to, after ``python``, beside a finished run of the leaderboard."""
    folder = tmp_path_factory.mktemp("page")
    run = folder / "outputs" / "leaderboard" / "adaptive_span-s0-0"
    run.mkdir(parents=True)
    metrics = {f"layers.{i}.attention.span": spans for i, spans in enumerate(LEARNED)}
    (run / "summary.json").write_text(json.dumps({"valid_metrics": {"layers.0.attention.other": 1.0} | metrics}))
    script = SHELL + "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    subprocess.run(["sh", "-e", "-c", script], cwd=folder, check=True, env=os.environ | {"PYTHON": sys.executable})
    return [command.splitlines() for command in (Path(folder) / "typed").read_text().split("\n\n") if command]


def grid(words: list[str]) -> list[list[str]]:
    """Every combination of values that commas divide."""
    return [list(job) for job in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)[0]]


def jobs(words: list[str]) -> list[list[str]]:
    """The jobs of one training command, as Hydra's sweeper makes them."""
    sweeps = [word.partition("=")[2] for word in words if word.startswith("sweep=")]
    params = OmegaConf.load(CONF / "sweep" / f"{sweeps[0]}.yaml").hydra.sweeper.params if sweeps else {}
    return grid([*(f"{key}={value}" for key, value in params.items()), *words])


def trainings(typed: list[list[str]], *words: str) -> list[list[str]]:
    """The words of the training commands that begin with these."""
    return [words_of for script, *words_of in typed if script == "train.py" and tuple(words_of[: len(words)]) == words]


def placed(words: list[str]) -> bool:
    """Whether a run goes elsewhere than those that are compared."""
    return any(word.startswith("outputs=") for word in words)


def test_every_training_is_planned_for_a_gpu(typed):
    distinct = {}
    for job in (job for words in trainings(typed) for job in jobs(words)):
        kind = [word for word in job if not re.match(r"(seed|trial|runtime\.(precision|compile))=", word)]
        distinct.setdefault(tuple(kind), job)
    assert len(distinct) > 15
    for job in distinct.values():
        assert plan_run(compose_config(*job), sweeping=True).runtime.device == "cuda", job


def test_every_other_command_composes(typed):
    commands = [words for flag, *words in typed if flag == "-m"]
    assert {module for module, *_ in commands} == {*NOT_COMPOSED, *(f"bench.{verb}" for verb in KEYS)}
    assert all(find_spec(module) for module, *_ in commands)
    verbs = [(module.removeprefix("bench."), line) for module, *line in commands if module not in NOT_COMPOSED]
    jobs_of = [(verb, grid([word for word in line if "=" in word])) for verb, line in verbs]
    for verb, words in [(verb, job) for verb, every in jobs_of for job in (every[0], every[-1])[: len(every)]]:
        if verb == "check":  # as its own small model has them
            words += [word for name in words if name.startswith("variant=") for word in fitting(name.partition("=")[2])]
        cfg = compose_config(*words, name=verb)
        settings = own_keys(cfg, *KEYS[verb])
        if verb in SETTINGS:
            parse(SETTINGS[verb], settings, key="")
        if verb == "check":
            assert settings["agree"] is None
        assert plan_run(cfg).runtime.device == "cuda", words


def test_every_variant_is_checked_and_trained(typed):
    checked = next(grid(words[3:]) for words in typed if words[1:3] == ["bench.check", "-m"])
    named = {word for job in checked for word in job if word.startswith("variant=")}
    assert named == {f"variant={variant}" for variant in VARIANTS}
    smoke = [job for words in trainings(typed, "sweep=smoke") for job in jobs(words)]
    how = ("variant=", "runtime.precision=", "runtime.compile=")
    trained = {tuple(word for word in job if word.startswith(how)) for job in smoke}
    assert len(trained) == len(smoke) == 4 * (len(VARIANTS) - 1) + 1 and {words[0] for words in trained} == named


def test_the_leaderboard_is_of_one_size_and_its_controls_train_as_long(typed):
    need(triton_window._installed(), "triton is not installed")
    runs = [words for words in trainings(typed, "sweep=leaderboard") if not placed(words)]
    plans = [plan_run(compose_config(*job)) for words in runs for job in jobs(words) if "seed=0" in job]
    assert {(plan.budget.unit, plan.budget.amount, str(plan.outputs)) for plan in plans} == {
        ("seconds", 60, "outputs/leaderboard")
    }
    assert {plan.protocol()["bytes"] for plan in plans} == {None} and len(plans) == 9
    with Unset():
        models = [plan.make_model() for plan in plans[:6]]
    assert all(36e6 < model.touched_parameters() < 42e6 for model in models[:4])
    for model in models:
        backends = {s.backend(torch.device("cuda"), training=True) for _, s in model.sublayers()}
        assert backends <= {"plain", "chunked", "fused", "kernel"}
    spans = [s.span.metrics({})["span"].tolist() for _, s in models[4].sublayers() if hasattr(s, "span")]
    assert plans[4].variant == "replayed_spans" and spans == [pytest.approx(layer) for layer in LEARNED]
    assert plans[5].variant == "mhsa" and plans[5].model.span == 350
