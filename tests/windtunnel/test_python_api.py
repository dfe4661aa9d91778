"""``windtunnel.load``: scores, samples and attention maps of a run's model. All commands open
runs by one function."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import windtunnel
from harness.compose.untrusted_config import read_config
from harness.data import corpora
from harness.plan.build import literal
from tests.support.command_line import GENERATED, ROOT, call, run_folders, train
from tests.support.small_runs import MEMORY

READERS = (
    r"\b(read_run|plan_of_run|read_provenance|read_config|load_best|load_newest|torch\.load)\("
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with learned spans, a tied embedding, and a table of positions that
    its layers share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        outcome = train(
            *GENERATED,
            "variant=adaptive_span_memory",
            *MEMORY,
            "position=relative",
            "model.tied=true",
        )
        assert outcome.code == 0, outcome
        yield run_folders(Path("outputs"))[0].resolve()


def test_a_loaded_model_has_the_exact_score_of_its_run_and_needs_three_files(run, tmp_path):
    for name in ("config.yaml", "record.jsonl", "checkpoints/best.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(run / name, tmp_path / name)
    models = [windtunnel.load(path) for path in (run, tmp_path)]
    assert len({model.generate(b"0", n_bytes=30, seed=5) for model in models}) == 1
    assert models[0].network.head.weight is models[0].network.embedding.weight
    summary = json.loads((run / "summary.json").read_text())
    protocol, corpus = summary["protocol"], corpora.load("recall", bytes=60000)
    split = corpus.scored_part(
        "valid", selection_bytes=protocol["selection_bytes"], limit=protocol["bytes"]
    )
    text = bytes(corpus.symbols[token] for token in split.tolist())
    cut = {key: protocol[key] for key in ("streams", "segment", "context")}
    torch.set_num_threads(1)
    assert [model.score(text, **cut) for model in models] == [summary["valid_bits_per_byte"]] * 2


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("1e5").via("a number for OmegaConf, a text for PyYAML")
@example(r"a\${b}\\${c}").via("no reference")
def test_a_text_of_a_configuration_is_the_same_text_when_a_run_is_opened(tmp_path_factory, name):
    assume(name != "???")  # OmegaConf's mark for a missing value, which no run has
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_bytes(yaml.safe_dump({"path": name, "paths": [name]}, sort_keys=False).encode())
    opened = OmegaConf.to_container(literal(read_config(path, label="run")), resolve=True)
    assert opened == {"path": name, "paths": [name]}


NAMES = ("1e5", "on", "null", "2020-01-01", "0x1F", "./~", "1_0", ".inf", "a${b}.bin", "é")


def test_a_run_of_a_corpus_of_any_name_can_be_repeated_in_a_sweep_and_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [r"\$".join(f"data.path='{name}'".split("$")) for name in NAMES]
    for name in NAMES:
        Path(name).write_bytes(bytes(range(65, 91)) * 1000)
    sweep = "data.path=" + ",".join(word.partition("=")[2] for word in words)
    outcome = train("-m", "data=file", "variant=mhsa", "budget.steps=1", sweep)
    assert outcome.code == 0 and f"{len(NAMES)} of {len(NAMES)} done" in outcome.out, outcome
    folders = run_folders(Path("outputs"))
    models = [windtunnel.load(folder) for folder in folders]
    assert {model.about["config"]["data"]["path"] for model in models} == {*NAMES}
    assert "finished before" in train("data=file", "variant=mhsa", "budget.steps=1", words[0]).out
    evaluated = [call("bench/evaluate.py", f"run={folder}", "eval.bytes=40") for folder in folders]
    assert [outcome.code for outcome in evaluated] == [0] * len(NAMES), evaluated
    keys = {"evaluate": "run", "inspect": "run", "cost": "rows"}
    commands = {"train.py": "data.path"} | {f"bench/{name}.py": keys[name] for name in keys}
    for command, key in commands.items():
        for word, reason in (
            ("1e5", f"\"{key}='..'\""),
            ("'~nobody-at-all'", f"{key}='~nobody-at-all': cannot"),
        ):
            outcome = call(command, f"{key}={word}")
            assert outcome.code == 2 and reason in outcome.err, outcome


def test_attention_maps_are_causal_and_sum_to_one_and_mistakes_are_named(run, tmp_path):
    model = windtunnel.load(run)
    maps = model.attention(b"0123456789" * 4)
    assert set(maps) == {"layers.0.attention", "layers.1.attention"}
    for weights in maps.values():
        assert weights.shape == (2, 40, 40) and torch.equal(weights, weights.tril())
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 40))
    with pytest.raises(ValueError, match="text: has one byte"):
        model.score(b"0")
    for path, reason in ((tmp_path, "must be a run folder"), ("~nobody-at-all", "cannot be read")):
        with pytest.raises(ValueError, match=rf"path=.*{reason}"):
            windtunnel.load(path)


def test_the_python_example_of_the_readme_runs(run, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    (lines,) = re.findall(
        r"^```python\n(import windtunnel.*?)^```$", readme, re.MULTILINE | re.DOTALL
    )
    assert len(lines.splitlines()) <= 10
    monkeypatch.chdir(run.parents[1])
    exec(lines, {})
    assert "bits per byte" in capsys.readouterr().out


def test_all_commands_open_a_run_folder_by_the_same_function():
    files = [
        *(ROOT / "bench").rglob("*.py"),
        *(ROOT / "windtunnel").glob("*.py"),
        ROOT / "harness/trained.py",
    ]
    code = {path.stem: path.read_text() for path in files}
    assert [name for name, text in code.items() if re.search(READERS, text)] == ["trained"]
    openers = {
        path.stem
        for path in (ROOT / "conf").glob("*.yaml")
        if re.search(r"^run:", path.read_text(), re.M)
    }
    openers |= {"trained"}  # with ``windtunnel.load``
    openers -= {"decompress"}  # its code is in compress.py
    assert not [name for name in openers if "open_trained(" not in code[name]]
