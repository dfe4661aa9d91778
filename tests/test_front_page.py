"""The README's results are those of committed runs, and of nothing else."""

import re
from pathlib import Path

import pytest

from bench import front_page
from bench.front_page import BEGIN, END, committed_runs, written
from tests.bench_rows import write_run, write_trial
from tests.fixed_rows import change

ROOT = front_page.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIM = re.compile(r"(?<![\w.-])[01]\.\d+|\d\s*(?:times|×|x|%|percent)(?!\w)|-fold|\bfaster\b|speed-?up")
MODEL = {"layers": 4, "d_model": 128, "heads": 4, "span": 512}


def results(root: Path) -> str:
    return front_page.results(committed_runs(root))


def config_of(variant: str = "mhsa", **model) -> dict:
    return {"variant": {"name": variant}, "model": MODEL | model, "optim": {"lr": 0.003}}


def test_the_page_says_what_the_rows_say_and_claims_no_speed_elsewhere():
    assert written(README, results(ROOT)) == README, "python -m bench.front_page"
    assert CLAIM.search("1.06 of x") and CLAIM.search("about 3 times the speed") and CLAIM.search("2x")
    assert not CLAIM.findall(README.replace(README.partition(BEGIN)[2].partition(END)[0], ""))


def test_results_are_of_one_source_and_one_machine_over_any_sittings(tmp_path):
    runs = tmp_path / "bench/results/here/runs"
    for seed in range(3):
        change(write_run(runs, seed=seed, config=config_of()), commit=f"{seed}" * 40)
    block = results(tmp_path)
    assert "Commit 00000000, 11111111 and 22222222, A made-up CPU, threads: " in block
    assert "AdamW, untuned, optim.lr=0.003. " in block and re.search(r"^\| mhsa +\| +3 \|", block, re.MULTILINE)
    for other in ({"source": "ff" * 32}, {"device": "Another CPU"}):
        change(next(runs.glob("mhsa-s1-*")), **other)
        with pytest.raises(ValueError, match="groups of runs that compare, [0-9] runs of other numbers"):
            results(tmp_path)
        change(next(runs.glob("mhsa-s1-*")), source="cd" * 32, device="A made-up CPU")


def test_folders_of_another_name_are_sections_of_their_own(tmp_path):
    here = tmp_path / "bench/results/here"
    for seed in range(3):
        for variant, cache, apart in (("mhsa", "kv", 0.0), ("transformer_xl", "hidden", 0.1)):
            bits = 2.0 + seed + apart + 0.01 * seed * bool(apart)
            write_run(here / "runs", variant=variant, seed=seed, bits=bits, config=config_of(variant, cache=cache))
    change(write_run(here / "runs_seconds", config=config_of()), budget={"seconds": 60}, source="ff" * 32)
    config = config_of(span=4096) | {"batch": {"carry": True}}
    change(write_run(here / "runs_recall", config=config), valid_bits_per_copy={"23": 3.25, "511": 3.99, "95": None})
    bytes_, recall, seconds = (page := results(tmp_path)).split("<summary>")
    (row,) = [line for line in bytes_.splitlines() if line.startswith("| transformer_xl")]
    assert " +0.1100 ± 0.0248 |" in row and "hidden" in row  # t = 4.30, s = 0.01, n = 3
    assert len({line.count("|") for line in bytes_.splitlines() if line.startswith("|")}) == 1
    assert bytes_.startswith("After 2,000,000 bytes of training (") and page.count("</details>") == 2
    assert "bytes/s" in seconds and "bytes/s" not in bytes_ + recall
    assert "60 seconds of training (" in seconds and "2,000,000 bytes of training (" in recall
    assert "read on with carried state" in recall and "carried state)" not in bytes_ + seconds
    assert re.search(r"copies from 23, bits \| +copies from 511, bits", recall)
    assert "3.2500" in recall and "3.9900" in recall
    assert front_page.COPIED in recall and front_page.COPIED not in bytes_ + seconds


def test_results_at_picked_points_name_them_and_a_stray_is_refused(tmp_path):
    runs = tmp_path / "bench/results/here/runs"
    for trial in range(16):
        write_trial(runs, rate=0.001 * (trial + 1), seed=100, bits=2.5 + abs(trial - 4) / 10, trial=trial)
    for seed in range(5):
        write_trial(runs, rate=0.005, seed=seed, bits=2.4)
    block = results(tmp_path)
    assert "AdamW, each at the best of its 16 trials on other seeds (100). " in block
    assert re.search(r"^\| mhsa +\| +5 \|", block, re.MULTILINE) and "\n- mhsa, picked: optim.lr=0.005" in block
    assert "2.5" not in block.partition("bzip2")[0].partition("mhsa")[2]
    write_trial(runs, rate=0.008, seed=6, bits=2.3)
    with pytest.raises(ValueError, match="mhsa-s6.* is at another point than the picked"):
        results(tmp_path)


def test_the_command_writes_page_and_picture_between_markers_or_ends_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    write_run(tmp_path / "bench/results/here/runs", config=config_of())
    page = tmp_path / "README.md"
    page.write_text("no markers", encoding="utf-8")
    assert front_page.main() == 2 and "error: README.md: must have the lines" in capsys.readouterr().err
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    assert front_page.main() == 0 and (tmp_path / front_page.FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "| mhsa " in (text := page.read_text()) and "old" not in text and text.endswith(f"{END}\nafter")
