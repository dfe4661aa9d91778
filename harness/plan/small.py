"""Small plans of the same kind, which the contract is checked on: sizes for the model, and a variant's own ``small``.

small: {attention: {block: 4}, model: {span: 12}}      # in a variant's YAML: keywords of sublayers, and keys of model
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from omegaconf import DictConfig, OmegaConf

from harness.plan.build import Plan, varied
from harness.plan.instantiate import resolve
from harness.plan.layers import KEYS
from harness.plan.settings import ModelSettings, checked, parse
from variants.contract import Sublayer

HEADS, HEAD_WIDTH = 2, 16
ON_CPU = {"device": "cpu", "backend": "plain", "precision": "float32", "compile": False}
SPANS = (13, 64)
"""Odd and prime, or for mechanisms that want a multiple of something."""


def with_small(plan: Plan, *, typed: Collection[str] = ()) -> Plan:
    """The plan with what its variant says under ``small``, but for keys that were ``typed`` on the command line."""
    small = _small(plan)
    if not small:
        return plan
    keys = {key.removeprefix("variant.") for key in typed}
    changes = {name: _untyped(own, keys, name) for name, own in small.items()}
    model = changes.pop("model", {})
    variant = {name: _merged(plan.config["variant"][name], own) for name, own in changes.items()}
    return varied(plan, variant=variant, model=model)


def _small(plan: Plan) -> dict[str, dict]:
    """``small`` of the plan's variant; ValueError naming the key, the value and what is allowed."""
    variant = plan.config["variant"]
    small = checked(variant.get("small"), dict | None, key="variant.small") or {}
    names = [name for name in variant if name not in KEYS]
    for name, own in small.items():
        key = f"variant.small.{name}"
        if name not in (*names, "model"):
            raise ValueError(f"{key}={own}: no such sublayer; allowed are {', '.join(names)} and model")
        checked(own, dict, key=key)
        if name == "model":
            parse(ModelSettings, plan.config["model"] | own, key=key)
        else:
            resolve(_merged(variant[name], own), key=key, kind=Sublayer, trust=plan.trust)
    return dict(small)


def _merged(node: Mapping, keys: Mapping) -> dict:
    return OmegaConf.to_container(OmegaConf.merge(DictConfig(node), DictConfig(keys)))


def _untyped(keys: Mapping, typed: Collection[str], prefix: str) -> dict:
    """Keys, at any depth, that nobody typed."""
    return {
        name: _untyped(value, typed, f"{prefix}.{name}") if isinstance(value, Mapping) else value
        for name, value in keys.items()
        if f"{prefix}.{name}" not in typed
    }


def shrunk(plan: Plan) -> Plan:
    """A small plan of the same kind.

    - Layers: one of each kind, in order, where a kind is its list of sublayers; two if all are alike.
    - What the variant has under ``small``, which goes before what follows.
    - Width: 2 heads of 16, or as many heads as asked for, or all as asked for: the first with which a model runs.
    - Span: 13, or 64 where none runs with that, or the one asked for, which takes long.

    Other keywords of sublayers (an explicit ``d_head``) stay as they are, so one that was interpolated from
    ``model.d_model`` needs all the width asked for.
    """
    small, sized = with_small(plan), _small(plan).get("model", {})
    return _narrowed(small, spans=(*SPANS, plan.model.span), layers=(_kinds(plan),), model=sized)


def narrow(plan: Plan) -> Plan:
    """The plan with few layers and small width, and all else as in the run: its span too, and nothing of ``small``.

    All its layers are there where keywords of sublayers fit no other number of them, such as a list with one for each.
    """
    return _narrowed(plan, spans=(plan.model.span,), layers=(_kinds(plan), [tuple(layer) for layer in plan.layers]))


def of_mechanism(plan: Plan, kind: str) -> Plan:
    """The plan as the contract is checked, on a CPU: in plain PyTorch where it is to run on a device of another ``kind``,
    whose kernels are not the CPU's."""
    return plan if kind == "cpu" else varied(plan, runtime=ON_CPU)


def _kinds(plan: Plan) -> list[tuple[str, ...]]:
    kinds = list(dict.fromkeys(tuple(layer) for layer in plan.layers))
    return kinds * 2 if len(kinds) == 1 and len(plan.layers) > 1 else kinds


def _narrowed(
    plan: Plan, *, spans: Sequence[int], layers: Sequence[Sequence], model: Mapping = MappingProxyType({})
) -> Plan:
    """The first of these sizes with which a model runs, else the last; ``model``: keys that go before them."""
    asked = plan.model
    widths = [(HEADS, HEADS * HEAD_WIDTH), (asked.heads, asked.heads * HEAD_WIDTH), (asked.heads, asked.d_model)]
    for span, chosen, (heads, d_model) in itertools.product(spans, layers, widths):
        variant = {"layers": list(chosen[0]), "at": {i: list(names) for i, names in enumerate(chosen)}}
        sizes = {"heads": heads, "d_model": d_model, "span": span} | dict(model) | {"layers": len(chosen)}
        small = varied(plan, variant=variant, model=sizes)
        if runs(small):
            return small
    return small


def runs(plan: Plan) -> bool:
    """Whether these sizes fit together; where none do, the check tells what the last of them say."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            plan.make_model().eval()(torch.zeros(2, 3, dtype=torch.int64))
    except Exception:
        return False
    return True
