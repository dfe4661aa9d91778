"""What chance makes: configurations, files of data and targets that nobody would think of."""

import io
import json
import lzma
import math
import random
import shutil
import zipfile

import pytest

from harness.data import sources
from tests.command import MADE, ROOT, empty_folder, run_folders, train  # noqa: F401 - a fixture

pytestmark = pytest.mark.faults

GROUPS = {name: sorted(path.stem for path in (ROOT / "conf" / name).glob("*.yaml")) for name in ("variant", "position")}
GROUPS |= {"optim": ["adagrad", "adamw", "muon"]}
SOUND = """
model.attend_self=true|false model.cache=kv|hidden model.norm=rms|layer model.norm_after=true|false model.tied=true|false
model.dropout=0|0.3 model.layers=1|3 model.span=1|7|64 batch.carry=true|false batch.accumulate=1|2 batch.segment=1|16|33
eval.every=0|0.5 eval.windows=true|false optim.clip=null|0.1 optim.lr=1e-3|1e-9|0.1|1e30 runtime.precision=float32|bfloat16
runtime.backend=auto|plain|chunked|fused|kernel runtime.checkpoint=none|layers checkpoint.every_steps=null|1
data.vocabulary=256|205"""
SOUND = {word.partition("=")[0]: word.partition("=")[2].split("|") for word in SOUND.split()}
ODD_KEYS = """model.d_model model.heads batch.streams eval.streams eval.segment eval.bytes seed budget.steps optim.schedule
optim.default.betas data.split data.bytes purpose trial space runtime.threads record.every_steps variant.layers variant.attention
init_from.run outputs"""
ODD_KEYS = [*SOUND, *ODD_KEYS.split()]
ODD = [
    "''",
    *["0", "-1", "1.5", "null", "true", "x", "[]", "[1]", "[x,y]", "{a:1}", "1e-400", "nan", "-0.0", "2,3x", "\\u202e"],
]


def random_words(chance: random.Random) -> list[str]:
    """A choice of every group, some sound values, and mostly one odd one."""
    words = {name: chance.choice(names) for name, names in GROUPS.items()}
    words |= {key: chance.choice(SOUND[key]) for key in chance.sample([*SOUND], chance.randrange(5))}
    words |= {chance.choice(ODD_KEYS): chance.choice(ODD) for _ in range(chance.choice((0, 1, 1, 2)))}
    return [f"{key}={value}" for key, value in words.items()]


@pytest.mark.parametrize("part", range(2))
def test_random_configurations_train_or_are_refused(here, monkeypatch, part):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    codes = []
    for number in range(26 * part, 26 * part + 26):
        words = random_words(random.Random(f"configuration {number}"))
        folder = here / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        ended = train(*MADE, "model.default_bytes=300", *words)
        report = (number, words, ended)
        codes.append(ended.code)
        assert "Traceback" not in ended.err and ended.code in (0, 2, 3), report
        if ended.code:
            assert ended.err.count("error: ") == 1, report
            statuses = [json.loads(path.read_text())["status"] for path in folder.rglob("summary.json")]
            assert statuses == ["diverged"] * (ended.code == 3), report
            continue
        (run,) = [path.parent for path in folder.rglob("summary.json") if not path.parent.is_symlink()]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "finished" and 0 < summary["valid_bits_per_byte"] < math.inf, report
        shutil.rmtree(folder)
    assert {0, 2} <= set(codes), codes


TEXT = b"".join(b"line %d of a text that is read as bytes\n" % n for n in range(200))


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", content)
    return out.getvalue()


def damaged(content: bytes, chance: random.Random) -> bytes:
    at, kind = chance.randrange(len(content)), chance.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + chance.randbytes(9) + content[at:]
    if kind == 3:
        return content + chance.randbytes(chance.randrange(1, 40))
    return chance.randbytes(chance.randrange(40))


@pytest.mark.parametrize(("suffix", "pack"), {".xz": lzma.compress, ".zip": zipped}.items())
def test_a_damaged_archive_is_its_text_or_refused(tmp_path, suffix, pack):
    path = tmp_path / f"data{suffix}"
    for number in range(25):
        path.write_bytes(damaged(pack(TEXT), random.Random(f"{suffix} {number}")))
        try:
            assert bytes(sources.read_path(str(path))) == TEXT, number
        except ValueError as error:
            assert str(error).startswith(f"data.path={str(path)!r}"), (number, error)
