"""Verdicts of ``bench.peers lineup=targets``: what is reached, missed, void or not judged, and how a row is shown."""

import pytest
from rich.console import Console

from bench.baselines.cases import MB, Comparison, rows_of
from bench.baselines.entry_workers import OurModel
from bench.baselines.proof import OK
from bench.baselines.rounds import Entry
from bench.report.tables_peers import speed_tables
from bench.rows import refusal
from harness.record.table import print_table
from tests.bench_rows import identity
from tests.test_speed import case


def entry(
    name: str, *rounds: list[float], peak_bytes: int = 10**6, allocator: str | None = None, timed: bool = True
) -> Entry:
    made = Entry(
        allocator=allocator,
        timed=timed,
        name=name,
        job="whole training step",
        make=OurModel,
        task=None,
        package="torch",
        reference=name,
        bytes_per_step=100,
        identity=identity("speed", variant=name),
    )
    made.checks, made.rounds = {"gradients": OK}, list(rounds)
    made.facts = {"backend": "fused", "memory": {"train_peak_bytes": peak_bytes, "approximate": True}}
    return made


def judged(comparison: Comparison, *, targets_apply: bool = True) -> dict:
    (row,) = rows_of(comparison, judged=targets_apply, planned_rounds=1)
    assert refusal(row) is None
    return row


def printed(row: dict) -> str:
    """What a terminal shows of it."""
    (table,) = speed_tables([row | {"read_from": "outputs/somewhere"}])
    console = Console(record=True, width=150)
    print_table(table, console=console)
    return console.export_text()


@pytest.mark.parametrize(("ms", "reached"), [(18.0, True), (18.3, False)])
def test_a_speed_is_to_be_at_least_its_target(ms, reached):
    fixed = case("fixed", "rotary")
    peak = round(fixed.peak_mb * MB) + (not reached)
    entries = [
        entry("reference_model", [10.0]),
        entry("x-transformers", [10.0]),
        entry(fixed.entry, [ms], peak_bytes=peak),
    ]
    comparison = Comparison(entries=entries, cases=[fixed], sanity_check="x-transformers")
    row = judged(comparison)
    assert row["ratio"] == pytest.approx(10 / ms) and row["target"] == 0.55
    assert row["reached"] is reached and row["peak_reached"] is reached and row["peak_bytes"] == peak
    assert row["reference_in_check"] == 1 and row["void"] is None
    assert ("MISSED" in printed(row)) is not reached
    row = judged(comparison, targets_apply=False)
    assert row["reached"] is None and row["peak_reached"] is None


def test_a_slow_reference_model_judges_nothing():
    fixed = case("fixed", "rotary")
    entries = [entry("reference_model", [10.4]), entry("x-transformers", [10.0]), entry(fixed.entry, [10.0])]
    row = judged(Comparison(entries=entries, cases=[fixed], sanity_check="x-transformers"))
    assert row["reached"] is None and "0.97" in row["void"]
    assert "VOID" in printed(row)


@pytest.mark.parametrize(("slowest_ms", "disturbed"), [(1.4, False), (1.6, True)])
def test_a_busy_machine_is_remarked_upon(slowest_ms, disturbed):
    match = case("mhsa_256")
    shaken = entry("x-transformers", [1.0, 1.0, slowest_ms, slowest_ms] * 5)
    row = judged(Comparison(entries=[shaken, entry("mhsa_256", [1.0])], cases=[match]))
    assert ("DISTURBED: steps of mhsa_256" in printed(row)) is disturbed


@pytest.mark.parametrize(("one_ms", "all_ms", "reached"), [(24, 100, True), (26, 100, False), (24, 120, False)])
def test_one_open_head_is_to_cost_little_and_all_open_as_much_as_a_window(one_ms, all_ms, reached):
    entries = [entry("one open", [one_ms]), entry("all open", [all_ms]), entry("mhsa", [100])]
    row = judged(Comparison(entries=entries, cases=[case("one_open")]))
    assert row["ratio"] == pytest.approx(one_ms / all_ms) and row["reached"] is reached
    assert row["second"]["ratio"] == pytest.approx(all_ms / 100)


def test_ratios_have_the_range_of_their_rounds():
    entries = [entry("one open", [20], [30]), entry("all open", [100], [100]), entry("mhsa", [100], [125])]
    row = judged(Comparison(entries=entries, cases=[case("one_open")]))
    assert row["ratio_range"] == [0.2, 0.3] and row["second"]["ratio_range"] == [0.8, 1.0]
    assert "0.200 to 0.300" in printed(row) and "(0.800 to 1.000)" in printed(row)
    match = case("mhsa_1024")
    sides = [entry("x-transformers", [10.0], [12.0]), entry(match.entry, [10.0], [10.0])]
    entries = [entry("reference_model", [10.0], [10.0]), *sides]
    row = judged(Comparison(entries=entries, cases=[match], sanity_check="x-transformers"))
    assert row["ratio_range"] == [1.0, 1.2] and row["reference_in_check_range"] == [1.0, 1.2]
    assert row["beside_reference"] == {"ratio": 1.0, "range": [1.0, 1.0]}
    assert "1.100 (1.000 to 1.200) of the speed of x-transformers" in " ".join(printed(row).split())


@pytest.mark.parametrize(("peak_bytes", "reached"), [(700, True), (701, False)])
def test_a_peak_may_be_bounded_by_the_references(peak_bytes, reached):
    memory = case("pkm_128")
    entries = [entry(memory.reference, [30.0], peak_bytes=1000), entry(memory.entry, [10.0], peak_bytes=peak_bytes)]
    row = judged(Comparison(entries=entries, cases=[memory]))
    assert row["ratio"] == pytest.approx(3) and row["reached"] and row["peak_reached"] is reached
    assert row["position"] is row["cache"] is None


@pytest.mark.parametrize(("kept_bytes", "reached"), [(1400, True), (1401, False)])
def test_a_case_says_of_which_setting_its_ratio_and_its_peaks_are(kept_bytes, reached):
    memory, entries = case("pkm_128"), []
    for name, ms, peaks in ((memory.reference, 30.0, (2000, 1000)), (memory.entry, 10.0, (kept_bytes, 600))):
        entries.append(entry(name, [ms], peak_bytes=peaks[0], allocator="keep"))
        entries.append(entry(name, peak_bytes=peaks[1], allocator="return", timed=False))
    row = judged(Comparison(entries=entries, cases=[memory]))
    assert row["ratio"] == pytest.approx(3) and row["rounds"] == 1 and not row["interrupted"]
    assert (row["peak_allocator"], row["peak_bytes"], row["peak_limit_bytes"], row["peak_reached"]) == (
        *("return", 600, 700),  # the limit is of the reference's in the same setting
        True,
    )
    assert row["timed_peak"] == {"bytes": kept_bytes, "limit_bytes": 1400, "reached": reached}
    assert ("MISSED: the peak as timed of pkm_128" in printed(row)) is not reached


def test_what_failed_has_a_row_with_the_reason_and_what_was_not_timed_has_none():
    match = case("mhsa_256")
    broken = entry("x-transformers")
    broken.fail("not installed")
    row = judged(Comparison(entries=[broken, entry("mhsa_256", [1.0])], cases=[match]))
    assert row["ratio"] is row["reached"] is None and row["reason"] == "x-transformers: not installed"
    comparison = Comparison(entries=[entry("x-transformers"), entry("mhsa_256", [1.0])], cases=[match])
    assert rows_of(comparison, judged=True, planned_rounds=1) == []
