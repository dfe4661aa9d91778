"""The wheel: it contains all files of the product, and it trains without a checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command_line import GENERATED, ROOT, TINY
from tests.support.timeouts import TIMEOUT_SECONDS
from windtunnel.__main__ import COMMANDS, VERBS

PARTS = ("windtunnel", "variants", "harness", "bench", "conf")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

PROGRAM = """import windtunnel, windtunnel.__main__
try:
    windtunnel.__main__.main()
except SystemExit as stop:
    assert not stop.code
print(windtunnel.load("outputs/latest").about["command"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    wanted = (*PARTS, "train.py", "pyproject.toml", "README.md", "LICENSE")
    for name in listed.splitlines():  # copied, because building creates folders
        if (
            name.partition("/")[0] in wanted
            and not name.startswith("bench/results/")
            and (ROOT / name).exists()
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True
    )
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_contains_every_file_of_the_product(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    wanted = {name for name in names if not name.startswith("bench/results/")} | {"train.py"}
    assert wanted <= inside, sorted(wanted - inside)
    others = {name.partition("/")[0] for name in inside} - {*PARTS, "train.py"}
    assert all(name.endswith(".dist-info") for name in others), others


def test_every_command_of_bench_is_a_command_of_windtunnel():
    # train is not of bench, bench and command are included by other files, and evidence is for this
    # project only.
    commands = {path.stem for path in (ROOT / "conf").glob("*.yaml")} - {
        "train",
        "bench",
        "command",
        "evidence",
    }
    # report has no configuration file
    assert {*COMMANDS} - {*VERBS, "train"} == commands | {"report"}


def test_an_installed_wheel_trains_and_loads_the_run_in_an_empty_folder(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, "train", *TINY, *GENERATED]
    options = {"cwd": tmp_path / "empty", "env": environment, "timeout": TIMEOUT_SECONDS}
    process = subprocess.run(command, **options, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    summary = tmp_path / "empty" / "outputs" / "latest" / "summary.json"
    assert json.loads(summary.read_text())["status"] == "finished"
    assert process.stdout.splitlines()[-1].startswith("windtunnel train model.d_model=32 ")
