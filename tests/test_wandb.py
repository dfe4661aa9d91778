"""W&B: an offline run is written and read back, jobs stay apart, and nothing that W&B does stops a run."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.record.wandb_run import WandbRun
from tests.wandb_runs import inspect, lonely_environment, python

PRETENDED_KEY = "0" * 40

TWO_JOBS = """
import sys
from pathlib import Path
from harness.record.wandb_run import WandbRun
assert "wandb" not in sys.modules, "wandb is imported late"
folder, pictures = Path(sys.argv[1]), [Path(sys.argv[2]).with_name("broken.png"), Path(sys.argv[2])]
try:
    with WandbRun(folder / "first", config={"seed": 1}, project="first", name="one", tags=("a",)) as first:
        first.log({"kind": "train", "bytes_seen": 10, "loss": 1.5})
        raise KeyError("the job fails")
except KeyError:
    pass
with WandbRun(folder / "second", config={"seed": 2, "model": {"width": 128}}, project="second") as second:
    second.log({"kind": "provenance", "command": "python train.py"})
    for step, bits in enumerate((3.0, 2.0, 2.5)):
        metrics = {"layers.0.attention.span": [1.0, 4.0, None], "layers.2.memory.usage_percent": 12.5}
        row = {"kind": "valid", "step": step, "bytes_seen": 100 * step, "bits_per_byte": bits, "text": "no", "blocks": [1.0]}
        second.log(row | {"clock": {"seconds": 0.5}, "metrics": metrics})
    summary = {"variant": "mhsa", "memory": {"peak_bytes": 12345}, "commit": None}
    second.log_end(summary=summary, figures=pictures)
with WandbRun(folder / "second", config={"seed": 2}, project="second", id=second.id) as again:
    again.log({"kind": "train", "bytes_seen": 300, "loss": 1.0})
print("\\n".join([first.id, first.hint, second.id, second.hint, again.id, again.hint]), file=open(sys.argv[3], "w"))
"""


def test_jobs_without_key_network_or_terminal_are_runs_of_their_own_on_disk(tmp_path):
    from matplotlib.figure import Figure

    Figure().savefig(tmp_path / "spans.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    environment = lonely_environment(tmp_path)
    ran = python("-c", TWO_JOBS, tmp_path, tmp_path / "spans.png", tmp_path / "said", environment=environment)
    assert (ran.stdout, ran.stderr) == ("", "")
    first_id, first_hint, second_id, second_hint, again_id, again_hint = (tmp_path / "said").read_text().splitlines()
    assert first_id != second_id == again_id

    first_folder = Path(first_hint.removeprefix("wandb sync "))  # relative to the working directory
    first = inspect(tmp_path / first_folder, environment=environment)
    assert first_folder.parts[:2] == ("first", "wandb")
    assert (first["run_id"], first["project"], first["config"]) == (first_id, "first", {"seed": 1})
    assert (first["exit_code"], first["tags"], first["summary"]["train/loss"]) == (1, ["a"], 1.5)

    second = inspect(tmp_path / second_hint.removeprefix("wandb sync "), environment=environment)
    assert (second["run_id"], second["exit_code"]) == (second_id, 0)
    assert second["config"] == {"seed": 2, "model": {"width": 128}}
    summary = second["summary"]
    assert summary["valid/bits_per_byte"] == {"min": 2.0} and summary["bytes_seen"] == 200
    assert summary["seconds"] == 0.5 and summary["valid_usage_percent/layers.2.memory"] == 12.5
    span = "valid_span/layers.0.attention"
    assert [summary[f"{span}/{which}"] for which in ("mean", "min", "max")] == [2.5, 1.0, 4.0]
    assert summary[span]["_type"] == "histogram" and sum(summary[span]["values"]) == 2
    assert (summary["variant"], summary["memory/peak_bytes"]) == ("mhsa", 12345)
    assert summary["command"] == "python train.py", "of the provenance row"
    assert summary["figures/spans"]["_type"] == "image-file" and "figures/broken" not in summary
    assert "train/loss" not in summary and not {"valid/text", "valid/blocks"} & set(summary) and "commit" not in summary

    assert again_hint == f"wandb sync second/wandb/offline-run-*-{second_id}*"
    assert len(list(tmp_path.glob(again_hint.removeprefix("wandb sync ")))) == 2


class FakeWandb:
    """As much of the module as we use. ``fails`` maps a call to what it raises."""

    def __init__(self, *, has_key=False, typed_offline=False, fails=None):
        self.fails, self.has_key, self.calls = fails or {}, has_key, []
        self.errors = SimpleNamespace(CommError=ConnectionError)
        self.settings = SimpleNamespace(mode="offline" if typed_offline else "online")
        self.run = SimpleNamespace(
            dir="/nowhere/wandb/offline-run-1-x/files",
            id="x",
            url="https://example.org/x",
            offline=False,
            disabled=False,
            summary={},
            log=lambda row: self.called("log", row),
            finish=lambda exit_code: self.called("finish", exit_code),
            define_metric=lambda *name, **keywords: None,
        )

    def called(self, name, value):
        self.calls.append((name, value))
        failure = self.fails.get(name)
        if failure is not None:
            raise failure

    def names(self):
        return [name for name, _ in self.calls]

    def setup(self, *, settings=None):
        return SimpleNamespace(settings=self.settings)

    def Settings(self, **settings):
        return settings

    def login(self, *, prompt, verify):
        assert not prompt and not verify
        return self.has_key

    def init(self, *, mode, **keywords):
        self.run.offline = mode == "offline"
        self.run.disabled = mode == "disabled"
        if mode == "online":
            self.called("online", keywords)
        self.called("init", {"mode": mode} | keywords)
        return self.run

    def teardown(self):
        self.calls.append(("teardown", None))


@pytest.fixture
def fake(monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("WANDB_"):
            monkeypatch.delenv(variable)

    def install(**keywords):
        module = FakeWandb(**keywords)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def run_job(folder, *, config=None, **keywords):
    with WandbRun(folder, config=config or {}, **keywords) as run:
        for step in range(3):
            run.log({"kind": "valid", "bytes_seen": step, "bits_per_byte": 2.0})
        run.log_end(summary={}, figures=[])
    return run


@pytest.mark.parametrize("call", ["init", "log", "finish"])
@pytest.mark.parametrize("failure", [RuntimeError("boom\nmore"), SystemExit(3)])
def test_a_failing_wandb_is_one_line_on_stderr(fake, tmp_path, capsys, call, failure):
    module = fake(fails={call: failure})
    hint = run_job(tmp_path).hint
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and type(failure).__name__ in err
    assert hint.startswith("wandb sync ") == (call != "init")
    assert ("finish" in module.names()) == (call != "init"), "a run that was started is finished"


@pytest.mark.parametrize(
    ("asked", "variable", "has_key", "typed_offline", "started", "lines"),
    [
        ("auto", None, False, False, "offline", 0),
        ("auto", None, True, False, "online", 0),
        ("auto", None, True, True, "offline", 0),
        ("online", None, True, False, "online", 0),
        ("online", None, False, False, "offline", 1),
        ("offline", None, True, False, "offline", 0),
        ("offline", "online", True, False, "online", 0),
        ("online", "disabled", True, False, None, 0),
    ],
)
def test_mode(fake, monkeypatch, tmp_path, capsys, asked, variable, has_key, typed_offline, started, lines):
    module = fake(has_key=has_key, typed_offline=typed_offline)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    hint = run_job(tmp_path, mode=asked).hint
    modes = [value["mode"] for name, value in module.calls if name == "init"]
    assert modes == ([started] if started else [])
    assert len(capsys.readouterr().err.splitlines()) == lines
    beginning = {"online": "wandb: https://", "offline": "wandb sync ", None: ""}[started]
    assert hint.startswith(beginning) and bool(hint) == bool(started)


def test_variables_win_over_config(fake, monkeypatch, tmp_path):
    module = fake()
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    monkeypatch.setenv("WANDB_JOB_TYPE", "theirs")
    ours = {"project": "ours", "group": "sweep", "job_type": "train", "tags": ("mine", "", "x" * 70, "mine")}
    assert run_job(tmp_path, **ours, id="ours", config={"at": {-2: ["memory"]}}).id == "given"
    (given,) = [value for name, value in module.calls if name == "init"]
    assert not {"project", "dir", "job_type"} & given.keys()
    assert (given["id"], given["group"], given["resume"]) == ("given", "sweep", "allow")
    assert given["reinit"] == "finish_previous" and given["tags"] == ["mine", "x" * 64], "W&B would refuse others"
    assert given["config"] == {"at": {"-2": ["memory"]}}, "numbers of layers are keys"


def test_train_rows_are_thinned_but_for_the_last_and_evaluations_are_not(fake, tmp_path):
    module = fake()
    with WandbRun(tmp_path, config={}, every_seconds=3600) as run:
        for step in range(5):
            run.log({"kind": "train", "bytes_seen": step, "loss": 1.0})
            run.log({"kind": "valid", "bytes_seen": step, "bits_per_byte": 2.0})
        run.log_end(summary={}, figures=[])
    sent = [value for name, value in module.calls if name == "log"]
    assert [value["bytes_seen"] for value in sent if "train/loss" in value] == [0, 4]
    assert len([value for value in sent if "valid/bits_per_byte" in value]) == 5


UNREACHED = """
from pathlib import Path
from harness.record.wandb_run import WandbRun
with WandbRun(Path.cwd(), config={"seed": 1}, id="keepthis", every_seconds=0) as run:
    for step in range(20):
        run.log({"kind": "train", "bytes_seen": step, "metrics": {"layers.0.attention.span": [1.0] * 64}})
    run.log_end(summary={"variant": "mhsa"}, figures=[])
print(run.hint)
"""


def test_a_server_that_cannot_be_reached_is_one_line_and_loses_nothing(tmp_path):
    key = {"WANDB_API_KEY": PRETENDED_KEY, "WANDB_PROJECT": "theirs", "WANDB_INIT_TIMEOUT": "1"}
    environment = lonely_environment(tmp_path, **key)
    ran = python("-c", UNREACHED, environment=environment)  # exit code 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith("wandb: cannot go online, so this run is written offline: ")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-keepthis")
    assert ran.stdout == f"wandb sync wandb/{folder.name}\n"
    run = inspect(folder, environment=environment)
    assert (run["config"], run["project"]) == ({"seed": 1}, "theirs")
    assert (run["summary"]["bytes_seen"], run["summary"]["variant"]) == (19, "mhsa")


KILLED = """
import os, signal
from pathlib import Path
from harness.record.wandb_run import WandbRun
def children():
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
with WandbRun(Path.cwd(), config={}, mode="offline") as run:
    (core,) = children()
    os.kill(core, signal.SIGKILL)
    for step in range(5):
        run.log({"kind": "valid", "bytes_seen": step, "loss": 1.0})
"""


def test_wandbs_own_process_may_die(tmp_path):
    ran = python("-c", KILLED, environment=lonely_environment(tmp_path))
    (line,) = ran.stderr.splitlines()
    assert line.startswith("wandb: ") and line.endswith("(the run itself goes on)")
