"""Tuning sweeps in a report: which trial is picked and what speaks against it, and that fresh seeds alone report."""

import json
import shlex
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from bench.report import plots
from bench.report.__main__ import main
from bench.report.gather import gather
from bench.report.plot_style import looks, styled
from bench.report.plots_rates import draw_rates, top_of_frame
from bench.report.tuning import choose, fresh_command, picks, settings, tuning_groups
from harness.record.table import Table, to_csv, to_markdown
from tests.bench_rows import write_failed, write_run, write_trial
from tests.report_of import all_tables, change, column, draw_all, headings, tables
from tests.test_gather import mutated

RATES = (0.001, 0.003, 0.01, 0.03)
VALLEY = (2.6, 2.4, 2.5, 3.0)
LOSS = "variant.loss_weight"
"""A key of a mechanism's own."""


def sweep(
    folder, *, variant: str = "mhsa", bits=VALLEY, rates=RATES, seeds=(100, 101), first: int = 0, **changes
) -> None:
    for trial, (rate, middle) in enumerate(zip(rates, bits, strict=True), start=first):
        for seed in seeds:
            of_seed = middle + (seed - 100) / 100
            write_trial(folder, variant=variant, rate=rate, seed=seed, bits=of_seed, trial=trial, **changes)


def choice_of(folder, *, variant: str = "mhsa"):
    found = gather([folder])
    (group,) = tuning_groups(found.runs, found.failed_runs)
    return choose(next(one for one in settings(group) if one.arm.variant == variant))


def cells(table: Table, row: int = 0) -> dict[str, str]:
    return {column.heading: cell.text for column, cell in zip(table.columns, table.rows[row], strict=True)}


def test_the_lowest_mean_over_tuning_seeds_is_picked_and_test_is_not_looked_at(tmp_path):
    sweep(tmp_path)
    for rate, test_bits in ((0.01, 0.5), (0.003, 5.0)):  # a better test score at another rate says nothing
        write_trial(tmp_path, rate=rate, seed=7, bits=0.1, test_bits_per_byte=test_bits)
    found = choice_of(tmp_path)
    assert (found.trial, found.values, found.edges) == (1, {"optim.lr": 0.003}, {})
    assert found.bits == pytest.approx(2.405) and not found.missing and not found.lost


def test_a_trial_is_a_point_of_all_that_was_tuned(tmp_path):
    """Two trials of one rate are two, and a result is at the pick where every tuned key is."""
    variants = [{"variant": {"name": "mhsa", "loss_weight": weight}} for weight in (1e-6, 1e-5)]
    both = {"optim.lr": 0.5, LOSS: 0.5}
    for trial, (keys, bits) in enumerate(zip(variants, (2.5, 2.4), strict=True)):
        write_trial(tmp_path, rate=0.003, seed=100, bits=bits, trial=trial, keys=keys, point=both)
    for keys, bits in zip(variants, (2.0, 2.3), strict=True):
        write_trial(tmp_path, rate=0.003, seed=0, bits=bits, keys=keys)
    shown = tables(tmp_path)
    assert column(shown["tuning-1"], "point") == [f"optim.lr=0.003, {LOSS}={weight}" for weight in ("1e-06", "1e-05")]
    assert column(shown["tuning-1"], "place") == ["", "picked"]
    (row,) = shown["reported-1"].rows
    assert cells(shown["reported-1"])["picked"] == f"optim.lr=0.003, {LOSS}=1e-05"
    assert cells(shown["reported-1"])["valid, bits per byte"] == "2.3000", "not the result with another weight"


@pytest.mark.parametrize("unit, end", [(0.04, "low"), (0.06, None), (0.94, None), (0.96, "high")])
def test_an_optimum_near_an_end_of_any_key_of_its_space_is_flagged(tmp_path, unit, end):
    keys = {"variant": {"name": "mhsa", "loss_weight": 1e-6}}
    sweep(tmp_path, keys=keys, point={"optim.lr": 0.5, LOSS: unit})
    assert choice_of(tmp_path).edges == ({LOSS: end} if end else {})
    picked = tables(tmp_path)["picked-1"]
    assert (f"{end} end of {LOSS}" in cells(picked)["flags"]) == bool(end)


def test_a_trial_that_failed_for_one_seed_is_no_choice(tmp_path):
    sweep(tmp_path, rates=RATES[:2], bits=(2.6, 2.4))
    write_trial(tmp_path, rate=0.01, seed=100, bits=2.0, trial=2)
    failed = write_failed(tmp_path, rate=0.01, seed=101, error="RuntimeError: loss is not finite", trial=2)
    found = choice_of(tmp_path)
    assert found.trial == 1 and found.lost == [(2, 101)] and not found.missing
    shown = tables(tmp_path)
    assert "1 failed" in cells(shown["picked-1"])["flags"] and cells(shown["picked-1"])["trials"] == "3"
    assert any("loss is not finite" in note and failed.name in note for note in shown["picked-1"].notes)
    assert cells(shown["tuning-1"], 2)["place"] == "not every seed has a score"


def test_a_failed_attempt_does_not_hide_a_result(tmp_path):
    sweep(tmp_path)
    write_failed(tmp_path, rate=0.003, seed=100, error="RuntimeError: the disk was full", trial=1)
    found = gather([tmp_path])
    for order in ([*found.failed_runs, *found.runs], [*found.runs, *found.failed_runs]):
        (setting,) = settings(order)
        assert choose(setting).trial == 1 and not choose(setting).lost and len(setting.runs) == 8


def test_missing_and_diverged_trials_are_flagged(tmp_path):
    for trial, of_seeds in enumerate(((2.5, 2.45), (2.4, 2.5), (2.6, None), (2.9, "missing"))):
        for seed, bits in zip((100, 101), of_seeds, strict=True):
            if bits != "missing":
                write_trial(tmp_path, rate=RATES[trial], seed=seed, bits=bits, trial=trial)
    found = choice_of(tmp_path)
    assert (found.trial, found.missing, found.lost) == (1, [(3, 101)], [(2, 101)])
    shown = tables(tmp_path)
    assert cells(shown["picked-1"])["flags"].split("; ") == ["fewer than 16 trials", "1 missing", "1 failed"]
    assert column(shown["tuning-1"], "n") == ["2", "2", "1", "1"]
    assert column(shown["tuning-1"], "place")[1:] == ["picked", *["not every seed has a score"] * 2]


def test_no_trial_with_all_seeds_means_no_pick(tmp_path):
    write_trial(tmp_path, rate=0.001, seed=100, bits=2.0, trial=0)
    write_trial(tmp_path, rate=0.003, seed=101, bits=2.0, trial=1)
    assert choice_of(tmp_path) is None
    row = cells(tables(tmp_path)["picked-1"])
    assert row["picked"] == "none" and row["flags"].startswith("no trial has a score of each seed")


def test_sixteen_trials_that_bracket_their_pick_are_not_flagged(tmp_path):
    rates = [0.001 * 1.2**step for step in range(16)]
    sweep(tmp_path, rates=rates, bits=[2.4 + abs(step - 7) / 50 for step in range(16)], seeds=(100,))
    row = cells(tables(tmp_path)["picked-1"])
    assert (row["flags"], row["trials"], row["tuning seeds"]) == ("none", "16", "100")
    (tmp_path / "fewer").mkdir()
    sweep(tmp_path / "fewer", rates=rates[:15], bits=[2.4] * 15)
    assert cells(tables(tmp_path / "fewer")["picked-1"])["flags"] == "fewer than 16 trials"


def test_unequal_trials_are_said(tmp_path):
    sweep(tmp_path)
    sweep(tmp_path, variant="adaptive_span")
    assert not any("unequal" in note for note in tables(tmp_path)["picked-1"].notes)
    sweep(tmp_path, variant="adaptive_span", rates=(0.02,), bits=(2.45,), first=4)
    picked = tables(tmp_path)["picked-1"]
    assert all("unequal tuning budget" in flags for flags in column(picked, "flags"))
    note = next(note for note in picked.notes if "unequal budgets" in note)
    assert "mhsa 4 trials on 2 seeds" in note and "adaptive_span 5 trials" in note
    assert sorted(column(picked, "tuning, bytes")) == ["16,000,000", "20,000,000"]


def test_fresh_seeds_report_and_tuning_seeds_never_do(tmp_path):
    sweep(tmp_path)
    for seed, bits in ((0, 2.30), (1, 2.40), (100, 1.0)):
        write_trial(tmp_path, rate=0.003, seed=seed, bits=bits, test_bits_per_byte=bits + 0.5)
    write_trial(tmp_path, rate=0.01, seed=0, bits=1.5)  # not the picked rate
    shown = tables(tmp_path)
    row = cells(shown["reported-1"])
    assert (row["picked"], row["n"], row["seeds"], row["trials"]) == ("optim.lr=0.003", "2", "0, 1", "4")
    assert row["test, bits per byte"] == "2.8500" and row["valid, bits per byte"] == "2.3500"
    assert cells(shown["picked-1"])["fresh runs"] == "n = 2, seeds 0, 1"
    (runs,) = (table for name, table in shown.items() if name.startswith("runs-"))
    assert dict(zip(column(runs, "optim.lr"), column(runs, "n"), strict=True)) == {"0.01": "1", "0.003": "2", "": ""}
    for table in (shown["reported-1"], runs):
        assert any("mhsa-s100" in note for note in table.notes), "the run of a tuning seed is named"
        assert "Test was scored 4 times in the folders that were read." in table.notes
    assert "1.0000" not in column(runs, "valid, bits per byte")


def test_tuning_runs_stand_in_no_table_of_results(tmp_path):
    sweep(tmp_path)
    write_trial(tmp_path, rate=0.003, seed=0, bits=2.4)
    shown = tables(tmp_path)
    assert "tuning" not in " ".join(name for name in shown if name.startswith(("runs", "differences", "equal")))
    results = [table for name, table in shown.items() if name.startswith(("runs", "reported"))]
    assert [column(table, "n")[0] for table in results] == ["1", "1"]
    every = [table for name, table in shown.items() if name.startswith("seeds")]
    assert sorted(len(table.rows) for table in every) == [1, 8]
    assert [table.title.startswith("Every seed: Tuning runs, no results") for table in every].count(True) == 1


def test_it_is_the_purpose_that_makes_a_run_one_of_tuning(tmp_path):
    """Not whether test was scored, and also without a space: such runs are shown, picked from and reported apart."""
    for seed, purpose, test_bits in ((0, "result", None), (1, "result", 2.5), (2, "tune", None), (3, "tune", 2.5)):
        folder = write_trial(tmp_path, rate=0.003, seed=seed, bits=2.4, test_bits_per_byte=test_bits)
        change(folder, purpose=purpose)
    shown = tables(tmp_path)
    groups = {name: column(shown[name], "n")[0] for name in ("runs-1", "runs-2")}
    assert groups == {"runs-1": "2", "runs-2": "2"} and "picked-1" not in shown
    titles = sorted(shown[name].title.startswith("Tuning runs, no results") for name in groups)
    assert titles == [False, True]


def test_a_longer_final_budget_is_said_and_another_configuration_does_not_report(tmp_path):
    sweep(tmp_path)
    change(write_trial(tmp_path, rate=0.003, seed=0, bits=2.2), budget={"bytes": 4_000_000})
    wide = {"model": {"d_model": 256, "layers": 4, "heads": 4, "span": 512}}
    write_trial(tmp_path, rate=0.003, seed=1, bits=2.0, keys=wide)
    shown = tables(tmp_path)
    assert "reported-2" not in shown and cells(shown["reported-1"])["seeds"] == "0"
    assert cells(shown["reported-1"])["a trial's budget"] == "2,000,000 bytes"
    assert any("Tuned under another budget" in note and "2,000,000 bytes" in note for note in shown["reported-1"].notes)
    assert "4,000,000 bytes" in shown["reported-1"].title


def test_a_pick_of_the_runs_own_source_code_is_reported_before_a_newer_one(tmp_path):
    sweep(tmp_path / "then")
    write_trial(tmp_path, rate=0.003, seed=0, bits=2.4)
    sweep(tmp_path / "now", bits=(2.7, 2.4, 2.5), rates=(0.001, 0.003, 0.01))
    for folder in (tmp_path / "now").iterdir():
        change(folder, source="f" * 64)
    shown = tables(tmp_path)
    assert cells(shown["reported-1"])["trials"] == "4"
    assert not any("other source code" in note for note in shown["reported-1"].notes)
    told = {cells(shown["picked-1"], row)["fresh runs"] for row in (0, 1)}
    assert told == {"n = 1, seed 0", "n = 1, seed 0, of other source code"}


def test_reported_picks_are_compared_over_matched_seeds(tmp_path):
    for variant, shift in (("mhsa", 0.0), ("adaptive_span", -0.1)):
        sweep(tmp_path, variant=variant)
        for seed in range(3):
            bits = 2.4 + seed / 50 + shift * (1 + seed / 9)
            write_trial(tmp_path, variant=variant, rate=0.003, seed=seed, bits=bits)
    found = tables(tmp_path)["reported-differences-1"]
    assert column(found, "verdict")[0] == "better" and column(found, "n")[0] == "3"


def test_without_fresh_runs_the_row_says_what_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda found, swept: [])
    words = "python train.py -m variant=mhsa,other 'trial=range(0,4)' seed=100,101 purpose=tune model.span=64,512 space=rate"
    words += " 'trust=[a,b]' sweep=tuning position=rotary,alibi hydra.searchpath=[pkg://mine]"
    sweep(tmp_path / "runs", keys={"position": {"_target_": "variants.position.Rotary"}})
    for folder in (tmp_path / "runs").iterdir():
        change(folder, command=words)
    wanted = "python train.py -m variant=mhsa optim.lr=0.003 seed=0,1,2,3,4 model.span=512 trust=[a,b] sweep=tuning"
    wanted += " position=rotary hydra.searchpath=[pkg://mine] purpose=result trial=null"
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("picked, not reported"))
    assert shlex.split(said.partition(": ")[2]) == wanted.split()
    picked = tables(tmp_path / "runs")["picked-1"]
    assert cells(picked)["fresh runs"] == "none, type [1]" and picked.notes[0].startswith(
        "[1] Type: python train.py -m"
    )


def test_what_is_typed_for_fresh_runs_keeps_the_sweep_s_own_keys_and_has_flags_first(tmp_path):
    """Hydra refuses a flag between words, and a sweep of one's own may set more than trials."""
    sweep(tmp_path)
    for folder in tmp_path.iterdir():
        change(folder, command="python train.py -cd /my/conf variant=file_of_mhsa trial=3 seed=100 sweep=mine a=1")
    ((pick,),) = picks(gather([tmp_path]).runs)
    wanted = "variant=file_of_mhsa optim.lr=0.003 seed=0,1,2,3,4 sweep=mine a=1 purpose=result trial=null"
    assert fresh_command(pick) == f"python train.py -m -cd /my/conf {wanted}"


def test_a_trial_that_diverged_is_a_failed_trial_and_not_refused(tmp_path):
    """A run writes null for what is no number, its blocks too."""
    sweep(tmp_path)
    folder = write_trial(tmp_path, rate=0.1, seed=100, bits=None, trial=4)
    path = folder / "record.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"block_nats": [None, 2.0], "bits_per_byte": None} if row.get("final") else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cells(tables(tmp_path)["picked-1"])["flags"] == "fewer than 16 trials; 1 missing; 1 failed"


def test_fresh_seeds_are_none_that_tuned(tmp_path):
    sweep(tmp_path, seeds=(0, 2))
    ((pick,),) = picks(gather([tmp_path]).runs)
    assert "seed=1,3,4,5,6" in fresh_command(pick)


@pytest.mark.parametrize("command", ["", "'", "python", "nonsense", "python train.py variant=mhsa -m"])
def test_any_command_gives_one_to_type(tmp_path, command):
    sweep(tmp_path)
    for folder in tmp_path.iterdir():
        change(folder, command=command)
    ((pick,),) = picks(gather([tmp_path]).runs)
    assert "-m variant=mhsa optim.lr=0.003 seed=0,1,2,3,4" in fresh_command(pick)


def test_the_sweep_is_named(tmp_path):
    sweep(tmp_path)
    assert "Sweep: rates-1a2b." in tables(tmp_path)["picked-1"].caption


def test_a_grid_of_two_keys_has_a_column_for_each(tmp_path):
    for variant in ("mhsa", "adaptive_span"):
        for span in (64, 512):
            model = {"d_model": 128, "layers": 4, "heads": 4, "span": span}
            sweep(tmp_path, variant=variant, bits=[bits + span / 1000 for bits in VALLEY], keys={"model": model})
    for folder in tmp_path.iterdir():
        row = json.loads((folder / "record.jsonl").read_text().splitlines()[0])
        change(folder, protocol=row["protocol"] | {"span": row["config"]["model"]["span"]})
    picked = tables(tmp_path)["picked-1"]
    assert headings(picked)[:2] == ["variant", "model.span"]
    assert sorted(zip(column(picked, "variant"), column(picked, "model.span"), strict=True)) == [
        ("adaptive_span", "512"), ("adaptive_span", "64"), ("mhsa", "512"), ("mhsa", "64")
    ]  # fmt: skip
    assert "of each row's own (64 to 512)" in picked.caption


def test_trials_of_two_spaces_are_two_sweeps(tmp_path):
    """Their numbers mean other points."""
    sweep(tmp_path)
    keys = {"variant": {"name": "mhsa", "loss_weight": 1e-6}}
    sweep(tmp_path, keys=keys, point={"optim.lr": 0.5, LOSS: 0.5})
    sweep(tmp_path, keys={"space": {"optim.lr": {"low": 1e-3, "high": 1.0, "scale": "log"}}})
    assert column(tables(tmp_path)["picked-1"], "trials") == ["4", "4", "4"]


def test_tuning_on_other_data_does_not_choose(tmp_path):
    sweep(tmp_path)
    folder = write_trial(tmp_path, rate=0.003, seed=0, bits=2.2)
    change(folder, data={"name": "file", "bytes": 5, "sha256": "99" * 32})
    assert "reported-1" not in tables(tmp_path)


def test_hostile_trials_do_not_stop_the_tables(tmp_path):
    sweep(tmp_path)
    for place, rate in enumerate((None, "0.1", True, -1, 0, 1e300, [0.1])):
        write_trial(tmp_path, rate=rate, seed=200 + place, bits=2.0, trial=5 + place)
    for place, trial in enumerate((True, "3", -1, 1e300, [3])):
        write_trial(tmp_path, rate=0.1, seed=300 + place, bits=2.0, trial=trial)
    write_trial(tmp_path, rate=0.1, seed=400, bits=2.0, trial=3, point={"no.such.key": 0.5})
    write_trial(tmp_path, rate=0.1, seed=401, bits=2.0, trial=3, point={})
    found = gather([tmp_path])
    assert "picked-1" in [table.name for table in all_tables(found)]
    swept = picks(found.runs)
    with styled():
        assert draw_rates(swept, look=looks(["mhsa"]))


def test_trials_are_in_no_figure_of_results(tmp_path, monkeypatch):
    sweep(tmp_path)
    write_trial(tmp_path, rate=0.003, seed=0, bits=2.2)
    write_trial(tmp_path, rate=0.003, seed=100, bits=2.2)
    drawn = {}
    for name in ("draw_trade_offs", "draw_curves", "draw_memories", "draw_spans"):
        monkeypatch.setattr(plots, name, lambda runs, name=name, **_: drawn.update({name: runs}) or [])
    assert [drawing.name.partition("-")[0] for drawing in draw_all(gather([tmp_path]))] == ["rates"]
    assert len(drawn) == 4 and all([run.summary["seed"] for run in runs] == [0] for runs in drawn.values())


@settings_of_hypothesis(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(seed=st.integers(0, 2**32))
def test_whatever_stands_in_trials_the_tables_come(tmp_path_factory, seed):
    random, folder = Random(seed), tmp_path_factory.mktemp("fuzz")
    sweep(folder, rates=RATES[:2], bits=VALLEY[:2])
    write_failed(folder, rate=0.02, error="RuntimeError: loss")
    write_trial(folder, rate=0.003, seed=0, bits=2.0)
    for run in random.sample(sorted(folder.iterdir()), 2):
        first, *others = (run / "record.jsonl").read_text().splitlines()
        first, summary = mutated(random, json.loads(first)), json.loads((run / "summary.json").read_text())
        if random.random() < 0.8:  # a change that both files agree on
            summary |= {key: first[key] for key in first.keys() & summary.keys() - {"kind"} if summary[key] is not None}
        (run / "record.jsonl").write_text("\n".join([json.dumps(first), *others]) + "\n")
        (run / "summary.json").write_text(json.dumps(mutated(random, summary) if random.random() < 0.2 else summary))
    found = gather([folder])
    for table in all_tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)
        for form in (to_markdown, to_csv):
            form(table).encode("utf-8")


def test_the_figure_marks_picks_ends_and_failures_and_is_the_same_for_equal_rows(tmp_path):
    sweep(tmp_path, bits=(2.6, 2.4, 2.5, 200.0))
    sweep(tmp_path, variant="adaptive_span", bits=(2.5, 2.6, 2.7, 2.8), point={"optim.lr": 0.01})
    write_failed(tmp_path, rate=0.1, error="RuntimeError: too high")
    found = gather([tmp_path])
    swept = picks(found.runs, found.failed_runs)
    low, high = top_of_frame(swept[0])
    assert low < 2.4 and 2.8 < high < 10, "what diverged leaves the frame, and nothing else"
    with styled():
        (first,), (second,) = (draw_rates(swept, look=looks(["mhsa"])) for _ in range(2))
    assert first == second and first.png.startswith(b"\x89PNG") and first.name.startswith("rates-")
    assert "an end of its space" in first.caption


def test_failed_runs_are_named_apart_and_are_no_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda found, swept: [])
    write_run(tmp_path, seed=1)
    failed = write_failed(tmp_path, error="RuntimeError:  loss\n is nan" + "x" * 1000)
    (write_failed(tmp_path, error=None, seed=3) / "record.jsonl").unlink()  # before it knew what it was
    strange = write_failed(tmp_path, error={"a": 1}, seed=4)
    found = gather([tmp_path])
    assert len(found.runs) == 1 and not found.unfinished and len(found.failed) == 2 and len(found.failed_runs) == 1
    assert [line for line in found.refused if str(strange) in line and "error is a dict" in line]
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if str(failed) in line)
    assert line.startswith(f"failed, not shown: {failed}: RuntimeError: loss is nanxxx") and len(line) < 600
    assert "Failed, not shown: " in (tmp_path / "report" / "report.md").read_text()
