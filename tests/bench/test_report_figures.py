"""The report's figures: what their lines show."""

import pytest

from bench.tables import figures
from bench.tables.frame import Rows
from harness.record.rows import read_rows
from tests.support.bench_rows import METRICS, write_lines, write_run


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """The figure of each drawing that is made, by its name."""
    made = {}
    monkeypatch.setattr(
        figures, "drawing_of", lambda figure, *, name, **_: made.update({name: figure})
    )
    return made


def lines_of(axes) -> dict:
    """Return the points of each line, by its name."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


@pytest.mark.parametrize("max_points", [200, 2])
def test_a_learning_curve_ends_at_its_last_sample_and_the_final_score_is_no_point_of_it(
    tmp_path, monkeypatch, drawn, max_points
):
    monkeypatch.setattr(figures, "MAX_POINTS", max_points)
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, bits=2.0 + seed, valid_bits_per_byte=1.5)
    figures.draw_all(Rows([tmp_path]))
    (axes,) = drawn["curves-1"].axes
    ((name, points),) = lines_of(axes).items()
    assert name == "mhsa: 1.5000" and points[-1] == [2_000_000, 2.5 + 2.0 / 20]
    assert axes.get_ylabel() == "bits per byte of a sample of valid"


def test_a_learning_curve_without_samples_is_named_train(tmp_path, drawn):
    record = write_run(tmp_path) / "record.jsonl"
    write_lines(record, [row for row in read_rows(record) if row["kind"] != "valid"])
    figures.draw_all(Rows([tmp_path]))
    (axes,) = drawn["curves-1"].axes
    assert [*lines_of(axes)] == ["mhsa (train): 2.4000"]
    assert axes.get_ylabel() == "bits per byte of train"


def test_spans_of_one_seed_of_each_mechanism_that_learns_them_are_drawn(tmp_path, drawn):
    for seed in (1, 0):
        for variant in ("mhsa", "adaptive_span"):
            write_run(tmp_path, variant=variant, seed=seed)
    figures.draw_all(Rows([tmp_path]))
    assert len(drawn) == 3 and "trade-off-1" in drawn
    (spans,) = [figure for name, figure in drawn.items() if name.startswith("spans")]
    ends = [[points[-1] for points in lines_of(axes).values()] for axes in spans.axes]
    learned = METRICS["adaptive_span"].values()
    assert ends == [[[2.0, span] for span in heads] for heads in learned]
