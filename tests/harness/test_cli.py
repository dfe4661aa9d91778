"""``python train.py`` at the command line: mistakes, the fallback corpus, and a repeated
command."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.command_line import (
    GENERATED,
    ROOT,
    call,
    empty_folder,  # noqa: F401 - a fixture
    run_folders,
    summaries,
    train,
)
from tests.support.small_configs import VARIANT_NAMES
from tests.support.timeouts import TIMEOUT_SECONDS

ALPHABET = b"abcdefghijklmnopqrstuvwxyz " * 1000


def refused(cwd, *words) -> str:
    """Return the one message of a training command that must end with exit code 2, before training,
    and change no file."""
    before = sorted(cwd.rglob("*"))
    outcome = train(*words)
    lines = [line for line in outcome.err.splitlines() if not line.startswith("data: downloading ")]
    out = [
        line
        for line in outcome.out.splitlines()
        if not (line.startswith("sweep ") and ": 0 of " in line)
    ]
    assert (outcome.code, out, len(lines)) == (2, [], 1), outcome
    assert sorted(cwd.rglob("*")) == before, "the command created or removed files"
    assert lines[0].startswith("error: ")
    return lines[0]


# Parts of the message of each mistake. test_config.py has the mistakes that planning a run detects.

MISTAKES = {
    ("variant=nonsense",): ("variant=nonsense", *VARIANT_NAMES),
    ("sweep=wandb_grid",): ("wandb sweep conf/sweep/wandb_grid.yaml",),
    ("model.widht=3",): ("model.widht=3", "d_model", "default_bytes", "heads"),
    ("recip=none",): (
        "recip=none: no such key (did you mean recipe?); allowed are",
        "recipe",
        "budget",
        "variant",
    ),
    ("wandb.mode=online",): ("wandb.mode=online: no such key (did you mean record.wandb?)",),
    ("name=x",): ("name=x: no such key (did you mean variant.name or ",),
    ("variant=mhsa,all_attention",): ("variant=mhsa,all_attention", "--multirun"),
    ("data.bytes=200", "batch.streams=8", "batch.carry=true"): (
        "batch.streams=8",
        "180",
        "longer corpus",
    ),
    ("outputs=${nonsense}",): ("outputs", "nonsense"),
    ("variant.name=a/b",): ("variant.name=a/b",),
    ("trust=[abc]",): ("trust=abc", "source file"),
    ("data.path=ü.bin",): ("\"KEY='VALUE'\" with signs",),
    ("-cd", "nowhere"): ("nowhere",),
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_error_message_and_leaves_no_file(cwd, words):
    flags = [word for word in words if "=" not in word and words[0] == "-cd"]
    message = refused(cwd, *flags, *GENERATED, *(word for word in words if word not in flags))
    for part in MISTAKES[words]:
        assert part in message


def test_a_mistake_about_files_names_the_key_or_the_file(cwd, tmp_path):
    outcome = call("bench/evaluate.py")
    assert (outcome.code, outcome.err) == (
        2,
        "error: run: Missing mandatory value: run\n",
    ) and not list(cwd.iterdir())
    path, wrong = tmp_path / "whole.txt", "0" * 64
    assert f"data.path='{path}'" in refused(cwd, "data=file", f"data.path={path}")
    path.write_bytes(ALPHABET)
    assert f"data.sha256={wrong}" in refused(
        cwd, "data=file", f"data.path={path}", f"data.sha256='{wrong}'"
    )
    (tmp_path / "conf" / "variant").mkdir(parents=True)
    (tmp_path / "conf" / "variant" / "mine.yaml").write_text("layers: [attention\nname: mine\n")
    assert "mine.yaml" in refused(cwd, "-cd", str(tmp_path / "conf"), *GENERATED, "variant=mine")


def test_a_bug_has_a_traceback_and_a_mistake_has_one_only_on_request(cwd, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    outcome = train(*GENERATED, "model.heads=3")
    assert (
        outcome.code == 2 and "Traceback" in outcome.err and "error: model.heads=3" in outcome.err
    )
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
    monkeypatch.delenv("HYDRA_FULL_ERROR")

    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr("harness.loop.prepare.plan_run", broken)
    for flags in ((), ("-m", "seed=0,1")):
        outcome = train(*flags, *GENERATED)
        assert (
            outcome.code == 1
            and outcome.err.count("Traceback") == 1 + bool(flags)
            and "in broken" in outcome.err
        )
        assert "Error executing job" not in outcome.err and not list(cwd.iterdir())


def test_without_network_the_fallback_corpus_is_read_and_labelled(cwd):
    outcome = train()
    (warning,) = [
        line for line in outcome.err.splitlines() if "ENWIK8 CANNOT BE DOWNLOADED" in line
    ]
    assert all(
        text in warning
        for text in ("READING STDLIB INSTEAD", "data.path=FILE", "data.fallback=null")
    )
    (summary,) = summaries(cwd / "outputs")
    corpus = summary["data"]
    assert (corpus["name"], corpus["fallback_for"]) == ("stdlib", "enwik8")
    assert f"{corpus['bytes']:,} bytes, sha256 {corpus['sha256']}" in warning
    label = (
        f"stdlib (fallback for enwik8), {corpus['bytes']:,} bytes, sha256 {corpus['sha256'][:12]}"
    )
    assert outcome.code == 0 and label in outcome.out
    # sweeps and recipes refuse the fallback
    for words in (("-m", "variant=mhsa"), ("recipe=adaptive_span_12",)):
        message = refused(cwd, *words)
        assert (
            "data=enwik8" in message
            and "data.path=FILE" in message
            and "harness.data enwik8" in message
        )


def test_a_finished_run_is_repeated_only_with_force(cwd, tmp_path):
    words = ("data=file", f"data.path={tmp_path / 'text'}")
    (tmp_path / "text").write_bytes(ALPHABET)
    first, again = train(*words), train(*words)
    (run,) = run_folders(cwd / "outputs")
    assert (first.code, again.code) == (0, 0)
    assert (
        f"finished before: outputs/{run.name} (force=true" in again.out
        and "training:" not in again.out
    )
    closing_lines = [line for line in first.out.splitlines() if line.startswith("this run")]
    assert closing_lines and closing_lines == [
        line for line in again.out.splitlines() if line.startswith("this run")
    ]

    (run / "evaluations.jsonl").write_text("of the earlier run\n")
    forced = train(*words, "force=true")
    assert forced.code == 0 and f"training: outputs/{run.name}" in forced.out
    assert closing_lines == [
        line for line in forced.out.splitlines() if line.startswith("this run")
    ]
    assert run_folders(cwd / "outputs") == [run] and (cwd / "outputs" / "latest").resolve() == run
    assert not (run / "evaluations.jsonl").exists()


def test_help_and_completion_do_not_import_torch(cwd):
    code = f"""
import os, runpy, sys
from hydra.core.global_hydra import GlobalHydra
sys.path.insert(0, {str(ROOT)!r})
for words in (["--help"], ["-sc", "query=bash"]):
    sys.argv = [{str(ROOT / "train.py")!r}, *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, stop.code
    GlobalHydra.instance().clear()
assert not {{"torch", "numpy", "matplotlib", "wandb", "rich"}} & sys.modules.keys()
assert len(sys.modules) < 700, len(sys.modules)  # Hydra and what it needs are 350
"""
    completion = {"COMP_LINE": "python train.py variant=prod", "COMP_POINT": "1000"}
    common = {
        "env": os.environ | completion,
        "capture_output": True,
        "text": True,
        "timeout": TIMEOUT_SECONDS,
    }
    process = subprocess.run([sys.executable, "-c", code], cwd=cwd, check=False, **common)
    assert process.returncode == 0 and {*VARIANT_NAMES} <= {*re.findall(r"\w+", process.stdout)}, (
        process
    )
    assert process.stdout.split()[-1] == "variant=product_key_memory", process
