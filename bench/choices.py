"""Choices of a run that a mechanism says it follows: what it accepts must change what it gives, or comparing them means nothing.

Models of a plan that differ in one choice get the same weights, and their sublayers the same input ``[B, T, D]``, in two
segments between which the weights move: past keys that were made once then differ from those that are made again.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.model import LanguageModel
from harness.plan.build import Plan
from variants.conformance import move
from variants.conformance.fixture import Outputs, Subject, Verdict, differs
from variants.contract import Position

Weights = list[dict[str, Tensor]]
"""Parameters by name, in the first segment and in the second."""


def follows(plan: Plan) -> Verdict:
    """Each sublayer that sees a past is held to what it ``honours``; what is refused when a model is built is not tried."""
    subject = Subject(plan.make_model, plan.model.span, plan.data["vocabulary"])
    model, tried = subject.build(), []
    held = {name: s.honours for name, s in model.sublayers() if s.honours is not None and s.reach() != 0}
    if not held:
        return "there is no other for a sublayer that declares what it honours"
    x = torch.randn(2, subject.length, plan.model.d_model, dtype=torch.float64)
    weights = [_weights(model), _weights(move(model))]
    mine = _answers(model, weights, x, held)
    for key, value, others in _choices(plan):
        values, moved = [str(value).lower()], set()
        for other, changed in others.items():
            if (made := _made(changed)) is not None:
                values.append(str(other).lower())
                y = _answers(made, weights, x, held)
                moved |= {name for name in held if differs("", {name: mine[name]}, {name: y[name]})}
        if len(values) == 1:
            continue
        tried.append(f"{key} ({', '.join(values)})")
        declared = {name: key != "model.span" or honours.span for name, honours in held.items()}
        words = f"{key}={','.join(sorted(values))}"
        if still := [name for name in held if declared[name] is True and name not in moved]:
            yield f"the same comes out of {', '.join(still)} with {words}, which honours say it follows"
        if moves := [name for name in held if declared[name] is False and name in moved]:
            yield f"not the same comes out of {', '.join(moves)} with {words}, which honours deny"
    return ", ".join(tried)


def _choices(plan: Plan) -> Iterator[tuple[str, object, dict[object, Plan]]]:
    """A key of the run, what the plan has there, and plans that differ from it in this key alone, by what they have there."""
    model, span = plan.model, plan.model.span

    def changed(key: str, *values: object) -> dict[object, Plan]:
        return {value: replace(plan, model=replace(model, **{key: value})) for value in values}

    scheme = getattr(plan.scheme, "func", plan.scheme)
    if span > 1:  # the weight of a single key is 1, whatever it is
        if scheme.ways():
            yield "position", scheme.__name__.lower(), {"none": replace(plan, scheme=Position)}
        yield "model.cache", model.cache, changed("cache", *({"kv", "hidden"} - {model.cache}))
    yield "model.attend_self", model.attend_self, changed("attend_self", not model.attend_self)
    yield "model.span", span, changed("span", 2 * span, max(1, span // 2))


def _made(plan: Plan) -> LanguageModel | None:
    """The plan's model as ``Subject`` builds it, or None where it refuses its sizes or choices."""
    torch.manual_seed(0)
    try:
        return plan.make_model().double().eval()
    except ValueError:
        return None


def _weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def _answers(model: LanguageModel, weights: Weights, x: Tensor, names: dict) -> Outputs:
    """What the sublayers of these names give ``[B, T, D]``, each fed with ``x``. Of a parameter as much is loaded as both have: a
    table may have a row for each visible key."""
    states, parts = dict.fromkeys(names), []
    start = torch.zeros(len(x), dtype=torch.int64)
    for loaded, part in zip(weights, x.chunk(2, dim=1), strict=True):
        for name, parameter in model.named_parameters():
            if name in loaded:
                common = tuple(map(slice, map(min, zip(parameter.shape, loaded[name].shape, strict=True))))
                parameter[common] = loaded[name][common]
        model.project_()
        outputs = {name: s(part, states[name], start) for name, s in model.sublayers() if name in names}
        states, start = {name: out.state for name, out in outputs.items()}, start + part.shape[1]
        parts.append({name: out.y for name, out in outputs.items()})
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in names}
