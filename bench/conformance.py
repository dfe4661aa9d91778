"""The contract on a plan: ``variants/conformance/suite.py``, and the promises that need the harness to be seen.

A plan as it was asked for is too large to be checked, so ``shrunk`` makes a small one of the same kind from its
configuration: every kind of layer, the same position scheme, cache, ``attend_self``, norms, dropout and backend.
"""

from dataclasses import replace
from functools import partial

import torch

from bench.choices import follows
from bench.planning import varied
from bench.small import runs, shrunk
from harness.count.flops import count_flops
from harness.count.ideal import compare_ideal
from harness.device.runtime import device_kind
from harness.plan.build import Plan
from variants.conformance import Finding, agree, check, finding_of, learns

ON_CPU = {"device": "cpu", "backend": "plain", "precision": "float32", "compile": False}
LONG = 70
"""Keys from which learned spans of several lengths are computed apart: widths come in steps of 64."""


def passed(plan: Plan) -> None:
    """Refuse to measure a variant that breaks the contract: ValueError naming it and the first breaks."""
    broken = gate(plan)
    if broken:
        first = "; ".join(f"{finding.promise}: {finding.detail}" for finding in broken[:2])
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise ValueError(
            f"variant={plan.variant}: breaks the contract, so it is not measured: {first}{more}; "
            f"all of it says python -m bench.check variant={plan.variant}"
        )


def gate(plan: Plan) -> list[Finding]:
    """The promises that a plan breaks at small sizes, in a second or two; ValueError if its backend cannot run.

    On another device than the CPU, its code is held to plain's by ``settled``, where it runs.
    """
    return [
        finding for finding in findings(shrunk(of_mechanism(plan, device_kind(plan.runtime)))) if not finding.passed
    ]


def of_mechanism(plan: Plan, kind: str) -> Plan:
    """The plan as the contract is checked, on a CPU: in plain PyTorch where it is to run on a device of another ``kind``,
    whose kernels are not the CPU's."""
    return plan if kind == "cpu" else varied(plan, runtime=ON_CPU)


def named_kind(device: str) -> str:
    """The kind of a device by its name; ``auto`` counts as the CPU, on which the contract is checked."""
    return "cpu" if device == "auto" else device.partition(":")[0]


def findings(plan: Plan) -> list[Finding]:
    """Every promise, one finding each, on the very model of a small plan; only the first where it cannot be built."""
    vocabulary = plan.data["vocabulary"]
    found = list(check(plan.make_model, span=plan.model.span, vocabulary=vocabulary))
    if len(found) > 1:
        backend = fast_backend(plan)
        found += [ideal_beside_executed(plan), needed_at_most_executed(plan)]
        found += [finding_of("a choice that is accepted is followed", partial(follows, plan))]
        found += [learns(plan.make_model, vocabulary=vocabulary)]
        found += [backends_agree(plan, backend)] if backend else []
    return found


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


def ideal_beside_executed(plan: Plan) -> Finding:
    """What a mechanism says it needs is no more than what its code executes, in warm state, nor much less."""

    def compared() -> tuple[list[str], str]:
        torch.manual_seed(0)
        return compare_ideal(plan.make_model(), span=plan.model.span)

    return finding_of("ideal FLOPs are at most the executed ones, and at least half", compared)


def needed_at_most_executed(plan: Plan) -> Finding:
    """What a mechanism says a training step needs is no more than what it executes, without a past and with one."""
    segment = 2 * plan.model.span

    def compared() -> tuple[list[str], str]:
        torch.manual_seed(0)
        model, lines, breaks = plan.make_model().train(), [], []
        if silent := model.charged_thrice():
            return [], f"not said by {', '.join(silent)}"
        tokens = torch.randint(plan.data["vocabulary"], (2, segment))
        for carried, state in ((0, None), (segment, model(tokens).state)):
            step = count_flops(lambda state=state: model(tokens, state).logits.sum().backward(), gradients=True)
            needed, executed = model.needed_flops(segment, carried=carried).training, step.total / tokens.numel()
            lines.append(f"train, {carried} bytes carried: {needed:,.0f} needed, {executed:,.0f} executed per byte")
            breaks += lines[-1:] if needed > executed else []
        return breaks, "; ".join(lines)

    return finding_of("needed FLOPs are at most the executed ones", compared)


def backends_agree(plan: Plan, backend: str) -> Finding:
    """The fast backend against the plain one, at the plan's span and, if that can be, where heads differ in width."""
    own = plan.model.span
    for span in (own, own * -(-LONG // own)):
        fast = varied(plan, model={"span": span})
        if span != own and not runs(fast):
            break
        plain = varied(fast, runtime={"backend": "plain"})
        found = agree(fast.make_model, plain.make_model, backend=backend, span=span, vocabulary=plan.data["vocabulary"])
        finding = replace(found, detail=f"span {span}, {found.detail}")
        if not finding.passed:
            break
    return finding
