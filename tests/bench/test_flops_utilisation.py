"""Model-FLOPs utilisation: its value, its data sheets and its column in the table of costs."""

import pytest
from omegaconf import OmegaConf

from bench.cost import dense_peak_flops, utilisation
from bench.tables.columns import for_terminal
from bench.tables.costs import cost_tables
from tests.bench.test_report import column, headings
from tests.support.bench_rows import cost_row
from tests.support.small_configs import CONF

H100 = {"device": "NVIDIA H100 80GB HBM3", "device_kind": "cuda", "precision": "bfloat16"}


def gpu_row(**changes) -> dict:
    return cost_row(length=512, **(H100 | {"streams": 64, "segment": 512} | changes))


def test_utilisation_is_flops_per_second_over_the_peak_and_none_where_either_is_missing():
    row = gpu_row(time={"train_ms": {"p20": 19.0, "p50": 20.0, "p80": 22.0, "n": 9}})
    row["flops"] = row["flops"] | {"training_per_byte": 3 * 88e6}
    share = utilisation(row)
    assert share["flops_per_s"] == pytest.approx(3 * 88e6 * 64 * 512 / 0.020)
    assert share["peak_flops_per_s"] == 989e12 and share["share"] == pytest.approx(0.4374, abs=1e-4)
    missing = [
        {"device": "NVIDIA H100 NVL"},
        {"time": {"train_ms": None}},
        {"flops": None},
    ]
    assert [utilisation(gpu_row(**changes)) for changes in missing] == [None] * 3


def test_device_names_of_data_sheets_are_unique_and_select_the_peak_of_a_precision():
    devices = OmegaConf.load(CONF / "fit.yaml").devices
    names = [name for entry in devices.values() for name in entry.reported_as]
    assert len(set(names)) == len(names)
    # torch does not report a name of the M4 Max.
    assert [key for key, entry in devices.items() if not entry.reported_as] == ["m4_max"]
    assert (
        dense_peak_flops("NVIDIA H200", "bfloat16") == 989e12
        and dense_peak_flops("NVIDIA H200", "float32") == 67e12
    )


def test_the_table_of_costs_has_utilisation_where_a_peak_is_known():
    share = {"flops_per_s": 4e14, "peak_flops_per_s": 989e12, "share": 0.404}
    estimated = gpu_row(utilisation=share, backend="plain")
    estimated["flops"] = estimated["flops"] | {"flops_estimated_3x": ["layers.0.mine"]}
    table = for_terminal(next(cost_tables([gpu_row(utilisation=share), estimated])))
    assert column(table, "model FLOPs utilisation, %") == ["40.4", "~40.4"]
    assert any("989 TFLOP/s" in note for note in table.notes)
    (table,) = cost_tables([gpu_row(utilisation=None)])
    assert "model FLOPs utilisation, %" not in headings(table)
