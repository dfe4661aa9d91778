"""Reading folders: good rows are found wherever they lie, bad ones are refused with their reason, nothing is lost."""

import copy
import json
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.report.gather import gather
from tests.bench_rows import cost_row, fit_row, peer_row, speed_row, write_rows, write_run


def test_all_kinds_are_found_below_a_folder(tmp_path):
    write_run(tmp_path / "deep" / "outputs")
    write_rows(tmp_path, [cost_row(), peer_row(), fit_row()])
    found = gather([tmp_path])
    assert [len(rows) for rows in (found.runs, found.costs, found.peers, found.fits, found.refused)] == [1, 1, 1, 1, 0]
    assert found.runs[0].provenance["config"] and found.runs[0].summary["status"] == "finished"
    assert found.costs[0]["read_from"].endswith("-cost")


def test_a_run_folder_itself_and_overlapping_folders_count_once(tmp_path):
    folder = write_run(tmp_path)
    (tmp_path / "latest").symlink_to(folder.name)
    found = gather([tmp_path, folder, tmp_path / "latest"])
    assert len(found.runs) == 1 and found.files == 1


@pytest.mark.parametrize("make", [False, True])
def test_a_missing_or_empty_folder_is_a_mistake_that_names_what_was_looked_for(tmp_path, make):
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    with pytest.raises(ValueError, match=r"nothing.*record\.jsonl.*rows\.jsonl"):
        gather([folder])


def test_bad_lines_are_refused_and_the_good_ones_are_still_there(tmp_path):
    without = cost_row()
    del without["source"]
    path = write_rows(
        tmp_path, [cost_row(), without, cost_row(kind="guess"), cost_row() | {"length": "long"}, cost_row()]
    )
    with path.open("a") as file:
        file.write('{"kind": "cost", \nnull\n')
    found = gather([tmp_path])
    assert len(found.costs) == 2
    told = "\n".join(found.refused)
    for words in (
        "line 2: no provenance: source missing",
        "line 3: kind is 'guess'",
        "line 4: length is 'long', not a finite number of 0 or more",
        "line 6: not JSON",
    ):
        assert f"{path}: {words}" in told
    assert "line 7" in told or "1 more" in told


def test_a_thousand_bad_lines_are_told_in_few(tmp_path):
    path = write_rows(tmp_path, [cost_row()])
    path.write_text(path.read_text() + "{}\n" * 1000)
    found = gather([tmp_path])
    assert len(found.costs) == 1 and len(found.refused) == 6
    assert found.refused[-1].endswith("995 more lines")


def test_an_empty_file_of_rows_is_named(tmp_path):
    write_rows(tmp_path, [])
    assert "no rows in it" in gather([tmp_path]).refused[0]


def test_unfinished_runs_are_named_and_not_shown(tmp_path):
    (write_run(tmp_path, seed=1) / "summary.json").unlink()
    write_run(tmp_path, seed=2, status="stopped")
    found = gather([tmp_path])
    assert not found.runs and not found.refused
    assert sorted(line.rpartition(": ")[2] for line in found.unfinished) == ["no summary yet", "stopped"]


def test_a_corrupt_summary_is_refused(tmp_path):
    (write_run(tmp_path) / "summary.json").write_text('{"status": ')
    found = gather([tmp_path])
    assert not found.runs and "summary.json: not JSON" in found.refused[0]


def test_a_folder_mixed_of_two_runs_is_refused(tmp_path):
    one, two = write_run(tmp_path, seed=1), write_run(tmp_path, variant="all_attention", seed=2)
    (one / "summary.json").write_text((two / "summary.json").read_text())
    found = gather([tmp_path])
    assert len(found.runs) == 1
    assert "summary.json: not of the run in record.jsonl: variant, seed, config_hash differ" in found.refused[0]


def test_a_bad_row_of_a_run_costs_that_row_only_unless_it_is_the_first(tmp_path):
    good, bad = write_run(tmp_path, seed=1), write_run(tmp_path, seed=2)
    lines = (good / "record.jsonl").read_text().splitlines()
    (good / "record.jsonl").write_text("\n".join([*lines[:3], "{", *lines[4:]]))
    (bad / "record.jsonl").write_text("\n".join(lines[1:]))
    found = gather([tmp_path])
    assert [run.summary["seed"] for run in found.runs] == [1] and len(found.runs[0].rows) == len(lines) - 1
    assert any("line 4: not JSON" in reason for reason in found.refused)
    assert any(str(bad) in reason and "no provenance" in reason for reason in found.refused)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    write_run(tmp_path)
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "gone")
    found = gather([tmp_path])
    assert len(found.runs) == 1 and "cannot be read" in found.refused[0]


def test_not_finite_and_huge_numbers_are_refused(tmp_path):
    for value in ("NaN", "Infinity", "1e400", "1" + "0" * 5000, "-1", "true"):
        path = write_rows(tmp_path, [cost_row()])
        path.write_text(path.read_text().replace('"length": 512', f'"length": {value}'))
        found = gather([tmp_path])
        assert not found.costs and len(found.refused) == 1, value


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


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(seed=st.integers(0, 2**32))
def test_whatever_stands_in_a_row_it_is_taken_or_refused(tmp_path, seed):
    random = Random(seed)
    make = random.choice([cost_row, peer_row, fit_row, speed_row])
    path = write_rows(tmp_path, [make(), mutated(random, make())])
    found = gather([tmp_path])
    assert sum(map(len, (found.costs, found.peers, found.fits, found.speeds, found.refused))) == 2
    assert all(str(path) in reason for reason in found.refused)


def test_a_folder_of_rows_keeps_the_order_of_its_calls(tmp_path):
    write_rows(tmp_path, [cost_row(length=2)], name="20261121-120000-cost")
    write_rows(tmp_path, [cost_row(length=1)], name="20261120-120000-cost")
    assert [row["length"] for row in gather([tmp_path]).costs] == [1, 2]


def test_what_bench_evaluate_appends_is_not_read(tmp_path):
    folder = write_run(tmp_path)
    (folder / "evaluations.jsonl").write_text(json.dumps({"kind": "evaluation"}) + "\n")
    found = gather([tmp_path])
    assert len(found.runs) == 1 and not found.refused
