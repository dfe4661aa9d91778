"""The README's speeds are those of committed rows, misses among them, and of nothing else."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import front_page
from bench.front_page import BEGIN, END, MISSED, REACHED, lines_changed, written
from tests.bench_rows import speed_row, write_run, write_trial
from tests.report_of import change

ROOT = front_page.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
BLOCK = PAGE.partition(BEGIN)[2].partition(END)[0]
CLAIM = re.compile(r"(?<![\w.-])[01]\.\d+|\d\s*(?:times|×|x|%|percent)(?!\w)|-fold|\bfaster\b|speed-?up")
SIZES = {"d_model": 256, "heads": 8, "layers": 4, "span": 1024}, {"streams": 8, "segment": 256, "carry": True}
CONFIG = {"variant": {"attention": {"persistent": None}}, "model": SIZES[0], "batch": SIZES[1]}
SIDE = {"name": "x-transformers", "package": "x-transformers", "version": "9.9", "optimizer": "fused AdamW"}
SIDE |= {"parameters": 1234567, "training_flops_per_byte": 2.5e6}
ROW = {"ratio_of": "speeds", "second": None, "spans": None, "interrupted": False, "reference_in_check": None}
ROW["timed_peak"] = None
ROW = speed_row(config=CONFIG, peak_reached=True, **ROW)


def whole(page: str, root: Path) -> str:
    return written(page, front_page.speeds, root, name="docs/speed.md")


def page_of(folder: Path, *rows: dict, machine: str = "here") -> str:
    path = folder / f"bench/results/{machine}/speed.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return whole(f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", folder)


def test_the_pages_say_what_the_rows_say():
    assert whole(PAGE, ROOT) == PAGE, "python -m bench.front_page"
    assert written(README, front_page.results, ROOT, name="README.md") == README, "python -m bench.front_page"


def edits() -> list[tuple[str, str]]:
    missed = max(BLOCK.splitlines(), key=lambda line: MISSED in line)
    number = re.search(r"\d\.\d{3} \(", BLOCK)[0]
    verdict = (f"{MISSED})", f"{REACHED})") if MISSED in BLOCK else (f"{REACHED})", f"{MISSED})")
    return [(f"{missed}\n", ""), verdict, (number, f"9{number}"), ("Commit ", "Commit 0"), ("- Peak", "Peak")]


@pytest.mark.parametrize(("now", "edited"), edits(), ids=["a miss left out", "verdict", "number", "commit", "legend"])
def test_an_edit_by_hand_is_found_and_undone(now, edited):
    page = PAGE.replace(BLOCK, BLOCK.replace(now, edited, 1))
    assert page != whole(page, ROOT) == whole(PAGE, ROOT)


def test_no_speed_is_claimed_elsewhere_in_the_readme():
    assert CLAIM.search("1.06 of x") and CLAIM.search("about 3 times the speed") and CLAIM.search("2x")
    assert not CLAIM.findall(PAGE.replace(BLOCK, ""))
    assert not CLAIM.findall(README.replace(README.partition(BEGIN)[2].partition(END)[0], ""))


def test_every_row_is_of_the_commit_that_is_named():
    for rows in front_page.tables(ROOT).values():
        for row in rows:
            assert row["commit"][:8] in BLOCK and {row["reached"], row["peak_reached"]} <= {True, False, None}


def test_results_are_of_one_source_and_one_machine_over_any_sittings(tmp_path):
    runs = tmp_path / "bench/results/here/runs"
    model = {"layers": 4, "d_model": 128, "heads": 4, "span": 512}
    for seed in range(3):
        config = {"variant": {"name": "mhsa"}, "model": model, "optim": {"lr": 0.003}}
        change(write_run(runs, seed=seed, config=config), commit=f"{seed}" * 40)
    block = front_page.results(tmp_path)
    assert (
        "Commit 00000000, 11111111 and 22222222, A made-up CPU, threads: " in block
        and "AdamW, untuned, optim.lr=0.003:" in block
    )
    assert re.search(r"^\| mhsa +\| +3 \|", block, re.MULTILINE)
    for other in ({"source": "ff" * 32}, {"device": "Another CPU"}):
        change(next(runs.glob("mhsa-s1-*")), **other)
        with pytest.raises(ValueError, match="groups of runs that compare, [0-9] runs of other numbers"):
            front_page.results(tmp_path)
        change(next(runs.glob("mhsa-s1-*")), source="cd" * 32, device="A made-up CPU")


def test_rows_are_set_beside_the_reference_of_the_same_seeds(tmp_path):
    """Where a variant alone has another cache, too, and compressors have rows of as many cells."""
    runs, model = tmp_path / "bench/results/here/runs", {"d_model": 128, "layers": 4, "heads": 4, "span": 512}
    for variant, cache, apart in (("mhsa", "kv", 0.0), ("transformer_xl", "hidden", 0.1)):
        config = {"variant": {"name": variant}, "model": model | {"cache": cache}, "optim": {"lr": 0.003}}
        for seed in range(3):
            found = 2.0 + seed + apart + 0.01 * seed * bool(apart)
            write_run(runs, variant=variant, seed=seed, bits=found, config=config)
    lines = front_page.results(tmp_path).splitlines()
    (row,) = [line for line in lines if line.startswith("| transformer_xl")]
    assert "| +0.110 ± 0.025" in row and "hidden" in row  # t = 4.30, s = 0.01, n = 3
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert not any("±" in line for line in lines if line.startswith("| mhsa"))


def test_folders_of_another_name_are_sections_of_their_own(tmp_path):
    model = {"layers": 4, "d_model": 128, "heads": 4, "span": 512}
    config = {"variant": {"name": "mhsa"}, "model": model, "optim": {"lr": 0.003}}
    here = tmp_path / "bench/results/here"
    write_run(here / "runs", config=config)
    change(write_run(here / "runs_seconds", config=config), budget={"seconds": 60}, source="ff" * 32)
    far = {"23": 3.25, "511": 3.99, "95": None}
    long = config | {"model": model | {"span": 4096}, "batch": {"carry": True}}
    change(write_run(here / "runs_recall", config=long), valid_bits_per_copy=far)
    bytes_, recall, seconds = (page := front_page.results(tmp_path)).split("<summary>")
    assert bytes_.startswith("After 2,000,000 bytes of training (") and page.count("</details>") == 2
    assert "bytes/s" in seconds and "bytes/s" not in bytes_ + recall
    assert "60 seconds of training (" in seconds and "2,000,000 bytes of training (" in recall
    assert "read on with carried state" in recall and "carried state)" not in bytes_ + seconds
    heading = re.compile(r"copies from 23, bits \| +copies from 95, bits \| +copies from 511, bits")
    assert not heading.search(bytes_ + seconds) and "3.2500" in recall and "3.9900" in recall
    assert front_page.COPIED in recall and front_page.COPIED not in bytes_ + seconds
    assert front_page.figure(tmp_path)


def test_results_at_picked_points_name_them_and_a_stray_is_refused(tmp_path):
    runs, model = tmp_path / "bench/results/here/runs", {"d_model": 128, "layers": 4, "heads": 4, "span": 512}
    for trial in range(16):
        write_trial(runs, rate=0.001 * (trial + 1), seed=100, bits=2.5 + abs(trial - 4) / 10, trial=trial)
    for seed in range(5):
        write_trial(runs, rate=0.005, seed=seed, bits=2.4)
    block = front_page.results(tmp_path)
    assert "AdamW, each at the best of its trials, of 2,000,000 bytes each, on other seeds (100):" in block
    assert re.search(r"^\| mhsa +\| +5 \|.* 16 \|$", block, re.MULTILINE)
    assert "\n- mhsa, picked: optim.lr=0.005" in block
    assert "2.5" not in block.partition("bzip2")[0].partition("mhsa")[2]
    muon = [{"name": "matrices", "optimizer": "Muon", "lr": 0.04, "parameters": 1, "share": 1.0}]
    change(
        write_run(
            runs, seed=7, config={"variant": {"name": "mhsa"}, "model": model, "optim": {"lr": 0.003, "cap": 1.0}}
        ),
        optimizers=muon,
    )
    both = front_page.results(tmp_path)
    assert both.index("AdamW, each") < both.index("Muon, untuned, optim.lr=0.003:")
    write_trial(runs, rate=0.008, seed=6, bits=2.3)
    with pytest.raises(ValueError, match="mhsa-s6.* is at another point than the picked"):
        front_page.results(tmp_path)


def test_a_verdict_is_read_off_the_numbers(tmp_path):
    times = {"ratio": 0.3, "ratio_of": "times", "target": 0.25}
    second = {"what": "time of a over b", "ratio": 0.9, "ratio_range": [0.8, 0.95], "target": 1.1}
    page = page_of(tmp_path, ROW | {"ratio": 0.3996}, ROW | times | {"second": second, "peak_bytes": 7e8})
    assert "| 0.400 (≥ 0.4 **MISSED**) | 400.0 (≤ 600.0 reached) |" in page
    assert (
        "| 0.300 (≤ 0.25 **MISSED**); time of a over b: 0.900, 0.800 to 0.950 (≤ 1.1 reached) | 700.0 (≤ 600.0 **MISSED**) |"
        in page
    )
    assert "**here: 2 targets reached, 3 missed.**" in page and page.startswith("Before.") and page.endswith("After.\n")
    other_sizes = page_of(tmp_path, ROW | {"reached": None, "peak_reached": None})
    assert "0 targets reached, 0 missed" in other_sizes and "(≥ 0.4 not judged)" in other_sizes


def test_a_peak_is_shown_in_both_settings_of_the_allocator(tmp_path):
    timed = {"bytes": 7 * 10**8, "limit_bytes": 6 * 10**8, "reached": False}
    page = page_of(tmp_path, ROW | {"timed_peak": timed})
    assert "| 400.0 (≤ 600.0 reached); as timed: 700.0 (≤ 600.0 **MISSED**) |" in page
    page = page_of(tmp_path, ROW | {"timed_peak": timed | {"limit_bytes": None, "reached": None}})
    assert "| 400.0 (≤ 600.0 reached); as timed: 700.0 |" in page
    nothing = dict.fromkeys(timed)
    assert page_of(tmp_path, ROW | {"ratio": None, "reason": "why", "timed_peak": nothing}).count("| - | - | - |") == 1


def test_what_is_not_known_or_void_or_failed_is_no_number(tmp_path):
    slow = ROW | {"invalid": "the reference model is slow", "ratio": 0.987}
    page = page_of(tmp_path, ROW, slow, ROW | {"ratio": None, "reason": "x: a | b"})
    assert page.count("| - | - | - |") == 3 and "| the reference model is slow |" in page and "0.987" not in page
    assert r"| x: a \| b |" in page


def test_both_sides_are_shown_and_how_strong_the_judge_is(tmp_path):
    sanity_check = {
        "relative_to": "x-transformers",
        "reference_in_check": 1.25,
        "ratio": 1.1,
        "ratio_range": [1.0, 1.2],
    }
    page = page_of(
        tmp_path, ROW | sanity_check | {"entry": SIDE | {"optimizer": "Adam", "parameters": 9}, "opponent": SIDE}
    )
    assert "`x-transformers` 9.9, itself 0.800 of the reference model: ours is 0.880 of the reference model" in page
    assert "| 1.100, 1.000 to 1.200 (≥ 0.4 reached) |" in page
    recorded = {"reference_in_check_range": [1.0, 2.0], "beside_reference": {"ratio": 0.9, "range": [0.7, 1.1]}}
    both = "itself 0.800, 0.500 to 1.000 of the reference model: ours is 0.900, 0.700 to 1.100 of the reference model"
    assert both in page_of(tmp_path, ROW | sanity_check | recorded | {"entry": SIDE, "opponent": SIDE})
    assert "| 9 / 1,234,567 | 2.5 M | Adam / fused AdamW |" in page
    assert "not measured beside the reference model" in page_of(
        tmp_path, ROW | sanity_check | {"reference_in_check": None}
    )


def test_a_row_of_a_busy_machine_is_marked(tmp_path):
    load = {"busy": True, "cores": 2, "wanted_cores": 2, "others_cores": 0.5, "stolen_cores": 0.0}
    page = page_of(tmp_path, ROW, ROW | {"case": "shaken", "load": load})
    assert "| `shaken` ! |" in page and f"| `{ROW['case']}` |" in page
    assert "\n! BUSY MACHINE: others had 0.50" in page and "BUSY" not in page_of(tmp_path, ROW)


def test_every_machine_has_a_table_and_changes_that_were_not_committed_are_said(tmp_path):
    page_of(tmp_path, ROW, machine="another")
    page = page_of(tmp_path, ROW | {"commit": f"{ROW['commit']}-dirty"})
    assert page.index("**another:") < page.index("**here:") and page.count("| case |") == 2
    assert page.count("Commit efefefef, with changes that were not committed") == page.count("not committed") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": ...}, "source missing"),
        ({"commit": None}, "commit missing"),
        ({"commit": "ab" * 20}, "must have the commit"),
        ({"threads": 16}, "threads"),
        ({"interrupted": True}, "interrupted"),
    ],
)
def test_rows_of_another_run_or_of_none_are_refused(tmp_path, change, said):
    row = {key: value for key, value in (ROW | change).items() if value is not ...}
    with pytest.raises(ValueError, match=rf"here/speed\.jsonl:2: .*{said}"):
        page_of(tmp_path, ROW, row)


def test_without_rows_or_markers_it_says_so(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        whole(PAGE, tmp_path)
    with pytest.raises(ValueError, match="must have the lines"):
        whole("# A page\n", ROOT)


def test_the_lines_that_changed_since_the_rows_are_counted(tmp_path):
    assert lines_changed("ab" * 20, tmp_path).startswith("not known")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    for name in (
        "variants/a.cpp",
        "bench/peers.py",
        "bench/report/__main__.py",
        "bench/results/x/speed.jsonl",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert lines_changed(commit, tmp_path) == "0 lines"
    for path in tmp_path.rglob("*.*"):
        if ".git" not in path.parts and path.is_file():
            path.write_text("one\nthree\nfour\n")
    assert lines_changed(f"{commit}-dirty", tmp_path) == "6 lines"  # two files: one removed and two added in each
    assert lines_changed("ab" * 20, tmp_path).startswith("not known")
    git("commit", "-qam", "second")
    assert lines_changed(commit, tmp_path) == "6 lines"


@pytest.mark.parametrize("commit", ["--output=PWNED", "HEAD", "ab" * 40, "abcdef", 7])
def test_a_commit_that_is_no_digest_is_given_to_nobody(commit, tmp_path):
    (row, *_) = (ROOT / "bench" / "results").glob("*/speed.jsonl")
    changed = json.loads(row.read_text().splitlines()[0]) | {"commit": commit}
    (tmp_path / "bench/results/x").mkdir(parents=True)
    (tmp_path / "bench/results/x/speed.jsonl").write_text(json.dumps(changed) + "\n")
    with pytest.raises(ValueError, match=r"speed\.jsonl:1: its commit must be a hexadecimal digest"):
        front_page.tables(tmp_path)


def test_the_command_writes_the_page_without_torch(tmp_path):
    for name in ("bench", "harness", "variants", "docs", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/speed.md").write_text(PAGE.replace(MISSED, REACHED), encoding="utf-8")
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('bench.front_page', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and (tmp_path / "docs/speed.md").read_text(encoding="utf-8") == whole(PAGE, ROOT), (
        ended.stderr
    )
    assert "speed.jsonl: commit" in ended.stdout and "not known" in ended.stdout


def test_a_page_that_cannot_be_written_ends_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no markers", encoding="utf-8")
    assert front_page.main() == 2 and "error: README.md: must have the lines" in capsys.readouterr().err
