"""Model-FLOPs utilisation: by hand, and silent where no peak is known."""

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from bench.model_flops import dense_peak, utilisation
from bench.report.columns import for_terminal
from bench.report.tables_costs import cost_tables
from harness.record.table import print_table
from tests.bench_rows import cost_row
from tests.composing import CONF

H100 = {"device": "NVIDIA H100 80GB HBM3", "device_kind": "cuda", "precision": "bfloat16"}


def gpu_row(**changes) -> dict:
    return cost_row(length=512, **(H100 | {"streams": 64, "segment": 512} | changes))


def test_the_share_by_hand():
    row = gpu_row(time={"train_ms": {"p20": 19.0, "p50": 20.0, "p80": 22.0, "n": 9}})
    row["flops"] = row["flops"] | {"training_per_byte": 3 * 88e6}
    found = utilisation(row)
    assert found["flops_per_s"] == pytest.approx(3 * 88e6 * 64 * 512 / 0.020)
    assert found["peak_flops_per_s"] == 989e12 and found["share"] == pytest.approx(0.4374, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "NVIDIA H100 PCIe"},
        {"device_kind": "cpu"},
        {"time": None},
        {"time": {"train_ms": None}},
        {"flops": None},
    ],
)
def test_nothing_is_said_of_what_is_not_known(changes):
    assert utilisation(gpu_row(**changes)) is None


def test_every_data_sheet_has_the_name_that_torch_reports():
    devices = OmegaConf.load(CONF / "fit.yaml").devices
    names = [name for entry in devices.values() for name in entry.reported_as]
    assert len(set(names)) == len(names)
    assert {key for key, entry in devices.items() if not entry.reported_as} == {"m4_max"}, (
        "torch has no name for Macs' GPUs"
    )
    assert dense_peak("NVIDIA H200", "bfloat16") == 989e12 and dense_peak("NVIDIA H200", "float32") == 67e12


def test_table_and_report_show_it_where_a_peak_is_known():
    share = {"flops_per_s": 4e14, "peak_flops_per_s": 989e12, "share": 0.404}
    console = Console(record=True, width=150)
    rows = [gpu_row(utilisation=share), gpu_row(backend="plain", utilisation=None)]
    print_table(for_terminal(cost_tables(rows)[0]), console=console)
    text = console.export_text()
    assert "40.4" in text and "of the peak, %" in text and "989 TFLOP/s" in text and "Model-FLOPs utilisation" in text
    known, unknown = cost_row(utilisation=share), cost_row(variant="adaptive_span", utilisation=None)
    guessed = known | {"flops": known["flops"] | {"flops_estimated_3x": ["layers.0.mine"]}}
    table, *_ = cost_tables([guessed])
    cells = dict(zip([column.heading for column in table.columns], table.rows[0], strict=True))
    assert cells["of the peak, %"].text == "~40.4" and cells["needed in training, MFLOP/byte"].text == "~7.50"
    table, *_ = cost_tables([unknown])
    assert "of the peak, %" not in [column.heading for column in table.columns]
