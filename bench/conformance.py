"""The contract on a small plan: ``variants/conformance/suite.py``, and the promises that need the harness.

A choice that a mechanism accepts must change its output, or comparing choices means nothing. Models that differ in one
choice get equal weights, and their sublayers equal inputs ``[B, T, D]``, in two segments. The weights change between
the segments, so cached keys differ from recomputed ones.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.count.flops import count_flops
from harness.loop.admission import ideal_beside_executed
from harness.model import LanguageModel
from harness.plan.build import Plan
from harness.plan.small import runs
from variants.conformance import Finding, check, perturb, run_check
from variants.conformance.agreement import equal_backends
from variants.conformance.fixture import Outputs, Subject, Verdict, differences
from variants.contract import Position

NEEDED = "needed FLOPs are at most the executed ones"
LONG = 70
"""From so many keys on, heads with different spans have different widths, in steps of 64 keys."""
Weights = list[dict[str, Tensor]]
"""Parameters by name, for the first segment and for the second."""


def named_kind(device: str) -> str:
    """The kind of a device by its name; ``auto`` is the CPU, on which the contract is checked."""
    return "cpu" if device == "auto" else device.partition(":")[0]


def findings(plan: Plan) -> list[Finding]:
    """A finding for each promise on the model of a small plan; only the first if it cannot be built."""
    vocabulary = plan.data["vocabulary"]
    results = list(check(plan.make_model, span=plan.model.span, vocabulary=vocabulary))
    if len(results) > 1:
        results += [ideal_beside_executed(plan), run_check(NEEDED, partial(needed_at_most_executed, plan))]
        results += [run_check("a choice that is accepted is followed", partial(follows, plan))]
        results += [backends_agree(plan, backend)] if (backend := fast_backend(plan)) else []
    return results


def fast_backend(plan: Plan) -> str | None:
    """The backend other than ``plain`` that a CPU uses in evaluation or in training, or None. ValueError if the plan
    cannot be built or its backend cannot run; other errors are left to ``findings``."""
    try:
        with torch.random.fork_rng(devices=[]):
            sublayers = [sublayer for _, sublayer in plan.make_model().sublayers()]
    except ValueError:
        raise
    except Exception:
        return None
    backends = {s.backend(torch.device("cpu"), training=training) for s in sublayers for training in (False, True)}
    return "+".join(sorted(backends - {"plain"})) or None


def in_plain(plan: Plan) -> Plan:
    """The same plan with the plain backend."""
    return replace(plan, runtime=replace(plan.runtime, backend="plain"))


def needed_at_most_executed(plan: Plan) -> Verdict:
    """Declared FLOPs of a training step are at most the executed ones, without a past and with one."""
    torch.manual_seed(0)
    model, segment, lines = plan.make_model().train(), 2 * plan.model.span, []
    if silent := model.flops_estimated_3x():
        return f"not said by {', '.join(silent)}"
    tokens = torch.randint(plan.data["vocabulary"], (2, segment))
    for carried, state in ((0, None), (segment, model(tokens).state)):
        step = count_flops(lambda state=state: model(tokens, state).logits.sum().backward(), gradients=True)
        needed, executed = model.needed_flops(segment, carried=carried).training, step.total / tokens.numel()
        lines.append(f"train, {carried} bytes carried: {needed:,.0f} needed, {executed:,.0f} executed per byte")
        if needed > executed:
            yield lines[-1]
    return "; ".join(lines)


def backends_agree(plan: Plan, backend: str) -> Finding:
    """Compares the fast backend with plain, with heads of different widths if that runs, else at the plan's span."""
    span = plan.model.span * -(-LONG // plan.model.span)
    fast = replace(plan, model=replace(plan.model, span=span))
    fast = fast if runs(fast) else plan
    subjects = (Subject(made.make_model, made.model.span, plan.data["vocabulary"]) for made in (fast, in_plain(fast)))
    finding = run_check(f"the {backend} backend equals the plain one", equal_backends, *subjects)
    return replace(finding, detail=f"span {fast.model.span}, {finding.detail}")


def follows(plan: Plan) -> Verdict:
    """Each sublayer with a past must follow what it ``honours``; choices that it refuses are not tried."""
    subject = Subject(plan.make_model, plan.model.span, plan.data["vocabulary"])
    model, tried = subject.build(), []
    held = {name: s.honours for name, s in model.sublayers() if s.honours is not None and s.reach() != 0}
    if not held:
        return "there is no other for a sublayer that declares what it honours"
    x = torch.randn(2, subject.length, plan.model.d_model, dtype=torch.float64)
    weights = [_weights(model), _weights(perturb(model))]
    mine = _answers(model, weights, x, held)
    for key, value, others in _choices(plan):
        values, moved = [str(value).lower()], set()
        for other, changed in others.items():
            if (made := _made(changed)) is not None:
                values.append(str(other).lower())
                y = _answers(made, weights, x, held)
                moved |= {name for name in held if differences("", {name: mine[name]}, {name: y[name]})}
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
    """A key of the run, the plan's value, and plans that differ in this key alone, by value."""
    model, span = plan.model, plan.model.span

    def changed(key: str, *values: object) -> dict[object, Plan]:
        return {value: replace(plan, model=replace(model, **{key: value})) for value in values}

    scheme = getattr(plan.scheme, "func", plan.scheme)
    if span > 1:  # a single key always has weight 1
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
    """Outputs ``[B, T, D]`` of the sublayers with these names, each fed with ``x``. Only the common part of a parameter
    is loaded, because a table may have a row for each visible key."""
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
