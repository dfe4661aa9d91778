"""The report's figures: which rows share one, that they are real files, and that what they draw is right."""

import copy
import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from bench.report import (
    comparison,
    plot_style,
    plots_bars,
    plots_costs,
    plots_curves,
    plots_inside,
    plots_runs,
)
from bench.report.gather import Found, gather
from harness.record.drawing import BINS, thinned
from harness.record.table import Drawing
from tests.bench_rows import PROTOCOL, cost_row, fit_row, peer_row, write_run
from tests.report_of import draw_all

OUT = {
    "status": "out of memory",
    "reason": "too much",
    "flops": None,
    "memory": None,
    "time": None,
    "bytes_moved": None,
}
MEMORY = {"usage_percent": 62.5, "kl_weighted_nats": 1.5, "kl_count_nats": 1.4, "usage_bytes": 20_000.0}


def found(**given) -> Found:
    return Found(**{"runs": [], "costs": [], "peers": [], "fits": [], "refused": []} | given)


def runs(folder, *, seeds=(0, 1), variants=("mhsa", "adaptive_span", "product_key_memory")) -> list:
    """Gathered runs, the memory's metrics named as the mechanism names them."""
    for index, (variant, seed) in enumerate(itertools.product(variants, seeds)):
        write_run(folder, variant=variant, seed=seed, bits=2.4 - index / 20, seconds=160.0 + 9 * index)
    gathered = gather([folder]).runs
    for run in gathered:
        if run.summary["variant"] == "product_key_memory":
            metrics = {f"layers.1.memory.{name}": value for name, value in MEMORY.items()}
            run.summary["valid_metrics"] = metrics
            for row in run.rows:
                row["metrics"] = metrics
    return gathered


def everything(folder) -> Found:
    lengths = [
        cost_row(variant=v, length=n, backend=p)
        for v in ("mhsa", "mine")
        for n in (256, 512)
        for p in ("plain", "fused")
    ]
    failed = {"status": "failed", "reason": "not causal", "bytes_per_second": None, "relative_to_reference": None}
    return found(
        runs=runs(folder),
        costs=[*lengths, cost_row(length=1024, backend="plain", **OUT)],
        peers=[
            peer_row(),
            peer_row(name="mhsa", tokens_per_second=12_000.0),
            peer_row(name="broken", time=None, **failed),
        ],
        fits=[fit_row(), fit_row(variant="mine", measured_peak_bytes=10**8)],
    )


def names(drawings) -> list[str]:
    return [drawing.name for drawing in drawings]


def of(drawings, start: str) -> list:
    return [drawing for drawing in drawings if drawing.name.startswith(start)]


@pytest.fixture
def figures(monkeypatch) -> dict[str, Figure]:
    """Figures by name, as they are when they would be saved; saving takes most of the time and is tested above."""
    kept = {}

    def keep(figure, *, name, **words) -> Drawing:
        kept[name] = figure
        return Drawing(name=name, svg=b"", png=b"", **words)

    for module in (plots_runs, plots_curves, plots_inside, plots_costs, plots_bars):
        monkeypatch.setattr(module, "finish", keep)
    return kept


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Found, list[Drawing]]:
    """Rows of every kind, and their real drawings."""
    rows = everything(tmp_path_factory.mktemp("rows"))
    return rows, draw_all(rows)


def test_all_are_drawn_as_files_that_are_whole_and_say_what_they_show(whole):
    _, drawings = whole
    kinds = ["trade-off", "curves", "spans", "memory", "cost", "peers", "fit"]
    assert [sum(name.startswith(kind) for name in names(drawings)) for kind in kinds] == [1] * len(kinds)
    for drawing in drawings:
        assert drawing.png.startswith(b"\x89PNG") and len(drawing.png) > 10_000
        root = ElementTree.fromstring(drawing.svg)
        assert root.tag.endswith("svg")
        assert not root.findall(".//{http://www.w3.org/2000/svg}text"), "text depends on the reader's fonts"
        assert drawing.title and drawing.caption.endswith((".", ")")) and "None" not in drawing.caption


def test_equal_rows_give_equal_files_in_any_order_and_process_and_styles_are_left_alone(whole):
    rows, drawings = whole
    before = dict(rcParams)
    turned = found(**{key: list(reversed(getattr(rows, key))) for key in ("runs", "costs", "peers", "fits")})
    assert [(d.name, d.svg, d.png) for d in draw_all(turned)] == [(d.name, d.svg, d.png) for d in drawings]
    assert dict(rcParams) == before
    assert not any(word in drawing.svg for drawing in drawings for word in (b"dc:date", b"Matplotlib v"))
    code = "import sys, json, hashlib; from bench.report.plots_bars import draw_fits\n"
    code += "from bench.report.plot_style import styled\n"
    code += "with styled(): drawing = draw_fits(json.load(sys.stdin))[-1]\n"
    code += "print(hashlib.sha256(drawing.svg).hexdigest(), 'torch' in sys.modules)"
    words = {"cwd": Path(__file__).resolve().parents[1], "input": json.dumps(rows.fits)}
    done = subprocess.run([sys.executable, "-c", code], **words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [hashlib.sha256(drawings[-1].svg).hexdigest(), "False"]


def test_no_rows_no_drawings():
    assert draw_all(found()) == []


def changed(run, **changes):
    other = copy.deepcopy(run)
    other.summary.update(changes)
    other.provenance.update({key: value for key, value in changes.items() if key in other.provenance})
    return other


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "file", "bytes": 4_000_000, "sha256": "99" * 32}},
        {"protocol": PROTOCOL | {"streams": 1}},
        {"budget": {"bytes": 4_000_000}},
        {"capped": {"valid": 1000, "test": 1000}},
    ],
)
def test_bits_of_other_data_protocol_budget_or_capping_get_a_drawing_of_their_own(tmp_path, figures, changes):
    both = runs(tmp_path, variants=("mhsa",))
    together = draw_all(found(runs=both))
    apart = draw_all(found(runs=[both[0], changed(both[1], **changes)]))
    for kind in ("trade-off", "curves"):
        assert len(of(together, kind)) == 1 and len(of(apart, kind)) == 2
    assert set(names(of(together, "trade-off"))) < set(names(of(apart, "trade-off"))), "a name depends on other groups"


def test_time_and_memory_of_two_machines_are_apart_but_their_bits_and_flops_together(tmp_path, figures):
    both = runs(tmp_path, variants=("mhsa",))
    drawings = draw_all(found(runs=[both[0], changed(both[1], device="Another")]))
    for kind, shared, own in (
        ("trade-off", "FLOPs per byte", "peak memory"),
        ("curves", "bytes seen", "time of training"),
    ):
        first, *rest = [texts(figures[drawing.name]) for drawing in of(drawings, kind)]
        assert shared in first and own not in first and len(rest) == 2
        assert all(own in words and shared not in words for words in rest)
        assert sum("Another" in words for words in rest) == 1
    costs = [cost_row(), cost_row(device="Another"), cost_row(mode="stream"), cost_row(streams=4)]
    costs.append(cost_row(allocator="return"))
    assert len(set(names(of(draw_all(found(costs=costs)), "cost")))) == 5
    fits, peers = [fit_row(), fit_row(threads=4)], [peer_row(), peer_row(allocator="return"), peer_row(job="other")]
    drawings = draw_all(found(fits=fits, peers=peers))
    assert len(set(names(of(drawings, "fit")))) == 2 and len(set(names(of(drawings, "peers")))) == 3


def test_pareto_front():
    points = [(1.0, 4.0), (2.0, 3.0), (2.5, 3.5), (3.0, 3.0), (4.0, 1.0), (1.0, 5.0)]
    assert plots_runs.pareto(points) == [(1.0, 4.0), (2.0, 3.0), (4.0, 1.0)]


def test_every_seed_is_a_dot_and_the_mean_is_marked_with_n(tmp_path, figures):
    given = runs(tmp_path, seeds=(0, 1, 2), variants=("mhsa",))
    (name,) = names(of(draw_all(found(runs=given)), "trade-off"))
    ax = figures[name].axes[3]
    dots, mean = [line for line in ax.lines if line.get_marker() == "o"]
    assert sorted(dots.get_xdata()) == [160.0, 169.0, 178.0] and list(mean.get_xdata()) == [169.0]
    assert np.allclose(mean.get_ydata(), np.mean([run.summary["test_bits_per_byte"] for run in given]))
    assert "mhsa (n=3)" in texts(figures[name])


def test_a_size_is_an_arm_of_its_own_and_labelled_by_what_differs(tmp_path):
    small, large = runs(tmp_path, variants=("mhsa",))
    large.provenance["config"]["model"]["d_model"] = 256
    small_again = changed(small, seed=7)
    found_arms = comparison.arms([small, large, small_again])
    assert [(arm.label, len(arm.members)) for arm in found_arms] == [("mhsa, d_model=128", 2), ("mhsa, d_model=256", 1)]


def test_labels_beside_points_cover_nothing_or_give_way_to_a_legend(tmp_path, figures):
    few = of(draw_all(found(runs=runs(tmp_path / "few"))), "trade-off")[0]
    figure = figures[few.name]
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = [note.get_window_extent(renderer) for note in ax.texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        for line in ax.lines:
            dots = ax.transData.transform(np.column_stack([line.get_xdata(), line.get_ydata()]))
            assert not any(box.count_contains(dots) for box in boxes)
    crowd = runs(tmp_path / "many", variants=tuple(f"variant_{number:02}" for number in range(15)), seeds=(0,))
    figure = figures[of(draw_all(found(runs=crowd)), "trade-off")[0].name]
    assert not any(ax.texts for ax in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()][0] == "variant_00 (n=1)"


def test_missing_numbers_leave_out_what_lacks_them(tmp_path, figures):
    one, two, three, four = runs(tmp_path, seeds=(0, 1, 2, 3), variants=("mhsa",))
    one = changed(one, memory={"peak_bytes": None}, flops_per_byte=None, training_flops=None)
    two = changed(two, test_bits_per_byte=None, valid_bits_per_byte=None)
    three = changed(three, seconds=None, memory=None, valid_metrics=None)
    (drawing,) = of(draw_all(found(runs=[one, two, three])), "trade-off")
    assert "1 runs" in drawing.caption and "test split" in drawing.caption
    four = changed(four, flops_per_byte=None, memory=None, seconds=None, training_flops=None, bytes_seen=None)
    assert not of(draw_all(found(runs=[four])), "trade-off")
    assert "valid" in of(draw_all(found(runs=[one, changed(three, test_bits_per_byte=None)])), "trade-off")[0].caption


def test_flops_spent_are_those_of_the_rows_and_end_at_the_trainers_sum(tmp_path):
    (run,) = runs(tmp_path, seeds=(0,), variants=("mhsa",))
    for row in run.rows:
        if row["kind"] == "train":
            row["training_flops"] = 6e7 * row["step"] if row["step"] <= 10 else 6e8 + 3e7 * (row["step"] - 10)
    run.summary["training_flops"] = 9e8
    at, spent = plots_curves.scale_of(run, "flops")
    assert np.interp(1_000_000, at, spent) == pytest.approx(6e8) and np.interp(2_000_000, at, spent) == pytest.approx(
        9e8
    )
    at, spent = plots_curves.scale_of(run, "seconds")
    assert np.interp(1_000_000, at, spent) == pytest.approx(80.0)


def test_a_caption_names_whose_training_flops_are_a_guess(tmp_path, figures):
    said, guessed = runs(tmp_path, seeds=(0,), variants=("mhsa", "mine"))
    (drawing,) = of(draw_all(found(runs=[said, guessed])), "curves")
    assert "does not say" not in drawing.caption
    (drawing,) = of(draw_all(found(runs=[said, changed(guessed, flops_estimated_3x=["layers.0.mine"])])), "curves")
    assert drawing.caption.endswith("FLOPs of mine: a mechanism does not say what it needs and is charged 3 x ideal.")


def test_long_training_curves_are_averaged_not_cut():
    at, bits = thinned([(float(step), 2.0 + step % 2) for step in range(10_000)])
    assert len(at) == BINS and np.allclose(bits, 2.5) and at[-1] > 9_970


def test_spans_are_sorted_and_only_the_first_seed_is_drawn(tmp_path, figures):
    drawings = of(draw_all(found(runs=runs(tmp_path, variants=("adaptive_span",)))), "spans")
    assert len(drawings) == 1 and "first of 2 seeds" in drawings[0].caption
    image = figures[drawings[0].name].axes[0].images[0].get_array()
    assert image.tolist() == [[90.0, 4.0], [300.0, 0.0]]
    assert "mean over heads 98.5" in texts(figures[drawings[0].name])
    cells, bars, *_ = figures[drawings[0].name].axes
    assert [bar.get_height() for bar in bars.patches] == [90.0, 4.0, 300.0, 0.0] and bars.get_yscale() == "symlog"
    means = [path.vertices[0][1] for lines in bars.collections for path in lines.get_paths()]
    assert means == [47.0, 150.0] and bars.get_xticks().tolist() == [0, 1]


def test_spans_of_unequal_layers_and_with_gaps(tmp_path, figures):
    (run,) = runs(tmp_path, seeds=(0,), variants=("adaptive_span",))
    run.summary["valid_metrics"] = {f"layers.{n}.attention.span": [float(n)] * (n % 3 + 1) for n in range(24)}
    run.summary["valid_metrics"]["layers.3.attention.span"] = [None]
    assert of(draw_all(found(runs=[run])), "spans")


def cost_axes(figures, costs, panel=0):
    (drawing,) = of(draw_all(found(costs=costs)), "cost")
    return figures[drawing.name].axes[panel], drawing


def test_cost_lines_are_told_apart_by_path_and_what_ran_out_is_a_cross(figures):
    costs = [cost_row(length=n, backend=p) for n in (256, 512, 1024) for p in ("plain", "fused")]
    ax, _ = cost_axes(figures, [*costs, cost_row(length=2048, backend="plain", **OUT)])
    lines = {
        line.get_linestyle(): line.get_ydata()
        for line in ax.lines
        if len(line.get_xdata()) == 3 and not line.get_marker()
    }
    assert lines["-"] == pytest.approx([25.6, 51.2, 102.4]) and lines["--"] == pytest.approx([25.6, 102.4, 409.6])
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == [2048] and cross.get_ydata()[0] > 0.9 and "2048, plain" in texts(ax.figure)
    slopes = [line.get_xydata() for line in ax.lines if line.get_linewidth() == 0.8]
    powers = [np.log(line[1, 1] / line[0, 1]) / np.log(line[1, 0] / line[0, 0]) for line in slopes]
    assert powers == pytest.approx([1.0, 2.0])


def test_a_figure_of_costs_says_what_becomes_of_freed_memory_and_where_spans_are(figures):
    rows = [
        cost_row(variant="adaptive_span", length=n, spans_from=s) for n in (256, 512) for s in ("learned", "one_long")
    ]
    ax, _ = cost_axes(figures, rows)
    drawn = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() > 1]
    assert {line.get_linestyle() for line in drawn if not line.get_marker()} == {"-", "--"}
    said = texts(ax.figure)
    assert "freed memory kept" in said and "fused, one_long" in said
    ax, _ = cost_axes(figures, [row | {"allocator": "return"} for row in rows])
    assert "freed memory returned" in texts(ax.figure)


@pytest.mark.parametrize("lengths", [(512,), (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)])
def test_ticks_of_cost_are_lengths_and_never_touch(figures, lengths):
    ax, _ = cost_axes(figures, [cost_row(length=length) for length in lengths])
    ticks = [label for label in ax.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in ticks]
    assert str(lengths[-1]) in json.dumps([label.get_text() for label in ticks]).replace(" k", "") or lengths[-1] > 1e5
    assert not any(one.padded(2).overlaps(other) for one, other in itertools.pairwise(boxes))


def test_ideal_flops_far_below_the_executed_are_in_the_frame(figures):
    flops = {"executed_per_byte": 3e6, "ideal_per_byte": 1e5}
    ax, _ = cost_axes(figures, [cost_row(flops=flops)], panel=2)
    assert ax.get_ylim()[0] < 1e5 and ax.get_ylim()[1] > 3e6


def test_when_everything_ran_out_or_failed_the_figure_says_so(figures):
    failed = OUT | {"status": "failed", "reason": "a shape"}
    ax, drawing = cost_axes(figures, [cost_row(length=256, **OUT), cost_row(length=512, **failed)])
    assert "nothing was measured" in texts(ax.figure) and "mhsa at 512 (a shape)" in drawing.caption


def test_peers_that_failed_have_their_reason_and_void_tables_are_printed_over(figures):
    failed = {"status": "failed", "bytes_per_second": None, "relative_to_reference": None, "time": None}
    peers = [
        peer_row(),
        peer_row(name="slow", tokens_per_second=5_000.0),
        peer_row(name="bad", reason="$ not causal", **failed),
    ]
    (drawing,) = of(draw_all(found(peers=peers)), "peers")
    words = texts(figures[drawing.name])
    assert "failed: $ not causal" in words and "3.00 M parameters" in words and "VOID" not in words
    widths = sorted(bar.get_width() for bar in figures[drawing.name].axes[0].patches)
    assert widths == [0.5, 1.0]
    (drawing,) = of(
        draw_all(found(peers=[peer | {"invalid": "too slow a reference model"} for peer in peers])), "peers"
    )
    assert "VOID" in texts(figures[drawing.name]) and "too slow a reference model" in drawing.caption


def test_ranges_of_speed_are_those_of_the_rounds():
    assert plots_bars._range({"relative_to_reference": 2.0, "relative_range": [1.0, 2.5]}) == (1.0, 2.5)
    assert plots_bars._range({"relative_to_reference": 2.0}) == (2.0, 2.0)


def test_fit_stacks_sum_to_the_peak_and_the_device_is_a_line(figures):
    rows = [fit_row(), fit_row(variant="near", device_memory_bytes=2 * 10**8)]
    (drawing,) = of(draw_all(found(fits=rows)), "fit")
    ax = figures[drawing.name].axes[0]
    ends = sorted({round((bar.get_x() + bar.get_width()) * 2**20) for bar in ax.patches})
    assert ends[-1] == pytest.approx(sum(fit_row()["split"].values()), abs=2)
    lines = [path.vertices[0][0] * 2**20 for collection in ax.collections for path in collection.get_paths()]
    assert lines == pytest.approx([2e8]) and "device: 24 GiB" in texts(ax.figure)


def test_looks_of_all_variants_differ_in_colour_and_in_marker_and_lightness():
    looks = plot_style.looks(["mine", "yours", "theirs"])
    assert {path.stem for path in (Path(__file__).parents[1] / "conf" / "variant").glob("*.yaml")} <= set(looks)
    assert len({look.marker for look in looks.values()}) == len(looks)
    assert len(
        {(look.colour, look.marker) for look in plot_style.looks(str(n) for n in range(18)).values()}
    ) == 18 + len(plot_style.KNOWN_LOOKS)
    four = [plot_style.looks([])[name] for name in ("mhsa", "adaptive_span", "all_attention", "product_key_memory")]
    grey = sorted(np.dot([int(look.colour[i : i + 2], 16) for i in (1, 3, 5)], [0.299, 0.587, 0.114]) for look in four)
    assert min(np.diff(grey)) > 10


def test_a_line_of_costs_ends_with_its_exponent(figures):
    assert plots_costs.exponent([(n, 3 * n**1.5) for n in (64, 256, 1024)]) == pytest.approx(1.5)
    assert plots_costs.exponent([(64, 1.0)]) is None and plots_costs.exponent([]) is None
    flat_then_square = [(256, 100.0), (512, 100.0), (1024, 100.0), (2048, 400.0)]
    assert plots_costs.exponent(flat_then_square) == pytest.approx(2.0), "short lengths tell of what is constant"
    rows = [cost_row(variant=v, length=n, backend=p) for v in "ab" for n in (256, 1024) for p in ("plain", "fused")]
    ax, _ = cost_axes(figures, rows)
    said = [note.get_text() for note in ax.texts]
    assert sorted(said) == sorted(["L¹·⁰", "L¹·⁰", "L²·⁰", "L²·⁰", "∝ L", "∝ L²"])
    boxes = [note.get_window_extent() for note in ax.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
