"""``windtunnel compare``, ``generate`` and ``export``, and training from Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import windtunnel
from tests.support.command_line import GENERATED, ROOT, TINY, run_folders, train
from tests.support.small_runs import MEMORY
from tests.support.timeouts import TIMEOUT_SECONDS
from windtunnel.verbs import run_verb

WORDS = (
    *GENERATED,
    "variant=adaptive_span_memory",
    *MEMORY,
    "position=relative",
    "model.tied=true",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with two runs, of one variant and two seeds, with shared and tied parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        outcome = train("-m", *WORDS, "seed=0,1")
        assert outcome.code == 0, outcome
        yield Path("outputs").resolve()


def test_generate_prints_the_prompt_and_what_the_model_adds_to_it(outputs, capsys):
    run = run_folders(outputs)[0]
    assert run_verb(["generate", str(run), "012", "--bytes", "30", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    added = windtunnel.load(run).generate(b"012", n_bytes=30, seed=5, temperature=0.8)
    assert printed == f"012{added.decode()}\n"
    assert run_verb(["generate", str(run), ""]) == 2
    assert "error: prompt: is empty" in capsys.readouterr().err


def test_compare_prints_the_table_of_a_folder_and_writes_nothing(
    outputs, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert run_verb(["compare", str(outputs)]) == 0
    assert "adaptive_span_memory" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    assert run_verb(["compare"]) == 2
    assert capsys.readouterr().err.startswith("error: outputs: must be a folder with runs")


def test_an_exported_run_is_the_same_model_and_stores_shared_tensors_once(
    outputs, capsys, tmp_path
):
    run = run_folders(outputs)[0]
    assert run_verb(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    model, exported = windtunnel.load(run), windtunnel.load(tmp_path / "exported")
    for (name, tensor), (other, loaded) in zip(
        model.network.state_dict().items(), exported.network.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(tensor, loaded)
    assert exported.network.head.weight is exported.network.embedding.weight
    stored = sum(parameter.nbytes for parameter in model.network.parameters())
    stored += sum(buffer.nbytes for buffer in model.network.buffers())
    size = (tmp_path / "exported" / "model.safetensors").stat().st_size
    assert stored * 0.9 < size < stored + 20_000
    assert exported.about["variant"] == "adaptive_span_memory"


def test_a_command_that_is_given_a_failed_run_says_why_it_failed_and_which_one_finished(
    outputs, monkeypatch
):
    failed = train(*WORDS, "optim.lr=1e30", "seed=7", f"outputs={outputs}")
    assert failed.code == 3, failed
    finished = {folder.name for folder in run_folders(outputs)[:2]}
    with pytest.raises(
        ValueError, match=r"must be a run folder with .*; this run has diverged \("
    ) as refused:
        windtunnel.load(outputs / "latest")
    assert str(refused.value).rpartition(" is ")[2] in finished


def test_a_damaged_export_is_refused(outputs, tmp_path):
    exported = tmp_path / "exported"
    assert run_verb(["export", str(run_folders(outputs)[0]), "--out", str(exported)]) == 0
    file = exported / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"path=.*model.safetensors cannot be read"):
        windtunnel.load(exported)


def test_train_returns_the_model_of_a_new_run_and_of_a_repeated_one_and_raises_a_mistake(
    outputs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = (*TINY, *GENERATED, "variant=mhsa", "outputs='my outputs'")
    models = [windtunnel.train(*words), windtunnel.train(*words)]
    printed = capsys.readouterr().out
    assert "this run" in printed and "finished before: " in printed
    assert repr(models[0]) == repr(models[1]) and re.fullmatch(
        r"Model\(variant=mhsa, data=recall, parameters=[\d,]+\)", repr(models[0])
    )
    with pytest.raises(ValueError, match="variant=mhsb: no such choice"):
        windtunnel.train("variant=mhsb")
    with pytest.raises(ValueError, match="makes one run"):
        windtunnel.train("-m", "seed=1,2")
    with pytest.raises(ValueError, match="objective=masked_lm: only models of objective=causal_lm"):
        windtunnel.train("objective=masked_lm")


def test_the_command_lists_its_commands_and_its_version_without_torch_and_refuses_others(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-X", "importtime", "-m", "windtunnel", *words]
        common = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS, "check": False}
        return subprocess.run(command, cwd=ROOT, **common)

    shown, version, refused = run("--help"), run("--version"), run("generat")
    assert (shown.returncode, version.returncode, refused.returncode) == (0, 0, 2)
    assert all(
        f"  {name} " in shown.stdout for name in ("train", "compare", "generate", "export", "check")
    )
    installed = r"\d+\.\d+\.\d+|\(a checkout that is not installed\)"
    assert re.fullmatch(rf"attention-windtunnel ({installed})\n", version.stdout)
    assert "generat: no such command (did you mean generate?)" in refused.stderr
    assert not re.search(
        r"\| +(torch|numpy|hydra)\n", shown.stderr + version.stderr + refused.stderr
    )
