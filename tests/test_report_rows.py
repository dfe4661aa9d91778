"""The report's tables of what the verbs measured: costs, peers, predictions, speeds."""

from bench.report.gather import gather
from tests.bench_rows import cost_row, fit_row, peer_row, speed_row, write_rows
from tests.report_of import all_tables, column, tables


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


def test_percentiles_are_shown_of_enough_calls(tmp_path):
    few, many = ({"train_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0, "n": n}} for n in (19, 20))
    write_rows(tmp_path, [cost_row(time=few), cost_row(variant="all_attention", time=many)])
    found = tables(tmp_path)["cost-1"]
    assert column(found, "step, n") == ["20", "19"] and column(found, "step, 20 to 80%") == ["1.00 to 3.00", ""]
