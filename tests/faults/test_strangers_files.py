"""A stranger's files run nothing: configurations of a ``-cd`` folder, on which Hydra would act before a command begins.

Each attack leaves a file, or a word, where it succeeds. It must not be there, nothing else may be new, and one message
names the file.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness import source
from tests.command import MADE, TINY, call, empty_folder, train  # noqa: F401 - a fixture

pytestmark = pytest.mark.attack("a stranger's configuration that runs, imports or reads something")

TOUCH = {"_target_": "torch.utils.collect_env.run", "command": "touch PWNED"}
"""A callable that Hydra's own list of forbidden ones does not know."""
PAYLOAD = "import pathlib\npathlib.Path('PWNED').touch()\n"
MIXER = """from variants.contract import Sublayer, SublayerOutput

class Evil(Sublayer):
    def __init__(self, place):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        return SublayerOutput(x)
"""
FSMONITOR = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": "touch PWNED; false"}
LOGGER = {
    "version": 1,
    "handlers": {"h": {"()": TOUCH["_target_"], "command": "touch PWNED"}},
    "root": {"handlers": ["h"]},
}
FILE_LOGGER = {
    "version": 1,
    "handlers": {"h": {"class": "logging.FileHandler", "filename": "PWNED", "mode": "w"}},
    "root": {"handlers": ["h"]},
}

OF_HYDRA = {
    "callbacks": {"callbacks": {"x": TOUCH}},
    "env_set": {"job": {"env_set": FSMONITOR}},
    "path": {"job": {"env_set": {"PATH": "stranger"}}},
    "job_logging": {"job_logging": LOGGER},
    "hydra_logging": {"hydra_logging": FILE_LOGGER},
    "run.dir": {"run": {"dir": "PWNED"}},
    "output_subdir": {"output_subdir": "PWNED"},
    "launcher": {"mode": "MULTIRUN", "launcher": TOUCH},
    "sweeper": {"mode": "MULTIRUN", "sweeper": TOUCH},
    "sweep.dir": {"mode": "MULTIRUN", "sweep": {"dir": "PWNED"}},
    "params.trust": {"mode": "MULTIRUN", "sweeper": {"params": {"trust": "[stranger]"}}},
    "params.callbacks": {"mode": "MULTIRUN", "sweeper": {"params": {"+hydra.callbacks.x": str(TOUCH)}}},
    "env_copy": {"job": {"env_copy": ["HOME"]}},
    "help": {"help": {"template": "x"}},
}
GLOBAL = "# @package _global_\n"
TO_CALLBACKS = yaml.safe_dump({"x": TOUCH})
PLACED = {
    "by its package": {"recipe/evil.yaml": f"# @package hydra.callbacks\n{TO_CALLBACKS}"},
    "by another's defaults": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: ['/recipe@hydra.callbacks: more']\n".replace("'", ""),
        "recipe/more.yaml": TO_CALLBACKS,
    },
    "by a chain of packages": {
        "recipe/evil.yaml": "# @package hydra\ndefaults: [{/recipe@callbacks: more}]\n",
        "recipe/more.yaml": TO_CALLBACKS,
    },
    "by its group": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: [{{override /hydra/callbacks: more}}]\n",
        "hydra/callbacks/more.yaml": TO_CALLBACKS,
    },
    "outside of the search path": {
        "recipe/evil.yaml": f"{GLOBAL}defaults: [/../../../../../../../../../../../../../../HERE/loose]\n",
        "loose.yaml": f"{GLOBAL}{yaml.safe_dump({'hydra': OF_HYDRA['callbacks']})}",
    },
    "trust": {"recipe/evil.yaml": f"{GLOBAL}trust: [stranger]\n"},
    "trust, by its package": {"recipe/evil.yaml": "# @package trust\n[stranger]\n"},
    "trust, tuned": {
        "recipe/evil.yaml": f"{GLOBAL}purpose: tune\ntrial: 0\nspace: {{trust: {{choices: [[stranger], [stranger]]}}}}\n"
    },
}


def write(here: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (here / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "conf" / name).write_text(text.replace("HERE", str(here / "conf").lstrip("/")), encoding="utf-8")


def refused(here: Path, *words: str) -> str:
    """The message of a command that must end before it begins, and leave everything as it is."""
    before = sorted(here.rglob("*"))
    ended = train(*words)
    assert sorted(here.rglob("*")) == before, "something was done"
    assert ended.code == 2 and not ended.out and ended.err.count("error: ") == 1, ended
    assert len(ended.err.splitlines()) == 1, ended.err
    return ended.err


@pytest.fixture(autouse=True)
def stranger(here, monkeypatch):
    """What attacks would have run: a module, and a git, in the folder where the command is typed."""
    (here / "stranger.py").write_text(PAYLOAD, encoding="utf-8")
    (here / "stranger").mkdir()
    (here / "stranger" / "git").write_text("#!/bin/sh\n/usr/bin/touch PWNED\n")
    (here / "stranger" / "git").chmod(0o755)


@pytest.mark.parametrize("attack", OF_HYDRA)
def test_hydras_own_keys_count_from_the_command_line_alone(here, attack):
    write(here, {"recipe/evil.yaml": GLOBAL + yaml.safe_dump({"hydra": OF_HYDRA[attack]})})
    said = refused(here, "-cd", "conf", *MADE, "recipe=evil")
    assert "evil.yaml" in said and "hydra" in said and "command line alone" in said


@pytest.mark.parametrize("attack", PLACED)
def test_no_way_of_placing_it_leads_there(here, attack):
    write(here, PLACED[attack])
    said = refused(here, "-cd", "conf", *MADE, "recipe=evil")
    assert "evil.yaml" in said or "space.trust" in said


def test_a_primary_file_of_a_stranger_names_no_package(here):
    (here / "stranger" / "__init__.py").write_text(PAYLOAD, encoding="utf-8")
    write(here, {"evil.yaml": "defaults: [train, _self_]\nhydra: {searchpath: ['pkg://stranger']}\n"})
    assert "hydra.searchpath" in refused(here, "-cd", "conf", "-cn", "evil", *MADE)


@pytest.mark.parametrize("word", ["+trust=[stranger]", "hydra.searchpath=[pkg://stranger]"])
def test_words_of_a_comparison_are_nobodys(here, word):
    comparison = {"job": "x", "reference": "reference_model", "words": word, "entries": {"reference_model": {}}}
    write(here, {"comparison/evil.yaml": GLOBAL + yaml.safe_dump({"comparisons": [comparison]})})
    ended = call("bench/peers.py", "-cd", "conf", "comparison=evil", *MADE, *TINY)
    assert not (here / "PWNED").exists() and "PWNED" not in ended.err
    assert ended.code == 2 and f"words of peers: {word}: " in ended.err and "command line alone" in ended.err, ended


def test_the_same_keys_typed_are_the_users_own(here):
    write(here, {"sweep/mine.yaml": f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{seed: '0,1'}}}}}}\n"})
    ended = call("train.py", "-cd", "conf", "sweep=mine", "+hydra.job.env_set.MINE=1", "--cfg", "hydra")
    assert ended.code == 0 and "seed: 0,1" in ended.out and "MINE: '1'" in ended.out, ended


def test_no_module_of_ours_is_looked_for_beside_a_strangers_configuration(here):
    for package in ("harness", "harness/plan"):
        (here / package).mkdir(exist_ok=True)
        (here / package / "evil.py").write_text(PAYLOAD + MIXER, encoding="utf-8")
        node = {"_target_": f"{package.replace('/', '.')}.evil.Evil", "_partial_": True}
        write(here, {"sublayer/evil.yaml": yaml.safe_dump(node)})
        said = refused(here, "-cd", "conf", *MADE, "sublayer@variant.feed_forward=evil")
        assert "cannot be imported" in said or "allowed are classes of" in said


def test_the_folder_where_a_command_is_typed_is_not_searched_unasked(here, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "model.heads=3" in refused(here, *MADE, "model.heads=3") and str(here) not in sys.path
    assert "PYTHONPATH" in refused(here, *MADE, "trust=[nowhere]") and str(here) in sys.path


LEAKS = {
    "a resolver": "optim: {lr: 0.001}\ndata: {path: '${oc.env:STRANGERS_WORD}'}\n",
    "a resolver in another's name": "data: {path: '${oc.${model.cache}:STRANGERS_WORD}'}\n",
    "two halves": (
        "record: {wandb: {project: '$', entity: '{oc.env:STRANGERS_WORD}'}}\n"
        "data: {path: '${record.wandb.project}${record.wandb.entity}'}\n"
    ),
    "an escape": "data: {path: '\\${oc.env:STRANGERS_WORD}'}\n",
    "a sweep's word": "hydra: {mode: MULTIRUN, sweeper: {params: {data.path: '${oc.env:STRANGERS_WORD}'}}}\n",
}


@pytest.mark.parametrize("attack", LEAKS)
def test_no_variable_of_the_environment_is_read(here, attack, monkeypatch):
    monkeypatch.setenv("STRANGERS_WORD", "my-secret")
    write(here, {"recipe/evil.yaml": GLOBAL + LEAKS[attack]})
    said = refused(here, "-cd", "conf", *MADE, "recipe=evil")
    assert "my-secret" not in said and "evil.yaml" in said and "refer to another key" in said


def bomb(levels: int) -> str:
    lists = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, levels))
    return f"a0: &a0 [x, x, x, x, x, x, x, x, x]\n{lists}"


HEAVY = {
    "aliased lists": (bomb(7), "more than 20,000 values"),
    "itself": ("a: &a [*a]\n", "stands in itself"),
    "levels": (f"a: {'[' * 500}\n", "levels deep"),
    "letters": ("a: " + "x" * 300_000, "more than 262,144 bytes"),
    "no text": ("a: \udcff", "no YAML"),
}


@pytest.mark.attack("a configuration without end")
@pytest.mark.parametrize("attack", HEAVY)
def test_a_file_too_heavy_is_refused_at_once(here, attack):
    text, reason = HEAVY[attack]
    write(here, {"recipe/evil.yaml": ""})
    (here / "conf/recipe/evil.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert reason in refused(here, "-cd", "conf", *MADE, "recipe=evil")


@pytest.mark.attack("a configuration without end")
def test_targets_and_messages_without_end(here):
    for target in ("variants" + ".a" * 2000, "variants." + "a" * 9_000):
        write(here, {"sublayer/evil.yaml": yaml.safe_dump({"_target_": target, "_partial_": True})})
        said = refused(here, "-cd", "conf", *MADE, "sublayer@variant.feed_forward=evil")
        assert len(said) < 4200 and "variant.feed_forward._target_=variants" in said and "trust=[..]" in said


def git(folder: Path, *words: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", "-C", str(folder), *words], env=own, check=True, capture_output=True)


def test_a_strangers_repository_around_ours_is_not_asked(here, monkeypatch):
    (here / "vendored").mkdir()
    git(here, "init", "-q")
    git(here, "-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x")
    git(here, "config", "core.fsmonitor", f"touch {here / 'PWNED'}; false")
    monkeypatch.setattr(source, "ROOT", here / "vendored")
    assert source.commit() is None and not (here / "PWNED").exists()
    monkeypatch.setattr(source, "ROOT", here)
    assert source.commit().endswith("-dirty") and not (here / "PWNED").exists()
