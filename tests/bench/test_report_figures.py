"""The report's figures: what their lines show."""

import pytest

from bench.tables import figures
from bench.tables.frame import Rows
from bench.tables.runs import run_groups
from harness.record.rows import read_rows
from tests.support.bench_rows import METRICS, write_lines, write_run


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """The figure and the caption of each drawing that is made, by its name."""
    made = {}

    def keep(figure, *, name: str, title: str, caption: str):
        made[name] = figure, caption

    monkeypatch.setattr(figures, "drawing_of", keep)
    return made


def lines_of(axes) -> dict:
    """Return the points of each line, by its name."""
    return {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.get_lines()}


@pytest.mark.parametrize("max_points", [200, 2])
def test_a_learning_curve_ends_at_its_last_sample_and_the_final_score_is_no_point_of_it(
    tmp_path, monkeypatch, drawn, max_points
):
    monkeypatch.setattr(figures, "MAX_POINTS", max_points)
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, bits=2.0 + seed, valid_bits_per_byte=1.5)
    figures.draw_all(Rows([tmp_path]))
    figure, caption = drawn["curves-1"]
    (axes,) = figure.axes
    ((name, points),) = lines_of(axes).items()
    assert name == "mhsa: 1.5000" and points[-1] == (2_000_000, 2.5 + 2.0 / 20)
    assert all(bits > 2.5 for _, bits in points) and len(points) > 1
    assert axes.get_ylabel() == "bits per byte of a sample of valid"
    assert "final" in axes.get_legend().get_title().get_text() and "no points" in caption


def test_a_learning_curve_without_samples_is_named_train(tmp_path, drawn):
    run = write_run(tmp_path)
    write_lines(
        run / "record.jsonl",
        [row for row in read_rows(run / "record.jsonl") if row["kind"] != "valid"],
    )
    figures.draw_all(Rows([tmp_path]))
    (axes,) = drawn["curves-1"][0].axes
    assert [*lines_of(axes)] == ["mhsa (train): 2.4000"]
    assert axes.get_ylabel() == "bits per byte of train"


def test_spans_of_one_seed_of_each_mechanism_that_learns_them_are_drawn(tmp_path, drawn):
    for seed in (1, 0):
        for variant in ("mhsa", "adaptive_span", "product_key_memory"):
            write_run(tmp_path, variant=variant, seed=seed)
    names = {*figures.draw_all(Rows([tmp_path]))}
    assert names == {"runs-1"} and len(run_groups(Rows([tmp_path]))) == 1
    ((name, (figure, caption)),) = [
        (name, made) for name, made in drawn.items() if name.startswith("spans")
    ]
    assert "windtunnel inspect" in caption
    learned = METRICS["adaptive_span"]
    assert len(figure.axes) == len(learned)
    for axes, spans in zip(figure.axes, learned.values(), strict=True):
        heads = lines_of(axes)
        assert [points[-1] for points in heads.values()] == [(2.0, span) for span in spans]
        assert [*heads] == ["head 0", "head 1"]


def test_one_arm_has_no_figure_against_cost(tmp_path, drawn):
    write_run(tmp_path)
    figures.draw_all(Rows([tmp_path]))
    assert [*drawn] == ["curves-1"]
    write_run(tmp_path, variant="local")
    figures.draw_all(Rows([tmp_path]))
    assert {*drawn} == {"curves-1", "trade-off-1"}
