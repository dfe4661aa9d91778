"""Checks a small plan against the contract: the promises of ``variants/conformance``, and those
that need the harness.

A choice that a mechanism accepts, such as ``model.cache``, must change its output, because
otherwise a comparison of choices would mean nothing. Models that differ in one choice get equal
weights, and their sublayers equal inputs ``[B, T, D]`` in two segments. The weights change between
the segments, so that cached keys differ from recomputed ones.
"""

import math
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.check.admission import check_plan, compare_flops
from harness.check.small import can_run
from harness.count.flops import count_flops
from harness.model import LanguageModel
from harness.plan.build import Plan
from variants.conformance import Finding, perturb, run_check
from variants.conformance.agreement import equal_backends
from variants.conformance.fixture import Outputs, Subject, Verdict, differences
from variants.contract import Position

NEEDED_FLOPS = "needed FLOPs are at most the executed ones"
# keys; learned spans are rounded up to multiples of 64 keys, so heads differ in width only above 64
WIDE_SPAN = 70
Weights = list[dict[str, Tensor]]  # parameters by name, for the first segment and for the second


def named_kind(device: str) -> str:
    """Return the kind of device that a ``runtime.device`` names. For ``auto`` it is ``cpu``, where
    the contract is checked."""
    if device == "auto":
        return "cpu"
    return device.partition(":")[0]


def findings(plan: Plan) -> list[Finding]:
    """Return a finding for each promise on the model of a small plan; a single one if the model
    cannot be built."""
    outcomes = list(check_plan(plan))
    if len(outcomes) > 1 and plan.objective.direction == "causal":
        outcomes += [
            compare_flops(plan),
            run_check(NEEDED_FLOPS, partial(needed_at_most_executed, plan)),
            run_check("a choice that is accepted is followed", partial(check_choices, plan)),
        ]
        if backend := fast_backend(plan):
            outcomes.append(backends_agree(plan, backend))
    return outcomes


def fast_backend(plan: Plan) -> str | None:
    """Return the backend other than ``plain`` that a CPU uses in evaluation or training (several
    joined by ``+``), or None. ValueError if the mechanism refuses the plan or the backend. None
    after other errors, which ``findings`` reports."""
    try:
        with torch.random.fork_rng(devices=[]):
            sublayers = plan.make_model().sublayers()
    except ValueError:
        raise
    except Exception:
        return None
    backends = {
        s.backend(torch.device("cpu"), training=training)
        for _, s in sublayers
        for training in (False, True)
    }
    return "+".join(sorted(backends - {"plain"})) or None


def plain_plan(plan: Plan) -> Plan:
    """Return the same plan with the plain backend."""
    return replace(plan, runtime=replace(plan.runtime, backend="plain"))


def needed_at_most_executed(plan: Plan) -> Verdict:
    """Check that the needed FLOPs of training, as declared, are at most the executed ones, with
    and without a past."""
    torch.manual_seed(0)
    model = plan.make_model().train()
    segment = 2 * plan.model.span
    lines = []
    if undeclared := model.flops_estimated_3x():
        return f"not declared by {', '.join(undeclared)}"
    tokens = torch.randint(plan.data.vocabulary, (2, segment))
    for carried, state in ((0, None), (segment, model(tokens).state)):
        step = count_flops(
            lambda state=state: model(tokens, state).logits.sum().backward(), gradients=True
        )
        needed = model.needed_flops(segment, carried=carried).training
        executed = step.total / tokens.numel()
        lines.append(
            f"train, {carried} bytes carried: {needed:,.0f} needed, {executed:,.0f} executed per "
            "byte"
        )
        if needed > executed:
            yield lines[-1]
    return "; ".join(lines)


def backends_agree(plan: Plan, backend: str) -> Finding:
    """Compare the fast backend with the plain one at the first multiple of the plan's span from
    ``WIDE_SPAN`` on, or at the plan's span if the mechanism cannot run at that multiple."""
    span = plan.model.span * math.ceil(WIDE_SPAN / plan.model.span)
    wide = replace(plan, model=replace(plan.model, span=span))
    fast = wide if can_run(wide) else plan
    subjects = (
        Subject(p.make_model, p.model.span, p.data.vocabulary) for p in (fast, plain_plan(fast))
    )
    finding = run_check(f"the {backend} backend equals the plain one", equal_backends, *subjects)
    return replace(finding, detail=f"span {fast.model.span}, {finding.detail}")


def check_choices(plan: Plan) -> Verdict:
    """Check that each choice that a sublayer declares in ``honours`` changes its output, and that
    ``model.span`` changes nothing if it is not declared. Refused choices and sublayers without a
    past are not checked."""
    subject = Subject(plan.make_model, plan.model.span, plan.data.vocabulary)
    model = subject.build()
    compared = []
    honours = {
        name: s.honours for name, s in model.sublayers() if s.honours is not None and s.reach() != 0
    }
    if not honours:
        return "no sublayer with a past declares what it honours"
    x = torch.randn(2, subject.length, plan.model.d_model, dtype=torch.float64)
    weights = [
        deepcopy(dict(model.named_parameters())),
        deepcopy(dict(perturb(model).named_parameters())),
    ]
    baseline = _outputs(model, weights, x, honours)
    for key, choice, alternatives in _choices(plan):
        choices = [str(choice).lower()]
        changed = set()
        for alternative, changed_plan in alternatives.items():
            if (changed_model := _build(changed_plan)) is None:
                continue
            choices.append(str(alternative).lower())
            outputs = _outputs(changed_model, weights, x, honours)
            changed |= {
                name
                for name in honours
                if differences("", {name: baseline[name]}, {name: outputs[name]})
            }
        if len(choices) == 1:
            continue
        compared.append(f"{key} ({', '.join(choices)})")
        # None: unchecked
        declared = {name: key != "model.span" or honour.span for name, honour in honours.items()}
        words = f"{key}={','.join(sorted(choices))}"
        if equal := [name for name in honours if declared[name] is True and name not in changed]:
            yield (
                f"the output of {', '.join(equal)} is the same with {words}, which its honours "
                "declare"
            )
        if different := [name for name in honours if declared[name] is False and name in changed]:
            yield (
                f"the output of {', '.join(different)} differs with {words}, which its honours "
                "exclude"
            )
    return ", ".join(compared)


def _choices(plan: Plan) -> Iterator[tuple[str, object, dict[object, Plan]]]:
    """Yield each key that is a choice, the plan's value of it, and plans that differ in this key
    only, by value."""
    model = plan.model
    span = plan.model.span

    def plans(key: str, *values: object) -> dict[object, Plan]:
        return {value: replace(plan, model=replace(model, **{key: value})) for value in values}

    scheme = getattr(plan.scheme, "func", plan.scheme)
    if span > 1:  # a single key always has weight 1
        if scheme.ways():
            yield "position", scheme.__name__.lower(), {"none": replace(plan, scheme=Position)}
        yield "model.cache", model.cache, plans("cache", *({"kv", "hidden"} - {model.cache}))
    yield "model.attend_self", model.attend_self, plans("attend_self", not model.attend_self)
    yield "model.span", span, plans("span", 2 * span, max(1, span // 2))


def _build(plan: Plan) -> LanguageModel | None:
    """Return the plan's model in float64, in evaluation mode; None if the mechanism refuses the
    plan."""
    torch.manual_seed(0)
    try:
        return plan.make_model().double().eval()
    except ValueError:
        return None


@torch.no_grad()
def _outputs(model: LanguageModel, weights: Weights, x: Tensor, names: Collection[str]) -> Outputs:
    """Return outputs ``[B, T, D]`` of the sublayers with these names, each with the input ``x``.
    Where shapes differ, only the common part of a parameter is loaded: a table may have a row for
    each visible key."""
    states = dict.fromkeys(names)
    parts = []
    start = torch.zeros(len(x), dtype=torch.int64)
    for loaded, segment in zip(weights, x.chunk(2, dim=1), strict=True):
        for name, parameter in model.named_parameters():
            if name in loaded:
                common = tuple(
                    map(slice, map(min, zip(parameter.shape, loaded[name].shape, strict=True)))
                )
                parameter[common] = loaded[name][common]
        model.project_()
        outputs = {
            name: s(segment, states[name], start) for name, s in model.sublayers() if name in names
        }
        states = {name: out.state for name, out in outputs.items()}
        start = start + segment.shape[1]
        parts.append({name: out.y for name, out in outputs.items()})
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in names}
