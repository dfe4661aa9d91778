"""Small plans of the same kind, on which the contract is checked; a variant's YAML may have sizes for them:

small: {attention: {block: 4}, model: {span: 12}}      # keywords of sublayers, and keys of model
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from omegaconf import OmegaConf

from harness.plan.build import Plan, varied
from harness.plan.network import KEYS
from harness.plan.settings import check_keys, checked

HEADS, HEAD_WIDTH = 2, 16
ON_CPU = {"device": "cpu", "backend": "plain", "precision": "float32", "compile": False}
SPANS = (13, 64)
"""A prime, or a power of 2 for mechanisms that need a multiple."""


def with_small(plan: Plan, *, typed: Collection[str] = ()) -> Plan:
    """The plan with its variant's ``small``, except for keys ``typed`` on the command line. ValueError by key."""
    variant = plan.config["variant"]
    small = checked(variant.get("small"), dict | None, key="variant.small") or {}
    check_keys(small, [*(name for name in variant if name not in KEYS), "model"], key="variant.small", required=())
    if not small:
        return plan
    changed = OmegaConf.create({"variant": variant, "model": plan.config["model"]})
    for key, leaf in _leaves(small):
        key = key if key.startswith("model.") else f"variant.{key}"
        if key not in typed:
            OmegaConf.update(changed, key, leaf, force_add=True)
    try:
        return varied(plan, **OmegaConf.to_container(changed))
    except ValueError as error:
        raise ValueError(f"variant.small: {error}") from error


def _leaves(node: Mapping, key: str = "") -> list[tuple[str, object]]:
    """Values that are no mappings, with their dotted keys."""
    below = [(f"{key}.{name}".lstrip("."), value) for name, value in node.items()]
    return [leaf for k, v in below for leaf in (_leaves(v, k) if isinstance(v, Mapping) else [(k, v)])]


def shrunk(plan: Plan) -> Plan:
    """A small plan of the same kind: one layer of each kind (or two alike), the variant's ``small``, 2 heads of 16, and
    a span of 13; or the first of larger widths and spans, up to the plan's, with which a model runs."""
    small, sizes = with_small(plan), (plan.config["variant"].get("small") or {}).get("model", {})
    return _first_that_runs(small, spans=(*SPANS, plan.model.span), layers=(_kinds(plan),), model=sizes)


def narrow(plan: Plan) -> Plan:
    """The plan in few layers (all if keywords fit no others) and small width, at the run's span, without ``small``."""
    layers = (_kinds(plan), [tuple(layer) for layer in plan.layers])
    return _first_that_runs(plan, spans=(plan.model.span,), layers=layers, model={})


def at_own_width(plan: Plan, *, sublayers: Collection[str], longest: int) -> Plan:
    """The plan on a CPU with one layer of each kind, these sublayers alone, a span of at most ``longest`` bytes and two
    streams; heads and widths as in the run."""
    layers = [tuple(name for name in layer if name in sublayers) or tuple(layer) for layer in plan.layers]
    kinds = [kind for kind in dict.fromkeys(layers) if set(kind) & set(sublayers)]
    m = plan.model
    sizes = {"heads": m.heads, "d_model": m.d_model, "embedding_dropout": 0.0}
    few = varied(plan, runtime=ON_CPU, batch={"streams": 2, "accumulate": 1})
    return _first_that_runs(few, spans=(min(longest, m.span), m.span), layers=(kinds, layers), model=sizes)


def of_mechanism(plan: Plan, kind: str) -> Plan:
    """The plan on which the contract is checked: in plain PyTorch on a CPU for a device of another ``kind``."""
    return plan if kind == "cpu" else varied(plan, runtime=ON_CPU)


def _kinds(plan: Plan) -> list[tuple[str, ...]]:
    kinds = list(dict.fromkeys(tuple(layer) for layer in plan.layers))
    return kinds * 2 if len(kinds) == 1 and len(plan.layers) > 1 else kinds


def _first_that_runs(plan: Plan, *, spans: Sequence[int], layers: Sequence[Sequence], model: Mapping) -> Plan:
    """The first of these sizes with which a model runs, else the last; keys of ``model`` win over them."""
    asked = plan.model
    widths = [(HEADS, HEADS * HEAD_WIDTH), (asked.heads, asked.heads * HEAD_WIDTH), (asked.heads, asked.d_model)]
    for span, chosen, (heads, d_model) in itertools.product(spans, layers, widths):
        variant = {"layers": list(chosen[0]), "at": {i: list(names) for i, names in enumerate(chosen)}}
        sizes = {"heads": heads, "d_model": d_model, "span": span} | dict(model) | {"layers": len(chosen)}
        small = varied(plan, variant=variant, model=sizes)
        if runs(small):
            break
    return small


def runs(plan: Plan) -> bool:
    """Whether a model of these sizes can be built and run."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            plan.make_model().eval()(torch.zeros(2, 3, dtype=torch.int64))
    except Exception:
        return False
    return True
