"""Small plans of a run's configuration, on which the contract is checked. A variant's YAML file may
set sizes for them: small: {attention: {block: 4}, model: {span: 12}}      # keywords of
sublayers, and keys of model"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from omegaconf import OmegaConf
from torch.utils._pytree import tree_leaves_with_path

from harness.plan.build import Plan, replan
from harness.plan.network import VARIANT_KEYS
from harness.plan.settings import check_keys, variant_section

HEADS = 2
HEAD_WIDTH = 16
ON_CPU = {"device": "cpu", "backend": "plain", "precision": "float32", "compile": False}
# a prime, and a power of 2 for mechanisms whose span must be a multiple of a block
SPANS = (13, 64)


def apply_small(plan: Plan, *, command_line_keys: Collection[str] = ()) -> Plan:
    """Return the plan with its variant's ``small`` sizes, except those of ``command_line_keys``.
    ValueError names the key."""
    variant = plan.config["variant"]
    small = variant_section(variant, "small")
    sublayers = [name for name in variant if name not in VARIANT_KEYS]
    check_keys(small, [*sublayers, "model"], key="variant.small", required=())
    if not small:
        return plan
    config = OmegaConf.create({"variant": variant, "model": plan.config["model"]})
    for path, size in tree_leaves_with_path(small, is_leaf=lambda node: not isinstance(node, dict)):
        key = ".".join(str(entry.key) for entry in path)
        config_key = key if key.startswith("model.") else f"variant.{key}"
        if config_key not in command_line_keys:
            OmegaConf.update(config, config_key, size, force_add=True)
    try:
        return replan(plan, **OmegaConf.to_container(config))
    except ValueError as error:
        raise ValueError(f"variant.small: {error}") from error


def shrink(plan: Plan) -> Plan:
    """Return a small plan with each different layer once (or two equal layers), the variant's
    ``small``, 2 heads of width 16, and a span of 13. If no model of these sizes runs, widths and
    spans grow up to the plan's."""
    small = apply_small(plan)
    sizes = variant_section(plan.config["variant"], "small").get("model", {})
    layers = list(dict.fromkeys(map(tuple, plan.layers)))
    if len(layers) == 1 < len(plan.layers):
        layers *= 2
    return _first_runnable(
        small, spans=(*SPANS, plan.model.span), layer_lists=(layers,), model=sizes
    )


def reduce_width(plan: Plan) -> Plan:
    """Return the plan with all layers, because a layer may depend on its index, and a small width,
    at the run's span, without ``small``."""
    layers = list(map(tuple, plan.layers))
    return _first_runnable(plan, spans=(plan.model.span,), layer_lists=(layers,))


def reduce_depth(plan: Plan, *, sublayers: Collection[str], max_span: int) -> Plan:
    """Return the plan on a CPU with the run's heads and widths, and two streams. It has each
    different layer once, with only the named ``sublayers``, and if possible a span of at most
    ``max_span`` bytes."""
    layers = [
        tuple(name for name in layer if name in sublayers) or tuple(layer) for layer in plan.layers
    ]
    distinct = [layer for layer in dict.fromkeys(layers) if set(layer) & set(sublayers)]
    span = plan.model.span
    sizes = {"heads": plan.model.heads, "d_model": plan.model.d_model, "embedding_dropout": 0.0}
    on_cpu = replan(plan, runtime=ON_CPU, batch={"streams": 2, "accumulate": 1})
    return _first_runnable(
        on_cpu, spans=(min(max_span, span), span), layer_lists=(distinct, layers), model=sizes
    )


def contract_plan(plan: Plan, device_kind: str) -> Plan:
    """Return the plan on which the contract is checked. If the run's device is no CPU, it is in
    plain PyTorch on a CPU."""
    if device_kind == "cpu":
        return plan
    return replan(plan, runtime=ON_CPU)


def _first_runnable(
    plan: Plan, *, spans: Sequence[int], layer_lists: Sequence[Sequence], model: Mapping = {}
) -> Plan:
    """Return the plan at the first combination of span, layers and width with which a model runs,
    else at the last one. ``model`` has keys of the section ``model`` that override these sizes."""
    heads = plan.model.heads
    d_model = plan.model.d_model
    widths = [(HEADS, HEADS * HEAD_WIDTH), (heads, heads * HEAD_WIDTH), (heads, d_model)]
    for span, layers, (heads, d_model) in itertools.product(spans, layer_lists, widths):
        variant = {
            "layers": list(layers[0]),
            "at": {i: list(names) for i, names in enumerate(layers)},
        }
        sizes = {"heads": heads, "d_model": d_model, "span": span, **model, "layers": len(layers)}
        small = replan(plan, variant=variant, model=sizes)
        if can_run(small):
            break
    return small


def can_run(plan: Plan) -> bool:
    """Return whether a model of these sizes can be built, and can read three bytes of two
    streams."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            plan.make_model().eval()(torch.zeros(2, 3, dtype=torch.int64))
    except Exception:
        return False
    return True
