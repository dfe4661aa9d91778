"""Views of what is held equal, and the columns of what a sweep varied."""

import pytest

from bench.report.comparison import RATE, arms
from bench.report.gather import gather
from bench.report.heads import MOST_COLUMNS, Heads
from tests.bench_rows import PROTOCOL, write_run, write_trial
from tests.report_of import change, column, headings, tables

PARAMETERS = {"touched": 1000, "by_sublayer": None}


def model(**keys) -> dict:
    return {"variant": {"name": "mhsa"}, "model": {"d_model": 128, "layers": 4, "heads": 4, "span": 512} | keys}


def swept(folder, **given):
    found = arms(gather([folder]).runs)
    heads = Heads(found, **given)
    cells = [[cell.text for cell in heads.of(arm)[1:]] for arm in found]
    return [column.heading for column in heads.swept], cells, heads.swept


@pytest.mark.parametrize(
    "budget, name, knob",
    [
        ({"bytes": 2_000_000}, "equal-bytes-1", "budget.bytes=2,000,000"),
        ({"seconds": 60.0}, "equal-seconds-1", "budget.seconds=60"),
        ({"flops": 5e9}, "equal-flops-1", "budget.flops=5,000,000,000"),
        ({"steps": 20}, "equal-bytes-1", "budget.steps=20 at equal batches"),
    ],
)
def test_a_view_names_what_is_equal_by_which_knob_and_what_is_not(tmp_path, budget, name, knob):
    for variant, total, flops in (("mhsa", 1_000_000, 2e13), ("adaptive_span", 1_500_000, 1e13)):
        parameters = PARAMETERS | {"total": total}
        change(write_run(tmp_path, variant=variant, training_flops=flops), budget=budget, parameters=parameters)
    found = tables(tmp_path)
    what = {"flops": "FLOPs"}.get(name.split("-")[1], name.split("-")[1])
    assert found[name].title == f"Equal {what}: file, {knob}"
    held, free = found[name].caption.split(" Not held equal: ")
    assert f"{what} (by {knob})" in held and "parameters" not in held
    assert "parameters (1,000,000 to 1,500,000)" in free
    assert ("FLOPs (10,000 to 20,000 x 10^9)" in free) == (what != "FLOPs")
    assert not [other for other in found if other.startswith("equal") and other != name]
    wanted = ["trained on, bytes", "training, s", "training, GFLOPs", "parameters", "training peak, MiB"]
    assert [heading for heading in headings(found[name]) if heading in wanted] == wanted
    assert any("FLOPs by budget.flops=1e+13" in note for note in found[name].notes) == (what != "FLOPs")


def test_training_flops_are_marked_where_a_mechanism_does_not_say(tmp_path):
    write_run(tmp_path, training_flops=2e13)
    write_run(tmp_path, variant="mine", training_flops=1e13, flops_estimated_3x=["layers.0.mine"])
    view = tables(tmp_path)["equal-bytes-1"]
    assert sorted(column(view, "training, GFLOPs")) == ["20,000", "~10,000"]
    told = "Training FLOPs of mine: a mechanism does not say what it needs and is charged 3 x ideal."
    assert told in view.notes


def test_steps_of_unequal_batches_are_not_equal_bytes(tmp_path):
    for variant, seen in (("mhsa", 10_000), ("adaptive_span", 20_000)):
        change(write_run(tmp_path, variant=variant, bytes_seen=seen), budget={"steps": 20})
    found = tables(tmp_path)["equal-steps-1"]
    assert (
        found.title.startswith("Equal steps") and "bytes (10,000 to 20,000)" in found.caption.partition("Not held")[2]
    )


def test_equal_parameters_are_within_two_percent(tmp_path):
    totals = {
        "mhsa": 1_000_000,
        "adaptive_span": 1_019_000,
        "all_attention": 1_021_000,
        "product_key_memory": 5_000_000,
    }
    for rate, (variant, total) in enumerate(totals.items(), start=1):
        parameters = PARAMETERS | {"total": total}
        write_trial(tmp_path, variant=variant, rate=rate / 100, seed=0, bits=2.4, parameters=parameters)
    found = {name: table for name, table in tables(tmp_path).items() if name.startswith("equal-parameters")}
    assert list(found) == ["equal-parameters-1"]
    assert sorted(column(found["equal-parameters-1"], "variant")) == ["adaptive_span", "mhsa"]
    caption = found["equal-parameters-1"].caption
    assert "within 2%: 1,000,000 to 1,019,000; by the choice of variant)" in caption
    assert "budget (by budget.bytes=2,000,000)" in caption


def test_one_row_or_rates_alone_are_no_view_and_only_picked_rates_are_in_one(tmp_path):
    write_trial(tmp_path, rate=0.003, seed=0, bits=2.4)
    write_trial(tmp_path, rate=0.01, seed=0, bits=2.5)
    assert not [name for name in tables(tmp_path) if name.startswith("equal")]
    write_trial(tmp_path, variant="adaptive_span", rate=0.003, seed=0, bits=2.4)
    assert len(tables(tmp_path)["equal-bytes-1"].rows) == 3
    for trial, (rate, bits) in enumerate(((0.003, 2.5), (0.01, 2.4), (0.03, 2.6))):
        write_trial(tmp_path, rate=rate, seed=100, bits=bits, trial=trial)
    view = tables(tmp_path)["equal-bytes-1"]
    assert dict(zip(column(view, "variant"), column(view, "optim.lr"), strict=True)) == {
        "adaptive_span": "0.003",
        "mhsa": "0.01",
    }
    assert any("other points than the picked: mhsa, lr=0.003" in note for note in view.notes)


def test_seconds_and_memory_stand_in_a_view_on_one_ground_only(tmp_path):
    write_run(tmp_path)
    change(write_run(tmp_path, variant="adaptive_span"), threads=9)
    view = tables(tmp_path)["equal-bytes-1"]
    assert not {"training, s", "training peak, MiB"} & set(headings(view))
    assert any("not measured on one ground" in note for note in view.notes) and "seconds" not in view.caption
    assert not any("budget.seconds" in note for note in view.notes)


def test_each_swept_key_is_a_column_and_keys_that_move_together_are_one(tmp_path):
    for seed, keys in enumerate(({"span": 64}, {"span": 512}, {"span": 64, "d_model": 256, "heads": 8})):
        folder = write_run(tmp_path, seed=seed, bits=2.0 + seed, config=model(**keys))
        change(folder, protocol=PROTOCOL | {"span": keys["span"]})
    names, rows, columns = swept(tmp_path)
    assert names == ["model.d_model, model.heads", "model.span"]
    assert sorted(map(tuple, rows)) == [("128, 4", "512"), ("128, 4", "64"), ("256, 8", "64")]
    assert "model.d_model and model.heads, which differ together" in columns[0].explained
    assert [column.number for column in columns] == [False, True]
    shown = tables(tmp_path)["runs-1"]
    assert headings(shown)[:3] == ["variant", *names] and set(column(shown, "variant")[:3]) == {"mhsa"}
    assert not any(" no. " in note for note in shown.notes)


def test_classes_are_named_and_what_a_variant_is_made_of_is_not_swept(tmp_path):
    rotary, alibi = ({"_target_": f"variants.position.{name}"} for name in ("Rotary", "Alibi"))
    configs = [
        {"variant": {"name": "mhsa", "attention": {"span": None}}, "position": rotary | {"base": 1e4}},
        {"variant": {"name": "mhsa", "attention": {"span": None}}, "position": rotary | {"base": 2e4}},
        {"variant": {"name": "adaptive_span", "attention": {"span": {"ramp": 32}}}, "position": alibi},
    ]
    for seed, config in enumerate(configs):
        write_run(tmp_path, variant=config["variant"]["name"], seed=seed, config=config)
    names, rows, _ = swept(tmp_path)
    assert names == ["position", "position.base"]
    assert sorted(map(tuple, rows)) == [("Alibi", ""), ("Rotary", "10000"), ("Rotary", "20000")]


def test_a_key_inside_a_variant_is_a_column_where_it_was_swept(tmp_path):
    for seed, ramp in enumerate((16, 32)):
        config = {"variant": {"name": "adaptive_span", "attention": {"span": {"ramp": ramp}}}}
        write_run(tmp_path, variant="adaptive_span", seed=seed, config=config)
    write_run(tmp_path, config={"variant": {"name": "mhsa", "attention": {"span": None}}})
    names, rows, _ = swept(tmp_path)
    assert names == ["variant.attention.span.ramp"] and sorted(map(tuple, rows)) == [("",), ("16",), ("32",)]


def test_many_swept_keys_are_numbered_rows(tmp_path):
    keys = [f"key_{place}" for place in range(MOST_COLUMNS + 1)]
    for seed, key in enumerate(keys):
        write_run(tmp_path, seed=seed, config=model(**{key: seed}))
    assert swept(tmp_path)[0] == []
    shown = tables(tmp_path)["runs-1"]
    assert headings(shown)[:2] == ["variant", "n"] and column(shown, "variant")[0].startswith("mhsa no. ")
    assert any("mhsa no. 1: " in note for note in shown.notes)


def test_rows_that_columns_cannot_tell_apart_keep_their_labels(tmp_path):
    write_run(tmp_path)
    change(write_run(tmp_path, seed=1), source="aa" * 32)
    names = {name.removesuffix(" +") for name in column(tables(tmp_path)["runs-1"], "variant")[:2]}
    assert names == {"mhsa, source=aaaaaa", "mhsa, source=cdcdcd"}


def test_the_rate_is_a_column_of_its_own(tmp_path):
    for variant, rate, layers in (("mhsa", 0.01, 2), ("adaptive_span", 0.02, 4)):
        keys = {"model": {"layers": layers}}
        write_trial(tmp_path, variant=variant, rate=rate, seed=0, bits=2.4, keys=keys)
    assert swept(tmp_path)[0] == [RATE, "model.layers"]
    assert swept(tmp_path, without=(RATE,))[0] == ["model.layers"]
