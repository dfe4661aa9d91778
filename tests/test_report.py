"""The report: what may stand in one table, what is marked, how sure a difference is, and the verb itself."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.report import __main__ as report
from bench.report import plots
from bench.report.__main__ import main
from bench.report.comparison import comparable
from bench.report.gather import gather
from harness.record.table import Drawing, Table, to_csv, to_markdown
from tests.bench_rows import PROTOCOL, cost_row, fit_row, peer_row, speed_row, write_rows, write_run
from tests.patience import PATIENCE_SECONDS
from tests.report_of import all_tables
from tests.test_gather import mutated

ROOT = Path(__file__).resolve().parents[1]


def tables(folder: Path) -> dict[str, Table]:
    found = gather([folder])
    assert not found.refused
    return {table.name: table for table in all_tables(found)}


def column(table: Table, heading: str) -> list[str]:
    place = [column.heading for column in table.columns].index(heading)
    return [row[place].text for row in table.rows]


def headings(table: Table) -> list[str]:
    return [column.heading for column in table.columns]


def change(folder: Path, **changes) -> None:
    """Change provenance and summary of a run alike."""
    record, summary = folder / "record.jsonl", folder / "summary.json"
    first, *others = record.read_text().splitlines()
    record.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | changes))


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


def test_percentiles_are_shown_of_enough_calls(tmp_path):
    few, many = ({"train_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "n": n}} for n in (19, 20))
    write_rows(tmp_path, [cost_row(time=few), cost_row(variant="all_attention", time=many)])
    found = tables(tmp_path)["cost-1"]
    assert column(found, "step, n") == ["20", "19"] and column(found, "step, 20 to 80%") == ["1.00 to 3.00", ""]


def test_a_row_that_does_not_say_was_made_by_one_process(tmp_path):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), processes=1)
    found = tables(tmp_path)["runs-1"]
    assert "bytes/s" in headings(found) and not any("processes" in note for note in found.notes)


def test_intervals_are_of_matched_seeds(tmp_path):
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.41), (2, 2.60, 2.49)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    write_run(tmp_path, variant="adaptive_span", seed=7, bits=5.0)  # no match: no part of the difference
    found = tables(tmp_path)["differences-1"]
    assert found.caption.startswith("Reference: mhsa.")
    assert column(found, "split") == ["valid", "test"]
    assert column(found, "n")[0] == "3" and column(found, "difference, bits per byte")[0] == "-0.1000"
    half = 4.30265 * 0.01 / 3**0.5
    assert column(found, "smallest visible")[0] == f"{half:.4f}"
    assert column(found, "95% interval")[0] == f"{-0.1 - half:+.4f} to {-0.1 + half:+.4f}"
    assert column(found, "verdict")[0] == "better"
    assert any("different seeds" in note for note in tables(tmp_path)["runs-1"].notes)


def test_one_seed_has_neither_interval_nor_verdict(tmp_path):
    """However many bytes were scored: these are one set of weights."""
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.61)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    write_run(tmp_path, variant="all_attention", seed=1, bits=2.6)
    found = tables(tmp_path)["differences-1"]
    names = ("variant", "verdict", "95% interval", "n", "p")
    rows = set(zip(*(column(found, name) for name in names), strict=True))
    assert ("all_attention", "n = 1", "", "1", "") in rows
    assert {row[1] for row in rows if row[0] == "adaptive_span"} == {"not separated"}


def compared(folder: Path, **of_variants: float) -> Path:
    """Five seeds of each variant on valid alone, that much better than the reference, give or take 0.01."""
    for variant, better in {"mhsa": 0.0, **of_variants}.items():
        for seed in range(5):
            bits = 2.4 + seed / 10 - better * (1 + 0.5 * (seed - 2))
            write_run(folder, variant=variant, seed=seed, bits=bits, test_bits_per_byte=None)
    return folder


def judged(table: Table) -> dict[str, tuple[str, str]]:
    shown = (column(table, name) for name in ("variant", "p", "verdict"))
    return {variant: (p, verdict) for variant, p, verdict in zip(*shown, strict=True)}


def test_verdicts_are_corrected_for_all_differences_of_a_table(tmp_path):
    """Student's t of one is 2.83, p 0.0474: separated alone, and not among two or three."""
    alone = tables(compared(tmp_path / "alone", adaptive_span=0.01))["differences-1"]
    assert judged(alone) == {"adaptive_span": ("0.0474", "better")}
    three = tables(compared(tmp_path / "three", adaptive_span=0.01, all_attention=0.02, dynamic_span=0.03))
    assert judged(three["differences-1"]) == dict.fromkeys(
        ("adaptive_span", "all_attention", "dynamic_span"), ("0.1423", "not separated")
    )
    assert "p and verdicts are corrected for 3 differences in this table, by Holm." in three["differences-1"].notes


def test_a_difference_that_was_named_in_advance_is_not_corrected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda found, swept: [])
    compared(tmp_path / "runs", adaptive_span=0.01, all_attention=0.02)
    words = [str(tmp_path / "runs"), "--out", str(tmp_path / "report")]
    assert main([*words, "--contrast", "adaptive_span", "mhsa"]) == 0
    told = (tmp_path / "report" / "differences-1.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("| a")}
    assert "| 0.0474 | better" in rows["adaptive_span"] and "| 0.0474 | better" in rows["all_attention"]
    assert "adaptive_span less mhsa on valid was named in advance: it is not corrected." in told
    assert "corrected for 1 difference in this table" in told
    assert main([*words, "--contrast", "mhsa", "all_attention"]) == 0
    told = (tmp_path / "report" / "differences-1.md").read_text()
    assert "Reference: all_attention." in told and "mhsa less all_attention on valid" in told
    capsys.readouterr()
    assert main([*words, "--contrast", "mhsa", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --contrast mhsa nonsense: must be two rows of one table; rows here are adaptive_span, "
    )


def test_the_named_difference_is_that_of_test_where_test_was_scored(tmp_path):
    for seed, own, other in ((0, 2.40, 2.30), (1, 2.50, 2.41), (2, 2.60, 2.49)):
        write_run(tmp_path, variant="mhsa", seed=seed, bits=own)
        write_run(tmp_path, variant="adaptive_span", seed=seed, bits=other)
    found = gather([tmp_path])
    (pairs,) = [
        table
        for table in report.all_tables(found, [], contrast=("adaptive_span", "mhsa"))
        if table.name == "differences-1"
    ]
    assert any("on test was named in advance" in note for note in pairs.notes)
    assert "p and verdicts are corrected for 1 difference in this table, by Holm." in pairs.notes


def test_runs_of_one_source_pool_over_sittings_and_commits(tmp_path):
    """Bits per byte depend on neither; times stay apart where the ground differs."""
    for seed in range(3):
        change(write_run(tmp_path / f"sitting-{seed}", variant="mhsa", seed=seed), commit=f"{seed}" * 40)
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[0] == "3" and "bytes/s" in headings(shown)
    change(write_run(tmp_path / "elsewhere", variant="mhsa", seed=3), threads=9)
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[0] == "4" and "bytes/s" not in headings(shown)


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


def test_costs_by_ground_and_mode_with_the_newest_of_equal_cells(tmp_path):
    slow = cost_row()
    slow["time"]["train_ms"]["p50"] = 1000.0
    write_rows(tmp_path, [slow, cost_row(backend="plain")], name="20261119-000000-cost")
    write_rows(tmp_path, [cost_row(), cost_row(length=256), cost_row(mode="stream"), cost_row(device="Another")])
    found = tables(tmp_path)
    assert len([name for name in found if name.endswith("-parts")]) == 3
    sizes = sorted(len(table.rows) for name, table in found.items() if not name.endswith("-parts"))
    assert sizes == [1, 1, 3]
    main_table = next(table for table in found.values() if len(table.rows) == 3)
    assert column(main_table, "backend") == ["fused", "fused", "plain"]
    assert column(main_table, "length, bytes") == ["256", "512", "512"]
    assert column(main_table, "step, ms") == ["25.60", "51.20", "102.40"]
    assert column(main_table, "training, bytes/s")[1] == "10,000"
    assert any("1 older row" in note for note in main_table.notes)


def test_what_ran_out_of_memory_is_a_row_and_a_leak_is_flagged(tmp_path):
    nothing = dict.fromkeys(("parameters", "flops", "memory", "time", "bytes_moved", "spans"))
    leaky = cost_row(variant="leaky")
    leaky["memory"]["growth_bytes_per_step"] = 10**7
    big = cost_row(variant="big", status="out of memory", reason="asked for 20 GiB", **nothing)
    write_rows(tmp_path, [cost_row(), leaky, big])
    found = tables(tmp_path)
    cells = dict(zip(column(found["cost-1"], "variant"), column(found["cost-1"], "step, ms"), strict=True))
    assert cells["big"] == "out of memory" and cells["leaky"] == "51.20"
    grown = dict(
        zip(*(column(found["cost-1-parts"], name) for name in ("variant", "left behind, KiB/step")), strict=True)
    )
    assert grown["leaky"] == "9,766 leak" and grown["mhsa"] == "0"
    assert any("asked for 20 GiB" in note for note in found["cost-1"].notes)
    assert any("_softmax" in note for note in found["cost-1-parts"].notes)


def test_peers_of_different_calls_do_not_mix_and_void_ones_say_so(tmp_path):
    write_rows(tmp_path, [peer_row(), peer_row(job="product-key layer")], name="20261120-000000-peers")
    reason = "the reference model is slow"
    failed = peer_row(name="bad", status="failed", reason="not causal", bytes_per_second=None, time=None)
    write_rows(tmp_path, [peer_row(void=reason), failed], name="20261121-000000-peers")
    found = tables(tmp_path)
    assert sorted(found) == ["peers-1", "peers-2", "peers-3"]
    assert not found["peers-1"].title.startswith("VOID") and found["peers-3"].title.startswith("VOID")
    assert column(found["peers-3"], "of the reference model") == ["VOID", "VOID"]
    assert column(found["peers-3"], "bytes/s") == ["10,000", "failed"]
    assert f"VOID: {reason}." in found["peers-3"].notes and "bad, keep: failed (not causal)." in found["peers-3"].notes


def test_settings_of_freed_memory_share_a_table_and_one_that_is_void_leaves_the_other(tmp_path):
    write_rows(tmp_path, [peer_row(), peer_row(allocator="return", void="slow")], name="20261120-000000-peers")
    write_rows(tmp_path, [cost_row(), cost_row(allocator="return")])
    over = {"bytes": 7 * 10**8, "limit_bytes": 6 * 10**8, "reached": False}
    write_rows(tmp_path, [speed_row(timed_peak=over)], name="20261120-000000-speed")
    found = tables(tmp_path)
    for name in ("peers-1", "cost-1"):
        assert sorted(column(found[name], "freed memory")) == ["keep", "return"]
    assert sorted(column(found["peers-1"], "of the reference model")) == ["1.000", "VOID"]
    assert column(found["speed-1"], "freed memory") == ["keep"]
    assert column(found["speed-1"], "peak as timed, MiB") == ["668"]
    assert "MISSED: the peak as timed of fixed rotary." in found["speed-1"].notes


def test_predictions_are_split_by_cause_and_checked_where_measured(tmp_path):
    write_rows(tmp_path, [fit_row(), fit_row(variant="all_attention", measured_peak_bytes=10**8)])
    found = tables(tmp_path)["fit-1"]
    assert column(found, "activations, MiB") == ["76.3", "76.3"] and column(found, "most streams") == ["1,024", "1,024"]
    assert sorted(column(found, "error, %")) == ["", "+1.8"] and column(found, "fits") == ["yes", "yes"]


def test_speeds_stand_beside_their_targets_and_void_ones_are_no_numbers(tmp_path):
    reason = "the reference model is slow"
    write_rows(tmp_path, [speed_row(), speed_row(case="zero", ratio=0.3)], name="20261120-120000-speed")
    write_rows(tmp_path, [speed_row(void=reason)], name="20261120-130000-speed")
    good, void = all_tables(gather([tmp_path]))
    shown = [[cell.text for cell in row] for row in good.rows]
    assert [(row[0], row[4], row[7]) for row in shown] == [("fixed", "0.500", "yes"), ("zero", "0.300", "missed")]
    assert [cell.text for cell in void.rows[0]][4] == "VOID" and void.notes == (f"VOID: {reason}.",)


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
