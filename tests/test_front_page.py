"""The table and picture of README and docs/results.md are made from the committed rows."""

import json
import re

import pytest

from bench import front_page, gpu_page, results_page
from bench.front_page import BEGIN, END, README, RESULTS, between_markers
from tests.bench_rows import peer_row

ROOT = front_page.ROOT
CLAIM = re.compile(r"\d\s*(?:times|×|percent)(?!\w)|-fold|\bfaster\b|speed-?up")


def line(variant: str, seed: int, test: float, *, status="finished", check="shipped", copies=None) -> dict:
    """A line that ``bench.evidence`` writes for a run."""
    run = {"variant": variant, "seed": seed, "status": status, "check": check, "device": "A CPU", "threads": 1}
    run |= {"precision": "float32", "protocol": {}, "data": {"sha256": "ab"}, "budget": {"bytes": 9}, "seconds": 1.0}
    run |= {"numerics": {"variant": 1, "shared": 1}, "valid_bits_per_byte": test + 0.1, "test_bits_per_byte": test}
    run |= {
        "parameters": {"total": 855_680},
        "flops_per_byte": {"executed": 2_700_288.0, "ideal": 2_600_000},
        "test_bits_per_copy": copies,
    }
    run |= {"memory": {"state_bytes": 2_093_064, "peak_bytes": 2**28}}
    run |= {"compressors": {"test": {"bzip2": 2.402, "xz": 2.499}}}
    record = [{"config": {"variant": {"lr_scale": {"muon": 2}}}}]
    curve = [{"from_bytes": n, "to_bytes": m, "bits_per_byte": b} for n, m, b in ((1, 1, 4.0), (2, 512, test))]
    cell = [f"variant={variant}", f"seed={seed}"]
    return {"cell": cell, "summary": run, "record": record, "evaluation": {"context_curve": curve}}


@pytest.fixture
def folder(tmp_path):
    """A folder with rows of three mechanisms. One run of ``linear`` is not causal and one has diverged."""

    def write(name: str, lines: list[dict]) -> None:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))

    runs = [line("mhsa", seed, 2.30 + seed / 100) for seed in range(3)]
    runs += [line("adaptive_span", seed, 2.29 + seed / 100 + 0.001 * seed) for seed in range(3)]
    runs += [line("linear", 0, 2.45), line("linear", 1, 1.0, check="not causal")]
    write("front_page", [*runs, line("linear", 2, 9.0, status="diverged")])
    copied = {"mhsa": {"31": 0.01, "447": 0.2}, "linear": {"31": 0.5, "447": 4.0}}
    write("recall", [line(name, 0, 2.0, copies=bits) for name, bits in copied.items()])
    seeds = [line("seeds", seed, 2.0, copies={"31": 0.01, "447": bits}) for seed, bits in enumerate((0.1, 0.1, 4.0))]
    write("abrupt", seeds)
    skills = [line("mhsa", 0, 2.0, copies={"16": 0.9, "2": 0.01}), line("mhsa", 0, 2.0, copies={"all": 0.25})]
    skills.append(line("linear", 0, 1.0, copies={"all": 0.01}, check="not causal"))
    skills[0]["cell"].append("data=state_tracking"), skills[1]["cell"].append("data=selective_copying")
    worse = line("mhsa", 0, 2.75)
    worse["record"][0]["config"]["variant"]["lr_scale"]["muon"] = 1
    write("combinations", [worse, line("mhsa", 0, 2.625)])
    write("skills", skills)
    write("cost", [{"variant": "mhsa", "status": "measured", "mode": "stream", "length": 4096, "segment": 512,
                    "spans_from": None, "flops": {"executed_per_byte": 1.0e7},
                    "memory": {"state_bytes": 2**20, "train_peak_bytes": 2**28},
                    "time": {"train_ms": {"p50": 51.2}}},
                   {"variant": "linear", "status": "failed", "mode": "stream", "length": 4096, "segment": 512}])  # fmt: skip
    return tmp_path


def test_committed_pages_are_up_to_date_rows_are_small_and_readme_claims_no_speed():
    for name, block in front_page.blocks(ROOT / RESULTS).items():
        page = (ROOT / name).read_text(encoding="utf-8")
        assert between_markers(page, block, name=name) == page, f"{name} is outdated: run python -m bench.front_page"
        assert all((ROOT / name).with_name(picture).exists() for picture in re.findall(r"\]\((\w+\.png)\)", page))
    files = [path for path in (ROOT / RESULTS).iterdir() if path.suffix == ".jsonl"]
    assert len(files) <= 12 and sum(path.stat().st_size for path in files) < 3e6
    assert not CLAIM.findall((ROOT / README).read_text(encoding="utf-8")), "a claim of speed needs its row"


def test_the_table_has_intervals_reach_costs_and_compressors_in_order_of_score(folder, monkeypatch):
    assert "`linear`" not in front_page.readme_table(folder), "only the variants of `readme` are rows"
    monkeypatch.setitem(front_page.VARIANTS, "readme", ["mhsa", "adaptive_span", "linear"])
    rows = front_page.readme_table(folder).splitlines()[2:]
    names = [row.split("|")[1].strip() for row in rows]
    assert names == ["`adaptive_span`", "`mhsa`", "bzip2 -9", "`linear`", "xz -9e"]
    cells = [cell.strip() for cell in rows[1].split("|")[1:-1]]
    assert cells[:4] == ["`mhsa`", "2.3100 ± 0.0248", "", "447"]  # t = 4.30, s = 0.01, n = 3
    assert cells[4:] == ["2.70", "10.00", "2,044", "855,680"]
    assert "| -0.0090 ± 0.0025 |" in rows[0]
    abrupt = results_page.read_runs(folder / "abrupt.jsonl")
    assert results_page.copy_reach(abrupt) == {"seeds": "447 (2 of 3)"}, "the mean of 4 bits and 0.1 is above 1 bit"
    assert results_page.copy_reach(abrupt[:0]) == {}
    cost = json.loads((folder / "cost.jsonl").read_text().splitlines()[0]) | {"spans_from": "learned"}
    (folder / "cost.jsonl").write_text(json.dumps(cost) + "\n" + json.dumps(cost | {"variant": "adaptive_span"}) + "\n")
    assert results_page.flops_at(folder / "cost.jsonl", 4096) == {"adaptive_span": 1e7}, "others have not learned these"
    assert "| 2.4500 (n=1) | +0.1500 (n=1) | 31 |" in rows[3], "leaked and diverged runs have no score"


def test_the_results_page_has_every_table_and_names_runs_without_a_score(folder):
    text = results_page.sections(folder)
    for words in (
        "selective_copying, all | state_tracking, 2 | state_tracking, 16 |",
        "| `mhsa` | 0.250 | 0.010 | 0.900 |\n| (counts only) | 2.369 | 0.048 | 0.874 |\n| (no memory) | 4.087 |",
        "| `mhsa` | 1 | 2.6250 (n=1) |  | 2.7250 (n=1) | 2 | 2.70 | 2.60 |",
        "- `linear`, seed 1: not causal\n- `linear`, seed 2: diverged",
        "| `adaptive_span` | 3 | 2.3010",
        "| xz -9e |  | 2.4990 |",
        "| mechanism | 1 | 2 to 512 |",
        "| `linear` | 1 | 31 | 0.500 | 4.000 |",
        "| `linear` | failed |",
        "| `mhsa` | 0.1 |",
        "**Learned spans are better than a uniform span of the same mean**",
    ):
        assert words in text, words
    assert "2.7500" not in text, "of two learning rates only the better on valid is shown"
    assert "## A span of 4,096" not in text, "a table without rows must be left out"


@pytest.mark.parametrize(
    ("seed", "word", "sha256", "factor", "message"),
    [
        (0, "", "ab", 2, "rows repeat a run"),
        (3, "model.layers=8", "ab", 2, "rows repeat a run, or differ in options"),
        (3, "", "cd", 2, "rows repeat a run, or differ in options"),
        (3, "data=recall", "cd", 2, "the runs of a table differ in data or conditions"),
        (0, "", "ab", 1, "two learning rates of one variant, or repeat a seed"),
        (3, "", "ab", 1, "two learning rates of one variant"),
    ],
)
def test_a_row_that_repeats_a_run_or_does_not_compare_is_refused(folder, seed, word, sha256, factor, message):
    row = line("mhsa", seed, 2.5)
    row["cell"] += [word] if word else []
    row["summary"]["data"]["sha256"] = sha256
    row["record"][0]["config"]["variant"]["lr_scale"]["muon"] = factor
    with (folder / "front_page.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        results_page.sections(folder)


def test_costs_rates_speeds_and_runs_on_a_gpu_of_other_conditions_are_refused(folder):
    rates = [line("mhsa", seed, 2.5) for seed in (100, 101)]
    for rate, row in enumerate(rates):
        row["cell"].append(f"{results_page.LR_FACTOR}={rate}")
    peer = peer_row()
    cost = json.loads((folder / "cost.jsonl").read_text().splitlines()[0])
    gpu = json.loads((ROOT / RESULTS / "gpu.jsonl").read_text().splitlines()[0])
    changes = [("device", "Another"), ("seed", 7), ("check", "not causal"), ("budget", {"seconds": 600.0})]
    wrong = [(gpu, gpu | {"summary": gpu["summary"] | {"variant": "linear", key: changed}}) for key, changed in changes]
    cases = [(gpu_page.gpu_sections, rows) for rows in [(gpu, gpu), *wrong]]
    cases += [(results_page.cost_tables, (cost, cost | change)) for change in ({}, {"variant": "linear", "threads": 2})]
    cases += [(results_page.speed_table, (peer, peer | change)) for change in ({}, {"name": "mhsa", "threads": 9})]
    for table, rows in [*cases, (results_page.learning_rate_table, rates)]:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ValueError, match=r"rows.jsonl: rows (repeat a|differ in)"):
            table(folder / "rows.jsonl")


def test_the_picture_is_drawn_and_a_page_without_markers_is_refused(folder, tmp_path, monkeypatch):
    for figure in (front_page.figure_png, front_page.skills_png):
        assert figure(folder).startswith(b"\x89PNG")
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    (tmp_path / README).write_text("no markers")
    with pytest.raises(ValueError, match=f"{README}: must have the lines {BEGIN} and {END}"):
        front_page.main()
