"""W&B: offline runs are written and read back, jobs stay apart, nothing that W&B does stops a run, and the dashboard's panels
name what runs log."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb_workspaces.workspaces as ws
import yaml
from omegaconf import OmegaConf

from bench.dashboard import pattern_of, workspace
from harness.plan.build import plan_run
from harness.record.rows import read_rows
from harness.record.wandb_run import WandbRun, numbers
from tests import forked
from tests.command import MADE, ROOT, TINY, call, empty_folder, run_folders  # noqa: F401 - a fixture
from tests.composing import CONF, compose_config, plan
from tests.patience import PATIENCE_SECONDS

SIZES = tuple(word for word in TINY if not word.startswith(("record.", "budget.", "eval.every"))) + MADE
"""A training of a second that keeps W&B and its figures."""


def lonely_environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """No settings of this user, no key unless it is given, and a server that nobody can reach."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "no_netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    kept |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_ERROR_REPORTING": "false", "PYTHONPATH": str(ROOT)}
    return kept | variables


def python(*arguments, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Python in a process of its own, in the environment's home folder."""
    given = {"env": environment, "cwd": environment["HOME"], "stdin": subprocess.DEVNULL, "timeout": PATIENCE_SECONDS}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=True, **given)


def inspect(folder: Path, *, environment: dict[str, str]) -> dict:
    """State, configuration and summary of an offline run, as W&B's own reader has them."""
    command = ("-m", "wandb", "leet", "inspect", "--summary", "--json", folder)
    return json.loads(python(*command, environment=environment).stdout)


@pytest.fixture(scope="module")
def offline_runs(tmp_path_factory) -> list[tuple[Path, dict]]:
    """Run folders of two jobs of one multirun, each with W&B's own reading of its file."""
    here = tmp_path_factory.mktemp("wandb")
    environment = lonely_environment(here)
    words = (*SIZES, "variant=adaptive_span,product_key_memory", "budget.steps=12", "eval.every=0.4", "eval.test=true")
    words += ("record.every_steps=3", "record.wandb.group=together")
    words += ("record.wandb.tags=[mine]", "eval.windows=true")
    ended = forked.run("train.py", "-m", *words, folder=here, environment=environment)
    assert ended.code == 0, ended
    files = {folder: next((folder / "wandb").glob("offline-run-*")) for folder in run_folders(here / "outputs")}
    return [(folder, inspect(file, environment=environment)) for folder, file in files.items()]


SCRIPT = """
import os, signal, sys
from pathlib import Path
from harness.record.wandb_run import WandbRun
assert "wandb" not in sys.modules, "wandb is imported late"
pictures, offline, hints = [Path("broken.png"), Path("spans.png")], {"mode": "offline"}, []
try:
    with WandbRun(Path("first"), config={"seed": 1}, project="first", name="one", tags=("a",), **offline) as run:
        hints.append(run)
        run.log({"kind": "train", "bytes_seen": 10, "loss": 1.5})
        raise KeyError("the job fails")
except KeyError:
    pass
with WandbRun(Path("second"), config={"seed": 2, "model": {"width": 128}}, **offline) as run:
    hints.append(run)
    run.log({"kind": "provenance", "command": "python train.py"})
    for step, bits in enumerate((3.0, 2.0, 2.5)):
        metrics = {"layers.0.attention.span": [1.0, 4.0, None], "layers.2.memory.usage_percent": 12.5}
        row = {"kind": "valid", "step": step, "bytes_seen": 100 * step, "bits_per_byte": bits, "text": "no", "blocks": [1.0]}
        run.log(row | {"clock": {"seconds": 0.5}, "metrics": metrics})
    run.log_end(summary={"variant": "mhsa", "memory": {"peak_bytes": 12345}, "commit": None}, figures=pictures)
with WandbRun(Path("second"), config={"seed": 2}, id=run.id, **offline) as run:
    hints.append(run)
    run.log({"kind": "train", "bytes_seen": 300, "loss": 1.0})
with WandbRun(Path.cwd(), config={"seed": 1}, id="keepthis") as run:  # its server cannot be reached
    hints.append(run)
    for step in range(20):
        run.log({"kind": "train", "bytes_seen": step, "metrics": {"layers.0.attention.span": [1.0] * 64}})
    run.log_end(summary={"variant": "mhsa"}, figures=[])
with WandbRun(Path.cwd(), config={}, **offline) as run:
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    for step in range(5):
        run.log({"kind": "valid", "bytes_seen": step, "loss": 1.0})
print("\\n".join(word for run in hints for word in (run.id, run.hint)))
"""


def test_jobs_without_network_or_terminal_are_runs_of_their_own_on_disk(tmp_path):
    from matplotlib.figure import Figure

    Figure().savefig(tmp_path / "spans.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    key = {"WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "1"}
    environment = lonely_environment(tmp_path, **key)
    ran = python("-c", SCRIPT, environment=environment)
    first_id, first_hint, second_id, second_hint, again_id, again_hint, _, lonely_hint = ran.stdout.splitlines()
    assert first_id != second_id == again_id
    unreached, killed = ran.stderr.splitlines()
    assert unreached.startswith("wandb: cannot go online, so this run is written offline: ")
    assert killed.startswith("wandb: ") and killed.endswith("(the run itself goes on)")

    def read(hint: str) -> dict:
        first = min(tmp_path.glob(hint.removeprefix("wandb sync ")))  # relative to the working directory
        return inspect(first, environment=environment)

    first, second, lonely = read(first_hint), read(second_hint), read(lonely_hint)
    assert first_hint.startswith("wandb sync first/wandb/")
    assert (first["run_id"], first["project"], first["config"]) == (first_id, "first", {"seed": 1})
    assert (first["exit_code"], first["tags"], first["summary"]["train/loss"]) == (1, ["a"], 1.5)
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
    assert again_hint == second_hint == f"wandb sync second/wandb/*run-*-{second_id}*"
    assert len(list(tmp_path.glob(again_hint.removeprefix("wandb sync ")))) == 2
    assert (lonely["run_id"], lonely["summary"]["bytes_seen"], lonely["summary"]["variant"]) == ("keepthis", 19, "mhsa")


class FakeWandb:
    """As much of the module as we use. ``fails`` maps a call to what it raises."""

    def __init__(self, *, has_key=False, typed_offline=False, fails=None):
        self.fails, self.has_key, self.calls = fails or {}, has_key, []
        self.errors = SimpleNamespace(CommError=ConnectionError)
        self.settings = SimpleNamespace(mode="offline" if typed_offline else "online")
        self.run = SimpleNamespace(
            **{"dir": "/nowhere/wandb/offline-run-1-x/files", "id": "x", "url": "https://example.org/x"},
            **{"offline": False, "disabled": False, "summary": {}},
            log=lambda row: self.called("log", row),
            finish=lambda exit_code: self.called("finish", exit_code),
            define_metric=lambda *name, **keywords: None,
        )

    def called(self, name, value):
        self.calls.append((name, value))
        if name in self.fails:
            raise self.fails[name]

    def given(self, name):
        return [value for call, value in self.calls if call == name]

    def setup(self, *, settings=None):
        return SimpleNamespace(settings=self.settings)

    def Settings(self, **settings):
        return settings

    def login(self, *, prompt, verify):
        assert not prompt and not verify
        return self.has_key

    def init(self, *, mode, **keywords):
        self.run.offline, self.run.disabled = mode == "offline", mode == "disabled"
        self.called("init", {"mode": mode} | keywords)
        return self.run

    def teardown(self):
        self.calls.append(("teardown", None))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.delenv("WANDB_MODE")

    def install(**keywords):
        module = FakeWandb(**keywords)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def run_job(folder, *, config=None, **keywords):
    with WandbRun(folder, config=config or {}, **keywords) as run:
        for step in range(5):
            run.log({"kind": "train", "bytes_seen": step, "loss": 1.0})
            run.log({"kind": "valid", "bytes_seen": step, "bits_per_byte": 2.0})
        run.log({"kind": "train", "bytes_seen": 5, "loss": 1.0})
        run.log_end(summary={}, figures=[])
    return run


@pytest.mark.parametrize(
    ("call", "failure"),
    [("init", RuntimeError("boom\nmore")), ("log", SystemExit(3)), ("finish", RuntimeError("boom"))],
)
def test_a_failing_wandb_is_one_line_on_stderr(fake, tmp_path, capsys, call, failure):
    module = fake(fails={call: failure})
    hint = run_job(tmp_path).hint
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and type(failure).__name__ in err
    assert hint.startswith("wandb sync ") == (call != "init")
    assert bool(module.given("finish")) == (call != "init"), "a run that was started is finished"


@pytest.mark.parametrize(
    ("asked", "variable", "has_key", "typed_offline", "started", "lines"),
    [
        ("auto", None, False, False, "offline", 0),
        ("auto", None, True, False, "online", 0),
        ("auto", None, True, True, "offline", 0),
        ("online", None, False, False, "offline", 1),
        ("offline", "online", True, False, "online", 0),
        ("online", "disabled", True, False, None, 0),
    ],
)
def test_mode(fake, monkeypatch, tmp_path, capsys, asked, variable, has_key, typed_offline, started, lines):
    module = fake(has_key=has_key, typed_offline=typed_offline)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    hint = run_job(tmp_path, mode=asked).hint
    assert [value["mode"] for value in module.given("init")] == ([started] if started else [])
    assert len(capsys.readouterr().err.splitlines()) == lines
    assert hint.startswith({"online": "wandb: https://", "offline": "wandb sync ", None: ""}[started])
    assert bool(hint) == bool(started)


def test_variables_win_over_config(fake, monkeypatch, tmp_path):
    module = fake()
    for name in ("PROJECT", "DIR", "RUN_ID", "JOB_TYPE"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    ours = {"project": "ours", "group": "sweep", "job_type": "train", "tags": ("mine", "", "x" * 70, "mine")}
    assert run_job(tmp_path, **ours, id="ours", config={"at": {-2: ["memory"]}}).id == "theirs"
    (given,) = module.given("init")
    assert not {"project", "dir", "job_type"} & given.keys()
    assert (given["id"], given["group"], given["resume"]) == ("theirs", "sweep", "allow")
    assert given["reinit"] == "finish_previous" and given["tags"] == ["mine", "x" * 64], "W&B would refuse others"
    assert given["config"] == {"at": {"-2": ["memory"]}}, "numbers of layers are keys"


# Trainings


def test_two_jobs_of_a_multirun_are_two_runs_with_their_configurations_and_summaries(offline_runs):
    runs = [run for _, run in offline_runs]
    assert len({run["run_id"] for run in runs}) == 2 and [run["exit_code"] for run in runs] == [0, 0]
    assert [run["tags"] for run in runs] == [
        ["mine", name, "recall"] for name in ("adaptive_span", "product_key_memory")
    ]
    for folder, run in offline_runs:
        assert run["name"] == folder.name
        written = yaml.safe_load((folder / "config.yaml").read_text())
        assert run["config"] == json.loads(json.dumps(_without_empty(written)))
        rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        summary, own = run["summary"], json.loads((folder / "summary.json").read_text())
        valid = [row["bits_per_byte"] for row in rows if row["kind"] == "valid" and not row.get("final")]
        assert summary["valid/bits_per_byte"] == {"min": min(valid)} and len(valid) > 1
        trained = [row["bits_per_byte"] for row in rows if row["kind"] == "train"]
        assert summary["train/bits_per_byte"] == trained[-1]
        same = {name: own[name] for name in ("variant", "seed", "valid_bits_per_byte", "training_flops")}
        same |= {"parameters/total": own["parameters"]["total"], "data/sha256": own["data"]["sha256"]}
        assert {name: summary.get(name) for name in same} == same
        assert summary["figures/learning_curve"]["_type"] == "image-file"
    assert written["variant"]["at"].keys() == {-2} and run["config"]["variant"]["at"].keys() == {"-2"}


def _without_empty(node: dict) -> dict:
    """As W&B's file has it: an empty section has nothing that could be stored."""
    inner = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {key: value for key, value in inner.items() if value != {}}


@pytest.mark.parametrize("file", sorted((CONF / "sweep").glob("wandb_*.yaml")), ids=lambda file: file.stem)
def test_a_sweep_of_wandb_is_made_of_our_keys(file):
    sweep = yaml.safe_load(file.read_text())
    assert sweep["program"] == "train.py" and "${args_no_hyphens}" in sweep["command"]
    first = {
        name: node.get("value", node.get("values", [node.get("min")])[0]) for name, node in sweep["parameters"].items()
    }
    words = sweep["command"][sweep["command"].index("${program}") + 1 : -1]
    planned = plan(*words, *(f"{name}={value}" for name, value in first.items()))
    assert planned.data["fallback"] is None, "in a sweep another corpus would spoil the comparison"
    assert sweep["metric"] == {"name": "valid_bits_per_byte", "goal": "minimize"}
    assert sweep["method"] == "grid" and planned.optim["matrices"] is None and not planned.eval.test
    assert (planned.purpose == "tune") == (planned.point is not None) == ("trials" in file.stem)
    cfg = OmegaConf.merge(OmegaConf.to_container(compose_config(), resolve=False), {"sweep": sweep})
    with pytest.raises(ValueError, match=r"^sweep: .*wandb sweep conf/sweep/wandb_"):
        plan_run(cfg)


# The dashboard

SECTIONS = yaml.safe_load((CONF / "dashboard.yaml").read_text(encoding="utf-8"))["sections"]
METRICS = [
    (panel["type"], name)
    for section in SECTIONS
    for panel in section["panels"]
    for name in (*panel.get("y", ()), *filter(None, [panel.get("x")]))
]
"""Every metric that a panel names, its x axis among them."""


def test_every_metric_that_a_panel_names_is_logged_and_stands_in_the_workspace(offline_runs):
    rows = [row for folder, _ in offline_runs for row in read_rows(folder / "record.jsonl")]
    logged = {name for row in rows if row["kind"] != "provenance" for name in numbers(row)}
    stored = {name for _, run in offline_runs for name in run["summary"]}
    for panel, name in METRICS:
        if panel == "LinePlot":  # over the run: in rows
            assert any(re.search(pattern_of(name), one) for one in logged), name
        else:
            assert name in stored, (panel, name)
    assert {name for name in stored if name.startswith("figures/")} == {n for p, n in METRICS if p == "MediaBrowser"}
    made = workspace(SECTIONS, entity="me", project="mine", name="A title")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]
    sizes = [(one["name"], len(one["panels"])) for one in spec["section"]["panelBankConfig"]["sections"]]
    assert sizes == [(section["title"], len(section["panels"])) for section in SECTIONS]
    text = json.dumps(spec)
    assert all(name in text for _, name in METRICS if "*" not in name)


def test_the_command_saves_and_says_why_not(here, monkeypatch):
    words, saved = ("bench/dashboard.py", "entity=me", "project=p"), []
    ended = call(*words)
    assert ended.code == 2 and ended.err.count("\n") == 1 and "WANDB_MODE=offline" in ended.err
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", lambda **asked: bool(saved))
    ended = call(*words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1) and "no API key is configured" in ended.err
    saved.append("a key")
    monkeypatch.setattr(ws.Workspace, "save", lambda made: saved.append((made.entity, made.project)))
    monkeypatch.setattr(ws.Workspace, "url", "https://example.org/here")
    ended = call(*words)
    assert (ended.code, ended.err, saved[1:]) == (0, "", [("me", "p")])
    assert ended.out.splitlines() == ["workspace: https://example.org/here"]

    def refuse(made):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    ended = call(*words)
    assert ended.code == 2 and "entity=me project=p: W&B refused (ConnectionError: nobody there)" in ended.err
    assert not list(here.iterdir())
