"""The contract on a plan: ``variants/conformance/suite.py``, and the promises that need the harness to be seen.

A plan as it was asked for is too large to be checked, so ``harness.plan.small`` makes a small one of the same kind from its
configuration: every kind of layer, the same position scheme, cache, ``attend_self``, norms, dropout and backend.
"""

from dataclasses import replace
from functools import partial

import torch

from bench.choices import follows
from harness.count.flops import count_flops
from harness.loop.admission import ideal_beside_executed
from harness.plan.build import Plan
from harness.plan.small import runs
from variants.conformance import Finding, check, finding_of
from variants.conformance.agreement import equal_backends
from variants.conformance.fixture import Subject, Verdict

NEEDED = "needed FLOPs are at most the executed ones"
LONG = 70
"""Keys from which learned spans of several lengths are computed apart: widths come in steps of 64."""


def named_kind(device: str) -> str:
    """The kind of a device by its name; ``auto`` counts as the CPU, on which the contract is checked."""
    return "cpu" if device == "auto" else device.partition(":")[0]


def findings(plan: Plan) -> list[Finding]:
    """Every promise, one finding each, on the very model of a small plan; only the first where it cannot be built."""
    vocabulary = plan.data["vocabulary"]
    results = list(check(plan.make_model, span=plan.model.span, vocabulary=vocabulary))
    if len(results) > 1:
        results += [ideal_beside_executed(plan), finding_of(NEEDED, partial(needed_at_most_executed, plan))]
        results += [finding_of("a choice that is accepted is followed", partial(follows, plan))]
        results += [backends_agree(plan, backend)] if (backend := fast_backend(plan)) else []
    return results


def fast_backend(plan: Plan) -> str | None:
    """The backend beside ``plain`` on a CPU, in evaluation or in training, or None.

    ValueError where the plan cannot be built or its backend cannot run; another exception is left to ``findings``.
    """
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
    """The same in plain PyTorch."""
    return replace(plan, runtime=replace(plan.runtime, backend="plain"))


def needed_at_most_executed(plan: Plan) -> Verdict:
    """What a mechanism says a training step needs is no more than what it executes, without a past and with one."""
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
    """The fast backend against the plain one: where heads differ in width, if that can be, else at the plan's span."""
    span = plan.model.span * -(-LONG // plan.model.span)
    fast = replace(plan, model=replace(plan.model, span=span))
    fast = fast if runs(fast) else plan
    subjects = (Subject(made.make_model, made.model.span, plan.data["vocabulary"]) for made in (fast, in_plain(fast)))
    finding = finding_of(f"the {backend} backend equals the plain one", equal_backends, *subjects)
    return replace(finding, detail=f"span {fast.model.span}, {finding.detail}")
