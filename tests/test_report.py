"""The report: its tables on fixed rows, what may stand in one table, and what is refused."""

import copy
import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.report.__main__ import all_tables
from bench.report.frame import read
from bench.report.tuning import picks
from harness.record.comparison import UNCOMPARED
from harness.record.table import Table, to_csv, to_markdown
from tests.bench_rows import PROTOCOL, cost_row, fit_row, peer_row, write_rows, write_run, write_trial
from tests.fixed_rows import BUSY, change, write_fixed_rows

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden_report"


def tables(folder: Path) -> dict[str, Table]:
    rows = read([folder])
    assert not rows.refused
    return {table.name: table for table in all_tables(rows)}


def column(table: Table, heading: str) -> list[str]:
    place = [column.heading for column in table.columns].index(heading)
    return [row[place].text for row in table.rows]


def headings(table: Table) -> list[str]:
    return [column.heading for column in table.columns]


def test_tables_of_the_fixed_rows_are_the_golden_ones(tmp_path):
    """After a change that is meant: ``python -m tests.golden_report`` writes them anew, and the difference is to be
    read."""
    write_fixed_rows(tmp_path)
    shown = {f"{name}.md": to_markdown(table) for name, table in tables(tmp_path).items()}
    golden = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.md")}
    assert sorted(shown) == sorted(golden)
    for name, text in golden.items():
        assert shown[name] == text, name


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "file", "bytes": 4_000_000, "sha256": "99" * 32}},
        {"protocol": PROTOCOL | {"vocabulary": 205}},
        {"budget": {"bytes": 3_000_000}},
        {"capped": {"valid": 10_000}},
    ],
)
def test_runs_that_do_not_compare_never_share_a_table(tmp_path, changes):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), **changes)
    found = tables(tmp_path)
    shown = [set(column(found[name], "variant")) - {"gzip", "bzip2", "xz"} for name in ("runs-1", "runs-2")]
    assert sorted(map(sorted, shown)) == [["adaptive_span"], ["mhsa"]]
    assert "less the reference, bits" not in headings(found["runs-1"])


@pytest.mark.parametrize("check", UNCOMPARED)
def test_a_run_that_failed_its_check_is_compared_with_nothing(tmp_path, check):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), check=check)
    rows = read([tmp_path])
    assert list(rows.of("run")["variant"]) == ["mhsa"] and rows.refused[0].endswith(
        f"summary.json: {check}: not compared"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "Another"},
        {"threads": 9},
        {"precision": "bfloat16"},
        {"versions": {"torch": "1"}},
        {"machine": {"cpu": "A made-up CPU", "cores": 9}},
        {"environment": {"MALLOC_ARENA_MAX": "1"}},
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
    assert found["costs-1-1"].about != found["costs-1-2"].about


def test_times_of_a_busy_machine_are_marked_and_explained_once(tmp_path):
    write_run(tmp_path, variant="mhsa")
    change(write_run(tmp_path, variant="adaptive_span"), load=BUSY)
    change(write_run(tmp_path, variant="local"), load=BUSY | {"others_cores": 1.75})
    found = tables(tmp_path)["runs-1"]
    for heading in ("bytes/s", "training, s"):
        marked = {
            name for name, cell in zip(column(found, "variant"), column(found, heading), strict=True) if "!" in cell
        }
        assert {name.split()[0] for name in marked} == {"adaptive_span", "local"}, heading
    assert not any("!" in cell for cell in column(found, "test, bits per byte"))
    (note,) = [note for note in found.notes if "BUSY" in note]
    assert note.startswith("! BUSY MACHINE: others had 1.75") and note.endswith("(the most of 2 rows).")
    assert not any("BUSY" in note for note in tables(tmp_path)["seeds-1"].notes)


NUMERICS = {"variant": 1, "shared": 1}


def test_runs_of_equal_numerics_pool_over_sources_and_commits_and_their_times_do_not(tmp_path):
    for seed in range(3):
        attention = {"_target_": f"variants.moved_{seed}.Attention"}
        config = {"variant": {"name": "mhsa", "numerics": 1, "attention": attention}} | (
            {"check": True} if seed else {}
        )
        about = {"config": config, "numerics": NUMERICS, "source": f"{seed}" * 64, "tree": f"{seed}" * 64}
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
        {"device_kind": "cuda"},
        {"optimizers": [{"name": "matrices", "optimizer": "Muon", "share": 1.0, "products": ["bfloat16"]}]},
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
    change(write_run(tmp_path, seed=1, bits=2.5), **same | changes)
    assert sorted(column(tables(tmp_path)["runs-1"], "n")[:2]) in (["1", "1"], ["1", "2"])


def test_no_difference_of_a_configuration_is_pooled(tmp_path):
    """Not even below a part that is another class elsewhere, whose column stands for all that is below it."""
    for seed, (name, base) in enumerate((("Rotary", 1), ("Rotary", 2), ("Alibi", 1))):
        position = {"_target_": f"variants.position.{name}", "base": base}
        write_run(tmp_path, seed=seed, config={"variant": {"name": "mhsa"}, "position": position})
    shown = tables(tmp_path)["runs-1"]
    names = {f"mhsa, position={name}, base={base}" for name, base in (("Rotary", 1), ("Rotary", 2))}
    assert {*column(shown, "variant")[:3]} == names | {"mhsa"} and column(shown, "n")[:3] == ["1"] * 3


def test_a_run_that_did_not_score_test_stands_beside_one_that_did(tmp_path):
    write_run(tmp_path, variant="mhsa", seed=0, capped={"valid": 1000, "test": 1000})
    write_run(tmp_path, variant="mhsa", seed=1, capped={"valid": 1000}, test_bits_per_byte=None)
    write_run(tmp_path, variant="adaptive_span", capped={"valid": 1000, "test": 1000})
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "n")[:2] == ["1", "2"] and column(shown, "variant")[:2] == ["adaptive_span", "mhsa"]
    assert column(shown, "test, bits per byte")[:2] == ["2.4300*", ""], "no mean over some of the seeds"
    assert "on valid" in shown.caption


def test_runs_that_diverged_are_shown_last_and_named(tmp_path):
    for seed, variant in enumerate(("mhsa", "adaptive_span")):
        write_run(tmp_path, variant=variant, seed=seed, valid_bits_per_byte=None, test_bits_per_byte=None)
    assert column(tables(tmp_path)["runs-1"], "variant")[:2] == ["adaptive_span", "mhsa"]
    write_run(tmp_path, variant="local")
    shown = tables(tmp_path)["runs-1"]
    assert column(shown, "variant")[:3] == ["local", "adaptive_span", "mhsa"]
    assert any(note.endswith("finite): adaptive_span, seed 1; mhsa, seed 0.") for note in shown.notes)


def test_every_look_at_test_is_counted_of_failed_runs_and_later_evaluations_too(tmp_path):
    folder = write_run(tmp_path, variant="mhsa")
    rows = [{"split": "test"}, {"split": "valid"}, {"split": "test"}, [], "garbage"]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    change(write_run(tmp_path, variant="adaptive_span"), status="failed", error="late")
    (write_run(tmp_path, variant="all_attention") / "summary.json").unlink()
    assert "Test was scored 5 times in the folders that were read." in tables(tmp_path)["runs-1"].notes


def test_recall_has_a_column_for_each_distance_and_the_largest_that_is_remembered(tmp_path):
    for variant in ("mhsa", "local"):
        copies = {"64": 0.1, "256": 0.9 if variant == "mhsa" else 3.9, "1024": None}
        write_run(tmp_path, variant=variant, valid_bits_per_copy=copies)
    shown = tables(tmp_path)["runs-1"]
    reach = dict(zip(column(shown, "variant"), column(shown, "recall reach"), strict=True))
    assert (reach["mhsa"], reach["local"]) == ("256", "64")
    assert [name for name in headings(shown) if "copies" in name] == ["copies from 64, bits", "copies from 256, bits"]


def test_differences_from_the_reference_are_of_equal_seeds_and_judged_together(tmp_path):
    """Of one t test p is 0.0027 and 0.0055: the smaller twice by Holm, and the interval is of each alone."""
    for variant, apart in (("mhsa", (0, 0, 0, 5)), ("local", (0.10, 0.11, 0.12)), ("linear", (-0.01, 0.02, 0.0))):
        for seed, difference in enumerate(apart):
            write_run(tmp_path, variant=variant, seed=seed, bits=2.0 + seed + difference, test_bits_per_byte=None)
    found = tables(tmp_path)["runs-1"]
    cells = zip(*(column(found, name) for name in ("pairs", "less the reference, bits", "p", "verdict")), strict=True)
    shown = dict(zip(column(found, "variant"), cells, strict=True))
    assert found.caption.startswith("Differences are from mhsa on valid.")
    assert shown["local"] == ("3", "+0.1100 ± 0.0248", "0.0055", "worse") and shown["mhsa"] == ("",) * 4
    assert shown["linear"][3] == "not separated" and float(shown["linear"][2]) > 0.05
    assert column(found, "valid, bits per byte")[0].endswith(" ± 2.4968"), "4.3027 x 1.0051 / sqrt(3)"


def test_a_pick_is_made_on_tuning_seeds_and_reported_on_fresh_ones(tmp_path):
    """A lost seed makes a trial no choice, an end of the range is flagged, and scores of tuning seeds are not reported."""
    ends = {"optim.lr": 0.99}
    for trial, (rate, bits) in enumerate(((0.001, 2.5), (0.003, 2.4), (0.01, 2.3))):
        for seed in (100, 101):
            lost = trial == 2 and seed == 101
            point = ends if trial == 1 else {"optim.lr": 0.5}
            score = None if lost else bits + seed / 1e4
            write_trial(tmp_path, rate=rate, seed=seed, bits=score, trial=trial, point=point)
    (pick,) = picks(read([tmp_path]).frame)
    assert pick.values == {"optim.lr": 0.003} and pick.trial == 1
    found = tables(tmp_path)["picked-1"]
    (flags,) = column(found, "flags")
    assert "high end of optim.lr" in flags and "1 failed" in flags and "fewer than 16 trials" in flags
    assert column(found, "picked") == ["optim.lr=0.003"] and column(found, "fresh runs") == ["none"]
    write_trial(tmp_path, rate=0.003, seed=0, bits=2.45)
    spoilt = write_trial(tmp_path, rate=0.003, seed=100, bits=2.0)
    found = tables(tmp_path)
    assert column(found["picked-1"], "fresh runs") == ["seeds 0"]
    results = next(table for name, table in found.items() if name.startswith("runs-"))
    assert column(results, "valid, bits per byte")[0] == "2.4500" and column(results, "n")[0] == "1"
    assert any(spoilt.name in note for note in results.notes)


def test_runs_of_one_line_are_read_as_run_folders_are(tmp_path):
    """``bench.evidence`` commits a line a run; a line without provenance is refused by its number."""
    lines = []
    for seed in range(2):
        folder = write_run(tmp_path / "runs", seed=seed)
        record = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        lines.append({"cell": ["seed=0"], "summary": summary, "record": [r for r in record if r["kind"] != "train"]})
    path = tmp_path / "results" / "front_page.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"summary": lines[0]["summary"], "record": []}])
    )
    folder, table = read([tmp_path / "runs"]), read([path.parent])
    assert table.refused == [f"{path}: line 3: no provenance: the record is missing"]
    one, other = (rows.frame.drop(columns=["run", "folder", "record"]) for rows in (folder, table))
    assert one.equals(other) and list(table.frame["run"]) == ["front_page:1", "front_page:2"]
    assert table.test_scores == folder.test_scores


def test_folders_are_searched_once_and_links_count_once(tmp_path):
    folder = write_run(tmp_path / "deep" / "outputs")
    write_rows(tmp_path, [cost_row(length=2)], name="20261121-120000-cost")
    write_rows(tmp_path, [cost_row(length=1), peer_row(), fit_row()], name="20261120-120000-cost")
    (tmp_path / "latest").symlink_to(folder)
    rows = read([tmp_path, folder, tmp_path / "latest"])
    assert list(rows.frame["kind"]) == ["run", "cost", "peers", "fit", "cost"] and not rows.refused
    assert list(rows.of("cost")["length"]) == [1, 2] and rows.files == 3


def test_bad_lines_are_refused_and_the_good_ones_are_still_there(tmp_path):
    without = cost_row()
    del without["source"]
    bad = [without, cost_row(kind="guess"), cost_row() | {"length": "long"}]
    path = write_rows(tmp_path, [cost_row(), *bad, cost_row()])
    with path.open("a") as file:
        file.write('{"kind": "cost", \n' + "null\n" * 1000)
    rows = read([tmp_path])
    assert len(rows.of("cost")) == 2 and len(rows.refused) == 6
    words = ("no provenance: source missing", "kind is 'guess'", "length is 'long': it should be a valid number")
    for line, told in enumerate(words, start=2):
        assert rows.refused[line - 2].startswith(f"{path}: line {line}: {told}")
    assert "line 6: not JSON" in rows.refused[3] and rows.refused[-1].endswith("999 more lines")


def test_runs_that_are_unfinished_corrupt_mixed_or_untraced_are_named_and_not_shown(tmp_path):
    folders = [write_run(tmp_path, seed=seed) for seed in range(6)]
    (folders[1] / "summary.json").unlink()
    (folders[2] / "summary.json").write_text('{"status": ')
    (folders[3] / "summary.json").write_text((folders[0] / "summary.json").read_text())
    lines = (folders[4] / "record.jsonl").read_text().splitlines()
    (folders[4] / "record.jsonl").write_text("\n".join(lines[1:]))
    lines = (folders[5] / "record.jsonl").read_text().splitlines()
    (folders[5] / "record.jsonl").write_text("\n".join([*lines[:3], "{", *lines[4:]]))
    rows = read([tmp_path])
    assert [line.rpartition(": ")[2] for line in rows.unfinished] == ["no summary yet"]
    assert sorted(rows.of("run")["seed"]) == [0, 5] and len(rows.refused) == 5
    told = "\n".join(rows.refused)
    for words in (
        "summary.json: not JSON",
        "not of the run in record.jsonl: seed, config_hash differ",
        "line 4: not JSON",
    ):
        assert words in told
    assert f"{folders[4] / 'record.jsonl'}: line 1: no provenance" in told


@pytest.mark.parametrize("value", ["NaN", "1" + "0" * 5000, "true"])
def test_not_finite_and_huge_numbers_are_refused(tmp_path, value):
    path = write_rows(tmp_path, [cost_row()])
    path.write_text(path.read_text().replace('"length": 512', f'"length": {value}'))
    rows = read([tmp_path])
    assert rows.frame.empty and len(rows.refused) == 1


def test_costs_have_the_newest_of_equal_cells_and_percentiles_of_enough_calls(tmp_path):
    slow = cost_row()
    slow["time"]["train_ms"] |= {"p50": 1000.0, "n": 30}
    write_rows(tmp_path, [slow, cost_row(backend="plain")], name="20261119-000000-cost")
    many = {"train_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "n": 20}}
    write_rows(
        tmp_path, [cost_row(), cost_row(length=256), cost_row(device="Another"), cost_row(variant="local", time=many)]
    )
    found = tables(tmp_path)
    assert sorted(len(table.rows) for table in found.values()) == [1, 4]
    shown = next(table for table in found.values() if len(table.rows) == 4)
    assert column(shown, "step, ms") == ["25.60", "2.00", "51.20", "102.40"]
    assert column(shown, "step, 20 to 80%") == ["", "1.00 to 3.00", "", ""]
    assert any("1 older row" in note for note in shown.notes)


def test_peers_of_different_calls_do_not_mix_and_void_ones_say_so(tmp_path):
    write_rows(tmp_path, [peer_row(), peer_row(job="product-key layer")], name="20261120-000000-peers")
    reason = "the reference model is slow"
    failed = peer_row(name="bad", status="failed", reason="not causal", bytes_per_second=None, time=None)
    rows = [peer_row(invalid=reason), peer_row(allocator="return"), failed]
    write_rows(tmp_path, rows, name="20261121-000000-peers")
    found = tables(tmp_path)
    assert sorted(found) == ["peers-1", "peers-2", "peers-3"]
    assert not found["peers-1"].title.startswith("VOID") and found["peers-3"].title.startswith("VOID")
    assert column(found["peers-3"], "of the reference model") == ["VOID", "1.000", "VOID"]
    assert column(found["peers-3"], "bytes/s") == ["10,000", "10,000", "failed"]
    assert f"VOID: {reason}." in found["peers-3"].notes and "bad, keep: failed (not causal)." in found["peers-3"].notes


JUNK = (None, True, -1, 0, 3, 10**40, 0.5, float("nan"), "", "text", "\ud800|*", [], {}, [{}], [1.0, None], {"a": "b"})


def mutated(random: Random, row: dict) -> dict:
    """``row`` with a few keys, at any depth, deleted or of another value."""
    row = copy.deepcopy(row)
    for _ in range(random.randint(1, 3)):
        place = row
        key = random.choice(sorted(place))
        while isinstance(place[key], dict) and place[key] and random.random() < 0.6:
            place = place[key]
            key = random.choice(sorted(place))
        if random.random() < 0.3 and len(place) > 1:
            del place[key]
        else:
            place[key] = copy.deepcopy(random.choice(JUNK))  # else it could end up inside itself
    return row


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_whatever_stands_in_rows_and_runs_the_tables_come(tmp_path_factory, seed):
    random = Random(seed)
    folder = tmp_path_factory.mktemp("fuzz")
    rows = [cost_row(), peer_row(), fit_row()]
    changed = [mutated(random, random.choice(rows)) for _ in range(3)]
    path = write_rows(folder, rows + changed)
    write_run(folder, variant="mhsa")
    point = {"trial": 1} if random.random() < 0.3 else {}
    make = (
        (lambda: write_trial(folder, rate=0.01, seed=3, bits=2.0, **point))
        if point
        else (lambda: write_run(folder, seed=3))
    )
    run = make()
    name = random.choice(["record.jsonl", "summary.json"])
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    place = random.randrange(len(lines)) if random.random() < 0.7 else 0
    lines[place] = mutated(random, lines[place])
    if name == "record.jsonl" and place == 0 and random.random() < 0.7:  # a change that both files agree on
        summary = json.loads((run / "summary.json").read_text())
        shared = {key: lines[0][key] for key in lines[0].keys() & summary.keys() - {"kind"}}
        (run / "summary.json").write_text(json.dumps(summary | shared))
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read([folder])
    verbs = len(found.frame) - len(found.frame[found.frame["kind"].isin(("run", "failed"))])
    assert verbs + sum(str(path) in reason for reason in found.refused) == 6
    for table in all_tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)
        for form in (to_markdown, to_csv):
            form(table).encode("utf-8")
