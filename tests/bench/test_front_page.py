"""The table and picture of README and docs/results.md are made from the committed rows."""

import json
import re

import pandas as pd
import pytest

from bench import front_page, published, published_runs
from bench.evidence import LR_FACTORS
from bench.front_page import BEGIN, END, README, RESULTS, between_markers
from bench.text_figures import label_heights, recall_curves, recall_finding, state_finding
from tests.support.bench_rows import peer_row, run_rows, write_lines

ROOT = front_page.ROOT
CLAIM = re.compile(r"\d\s*(?:times|×|percent)(?!\w)|-fold|\bfaster\b|speed-?up")


def line(
    variant: str, seed: int, test: float, *, status="finished", check="shipped", copies=None
) -> dict:
    """Return a line that ``bench.evidence`` writes for a run."""
    _, run = run_rows(variant=variant, seed=seed, bits=test + 0.1)
    run |= {"status": status, "check": check, "budget": {"bytes": 9}, "protocol": {}}
    run |= {
        "numerics": {"variant": 1, "shared": 1},
        "test_bits_per_byte": test,
        "test_bits_per_copy": copies,
    }
    run["data"] = {"sha256": "ab"}
    record = [{"config": {"variant": {"lr_scale": {"muon": 2}}}}]
    curve = [
        {"from_bytes": n, "to_bytes": m, "bits_per_byte": b}
        for n, m, b in ((1, 1, 4.0), (2, 512, test))
    ]
    cell = [f"variant={variant}", f"seed={seed}"]
    return {"cell": cell, "summary": run, "record": record, "evaluation": {"context_curve": curve}}


@pytest.fixture
def folder(tmp_path):
    """A folder with rows of three mechanisms. One run of ``linear`` is not causal and one has
    diverged."""

    def write(name: str, lines: list[dict]):
        write_lines(tmp_path / f"{name}.jsonl", lines)

    runs = [line("mhsa", seed, 2.30 + seed / 100) for seed in range(3)]
    runs += [line("adaptive_span", seed, 2.29 + seed / 100 + 0.001 * seed) for seed in range(3)]
    runs += [line("linear", 0, 2.45), line("linear", 1, 1.0, check="not causal")]
    write("front_page", [*runs, line("linear", 2, 9.0, status="diverged")])
    copied = {"mhsa": {"31": 0.01, "447": 0.2}, "linear": {"31": 0.5, "447": 4.0}}
    write("recall", [line(name, 0, 2.0, copies=bits) for name, bits in copied.items()])
    skills = [
        line("mhsa", 0, 2.0, copies={"16": 0.9, "2": 0.01}),
        line("mhsa", 0, 2.0, copies={"all": 0.25}),
    ]
    skills.append(line("linear", 0, 1.0, copies={"all": 0.01}, check="not causal"))
    skills[0]["cell"].append("data=state_tracking")
    skills[1]["cell"].append("data=selective_copying")
    worse = line("mhsa", 0, 2.75)
    worse["record"][0]["config"]["variant"]["lr_scale"]["muon"] = 1
    write("combinations", [worse, line("mhsa", 0, 2.625)])
    write("skills", skills)
    recall = []
    for bits, accuracy, factor, sequence, more in (
        (1.74, 0.995, 1, 64, []),
        (2.5, 0.2, 0.5, 64, []),
        (1.8, 0.3, 1, 32, ["data.sequence=32"]),
    ):
        row = recall_line(0, [0.3, 0.99, 1.0], factor=factor)
        row["cell"] += [f"++variant.lr_scale.adamw={factor}", *more]
        scores = {"valid_bits_per_byte": bits, "test_answer_accuracy": {"all": accuracy}}
        row["summary"] |= scores | {"protocol": {"sequence": sequence}}
        recall.append(row)
    write("recall_by_key", recall)
    common = {"mode": "stream", "length": 4096, "segment": 512}
    measured = {"spans_from": None, "flops": {"executed_per_byte": 1.0e7}}
    measured |= {"memory": {"state_bytes": 2**20, "train_peak_bytes": 2**28}}
    measured |= {"time": {"train_ms": {"p50": 51.2}}}
    costs = [{"variant": "mhsa", "status": "measured"} | common | measured]
    write("cost", [*costs, {"variant": "linear", "status": "failed"} | common])
    return tmp_path


def test_committed_pages_are_up_to_date_rows_are_small_and_readme_claims_no_speed():
    for name, block in front_page.blocks(ROOT / RESULTS).items():
        page = (ROOT / name).read_text()
        assert between_markers(page, block, name=name) == page, (
            f"{name} is outdated: run python -m bench.front_page"
        )
        assert all(
            (ROOT / name).with_name(picture).exists()
            for picture in re.findall(r"\]\((\w+\.png)\)", page)
        )
    files = [path for path in (ROOT / RESULTS).iterdir() if path.suffix == ".jsonl"]
    assert sum(path.stat().st_size for path in files) < 4e6
    named = (ROOT / RESULTS / "README.md").read_text()
    for path in files:
        assert path.name in named
        assert path.stat().st_size < 7_000 * len(path.read_bytes().splitlines()), path
    assert not CLAIM.findall((ROOT / README).read_text()), "a claim of speed needs its row"


def test_the_table_has_baselines_intervals_costs_and_compressors_in_order_of_score(
    folder, monkeypatch
):
    assert "`linear`" not in front_page.readme_table(folder), (
        "only the variants of `readme` are rows"
    )
    monkeypatch.setitem(front_page.VARIANTS, "readme", ["mhsa", "adaptive_span", "linear"])
    monkeypatch.setitem(front_page.VARIANTS["baselines"], "linear", "adaptive_span")
    table, note = front_page.readme_table(folder).split("\n\n")
    headings, _, *rows = (line.split(" | ") for line in table.removesuffix(" |").split(" |\n"))
    assert [row[0] for row in rows] == ["| `adaptive_span`", "| `mhsa`", "| `linear`"]
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [*cells[1].values()] == ["| `mhsa`", "3", "2.3100", "", "", "", "+0.0", "2.95", "1,024"]
    # Both have three seeds; t = 4.30, and the deviation of their differences is 0.001.
    assert (cells[0]["baseline"], cells[0]["Δ, 95% interval"]) == ("`mhsa`", "-0.0090 ± 0.0025")
    assert (cells[0]["verdict"], cells[2]["verdict"], cells[0]["Δ parameters, %"]) == (
        "better",
        "too few seeds",
        "+0.0",
    )
    assert (cells[2]["baseline"], cells[2]["Δ, 95% interval"]) == (
        "`adaptive_span`",
        "+0.1600 ± 0.0043",
    )
    assert "repeats" not in table, "a column that is empty in all rows is left out"
    assert "will replace this table" in note


def test_rows_with_windows_in_a_permutation_replace_the_older_ones_once_all_are_there(
    folder, monkeypatch
):
    rows = [line("mhsa", seed, 2.2 + seed / 100) for seed in range(3)]
    for row in rows:
        row["cell"].insert(0, "sweep=text")
        row["summary"]["test_bits_per_repeat"] = {"32 to 512": 1.25, "513 to 4096": None}
    write_lines(folder / "text.jsonl", rows)
    table = front_page.readme_table(folder)
    assert "will replace this table" in table and "2.3100" in table
    monkeypatch.setattr(published_runs, "missing_runs", lambda *_: [])
    table = front_page.readme_table(folder)
    assert "| repeats, 32 to 512 |" in table and "| `mhsa` | 3 | 2.2100 | 1.250 | +0.0 |" in table
    assert "2.3100" not in table and "will replace" not in table


def test_the_results_page_has_every_table_and_names_runs_without_a_score(folder):
    text = published.results_sections(folder)
    for words in (
        "selective_copying, all | state_tracking, 2 | state_tracking, 16 |",
        "| `mhsa` | 0.250 | 0.010 | 0.900 |\n| (counts only) | 2.369 | 0.048 | 0.874 |\n| (no "
        "memory) | 4.087 |",
        "| `mhsa` | 1 | 2.6250 | +0.0 | 2.7250 | 2 | 2.95 | 2.69 |",
        "- `linear`, seed 1: not causal\n- `linear`, seed 2: diverged",
        "| `adaptive_span` | 3 | 2.3010 | `mhsa` | -0.0090 ± 0.0025 | better |",
        "- Test: bzip2 -9 2.5000, xz -9e 2.7000\n",
        "- Standard deviation of a difference between two runs of one seed: 0.0010, 2 degrees of "
        "freedom",
        "Runs still to come (`python -m bench.evidence stage=text_bytes`): 8 of `mhsa_alibi`",
        "### Generation, ms per byte",
        "No row yet of `python -m bench.cost mode=cold`.",
        "| mechanism | 1 | 2 to 512 |",
        "| `linear` | 1 | 0.500 | 4.000 |",
        "| `linear` | failed |",
        "| `mhsa` | 0.995 |  | 2.0 | 1 | 0.300 |  |  | 1,024 |  |",
        "| `mhsa` | 0.1 |",
        "**Learned spans are better than a uniform span of the same mean**",
    ):
        assert words in text, words
    assert "2.7500" not in text, "of two learning rates only the better on valid is shown"
    assert "## Training speed" not in text, "a table without rows must be left out"


def test_a_skill_with_searched_learning_rates_has_only_mechanisms_at_their_best_rate():
    columns = ["corpus", "variant", "seed", "lr_factor", "valid_bits_per_byte"]
    runs = [("copy", "mhsa", 0, factor, abs(factor - 2)) for factor in (1, 2, 4)]
    runs += [("copy", "linear", 0, 1, 0.0), ("recall", "linear", 0, 1, 0.5)]
    best = published_runs.best_rates(pd.DataFrame(runs, columns=columns))
    assert best.values.tolist() == [list(runs[1]), list(runs[-1])]


@pytest.mark.parametrize(
    "seed, word, sha256, factor, message",
    [
        (0, "", "ab", 2, "rows repeat a run"),
        (3, "model.layers=8", "ab", 2, "rows repeat a run, or differ in options"),
        (3, "", "cd", 2, "rows repeat a run, or differ in options"),
        (3, "data=recall", "cd", 2, "the runs of a table differ in data or conditions"),
        (0, "", "ab", 1, "two learning rates of one variant, or repeat a seed"),
        (3, "", "ab", 1, "two learning rates of one variant"),
    ],
)
def test_a_row_that_repeats_a_run_or_does_not_compare_is_refused(
    folder, seed, word, sha256, factor, message
):
    row = line("mhsa", seed, 2.5)
    row["cell"] += [word] if word else []
    row["summary"]["data"]["sha256"] = sha256
    row["record"][0]["config"]["variant"]["lr_scale"]["muon"] = factor
    with (folder / "front_page.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        published.results_sections(folder)


def test_costs_rates_speeds_and_runs_on_a_gpu_of_other_conditions_are_refused(folder):
    rates = [line("mhsa", seed, 2.5) for seed in (100, 101)]
    for rate, row in enumerate(rates):
        row["cell"].append(f"{LR_FACTORS[0]}={rate}")
    peer = peer_row()
    cost = json.loads((folder / "cost.jsonl").read_text().splitlines()[0])
    gpu = json.loads((ROOT / RESULTS / "gpu.jsonl").read_text().splitlines()[0])
    changes = [
        ("device", "Another"),
        ("seed", 7),
        ("check", "not causal"),
        ("budget", {"seconds": 600.0}),
    ]
    wrong = [
        (gpu, gpu | {"summary": gpu["summary"] | {"variant": "linear", key: changed}})
        for key, changed in changes
    ]
    cases = [(published.gpu_sections, rows) for rows in [(gpu, gpu), *wrong]]
    cases += [
        (published.cost_tables, (cost, cost | change))
        for change in ({}, {"variant": "linear", "threads": 2})
    ]
    cases += [
        (published.speed_tables, (peer, peer | change))
        for change in ({}, {"name": "mhsa", "threads": 9})
    ]
    for table, rows in [*cases, (published.learning_rate_tables, rates)]:
        write_lines(folder / "rows.jsonl", rows)
        with pytest.raises(ValueError, match=r"rows.jsonl: rows (repeat a|differ in)"):
            list(table(folder / "rows.jsonl"))


def recall_line(
    seed: int, accuracy: list[float], *, variant="mhsa", factor=1.0, **attention
) -> dict:
    """Return a line of a run of recall by key: the accuracies of its validations, a megabyte
    apart."""
    row = line(variant, seed, 2.0)
    row["summary"]["protocol"] = {"sequence": 64}
    options = {"name": variant, "attention": attention, "lr_scale": {"adamw": factor}}
    n_bytes = [1e6 * (index + 1) for index in range(len(accuracy))]
    curve = {"kind": "curve", "bytes_seen": n_bytes, "answer_accuracy": accuracy}
    return row | {"record": [{"config": {"variant": options}}, curve]}


def test_curves_of_recall_have_their_seeds_at_the_best_rate(folder):
    rows = [recall_line(seed, [0.1, 0.2, 0.99 + seed / 500]) for seed in range(3)]
    rows += [
        recall_line(0, [0.1, 0.1, 0.5], factor=2.0),
        recall_line(0, [0.99, 1.0], variant="mhsa_shift", key_shift=True),
    ]
    rows += [recall_line(0, [0.5], variant="gated_delta", filter_bytes=1)]
    diverged = recall_line(3, [])
    diverged["summary"]["status"] = "diverged"
    diverged["record"][1] = {"kind": "curve"}  # it was never validated
    rows.append(diverged)
    write_lines(folder / "recall_by_key.jsonl", rows)
    curves = recall_curves(folder / "recall_by_key.jsonl")
    assert {name: runs.shape[1] for name, runs in curves.items()} == {
        "mhsa": 3,
        "mhsa, key_shift": 1,
        "gated_delta, filter_bytes=1": 1,
    }
    assert curves["mhsa"][1].to_dict() == {1.0: 0.1, 2.0: 0.2, 3.0: 0.992}
    assert recall_finding(curves).endswith("after 1.0 MB with shifted keys, after 3.0 MB without")
    late = curves | {"mhsa": curves["gated_delta, filter_bytes=1"]}
    assert recall_finding(late).endswith("not within 1.0 MB without")
    assert recall_finding({}).startswith("Recall by key: rows are missing")
    assert front_page.figure_png(folder).startswith(b"\x89PNG")


def test_the_title_of_the_state_panel_says_how_the_least_state_scores(folder):
    runs = published_runs.PublishedRuns(folder / "front_page.jsonl").finished
    runs.loc[runs["variant"] == "adaptive_span", published_runs.STATE] /= 4
    runs.loc[runs["variant"] == "linear", published_runs.STATE] = 9
    means, names = published_runs.published_means(runs), ["mhsa", "adaptive_span"]
    assert state_finding(means, names) == "With 25% of its state, adaptive_span beats mhsa"
    assert state_finding(means, [*names, "linear"]).endswith(
        "linear has too few seeds to compare with mhsa"
    )
    assert label_heights([0, 0, 5], gap=1) == [-0.5, 0.5, 5]


def test_runs_of_several_budgets_are_a_table_and_a_figure(folder):
    rows = []
    for budget, bits in ((850_000, 2.5), (3_400_000, 2.3)):
        row = line("mhsa", 0, bits)
        row["cell"] += ["sweep=text", f"budget.bytes={budget}", "optim.schedule.decay_fraction=0.2"]
        row["summary"] |= {
            "budget": {"bytes": budget},
            "training_flops": 1e6 * budget,
            "epochs": budget / 3.4e6,
        }
        rows.append(row)
    write_lines(folder / "text_bytes.jsonl", rows)
    text = published.results_sections(folder)
    assert "| mechanism | 0.85 MB, epochs: 0.25 | 3.4 MB, epochs: 1 |" in text
    assert "| `mhsa` | 2.5000 (n=1) | 2.3000 (n=1) |" in text and "6 of `mhsa`" in text
    assert front_page.bytes_png(folder).startswith(b"\x89PNG")


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match=f"{README}: must have the lines {BEGIN} and {END}"):
        between_markers("no markers", "", name=README)
