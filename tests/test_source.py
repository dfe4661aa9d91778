"""The digest of the code that runs: every file that can change a number, as this process read it."""

import importlib
import sys
from pathlib import Path

import pytest

from harness import source
from harness.source import digest
from tests.command import forget_source


@pytest.fixture(autouse=True)
def new_process():
    """What a process remembers is forgotten, now, by calls and afterwards."""
    forget_source()
    yield forget_source
    forget_source()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    files = (
        "train.py",
        "variants/kernels/window.py",
        "variants/window.cpp",
        "variants/deep/inside.json",
        "harness/loop/step.py",
    )
    files += ("bench/cost.py", "bench/inner/rounds.py", "bench/report/page.css", "bench/results/one/rows.jsonl")
    for name in files:
        write(tmp_path / name, f"# {name}\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name",
    [
        "train.py",
        "variants/kernels/window.py",
        "variants/window.cpp",
        "variants/deep/inside.json",
        "harness/loop/step.py",
    ],
)
def test_one_byte_of_any_file_is_another_source(checkout, new_process, name):
    found = {(digest(), digest(measuring=True))}
    write(checkout / name, f"# {name}.\n")
    new_process()
    found.add((digest(), digest(measuring=True)))
    (checkout / name).rename(checkout / f"{name}.old")
    new_process()
    if name != "train.py":
        found.add((digest(), digest(measuring=True)))
    assert len(found) == (2 if name == "train.py" else 3) and len({one for one, _ in found}) == len(found)


def test_what_measures_counts_for_rows_of_bench(checkout, new_process):
    def both() -> tuple[str, str]:
        new_process()
        return digest(), digest(measuring=True)

    own, measuring = both()
    assert own != measuring
    for name, changes in {"cost.py": True, "inner/rounds.py": True, "report/page.css": False}.items():
        write(checkout / "bench" / name, "edited")
        now, measuring_now = both()
        assert now == own and (measuring_now != measuring) == changes, name
        measuring = measuring_now
    write(checkout / "bench/results/two/rows.jsonl", "{}")
    write(checkout / "variants/__pycache__/window.pyc", "compiled")
    write(checkout / "variants/.window.py.swp", "an editor's")
    assert both() == (own, measuring)


def test_a_process_remembers_what_it_read(checkout, new_process):
    """A sweep whose source is edited midway goes on with the modules that it has loaded, and says so."""
    before = digest()
    write(checkout / "variants/kernels/window.py", "edited")
    write(checkout / "variants/new.py", "new")
    assert digest() == before
    new_process()
    assert digest() != before


@pytest.mark.parametrize("edited", ["late.py", "late.cpp"])
def test_a_module_that_was_edited_before_it_was_loaded_is_refused(tmp_path, monkeypatch, edited):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("__init__.py", "early.py", "late.py", "late.cpp"):
        write(tmp_path / "outside" / name, "")
    importlib.import_module("outside.early")
    before = digest(("outside",))
    write(tmp_path / "outside" / "early.py", "EDITED = True\n")
    assert digest(("outside",)) == before
    write(tmp_path / "outside" / edited, "EDITED = True\n")
    assert digest(("outside",)) == before  # it has not been read
    importlib.import_module("outside.late")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"{edited} was edited while this process ran; the same command again runs"
        ):
            digest(("outside",))
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


def test_trusted_modules_are_source_too(tmp_path, monkeypatch, new_process):
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "one_file.py": "import helper, os\nfrom torch import nn\n",
        "one_file.cpp": "",
        "helper.py": "import deep.er\n",
    }
    files |= {"helper.cu": "", "deep/__init__.py": "", "deep/er.py": "", "one_package/__init__.py": ""}
    files |= {"one_package/part.py": "", "one_package/inner/kernel.cu": "", "apart.py": "", "one_package/table.bin": ""}
    for name, text in files.items():
        write(tmp_path / name, text)
    found = {(): digest(), ("one_file",): digest(("one_file",)), ("one_package",): digest(("one_package",))}
    assert len(set(found.values())) == 3
    for name in files:
        new_process()
        write(tmp_path / name, files[name] + "# edited\n")
        changed = {trust for trust, before in found.items() if digest(trust) != before}
        owner = () if name == "apart.py" else ("one_package",) if name.startswith("one_package") else ("one_file",)
        assert changed == ({owner} if owner else set()), name
        write(tmp_path / name, files[name])
    with pytest.raises(ValueError, match="trust=nowhere_at_all"):
        digest(("nowhere_at_all",))


def test_what_lies_beside_an_installed_file_is_not_followed(tmp_path, monkeypatch, new_process):
    """Else all of torch would be read."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    write(tmp_path / "installed.py", "import other\n")
    write(tmp_path / "other.py", "")
    before = digest(("installed",))
    new_process()
    write(tmp_path / "other.py", "edited")
    assert digest(("installed",)) == before


def test_a_trusted_file_with_an_error_has_a_digest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "broken.py", "def (\n")
    assert digest(("broken",)) != digest()
