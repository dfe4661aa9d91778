"""The Python door and the exported folder: the run's own model and score, without the run and without its tools."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import windtunnel
from bench import exported
from harness.data import corpora
from tests.command import MADE, ROOT, call, run_folders, train
from tests.runs import MEMORY

TEXT = bytes(range(48, 58)) * 30
WITHOUT = """import sys
finders, absent = sys.meta_path[:], {"numpy", "hydra", "omegaconf", "yaml", "wandb", "rich", "matplotlib"}
class Installed:
    def find_spec(self, name, path=None, target=None):
        specs = (finder.find_spec(name, path, target) for finder in finders)
        return None if name.partition(".")[0] in absent else next(filter(None, specs), None)
sys.meta_path[:] = [Installed()]
import windtunnel
model = windtunnel.load(sys.argv[1])
print(repr((model.score(b"0123456789" * 30), model.generate(b"0", n_bytes=20, seed=2))))
"""


@pytest.fixture(scope="module")
def taken_away(tmp_path_factory):
    """A run of learned spans with tied and shared matrices, and its exported folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("door"))
        words = ("variant=adaptive_span_memory", *MEMORY, "position=relative", "model.tied=true")
        ended = train(*MADE, *words)
        assert ended.code == 0, ended
        (run,) = run_folders(Path("outputs"))
        ended = call("bench/export.py", f"run={run}", "out=away")
        assert ended.code == 0, ended
        yield run.resolve(), Path("away").resolve()


def test_an_exported_model_is_the_runs_and_has_its_score_to_the_last_bit(taken_away):
    run, away = taken_away
    of_run, of_export = (windtunnel.load(path) for path in taken_away)
    assert of_run.generate(b"0", n_bytes=30, seed=5) == of_export.generate(b"0", n_bytes=30, seed=5)
    assert of_export.network.head.weight is of_export.network.embedding.weight
    trained, back = ([p.requires_grad for p in model.network.parameters()] for model in (of_run, of_export))
    assert trained == back
    about, card = json.loads((away / "model.json").read_text()), (away / "README.md").read_text()
    assert about["shared"]["head.weight"] == "embedding.weight"
    assert "head.weight" not in exported.unpacked(away / "weights.safetensors")
    assert about["trained"]["data"]["sha256"] in card and "windtunnel.load" in card
    summary = json.loads((run / "summary.json").read_text())
    protocol, corpus = summary["protocol"], corpora.load("recall", bytes=60000)
    split = corpus.reported("valid", selection_bytes=protocol["selection_bytes"], limit=protocol["bytes"])
    text = bytes(corpus.symbols[number] for number in split.tolist())
    cut, threads = {key: protocol[key] for key in ("streams", "segment", "context")}, torch.get_num_threads()
    torch.set_num_threads(1)
    assert [model.score(text, **cut) for model in (of_run, of_export)] == [summary["valid_bits_per_byte"]] * 2
    torch.set_num_threads(threads)


def test_torch_and_einops_suffice(taken_away, tmp_path):
    model = windtunnel.load(taken_away[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", WITHOUT, str(taken_away[1])]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == repr((model.score(TEXT), model.generate(b"0", n_bytes=20, seed=2)))


def test_the_format_is_the_known_one(tmp_path):
    """Length of the header, header, bytes: written out by hand."""
    header = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'
    )
    header += b" " * (-len(header) % 8)
    content = len(header).to_bytes(8, "little") + header + b"\0\0\x80\x3f\0\0\0\xc0" + b"\x80\x3f"
    tensors = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    assert exported.packed(tensors) == content
    (tmp_path / "w").write_bytes(content)
    unpacked = exported.unpacked(tmp_path / "w")
    assert all(torch.equal(unpacked[name], tensors[name]) for name in tensors) and unpacked.keys() == tensors.keys()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match="cut"):
            exported.unpacked(tmp_path / "cut")


def test_a_strangers_folder_is_refused(taken_away, tmp_path):
    shutil.copytree(taken_away[1], tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.json"
    about, code = json.loads(path.read_text()), {"_target_": "os.system", "_partial_": True}
    for key, value, reason in (
        ("format", 2, "must be of format 1"),
        ("symbols", [0, 0], "symbols: must be different bytes"),
        ("vocabulary", 10**9, "symbols: must be different bytes"),
        ("shared", {"head.weight": "nowhere"}, "do not fit"),
        ("position", code, "position._target_=os.system: allowed are classes of"),
        ("model", {"layers": 10**12}, "model"),
    ):
        path.write_text(json.dumps(about | {key: value}))
        with pytest.raises(ValueError, match=reason):
            windtunnel.load(path.parent)


def test_attention_maps_are_the_models_own(taken_away):
    model, text = windtunnel.load(taken_away[1]), TEXT[:40]
    maps = model.attention(text)
    assert set(maps) == {"layers.0.attention", "layers.1.attention"}
    for layer in maps.values():
        assert layer.shape == (2, 40, 40) and torch.equal(layer, layer.tril())
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 40))


def test_what_the_readme_types(taken_away, monkeypatch, capsys):
    (lines,) = re.findall(
        r"^```python\n(import windtunnel.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(lines.splitlines()) <= 10
    monkeypatch.chdir(taken_away[0].parents[1])
    exec(lines, {})
    assert "adaptive_span_memory recall" in capsys.readouterr().out


def test_what_cannot_be_scored_or_opened_is_refused(taken_away, tmp_path):
    with pytest.raises(ValueError, match="text: has one byte"):
        windtunnel.load(taken_away[1]).score(b"0")
    with pytest.raises(ValueError, match=r"path=.*must be a run folder"):
        windtunnel.load(tmp_path)
    refused = call("bench/export.py", f"run={taken_away[0]}", f"out={taken_away[1]}")
    assert refused.code == 2 and "is there already" in refused.err


READERS = r"\b(read_run|plan_of_run|read_provenance|read_config|load_best|load_newest|torch\.load)\("


def test_every_door_goes_through_one_function_that_believes_nothing():
    code = {path.stem: path.read_text() for part in ("bench", "windtunnel") for path in (ROOT / part).rglob("*.py")}
    assert [name for name, text in code.items() if re.search(READERS, text)] == ["planning"]
    asks = {path.stem for path in (ROOT / "conf").glob("*.yaml") if re.search(r"^run:", path.read_text(), re.M)}
    asks |= {"cost_worker", "cost", "model"}
    assert not [name for name in asks - {"decompress"} if "open_trained(" not in code[name]]  # one file with compress
