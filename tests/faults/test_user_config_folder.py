"""A ``-cd`` folder cannot set ``hydra.*`` or ``trust``, which could run code. A successful
attack creates PWNED."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness import source
from tests.harness.test_cli import refused
from tests.support.command_line import GENERATED, TINY, call, empty_folder  # noqa: F401 - a fixture

TOUCH = {"_target_": "torch.utils.collect_env.run", "command": "touch PWNED"}
"""A node whose function is not on Hydra's own list of forbidden targets."""
PAYLOAD = "import pathlib\npathlib.Path('PWNED').touch()\n"
MIXER = """from variants.contract import Sublayer, SublayerOutput

class Evil(Sublayer):
    def __init__(self, context):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(x)
"""
KEYS = {
    "callbacks": {"callbacks": {"x": TOUCH}},
    "run.dir": {"run": {"dir": "PWNED"}},
    "params.trust": {"mode": "MULTIRUN", "sweeper": {"params": {"trust": "[stranger]"}}},
    "params.callbacks": {
        "mode": "MULTIRUN",
        "sweeper": {"params": {"+hydra.callbacks.x": str(TOUCH)}},
    },
}
GLOBAL = "# @package _global_\n"
ATTACKS = {
    **{
        name: {"recipe/evil.yaml": GLOBAL + yaml.safe_dump({"hydra": node})}
        for name, node in KEYS.items()
    },
    "by its package": {
        "recipe/evil.yaml": f"# @package hydra.callbacks\n{yaml.safe_dump({'x': TOUCH})}"
    },
    "by another's defaults": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: [{{/recipe@hydra.callbacks: more}}]\n"
    },
    "by one text": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: [/recipe/more@_global_.hydra.callbacks]\n"
    },
    "by its group": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: [{{override /hydra/callbacks: more}}]\n"
    },
    "above the folder": {"recipe/evil.yaml": f"{GLOBAL}defaults: [{'/..' * 20}HERE/loose]\n"},
    "trust": {"recipe/evil.yaml": f"{GLOBAL}trust: [stranger]\n"},
    "trust, by its package": {"recipe/evil.yaml": "# @package trust\n[stranger]\n"},
}
OTHER_FILES = {
    "recipe/more.yaml": yaml.safe_dump({"x": TOUCH}),
    "hydra/callbacks/more.yaml": yaml.safe_dump({"x": TOUCH}),
    "loose.yaml": GLOBAL + yaml.safe_dump({"hydra": KEYS["callbacks"]}),
}


def write(cwd: Path, files: dict[str, str]):
    for name, text in files.items():
        (cwd / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / "conf" / name).write_text(text.replace("HERE", str(cwd / "conf")))


@pytest.fixture(autouse=True)
def stranger(cwd):
    """A Python module and a program named git in the current folder, neither of which may run."""
    (cwd / "stranger.py").write_text(PAYLOAD)
    (cwd / "stranger").mkdir()
    (cwd / "stranger" / "git").write_text("#!/bin/sh\n/usr/bin/touch PWNED\n")
    (cwd / "stranger" / "git").chmod(0o755)


@pytest.mark.parametrize("attack", ATTACKS)
def test_keys_of_hydra_and_trust_may_be_set_on_the_command_line_only(cwd, attack):
    write(cwd, OTHER_FILES | ATTACKS[attack])
    assert "may be set on the command line only" in refused(
        cwd, "-cd", "conf", *GENERATED, "recipe=evil"
    )


def test_a_primary_configuration_of_the_folder_cannot_extend_the_search_path(cwd):
    (cwd / "stranger" / "__init__.py").write_text(PAYLOAD)
    write(
        cwd, {"evil.yaml": "defaults: [train, _self_]\nhydra: {searchpath: ['pkg://stranger']}\n"}
    )
    assert "hydra.searchpath" in refused(cwd, "-cd", "conf", "-cn", "evil", *GENERATED)


def test_sweeps_interpolations_and_environment_variables_of_the_folder_are_read(cwd, monkeypatch):
    """A variant may be named hydra, and keys of Hydra may be set on the command line."""
    monkeypatch.setenv("MY_RATE", "0.125")
    params = f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{seed: '0,1'}}}}}}\n"
    write(cwd, {"sweep/mine.yaml": params, "variant/hydra.yaml": "defaults: [mhsa]\nname: hydra\n"})
    write(
        cwd,
        {
            "recipe/mine.yaml": f"{GLOBAL}optim: {{lr: '${{oc.env:MY_RATE}}'}}\nseed: "
            f"'${{model.heads}}'\n"
        },
    )
    words = ("-cd", "conf", "sweep=mine", "recipe=mine", "variant=hydra")
    outcome = call(
        "train.py", *words, "+hydra.job.env_set.MINE=1", "trust=[json]", "--cfg", "all", "--resolve"
    )
    assert outcome.code == 0 and "seed: 0,1" in outcome.out and "MINE: '1'" in outcome.out, outcome
    assert "name: hydra" in outcome.out and "lr: '0.125'" in outcome.out and "- json" in outcome.out


def test_a_folder_named_like_our_packages_does_not_extend_them(cwd):
    for package in ("harness", "harness/plan"):
        (cwd / package).mkdir(exist_ok=True)
        (cwd / package / "evil.py").write_text(PAYLOAD + MIXER)
        node = {"_target_": f"{package.replace('/', '.')}.evil.Evil", "_partial_": True}
        write(cwd, {"sublayer/evil.yaml": yaml.safe_dump(node)})
        message = refused(cwd, "-cd", "conf", *GENERATED, "sublayer@variant.feed_forward=evil")
        assert "cannot be imported" in message or "allowed are classes of" in message


def test_the_current_folder_is_searched_for_modules_only_with_trust(cwd, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "model.heads=3" in refused(cwd, *GENERATED, "model.heads=3") and str(cwd) not in sys.path
    assert "PYTHONPATH" in refused(cwd, *GENERATED, "trust=[nowhere]") and str(cwd) in sys.path


def test_an_error_message_is_cut_to_a_maximal_length(cwd):
    write(
        cwd,
        {
            "sublayer/evil.yaml": yaml.safe_dump(
                {"_target_": "stranger." + "a" * 9_000, "_partial_": True}
            )
        },
    )
    message = refused(cwd, "-cd", "conf", *GENERATED, "sublayer@variant.feed_forward=evil")
    assert (
        len(message) < 4200
        and "variant.feed_forward._target_=stranger" in message
        and "trust=[..]" in message
    )


def git(folder: Path, *words: str):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(
        ["git", "-C", str(folder), *words], env=environment, check=True, capture_output=True
    )


def test_git_is_not_run_in_a_repository_that_contains_ours(cwd, monkeypatch):
    (cwd / "vendored").mkdir()
    git(cwd, "init", "-q")
    git(cwd, "-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x")
    git(cwd, "config", "core.fsmonitor", f"touch {cwd / 'PWNED'}; false")
    monkeypatch.setattr(source, "ROOT", cwd / "vendored")
    assert source.commit() is None and not (cwd / "PWNED").exists()
    monkeypatch.setattr(source, "ROOT", cwd)
    assert source.commit().endswith("-dirty") and not (cwd / "PWNED").exists()
