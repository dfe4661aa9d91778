"""Files under ``conf/`` compose and can be planned. A mistake is refused with key, value and
requirement."""

import inspect
import math
import pydoc
import re

import pytest
import yaml
from hydra.errors import HydraException

from harness.compose.cli import explain
from harness.data import corpora
from harness.plan.build import plan_run
from harness.plan.network import plan_layers
from harness.plan.targets import constructor_schema, resolve
from tests.support.small_configs import CONF, TINY, compose_config, one_step, plan
from variants.contract import Part, Position, Sublayer

FILES = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*/*.yaml"))
# Groups of Hydra, sweeps of W&B and what variants share do not compose by themselves.
FILES = [file for file in FILES if not file.startswith(("hydra/", "sweep/wandb_", "base/"))]
STEPPED = ("optim/", "recipe/")
"""Groups whose files take a training step, because they use code that tests/golden does not run.
Others are planned."""


def read(file):
    return yaml.safe_load((CONF / f"{file}.yaml").read_text())


# Files under conf/


PLANNED = [file for file in FILES if not file.startswith(("sublayer/", "sweep/", "variant/"))]
"""``test_variant_contract.py`` plans all variants at their small sizes, and ``test_sweep.py``
all sweeps."""


@pytest.mark.parametrize("file", PLANNED)
def test_every_file_is_planned_and_optimizers_and_recipes_take_a_step(file):
    tiny = [*TINY, "init_from.run=somewhere"] if file.endswith("_finetune") else list(TINY)
    if "product_key_memory_12" in file:
        tiny += ["variant.memory.half_keys=8", "variant.memory.top_k=4"]
    if file == "data/associative_recall":
        tiny.append("batch.segment=64")
    if file == "objective/classify":
        tiny.append("data=listops")
    run_plan = plan(file.replace("/", "=", 1), *tiny)
    if file.startswith(STEPPED):
        row = one_step(run_plan)
        assert row.step == 1 and math.isfinite(row.bits_per_byte)


def nodes(node, key):
    """Yield a configuration node and all nodes inside it, with their keys."""
    yield key, node
    for name, value in node.items():
        if isinstance(value, dict):
            yield from nodes(value, f"{key}.{name}")


def test_keys_in_the_files_are_keywords_of_the_constructors():
    for file in [file for file in FILES if file.startswith(("sublayer/", "position/"))]:
        for key, node in nodes(read(file), file):
            base = Position if file.startswith("position/") else Sublayer if key == file else Part
            cls = resolve(node, key=key, base=base, trust=()).func
            assert set(node) - {"_target_", "_partial_"} <= set(constructor_schema(cls, key=key)), (
                key
            )


def keywords_in(text):
    """Yield the plain keywords of all nodes with a target in a YAML file: class, name, value and
    line."""
    loader = yaml.SafeLoader(text)
    mappings = [loader.get_single_node()]
    for mapping in mappings:
        values = {
            key.value: loader.construct_object(value, deep=True) for key, value in mapping.value
        }
        mappings += [value for _, value in mapping.value if isinstance(value, yaml.MappingNode)]
        for key, _ in mapping.value if "_target_" in values else ():
            value = values[key.value]
            if not key.value.startswith("_") and not isinstance(value, dict):
                yield (
                    pydoc.locate(values["_target_"]),
                    key.value,
                    value,
                    text.splitlines()[key.start_mark.line],
                )


def default_of(cls, name):
    """Return the default of a keyword, which a class may pass on to its base; ``Parameter.empty``
    if it has none."""
    signatures = (inspect.signature(base.__init__).parameters for base in cls.__mro__)
    return next(parameters[name].default for parameters in signatures if name in parameters)


def as_tuple(value):
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF))
)
def test_a_keyword_has_the_constructors_default_or_its_comment_says_why_not(path):
    for cls, name, value, line in keywords_in(path.read_text(encoding="utf-8")):
        default = default_of(cls, name)
        stated = re.search("# .*not the constructor's (.+?): .*[a-z]{3}", line)
        if default is inspect.Parameter.empty or as_tuple(value) == default:
            assert not stated, line
        else:
            assert stated and as_tuple(yaml.safe_load(stated[1])) == default, (
                f"{line}: default {default}"
            )


def test_a_variant_names_its_base_and_its_attention_and_no_other_variant():
    allowed = ("/base/", "/sublayer@", "/position@", "override /position")
    for path in (CONF / "variant").glob("*.yaml"):
        defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
        entries = [entry if isinstance(entry, str) else next(iter(entry)) for entry in defaults]
        assert all(entry.startswith(allowed) for entry in entries), path
        assert {"/sublayer@attention", "/sublayer@variant.attention"}.intersection(entries), path


# Overrides on the command line


def names_of(plan):
    return [list(layer) for layer in plan.layers]


def test_sublayers_are_replaced_for_all_layers_or_for_one():
    run_plan = plan("sublayer@variant.feed_forward=product_key_memory", *TINY)
    assert {type(s).__name__ for _, s in run_plan.make_model().sublayers()} == {
        "Attention",
        "ProductKeyMemory",
    }
    default, with_memory = ["attention", "feed_forward"], ["attention", "memory"]
    four_layers = [*TINY, "model.layers=4", "variant=product_key_memory"]
    assert names_of(plan(*four_layers)) == [default, default, with_memory, default]
    first_and_last = "+variant.at={0:[memory],-1:[attention,memory]}"
    assert names_of(plan(*four_layers, first_and_last)) == [
        ["memory"],
        default,
        with_memory,
        with_memory,
    ]
    from_the_end = "+variant.at={-2:null,-3:[attention,memory]}"
    assert names_of(plan(*four_layers, from_the_end)) == [default, with_memory, default, default]
    assert names_of(plan(*four_layers, "+variant.at.0=[feed_forward]"))[0] == ["feed_forward"]


def test_numbers_are_converted_to_the_types_of_their_keys_and_a_sweep_reads_no_fallback_corpus():
    cfg = compose_config(*TINY, "budget.bytes=1e6", "model.dropout=0", "eval.bytes=2e5")
    run_plan, swept = plan_run(cfg), plan_run(cfg, sweeping=True)
    assert run_plan.budget.amount == 10**6 and isinstance(run_plan.model.dropout, float)
    assert run_plan.eval.bytes == 200_000 and isinstance(run_plan.eval.bytes, int)
    assert (
        run_plan.data.fallback == "stdlib"
        and swept.data.fallback is swept.config["data"]["fallback"] is None
    )


# Mistakes


MISTAKES = [
    # choices and keys
    ("+budget.hours=3", "budget.hours=3", "bytes", "seconds"),
    ("+variant.attention.ramp=3", "variant.attention.ramp=3", "span"),
    ("~model.heads", "model.heads: is required, but"),
    ("seed=???", "seed=???: is required, but"),
    ("init_from.restore=everything", "init_from.run=null", "init_from.restore=weights"),
    # types and ranges
    ("model.heads=2.5", "model.heads=2.5", "an integer"),
    ("model.norm=batch", "model.norm=batch", "rms, layer"),
    ("budget=3", "budget=3", "section"),
    # sizes that do not fit together
    ("model.heads=3", "model.heads=3", "model.d_model=32", "divide"),
    ("batch.accumulate=3", "batch.accumulate=3", "batch.streams=2"),
    ("batch.order=permuted", "batch.order=permuted: allowed are random, permutation"),
    (
        "batch.order=permutation batch.carry=true",
        "batch.order=permutation: allowed with batch.carry=true is random",
    ),
    ("variant=product_key_memory variant.memory.top_k=65", "top_k=65", "half_keys=64"),
    # layers of a variant
    ("+variant.at={2:[attention]}", "variant.at.2=", "-2 to 1", "model.layers=2"),
    ("+variant.at={-1:[attention],1:[feed_forward]}", "variant.at.1=", "variant.at.-1"),
    ("+variant.depth=3", "variant.depth=3", "layers, at, groups"),
    # groups and rates of a variant
    ("+variant.groups.x={match:'*.nothing'}", "variant.groups.x.match='*.nothing'", "query.weight"),
    ("+variant.groups.x={lr_scale:1}", "variant.groups.x.match: is required, but"),
    (
        "+variant.groups.x={match:'*',lr_scale:-1}",
        "variant.groups.x.lr_scale=-1",
        "greater than or equal to 0",
    ),
    ("++variant.lr_scale.muon=-1", "variant.lr_scale.muon=-1", "greater than 0"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[0])
def test_a_mistake_is_refused_with_key_value_and_requirement(case):
    words, *fragments = case
    with pytest.raises((ValueError, HydraException)) as caught:
        run_plan = plan(*TINY, "data=recall", *words.split())
        run_plan.make_optimizers(run_plan.make_model())
        corpora.load(**vars(run_plan.data))
    for fragment in fragments:
        assert fragment in explain(caught.value)


def test_an_order_other_than_that_of_older_rows_is_part_of_the_protocol():
    assert "order" not in plan(*TINY).protocol()
    assert plan(*TINY, "batch.order=permutation").protocol()["order"] == "permutation"


def test_the_factors_of_a_variant_multiply_the_learning_rates_of_the_named_optimizers():
    def rates(*words):
        run_plan = plan(*TINY, *words)
        return {
            row["name"]: row["lr"]
            for row in run_plan.make_optimizers(run_plan.make_model()).describe()
        }

    factors = "++variant.lr_scale={muon:2,adamw:0.5}"
    assert rates(factors) == pytest.approx({"default": 0.006, "matrices": 0.006 * 13.3})
    assert rates(factors, "optim=adamw", "optim.lr=0.01") == pytest.approx({"default": 0.005})
    assert (
        rates(factors, "optim=adagrad")
        == rates("optim=adagrad", "variant.lr_scale=null")
        == {"default": 0.07}
    )


def test_sublayer_names_that_torch_reserves_are_refused():
    for name in ("values", "pop", "forward", "training"):
        node = {"layers": [name], name: read("sublayer/feed_forward")}
        with pytest.raises(ValueError, match=rf"variant\.{name}: .*feed_forward"):
            plan_layers(node, n_layers=1, trust=())
