"""Recipes reproduce published runs: their flags, numbers of parameters, and independence of our
defaults."""

from collections.abc import Iterator

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.model import LanguageModel
from harness.plan import settings
from harness.record.schema import flatten
from tests.support.small_configs import CONF, TINY, compose_config, plan
from variants.adaptive_span import AdaptiveSpan
from variants.position import Relative

RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
FINETUNES = [name for name in RECIPES if name.endswith("_finetune")]
TRAININGS = [name for name in RECIPES if name not in FINETUNES]

V = 205
FLAGS = (
    *(
        "model.layers",
        "model.d_model",
        "model.heads",
        "model.span",
        "batch.segment",
        "model.dropout",
    ),
    *(
        "variant.attention.span.loss_weight",
        "budget.steps",
        "optim.schedule.warmup_steps",
        "batch.accumulate",
    ),
)
# experiments/*.sh of facebookresearch/adaptive-span: flags in this order, then the width of the
# feed-forward
SPANS = {
    "adaptive_span_8": ((8, 256, 4, 1024, 256, 0.0, 2e-6, 150_000, 8_000, 1), 1024),
    "adaptive_span_12": ((12, 512, 8, 8192, 512, 0.3, 5e-7, 600_000, 32_000, 1), 2048),
    "adaptive_span_24": ((24, 768, 8, 8192, 512, 0.4, 5e-7, 150_000, 32_000, 2), 4096),
}
PERSISTENT = {  # the same flags, then the number of persistent vectors
    "all_attention_18": ((18, 512, 8, 8192, 512, 0.3, 1e-7, 450_000, 32_000, 2), 1024),
    "all_attention_36": ((36, 512, 8, 8192, 512, 0.4, 1e-7, 200_000, 32_000, 2), 2048),
}
MILLIONS = {"adaptive_span_8": "6.5", "adaptive_span_12": "38.54", "adaptive_span_24": "208.9"}
MILLIONS |= {"all_attention_18": "38.50", "all_attention_36": "114.02"}
"""Millions of parameters, printed in the papers or computed from their sizes."""


class Unset(TorchFunctionMode):
    """Leaves parameters uninitialized, because memory that is never written takes no space."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if getattr(function, "__module__", "") == "torch.nn.init" or name in (
            "normal_",
            "uniform_",
        ):
            return args[0] if args else kwargs["tensor"]
        return (torch.empty if function is torch.randn else function)(*args, **(kwargs or {}))


def build(name: str, *overrides: str) -> LanguageModel:
    run_plan = plan(f"recipe={name}", *overrides)
    with Unset():
        return run_plan.make_model()


def count(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def embedding_and_head(d: int, vocabulary: int) -> int:
    """Return parameters of an embedding and an untied head with a bias."""
    return 2 * vocabulary * d + vocabulary


@pytest.mark.parametrize("name", SPANS | PERSISTENT)
def test_models_have_the_number_of_parameters_of_the_papers(name):
    (layers, d, heads, span, *_), width = (SPANS | PERSISTENT)[name]
    layer = 4 * d**2 + 2 * d * width + heads + (width + d + 2 * 2 * d if name in SPANS else 2 * d)
    expected = layers * layer + embedding_and_head(d, V) + span * (d // heads)
    assert count(build(name).parameters()) == expected
    digits = len(MILLIONS[name].partition(".")[2])
    assert f"{expected / 1e6:.{digits}f}" == MILLIONS[name]


def test_the_product_key_memory_model_has_the_parameters_of_its_parts():
    layers, d, hidden, half_keys, top_k, heads, d_query = 12, 512, 2048, 512, 32, 4, 256
    attention, norm, feed_forward = 4 * d**2, 2 * d, 2 * d * hidden + hidden + d
    memory = (d + 1) * heads * d_query + 2 * d_query + heads * half_keys * d_query
    rest = (
        layers * (attention + 2 * norm)
        + (layers - 1) * feed_forward
        + norm
        + embedding_and_head(d, V)
    )
    model = build("product_key_memory_12")
    assert count(model.parameters()) == memory + rest + half_keys**2 * d == 171_183_309
    assert (
        model.touched_parameters() == memory + rest + heads * top_k * d - (V - 1) * d == 36_926_669
    )
    assert [list(layer) for layer in model.layers].index(["attention", "memory"]) == layers - 2


@pytest.mark.parametrize("name", SPANS | PERSISTENT)
def test_flags_equal_those_of_the_published_scripts(name):
    cfg = compose_config(f"recipe={name}")
    flags, width = (SPANS | PERSISTENT)[name]
    assert tuple(OmegaConf.select(cfg, key) for key in FLAGS) == flags
    key = "variant.feed_forward.hidden" if name in SPANS else "variant.attention.persistent.number"
    assert OmegaConf.select(cfg, key) == width
    assert (cfg.batch.streams, cfg.optim.lr, cfg.optim.default.clip) == (64, 0.07, 0.03)
    assert (cfg.optim.schedule.decay, cfg.optim.clip, cfg.optim.matrices) == (
        "constant",
        None,
        None,
    )
    assert cfg.variant.groups.spans.lr_scale == 1.0 and cfg.variant.attention.span.initial == 0.0
    assert (cfg.eval.streams, cfg.eval.segment, cfg.eval.bytes) == (8, cfg.batch.segment, None)
    assert (cfg.model.attend_self, cfg.model.cache) == (False, "hidden")
    model, tables, spans = build(name, *TINY), set(), 0
    assert isinstance(model.norm, nn.Identity) and model.head.weight is not model.embedding.weight
    for residual in model.residuals():
        assert residual.norm_after and isinstance(residual.norm, nn.LayerNorm)
        sublayer = residual.sublayer
        if hasattr(sublayer, "span"):
            assert isinstance(sublayer.position, Relative) and isinstance(
                sublayer.span, AdaptiveSpan
            )
            assert sublayer.query.bias is None and sublayer.shift == 1
            assert sublayer.span.ramp == 32 and not sublayer.span.fraction.any()
            tables.add(sublayer.position.table)
            spans += 1
        else:
            assert sublayer.activate is nn.functional.relu and sublayer.enter.bias is not None
    assert len(tables) == 1 and spans == 2


def keys_set_by(name: str) -> set[str]:
    """Return keys that are set by the file of a recipe or by files that it includes."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / "recipe" / f"{name}.yaml"))
    parents = [entry for entry in node.pop("defaults", []) if isinstance(entry, str)]
    keys = {f"{section}.{key}" for section, part in node.items() for key in part}
    return keys.union(*(keys_set_by(parent) for parent in parents))


@pytest.mark.parametrize("name", TRAININGS)
def test_a_recipe_sets_all_keys_of_model_and_batch_and_reads_enwik8(name):
    data = plan(f"recipe={name}").data
    assert (data.name, data.fallback, data.vocabulary) == ("enwik8", None, V)
    assert not data.drop_newlines
    required = {f"model.{key}" for key in settings.ModelSettings.__dataclass_fields__} - {
        "model.default_bytes"
    }
    required |= {f"batch.{key}" for key in settings.BatchSettings.__dataclass_fields__}
    required |= {
        "data.fallback",
        "data.vocabulary",
        "data.drop_newlines",
        "data.split",
        "eval.bytes",
        "budget.steps",
    }
    assert required <= keys_set_by(name)


@pytest.mark.parametrize("name, steps", list(zip(FINETUNES, (20_000, 30_000, 10_000), strict=True)))
def test_a_finetune_recipe_adds_steps_at_a_tenth_of_the_learning_rate(name, steps):
    recipes = (name.removesuffix("_finetune"), name)
    before, after = (
        flatten(OmegaConf.to_container(compose_config(f"recipe={recipe}"))) for recipe in recipes
    )
    assert {key: value for key, value in after.items() if before[key] != value} == {
        "init_from.restore": "everything",
        "optim.lr": pytest.approx(before["optim.lr"] / 10),
        "budget.steps": before["budget.steps"] + steps,
    }
    with pytest.raises(ValueError, match="init_from.run=null"):
        plan(f"recipe={name}")


def test_the_product_key_memory_recipe_trains_values_in_a_separate_group():
    tiny = (*TINY, "variant.memory.half_keys=8", "variant.memory.top_k=4")
    run_plan = plan("recipe=product_key_memory_12", *tiny)
    optimizers = run_plan.make_optimizers(run_plan.make_model())
    rates = {row["name"]: row["lr"] for row in optimizers.describe()}
    assert rates == {"default": pytest.approx(2.5e-4), "values": pytest.approx(1e-3)}
    values = optimizers.groups["values"]
    assert (values.schedule, values.clip) == ("constant", 0.25)
    assert list(values.parameters) == ["layers.0.memory.sublayer.values"]
    decays = [
        part["weight_decay"] for o in optimizers.optimizers.values() for part in o.param_groups
    ]
    assert not any(decays)
    optimizers.step(0.999)
    assert optimizers.optimizers["values"].param_groups[0]["lr"] == pytest.approx(1e-3)
    assert optimizers.optimizers["default"].param_groups[0]["lr"] < 1e-8
