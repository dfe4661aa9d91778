"""Settling of ``runtime.backend`` on a device that was not tested: the candidates of each kind of sublayer are proven and
timed, each in a process of its own."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from statistics import median

import torch
from omegaconf import OmegaConf

from harness import source
from harness.device import first_use, random_state, runtime
from harness.device.cell import Cell, CellError
from harness.device.first_use import PLAIN, Answer, Choice, Subject, Verdict
from harness.device.runtime import Runtime
from harness.plan.build import Plan, plan_run
from harness.plan.settings import RuntimeSettings
from variants.contract import KernelSublayer, Proof, Sublayer

WARM_CALLS, TIMED_CALLS = 2, 5
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
Ask = Callable[..., Answer]


def settled(plan: Plan, where: Runtime, *, recorded: dict | None = None, choosing: Callable = None) -> Plan:
    """The plan with the backend that is right and fastest on the run's device, and with how it was chosen.

    On a CPU, whose code has its tests, it is the plan as it is. Of several processes, the first decides.

    Args:
        recorded: the choice that the run's record has, which a run that goes on must keep.
        choosing: what makes the ``Choice``; None for ``chosen``.

    Raises:
        ValueError: what was asked for by name, or recorded, fails its proof.
    """
    if plan.runtime.backend == PLAIN or (where.device.type == "cpu" and choosing is None):
        return plan
    choice = where.processes.on_main(lambda: (choosing or chosen)(plan, where, recorded=recorded))
    if choice is None:
        return plan
    own = replace(plan.runtime, backend=choice.backend)
    return replace(plan, runtime=own, backend_choice=choice.as_dict())


def chosen(
    plan: Plan,
    where: Runtime,
    *,
    recorded: dict | None = None,
    ask: Ask | None = None,
    **options: object,
) -> Choice | None:
    """Which backend to take there; None where no sublayer has a choice.

    Args:
        ask: of a sublayer's name, then as ``Subject.ask``; None for a process of its own.
        options: keywords of ``first_use.choose``.
    """
    sublayers = kinds(plan)
    able = {name: own for name, own in sublayers.items() if isinstance(own, KernelSublayer)}
    offered = {name: own.backends(where.device, training=True) for name, own in able.items()}
    offered = {name: [one for one in names if one != PLAIN] for name, names in offered.items() if names != (PLAIN,)}
    asked, because = plan.runtime.backend, "asked for by name"
    everywhere = all(asked in names for names in offered.values())
    if not offered or (asked != "auto" and not everywhere):
        return None  # the sublayers themselves say why it cannot be
    if recorded is not None and asked == "auto":
        asked, because = recorded["backend"], "this run has recorded it, and goes on with no other"
        if asked == PLAIN:
            return Choice(backend=PLAIN, why=(because,), verdicts={}, step_ms={})
        if not all(asked in names for names in offered.values()):
            raise ValueError(f"runtime.backend={asked}: {because}; it cannot run here now; force=true begins anew")
    first, *others = offered.values()
    candidates = [one for one in first if all(one in names for names in others)]
    facts, subjects = device_facts(plan, where), {}
    ask = ask or partial(_ask_a_cell, plan, where)
    for name in offered:
        shapes = facts | {"batch": plan.config["batch"], "processes": where.processes.world_size} | _section(plan, name)
        own = sublayers[name].proof_class()
        kind = f"{type(sublayers[name]).__module__}.{type(sublayers[name]).__qualname__}"
        key = facts | {"kind": kind, "class": _section(plan, name) if own is None else own}
        layers = sum(name in layer for layer in plan.layers)
        subjects[name] = Subject(layers=layers, key=key, shapes=_plain(shapes), ask=partial(ask, name))
    return first_use.choose(candidates, subjects, asked=asked, because=because, **options)


def kinds(plan: Plan) -> dict[str, Sublayer]:
    """One of each kind of sublayer, by name, on the CPU, as ``auto`` would have it."""
    names = dict.fromkeys(name for layer in plan.layers for name in layer)
    with torch.random.fork_rng(devices=[]):
        return {name: alone(plan, name, backend="auto") for name in names}


def alone(plan: Plan, name: str, *, backend: str) -> Sublayer:
    """The first sublayer of that name, in its own layer, without the others."""
    below = list(takewhile(lambda layer: name not in layer, plan.layers))
    make = plan.layers[len(below)][name]
    changed = replace(plan, layers=[{} for _ in below] + [{name: make}], runtime=replace(plan.runtime, backend=backend))
    ((_, sublayer),) = changed.make_model().sublayers()
    return sublayer


def device_facts(plan: Plan, where: Runtime) -> dict[str, object]:
    """What a verdict depends on beside what is proven: the device, its driver, the libraries, the mode and the source."""
    found = where.describe()
    accelerator = where.device.type == "cuda"
    return _plain(
        {key: found[key] for key in ("device", "device_kind", "versions", "precision", "compile", "tf32")}
        | {"deterministic": plan.runtime.deterministic}
        | {"capability": torch.cuda.get_device_capability(where.device) if accelerator else None}
        | {"products": products()}
        | {"environment": {name: os.environ[name] for name in VARIABLES if name in os.environ}}
        | {"source": source.digest_of(source.mechanism_files(plan.config, trust=plan.trust))}
    )


def products() -> str:
    """How float32 factors are multiplied, which torch says by one of two interfaces and refuses by the other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision


def _section(plan: Plan, name: str) -> dict[str, object]:
    """The configuration of one sublayer."""
    return _plain(
        {"sublayer": plan.config["variant"][name], **{key: plan.config[key] for key in ("position", "model")}}
    )


def _plain(value: dict) -> dict:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _ask_a_cell(
    plan: Plan, where: Runtime, name: str, backend: str, *, prove: bool, timed: bool, limit_seconds: float
) -> Answer:
    """Ask a process that is thrown away."""
    if prove:
        print(
            f"runtime.backend: proving {backend} for {name} on {where.device}, once for this machine", file=sys.stderr
        )
    changed = replace(plan.runtime, backend=backend, device=str(where.device))
    verdict = step_ms = reason = None
    began = time.monotonic()
    try:
        with Cell(Candidate, plan.config, plan.trust, changed, name, where.processes.world_size) as cell:
            if prove:
                proofs = cell.ask("prove", limit_seconds=limit_seconds)
                verdict = verdict_of(proofs, seconds=time.monotonic() - began)
            if timed and (verdict is None or verdict.passed):
                left = limit_seconds - (time.monotonic() - began)
                step_ms = cell.ask("step_ms", limit_seconds=max(left, 0.0))
    except (CellError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
    if prove and verdict is None:
        verdict = Verdict(passed=False, said=reason, seconds=time.monotonic() - began)
    return Answer(verdict=verdict, step_ms=step_ms, reason=reason)


def verdict_of(proofs: Sequence[Proof], *, seconds: float) -> Verdict:
    """Of all cases."""
    if not proofs:
        return Verdict(passed=False, said="it has no case", seconds=seconds)
    worst = max(proofs, key=lambda proof: proof.ratio)
    finite = math.isfinite(worst.error)
    said = f"{worst.case}: " + (f"{worst.error:.1e}" if finite else "not finite") + f", allowed {worst.allowed:.1e}"
    return Verdict(
        passed=all(proof.passed for proof in proofs),
        said=said,
        case=worst.case,
        error=worst.error if finite else None,
        allowed=worst.allowed,
        cases=len(proofs),
        seconds=seconds,
    )


class Candidate:
    """A backend of one sublayer on the device, in the process that is thrown away.

    Args:
        settings: with the backend and the device.
        name: of the sublayer.
        processes: of the run, which share its streams.
    """

    def __init__(self, config: dict, trusted: Sequence[str], settings: RuntimeSettings, name: str, processes: int):
        plan = plan_run(OmegaConf.create(config), trusted=tuple(trusted))
        self.plan, self.where = replace(plan, runtime=settings), runtime.start(settings)
        random_state.seed(plan.seed)
        self.sublayer = alone(self.plan, name, backend=settings.backend).to(self.where.device)
        b = plan.batch
        self.streams = -(-b.streams // (processes * b.accumulate))

    def prove(self) -> list[Proof]:
        """All cases of the sublayer's own."""
        mode = {"precision": self.where.precision, "deterministic": self.plan.runtime.deterministic}
        return list(self.sublayer.prove(self.plan.runtime.backend, self.where.device, **mode))

    def step_ms(self) -> float:
        """The median of a few forward and backward passes on what a step of the run gives the sublayer."""
        b, m, where, sublayer = self.plan.batch, self.plan.model, self.where, self.sublayer
        x = torch.randn(self.streams, b.segment, m.d_model, device=where.device)
        start, state = torch.zeros(len(x), dtype=torch.int64, device=where.device), None
        sublayer.train()
        while b.carry and start[0] < m.span:
            with torch.no_grad(), where.autocast():
                state = sublayer(x, state, start).state
            start = start + b.segment
        x.requires_grad_()

        def step() -> float:
            where.synchronise()
            began = time.perf_counter()
            with where.autocast():
                out = sublayer(x, state, start)
            (out.y.float().sum() + (0.0 if out.loss is None else out.loss)).backward()
            where.synchronise()
            return 1000 * (time.perf_counter() - began)

        return median([step() for _ in range(WARM_CALLS + TIMED_CALLS)][WARM_CALLS:])
