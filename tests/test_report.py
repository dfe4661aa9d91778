"""The report: what may stand in one table, what is marked, how sure a difference is, and the verb itself."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.report import plots
from bench.report.__main__ import main
from bench.report.comparison import comparable
from bench.report.gather import gather
from harness.record.table import Drawing, Table, to_csv, to_markdown
from tests.bench_rows import PROTOCOL, cost_row, fit_row, peer_row, speed_row, write_rows, write_run
from tests.patience import PATIENCE_SECONDS
from tests.report_of import all_tables, change, column, headings, tables
from tests.test_gather import mutated

ROOT = Path(__file__).resolve().parents[1]


def test_means_over_seeds_the_best_first_and_compressors_beside(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=2.4 + seed / 10)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=2.3 + seed / 10)
    found = tables(tmp_path)["runs-1"]
    assert column(found, "variant") == ["adaptive_span", "mhsa", "bzip2", "xz", "gzip"]
    assert column(found, "n") == ["2", "2", "", "", ""]
    assert column(found, "valid, bits per byte") == ["2.3500", "2.4500", "2.5800", "2.7100", "3.0400"]
    assert "training peak, MiB" in headings(found)
    for words in (
        "4,000,000 bytes",
        "sha256 abab",
        "8 streams, each after 2,048 bytes of unscored context, segment 512",
        "the last 100,000 bytes of valid (at most half) choose the weights and are left out",
        "budget.bytes=2,000,000",
        "differ in: variant",
    ):
        assert words in found.caption
    seeds = tables(tmp_path)["seeds-1"]
    assert column(seeds, "seed") == ["0", "1", "0", "1"]
    assert column(seeds, "valid, bits per byte") == ["2.3000", "2.4000", "2.4000", "2.5000"]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "file", "bytes": 4_000_000, "sha256": "99" * 32}},
        {"protocol": PROTOCOL | {"vocabulary": 205}},
        {"protocol": PROTOCOL | {"streams": 1}},
        {"budget": {"bytes": 3_000_000}},
        {"budget": {"steps": 2_000_000}},
        {"capped": {"valid": 10_000}},
        {"config": {"variant": {"name": "mhsa"}, "data": {"split": [0.8, 0.1, 0.1]}}},
    ],
)
def test_runs_that_do_not_compare_never_share_a_table(tmp_path, changes):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), **changes)
    found = tables(tmp_path)
    shown = [set(column(found[name], "variant")) - {"gzip", "bzip2", "xz"} for name in ("runs-1", "runs-2")]
    assert sorted(map(sorted, shown)) == [["adaptive_span"], ["mhsa"]]
    assert "differences-1" not in found


def test_a_budget_of_seconds_is_equal_on_equal_ground_only(tmp_path):
    for variant, threads in (("mhsa", 2), ("adaptive_span", 2), ("all_attention", 4)):
        change(write_run(tmp_path, variant=variant), budget={"seconds": 60.0}, threads=threads)
    keys = {run.row["variant"]: comparable(run) for run in gather([tmp_path]).runs}
    assert keys["mhsa"] == keys["adaptive_span"] != keys["all_attention"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"device": "Another"}, {"threads": 9}, {"precision": "bfloat16"}, {"compile": True}),
        *(
            {"versions": {"torch": "1"}},
            {"machine": {"cpu": "A made-up CPU", "cores": 9}},
            {"allocator": "return"},
            {"processes": 2},
            {"instruction_set": "AVX2"},
            {"environment": {"MALLOC_ARENA_MAX": "1"}},
        ),
    ],
)
def test_time_and_memory_of_different_grounds_stand_in_tables_apart(tmp_path, changes):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), **changes)
    found = tables(tmp_path)
    assert len(column(found["runs-1"], "variant")) == 5
    assert not {"training peak, MiB", "bytes/s", "training, s"} & set(headings(found["runs-1"]))
    assert any(next(iter(changes)) in note for note in found["runs-1"].notes)
    for name in ("costs-1-1", "costs-1-2"):
        assert len(found[name].rows) == 1 and {"backend", "training peak, MiB"} <= set(headings(found[name]))
    assert found["costs-1-1"].caption != found["costs-1-2"].caption


BUSY = {"busy": True, "cores": 2, "wanted_cores": 2, "average_at_start": 0.5, "seconds": 60.0}
BUSY |= {"others_cores": 1.25, "stolen_cores": 0.0}


def test_times_of_a_busy_machine_are_marked(tmp_path):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), load=BUSY)
    found = tables(tmp_path)["runs-1"]
    for heading in ("bytes/s", "training, s"):
        marked = [cell.endswith(" !") for cell in column(found, heading)]
        assert marked == [name.startswith("adaptive_span") for name in column(found, "variant")], heading
    assert not any("!" in cell for cell in column(found, "test, bits per byte"))
    assert [note for note in found.notes if note.startswith("! BUSY MACHINE: others had 1.25")]
    assert not any("BUSY" in note for note in tables(tmp_path)["seeds-1"].notes)
    write_rows(tmp_path, [cost_row(), cost_row(variant="all_attention", load=BUSY | {"stolen_cores": 0.5})])
    found = tables(tmp_path)["cost-1"]
    assert column(found, "variant") == ["all_attention !", "mhsa"]
    assert any("hypervisor 0.50 of 2 cores" in note for note in found.notes)


def test_what_ran_in_evaluation_is_said_where_it_is_other_code(tmp_path):
    write_run(tmp_path, variant="mhsa", evaluation_backend="kernel")
    write_run(tmp_path, variant="adaptive_span", evaluation_backend="fused")
    found = tables(tmp_path)["runs-1"]
    said = dict(zip(column(found, "variant"), column(found, "in evaluation"), strict=True))
    assert said["mhsa"] == "kernel" and said["adaptive_span"] == ""
    write_run(tmp_path / "alike", variant="mhsa", evaluation_backend="fused")
    assert "in evaluation" not in headings(tables(tmp_path / "alike")["runs-1"])


def test_a_row_that_does_not_say_was_made_by_one_process(tmp_path):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), processes=1)
    found = tables(tmp_path)["runs-1"]
    assert "bytes/s" in headings(found) and not any("processes" in note for note in found.notes)


def test_runs_of_one_source_pool_over_sittings_and_commits(tmp_path):
    """Bits per byte depend on neither; times stay apart where the ground differs."""
    for seed in range(3):
        change(write_run(tmp_path / f"sitting-{seed}", variant="mhsa", seed=seed), commit=f"{seed}" * 40)
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[0] == "3" and "bytes/s" in headings(shown)
    change(write_run(tmp_path / "elsewhere", variant="mhsa", seed=3), threads=9)
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[0] == "4" and "bytes/s" not in headings(shown)


NUMERICS = {"variant": 1, "shared": 1}


def test_runs_of_equal_numerics_pool_over_sources_and_processors_and_their_times_do_not(tmp_path):
    config = {"variant": {"name": "mhsa", "numerics": 1, "attention": {"_target_": "variants.attention.Attention"}}}
    for seed in range(3):
        own = {"variant": config["variant"] | {"attention": {"_target_": f"variants.moved_{seed}.Attention"}}}
        own |= {"check": True} if seed else {}
        about = {"config": own, "numerics": NUMERICS, "source": f"{seed}" * 64, "tree": f"{seed}" * 64}
        change(write_run(tmp_path / str(seed), variant="mhsa", seed=seed), commit=f"{seed}" * 40, **about)
    shown = tables(tmp_path)
    assert column(shown["runs-1"], "n")[0] == "3" and "bytes/s" not in headings(shown["runs-1"])
    assert not any(note.startswith("+") for note in shown["runs-1"].notes)
    assert "Commit 00000000, 11111111 and 22222222." in shown["runs-1"].notes
    assert [len(shown[f"costs-1-{place}"].rows) for place in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"numerics": {"variant": 2, "shared": 1}},
        {"numerics": {"variant": 1, "shared": 2}},
        {"numerics": {"variant": None, "shared": 1}},
        {"device_kind": "cuda"},
        {"optimizers": [{"name": "matrices", "optimizer": "Muon", "share": 1.0, "products": ["bfloat16"]}]},
        {"config": {"variant": {"name": "mhsa"}, "check": False}},
        {"config": {"variant": {"name": "mhsa"}, "position": {"_target_": "variants.position.Alibi"}}},
    ],
)
def test_runs_of_other_numbers_do_not_pool(tmp_path, changes):
    muon = [{"name": "matrices", "optimizer": "Muon", "share": 1.0, "products": ["float32"]}]
    config = {"variant": {"name": "mhsa"}, "position": {"_target_": "variants.position.Rotary"}}
    same = {"numerics": NUMERICS, "optimizers": muon, "config": config}
    change(write_run(tmp_path, seed=0), source="aa" * 32, **same)
    change(write_run(tmp_path, seed=1), **same)
    assert column(tables(tmp_path)["runs-1"], "n")[0] == "2"
    change(write_run(tmp_path, seed=1), **same | changes)
    assert column(tables(tmp_path)["runs-1"], "n")[:2] == ["1", "1"]


def test_a_run_that_did_not_score_test_stands_beside_one_that_did(tmp_path):
    write_run(tmp_path, variant="mhsa", seed=0, capped={"valid": 1000, "test": 1000})
    write_run(tmp_path, variant="mhsa", seed=1, capped={"valid": 1000}, test_bits_per_byte=None)
    write_run(tmp_path, variant="adaptive_span", capped={"valid": 1000, "test": 1000})
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[:2] == ["1", "2"] and column(shown, "variant")[:2] == ["adaptive_span", "mhsa"]
    assert column(shown, "test, bits per byte")[:2] == ["2.4300*", ""], "no mean over some of the seeds"


def test_how_often_test_was_scored_is_said_of_runs_and_of_what_was_evaluated_later(tmp_path):
    """Every look counts: of failed and of unfinished runs, too, and on these data alone."""
    folder = write_run(tmp_path, variant="mhsa")
    rows = [{"split": "test"}, {"split": "valid"}, {"split": "test"}, [], "garbage"]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    change(write_run(tmp_path, variant="adaptive_span"), status="failed", error="late")
    (write_run(tmp_path, variant="all_attention") / "summary.json").unlink()
    other = {"name": "file", "bytes": 4_000_000, "sha256": "99" * 32}
    change(write_run(tmp_path, variant="dynamic_span"), data=other)
    said = [next(note for note in table.notes if "Test was" in note) for table in all_runs(tmp_path)]
    assert sorted(said) == [
        "Test was scored 1 time in the folders that were read.",
        "Test was scored 5 times in the folders that were read.",
    ]


def all_runs(folder: Path) -> list[Table]:
    return [table for name, table in tables(folder).items() if name.startswith("runs-")]


def test_capped_scores_and_other_sources_are_marked(tmp_path):
    for variant in ("mhsa", "adaptive_span"):
        write_run(tmp_path, variant=variant, capped={"valid": 1000})
    change(write_run(tmp_path, variant="all_attention", capped={"valid": 1000}), source="aa" * 32)
    found = tables(tmp_path)["runs-1"]
    assert all(text.endswith("*") for text in column(found, "valid, bits per byte"))
    assert not any(text.endswith("*") for text in column(found, "test, bits per byte"))
    assert any("first 1,000 bytes of valid" in note for note in found.notes)
    marked = {name for name in column(found, "variant") if name.endswith("+")}
    assert marked in ({"all_attention +"}, {"mhsa +", "adaptive_span +"})  # whichever was written last is the newest
    assert any(note.startswith("+ made by other source") and "aaaaaaaa" in note for note in found.notes)


def test_seeds_of_other_configuration_or_source_are_not_averaged(tmp_path):
    write_run(tmp_path, variant="mhsa", seed=0)
    other = {"variant": {"name": "mhsa"}, "model": {"d_model": 256, "layers": 4, "heads": 4}}
    change(write_run(tmp_path, variant="mhsa", seed=1), config=other)
    change(write_run(tmp_path, variant="mhsa", seed=2), source="aa" * 32)
    found = tables(tmp_path)["runs-1"]
    assert column(found, "n")[:3] == ["1", "1", "1"] and len(set(column(found, "variant")[:3])) == 3
    assert "model.d_model" in found.caption


def test_a_diverged_run_is_shown_and_named(tmp_path):
    write_run(tmp_path, variant="mhsa")
    write_run(tmp_path, variant="adaptive_span", valid_bits_per_byte=None)
    found = tables(tmp_path)["runs-1"]
    assert column(found, "variant")[:2] == ["mhsa", "adaptive_span"]
    assert any("adaptive_span, seed 0" in note for note in found.notes)


def test_the_verb_writes_everything_and_takes_away_what_is_no_longer_true(tmp_path, capsys, monkeypatch):
    drawing = Drawing(name="drawn", title="Drawn", caption="By hand.", svg=b"<svg/>", png=b"png")
    monkeypatch.setattr(plots, "draw_all", lambda found, swept: [drawing])
    outputs, out = tmp_path / "outputs", tmp_path / "report"
    write_run(outputs, variant="mhsa")
    write_rows(outputs, [cost_row(), {"kind": "cost"}])
    assert main([str(outputs), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for name in ("runs-1.md", "runs-1.csv", "cost-1.md", "report.md", "index.html"):
        assert (out / name).stat().st_size and name.partition(".")[0] in said
    assert "refused: " in said and "no provenance: variant" in said
    markdown = (out / "report.md").read_text()
    assert "python train.py variant=mhsa seed=0" in markdown and "Refused: " in markdown
    assert "![drawn](figures/drawn.png)" in markdown and (out / "figures" / "drawn.svg").read_bytes() == b"<svg/>"
    (out / "mine.md").write_text("not of the report")
    write_rows(outputs, [])
    assert main([str(outputs), "--out", str(out)]) == 0
    assert not (out / "cost-1.md").exists() and (out / "runs-1.md").exists() and (out / "mine.md").exists()
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("content", [None, "", "{}\n", "garbage"])
def test_nothing_to_show_is_a_mistake_with_a_reason(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "report").exists()


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file" / "report")]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_report_needs_neither_torch_nor_a_server(tmp_path):
    write_run(tmp_path)
    write_rows(tmp_path, [cost_row(), peer_row(), fit_row(), speed_row()])
    code = (
        "import sys; from bench.report.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit(code or sorted({'torch', 'wandb', 'hydra'} & set(sys.modules)) or 0)"
    )
    words = [sys.executable, "-c", code, str(tmp_path), "--out", str(tmp_path / "report")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {".png", ".svg"}


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(seed=st.integers(0, 2**32))
def test_whatever_stands_in_rows_and_runs_the_tables_come(tmp_path_factory, seed):
    random = Random(seed)
    folder = tmp_path_factory.mktemp("fuzz")
    rows = [cost_row(), peer_row(), fit_row(), speed_row()]
    write_rows(folder, rows + [mutated(random, random.choice(rows)) for _ in range(3)])
    write_run(folder, variant="mhsa")
    run = write_run(folder, variant="adaptive_span")
    name = random.choice(["record.jsonl", "summary.json"])
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    place = random.randrange(len(lines)) if random.random() < 0.7 else 0
    lines[place] = mutated(random, lines[place])
    if name == "record.jsonl" and place == 0 and random.random() < 0.7:  # a change that both files agree on
        summary = json.loads((run / "summary.json").read_text())
        shared = {key: lines[0][key] for key in lines[0].keys() & summary.keys() - {"kind"}}
        (run / "summary.json").write_text(json.dumps(summary | shared))
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = gather([folder])
    for table in all_tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)
        for form in (to_markdown, to_csv):
            form(table).encode("utf-8")
