"""``python -m bench.inspect``: figures of attention maps and spans of a trained run, and the
reach of heads."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from bench import inspect
from bench.inspect import reach
from harness.record.rows import RECORD, read_rows
from tests.support.small_configs import compose_config
from tests.support.small_runs import whole_run

MIXED = (
    "variant=adaptive_span",
    "sublayer@variant.attention=all_attention",
    "variant.attention.persistent.number=8",
)
MIXED += (
    "variant.attention.span.initial=0.5",
    "variant.attention.span.ramp=4",
    "runtime.backend=plain",
)
MASKED = ("variant=adaptive_span", "objective=masked_lm", "data=synthetic_text")
MASKED += ("data.bytes=60000", "data.distances=null", "eval.bytes=3000", "runtime.backend=plain")
FIGURES = ["inspect_attention.png", "inspect_spans.png", "inspect_training.png"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of two steps with learned spans and persistent vectors."""
    return whole_run(*MIXED, "budget.steps=2", f"outputs={tmp_path_factory.mktemp('runs')}")[
        0
    ].folder.path


def draw_figures(run: Path, *words: str) -> list[str]:
    """Run the command in this process. Returns the names of the figures that it wrote."""
    machine = ("runtime.device=cpu", "runtime.threads=1", "runtime.backend=plain", "bytes=24")
    for name in FIGURES:
        (run / name).unlink(missing_ok=True)
    inspect.main.__wrapped__(compose_config(f"run={run}", *machine, *words, name="inspect"))
    return sorted(path.name for path in run.glob("inspect_*.png"))


def test_the_curves_of_spans_are_those_of_the_record_without_the_ramp(trained):
    rows = [row for row in read_rows(trained / RECORD) if row["kind"] == "train"]
    curves = inspect.span_curves(rows)
    assert curves
    for name, points in curves.items():
        assert points[:, 0].tolist() == [row["bytes_seen"] for row in rows]
        assert points[-1, 1:].tolist() == rows[-1]["metrics"][f"{name}.span"]


def test_figures_are_written_for_the_corpus_of_the_run_or_a_text_file(
    trained, tmp_path, monkeypatch
):
    assert draw_figures(trained) == FIGURES
    for name in FIGURES:
        pixels = image.imread(trained / name)
        assert 400 < pixels.shape[0] < 2000 and pixels[..., :3].std() > 0.02, (
            "the figure must not be empty"
        )
    maps, draw = [], inspect.draw_attention

    def recorded_draw(layers, *args, **kwargs):
        maps.append(layers)
        return draw(layers, *args, **kwargs)

    monkeypatch.setattr(inspect, "draw_attention", recorded_draw)
    monkeypatch.setattr("harness.data.corpora.load", lambda **_: pytest.fail("data were read"))
    (tmp_path / "text").write_bytes("Grüße, $x$ <b>\0\xff with some more".encode("latin-1"))
    assert draw_figures(trained, f"text={tmp_path / 'text'}") == FIGURES
    shapes = {name: layers.shape for name, layers in maps[0].items()}
    assert shapes == {f"layers.{i}.attention": (2, 24, 24) for i in range(2)}


def test_a_map_shows_later_keys_only_if_both_sides_are_seen(trained, tmp_path, monkeypatch):
    masked = whole_run(*MASKED, "budget.steps=2", f"outputs={tmp_path}")[0].folder.path
    figures = []
    monkeypatch.setattr(inspect, "png_of", lambda figure: figures.append(figure) or b"")
    for run, shown in ((trained, False), (masked, True)):
        figures.clear()
        draw_figures(run)
        weights = np.ma.filled(figures[0].axes[0].images[0].get_array(), np.nan)
        assert (weights[0, 1:4] > 0).all() == shown  # those of other keys are NaN


def test_a_sublayer_without_an_attention_map_is_named(trained, monkeypatch, capsys):
    monkeypatch.setattr("harness.model.LanguageModel.inspect", lambda *_: (None, {}))
    assert (
        draw_figures(trained) == [] and "layers.0.attention is not drawn" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (("bytes=1",), "bytes=1: must be greater than or equal to 2"),
        (("text=a",), "text=a: has 1 byte; allowed are at least 2"),
        (("bytes=60", f"text={'ab' * 500}"), "bytes=60: allowed is 40 or less"),
    ],
)
def test_mistakes_are_refused_by_key(trained, monkeypatch, words, message):
    monkeypatch.setattr(inspect, "MAX_CELLS", 4 * 40**2)
    with pytest.raises(ValueError, match=message):
        draw_figures(trained, *words)
    assert not list(trained.glob("inspect_*.png"))


def test_reach_is_the_distance_within_which_lies_a_fraction_of_the_attention():
    attention_maps = np.zeros((3, 8, 8))
    for query in range(8):
        attention_maps[0, query, query] = 1.0  # itself
        attention_maps[1, query, max(0, query - 3)] = 1.0
        attention_maps[2, query, : query + 1] = 1 / (query + 1)  # uniform over all visible keys
    assert reach(attention_maps, 0.5)[:2].tolist() == [0, 3] and reach(attention_maps, 0.9)[
        :2
    ].tolist() == [0, 3]
    # ``reach`` gives the later half of the queries equal weights. 840 is divisible by their 5, 6, 7
    # and 8 keys.
    distances = [
        distance
        for query in range(4, 8)
        for distance in range(query + 1)
        for _ in range(840 // (query + 1))
    ]
    assert reach(attention_maps, 0.5)[2] == pytest.approx(np.median(distances), abs=1)
    assert reach(attention_maps, 1.0 - 1e-9)[2] == 7
