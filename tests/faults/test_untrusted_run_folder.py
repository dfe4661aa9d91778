"""Run folders and checkpoints from others run no code, and invalid content in them is one error
message."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from harness.loop import prepare
from harness.plan.build import Plan
from harness.record.folder import read_provenance
from harness.record.rows import CONFIG, EVALUATIONS, FORMAT, RECORD
from harness.trained import plan_of_run
from tests.faults.test_damaged_checkpoints import write_with_digest
from tests.faults.test_user_config_folder import MIXER, PAYLOAD
from tests.support.command_line import call
from tests.support.small_configs import CONF, CPU
from tests.support.small_runs import make_run, temporary_cwd, whole_run  # noqa: F401 - a fixture

RUN = "theirs"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    run, _ = whole_run(
        "variant=mhsa", "budget.steps=2", f"outputs={tmp_path_factory.mktemp('runs')}"
    )
    return run.folder.path


@pytest.fixture
def run(finished_run, cwd) -> Path:
    """A copy of the finished run in the current folder, which stands for a downloaded one."""
    return Path(shutil.copytree(finished_run, cwd / RUN))


def configure(run: Path, **sections: object):
    """Replace sections of a run's configuration. A dictionary is merged into the existing
    section."""
    config = yaml.safe_load((run / CONFIG).read_text())
    for name, value in sections.items():
        section = config.get(name)
        config[name] = (
            section | value if isinstance(value, dict) and isinstance(section, dict) else value
        )
    (run / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))


def refused(run: Path, script: str, *words: str) -> str:
    """Return the error message of a command that must end with exit code 2 and create or remove no
    file."""
    before = sorted(run.parent.rglob("*"))
    outcome = call(script, *words)
    assert sorted(run.parent.rglob("*")) == before and outcome.code == 2, outcome
    assert outcome.err.count("error: ") == 1 and "Traceback" not in outcome.err, outcome.err
    return outcome.err


def plan_of_folder(run: Path) -> Plan:
    """Return the plan that commands build from the folder's configuration."""
    runtime = OmegaConf.load(CONF / "runtime" / "default.yaml")
    return plan_of_run(run, key="run", runtime=runtime, trust=[])


EVALUATE = ("bench/evaluate.py", f"run={RUN}", "eval.bytes=400", *CPU)
"""One command suffices, because all open a folder by the same function
(``tests/windtunnel/test_python_api.py``)."""


def test_trust_in_the_configuration_of_a_run_folder_is_ignored(run):
    (run / "evil.py").write_text(PAYLOAD + MIXER)
    node = {"_target_": f"{RUN}.evil.Evil", "_partial_": True}
    configure(run, trust=[f"{RUN}.evil"], variant={"attention": node})
    message = refused(run, *EVALUATE)
    assert (
        f"{RUN}: {CONFIG}: variant.attention._target_={RUN}.evil.Evil: allowed are classes of"
        in message
    )


HOSTILE_CONFIGURATIONS = {
    "a list in itself": "variant: &a [*a]\n",
    "deep": f"variant: {'[' * 1000}\n",
    "long": f"# {'x' * 300_000}\n",
    "a list": "[variant]\n",
    "a tag": "variant: !!python/object/apply:os.system ['touch PWNED']\n",
    "not UTF-8": b"\xff\xfe\x00",
    "a variable, escaped": 'data: {path: "\\x24{oc.env:HOME}"}\n',
    "layers": {"model": {"layers": 10**12}},
    "a seed of text": {"seed": "zero"},
    "a key too many": {"callbacks": {"x": {"_target_": "torch.utils.collect_env.run"}}},
}
"""By name of the attack, the content of a ``config.yaml`` or the sections to change in a valid
one."""


@pytest.mark.parametrize("attack", HOSTILE_CONFIGURATIONS)
def test_a_hostile_configuration_is_one_error_message(run, attack):
    hostile = HOSTILE_CONFIGURATIONS[attack]
    if isinstance(hostile, dict):
        configure(run, **hostile)
    else:
        (run / CONFIG).write_bytes(hostile if isinstance(hostile, bytes) else hostile.encode())
    with pytest.raises(ValueError, match=f"run=.*{RUN}: {CONFIG}") as caught:
        plan_of_folder(run)
    assert (
        os.environ["HOME"] not in str(caught.value).replace(str(run), "")
        and not (run.parent / "PWNED").exists()
    )


def test_an_older_folder_has_the_same_plan_with_the_keys_of_a_search(run):
    config = plan_of_folder(run).config
    configure(run, trial=3, space={"optim.lr": {"low": 0.001, "high": 0.1, "scale": "log"}})
    assert plan_of_folder(run).config == config


def test_a_pipe_in_place_of_the_configuration_is_refused_without_waiting(run):
    (run / CONFIG).unlink()
    os.mkfifo(run / CONFIG)
    with pytest.raises(ValueError, match=f"{RUN}: {CONFIG}"):
        plan_of_folder(run)


RECORDS = {
    "garbage": b"\xff\x00garbage{\n",
    "deep": b"[" * 200_000 + b"\n",
    "no keys": b'{"kind": "provenance", "format": %d}\n' % FORMAT,
    "another format": b'{"kind": "provenance", "format": [1]}\n',
    "long": b'{"kind": "' + b"x" * (5 << 20) + b'"}\n',
}
WRONG_KEYS = {"config.model": "tiny", "data": None, "optimizers": {}, "format": FORMAT + 1}


@pytest.mark.parametrize("attack", [*RECORDS, *WRONG_KEYS])
def test_a_hostile_record_is_one_error_message(run, attack):
    if attack in RECORDS:
        (run / RECORD).write_bytes(RECORDS[attack])
    else:
        row = node = json.loads((run / RECORD).read_text().splitlines()[0])
        *above, last = attack.split(".")
        for name in above:
            node = node[name]
        node[last] = WRONG_KEYS[attack]
        (run / RECORD).write_text(json.dumps(row) + "\n")
    for key in ("run", "init_from.run"):
        with pytest.raises(ValueError, match=f"{key}=.*{RUN}: {RECORD}"):
            read_provenance(run, key=key)


def test_init_from_a_checkpoint_with_invalid_values_is_one_error_message(run, monkeypatch):
    provenance, trainer = (
        read_provenance(run, key="init_from.run"),
        make_run("variant=mhsa", "outputs=mine").trainer,
    )
    good = prepare.checkpoint.load(prepare.checkpoint.newest(run))
    contents = [{}, *(good | {"model": value} for value in ("text", None, {"a": 1}))]
    contents += [good | {name: "text"} for name in ("spent", "last", "optimizers", "random")]
    contents += [
        {key: good[key] for key in good if key != name} for name in ("spent", "state", "random")
    ]
    init_from = prepare.dataclasses.replace(
        trainer.plan.init_from, run=str(run), restore="everything"
    )
    trainer.plan = prepare.dataclasses.replace(trainer.plan, init_from=init_from)
    for content in contents:
        monkeypatch.setattr(
            prepare, "_read_initial", lambda path, content=content: (dict(content), provenance)
        )
        with pytest.raises(ValueError, match="init_from.run="):
            prepare.initialise(trainer)


class CalledOnLoad:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, call, *arguments):
        self._reduced = call, arguments

    def __reduce__(self):
        return self._reduced


CALLS = {"system": (os.system, "touch PWNED"), "getattr": (getattr, dict, "pop")}


@pytest.mark.parametrize("call", CALLS)
def test_loading_a_checkpoint_calls_no_function_of_its_pickle(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, payload = tmp_path / "step-000000009.pt", CalledOnLoad(*CALLS[call])
    for content in (payload, {"format": 3, "model": payload}):
        torch.save(content, path)
        write_with_digest(path, path.read_bytes())
        with pytest.raises(prepare.checkpoint.Damaged, match="is no checkpoint of a run"):
            prepare.checkpoint.load(path)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("name", [EVALUATIONS, "context.png"])
def test_a_bench_command_writes_through_no_link_in_the_folder(run, name):
    victim = run.parent / "mine.txt"
    victim.write_text("mine")
    (run / name).symlink_to(victim)
    assert f"{name} is a link" in refused(run, *EVALUATE)
    assert victim.read_text() == "mine"


def test_a_training_run_writes_through_no_link_in_the_folder(cwd):
    run = make_run("variant=mhsa", "budget.steps=2")
    victim = cwd / "mine.txt"
    victim.write_text("mine")
    run.folder.path.mkdir(parents=True)
    (run.folder.path / "lock").symlink_to(victim)
    with pytest.raises(ValueError, match="lock is a link"):
        run.folder.lock()
    assert victim.read_text() == "mine"
