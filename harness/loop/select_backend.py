"""Selection of the code that computes attention: on a CPU it has its tests, elsewhere it is proven where it first runs.

Candidates are taken in the order in which the sublayers prefer them; the first that agrees with plain PyTorch in float64
runs. Each computes in a process that is thrown away: one that reads where it must not leaves a device's context unusable, and
one that hangs must not hang the run.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

from harness.device import runtime
from harness.device.cell import Cell, CellError
from harness.device.runtime import Runtime
from harness.plan.build import Plan, plan_run, varied
from harness.plan.settings import RuntimeSettings
from harness.plan.small import ON_CPU, at_own_width
from variants.conformance import move
from variants.conformance.agreement import compare, outcome
from variants.conformance.fixture import open_

PLAIN = "plain"
TESTED = ("cpu",)
"""Types of devices whose code has its tests."""
SEGMENTS = (300, 301, 1, 65)
"""Bytes: more than blocks of kernels, and what divides nothing."""
LEAST = 1e-4
"""Relative error that is always allowed."""
LIMIT_SECONDS = 120.0
"""The longest that a candidate may take: other processes of the run wait for ten minutes, and no longer."""
SEED = 0x123456789ABCDEF
_verdicts: dict[str, dict] = {}
"""Of all jobs of this process, by what was proven."""


def settled(plan: Plan, where: Runtime, *, recorded: dict | None = None) -> Plan:
    """The plan with the backend that is right on the run's device, and with how it was chosen. Of several processes, the first
    decides.

    Args:
        recorded: the choice that the run's record has, which a run that goes on keeps.

    Raises:
        ValueError: what was asked for by name fails its proof.
    """
    if plan.runtime.backend == PLAIN or where.device.type in TESTED:
        return plan
    choice = recorded or where.processes.on_main(lambda: select(plan, where))
    if choice is None:
        return plan
    chosen = dataclasses.replace(plan.runtime, backend=choice["backend"])
    return dataclasses.replace(plan, runtime=chosen, backend_choice=choice)


def select(plan: Plan, where: Runtime) -> dict | None:
    """``backend``; ``why``, in lines for a reader; and ``verdicts`` by candidate: ``passed``, ``said`` and ``seconds``.

    None where no sublayer has a choice, or none has what was asked for: then the sublayers say so.
    """
    asked, (possible, small) = plan.runtime.backend, candidates(plan, where)
    if not possible or asked not in ("auto", *possible):
        return None
    verdicts, why = {}, []
    for backend in possible if asked == "auto" else [asked]:
        verdict = verdicts[backend] = prove(small, where, backend)
        if verdict["passed"]:
            why.append(f"{backend}: {verdict['said']}" if asked == "auto" else "asked for by name")
            return {"backend": backend, "why": why, "verdicts": verdicts}
        why.append(f"{backend} failed: {verdict['said']}")
        if asked != "auto":
            raise ValueError(f"runtime.backend={asked}: asked for by name; {why[-1]}; allowed are auto, {PLAIN}")
        _warn(why[-1])
    why.append(f"{PLAIN}, because no other code is proven here: slow, with all scores in memory")
    _warn(why[-1])
    return {"backend": PLAIN, "why": why, "verdicts": verdicts}


def _warn(reason: str) -> None:
    print(f"WARNING: runtime.backend=auto: {reason}", file=sys.stderr)


def candidates(plan: Plan, where: Runtime) -> tuple[list[str], Plan]:
    """Backends beside plain that every sublayer with a choice may take there, in order of preference, and the plan on which they
    are proven."""
    with torch.random.fork_rng(devices=[]):
        sublayers = dict(varied(plan, runtime=ON_CPU).make_model().sublayers())
    offers = {name.rpartition(".")[2]: s.backends(where.device, training=True) for name, s in sublayers.items()}
    offers = {name: names for name, names in offers.items() if names != (PLAIN,)}
    first = next(iter(offers.values()), ())
    common = [backend for backend in first if backend != PLAIN and all(backend in names for names in offers.values())]
    small = at_own_width(plan, sublayers=offers.keys(), longest=sum(SEGMENTS) // 2) if common else plan
    return common, dataclasses.replace(small, runtime=plan.runtime)


def agreement(
    plan: Plan, where: Runtime, *, segments: Sequence[int] = SEGMENTS, least: float = LEAST
) -> tuple[bool, str]:
    """Whether logits and every gradient of the plan's model agree there with plain PyTorch's in float64 on a CPU, from the
    same weights, bytes and dropped weights of attention; and the worst error.

    Args:
        segments: bytes of each, read one after the other with carried state.
        least: error that is allowed whatever plain errs in the precision of ``where``.
    """
    host = varied(plan, runtime=ON_CPU | ({"backend": "chunked"} if plan.model.dropout else {}))
    torch.manual_seed(plan.seed)
    reference = open_(move(host.make_model()), 0.0, 1.0)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    shape = (plan.batch.streams, sum(segments) + 1)
    tokens = torch.randint(plan.data["vocabulary"], shape, generator=torch.Generator().manual_seed(1))

    def outcome_of(made: Plan, mode: Runtime) -> dict[str, torch.Tensor]:
        model = made.make_model()
        model.load_state_dict(weights)
        model.project_()
        forward = mode.forward(model.to(mode.device).train())
        return outcome(model, tokens.to(mode.device), segments, forward=forward, autocast=mode.autocast)

    with patch("variants.backends.draw_seed", lambda device: torch.full((), SEED, dtype=torch.int64, device=device)):
        expected = outcome(reference.double().train(), tokens, segments)
        actual, mode = outcome_of(plan, where), _rounding(where)
        return compare(actual, expected, least=least, plain=None if mode is None else outcome_of(host, mode))


def _rounding(where: Runtime) -> Runtime | None:
    """Where plain PyTorch shows what the mode costs: bfloat16 on a CPU, TF32 on the device; None for IEEE float32."""
    if where.precision == "float32":
        return dataclasses.replace(where, compile=False) if where.tf32 else None
    return Runtime(device=torch.device("cpu"), precision=where.precision, compile=False)


def prove(small: Plan, where: Runtime, backend: str) -> dict:
    """A verdict; one that was reached stands for all jobs of this process."""
    key = json.dumps([backend, where.describe(), *(small.config[name] for name in ("variant", "position", "model"))])
    if key not in _verdicts:
        print(f"runtime.backend: proving {backend} on {where.device}", file=sys.stderr)
        settings = dataclasses.replace(small.runtime, backend=backend, device=str(where.device), compile=False)
        began = time.monotonic()
        try:
            with Cell(Candidate, small.config, small.trust, settings) as cell:
                passed, detail = cell.ask("agrees", limit_seconds=LIMIT_SECONDS)
        except (CellError, ValueError) as error:
            passed, detail = False, str(error).strip().partition("\n")[0][:300]
        _verdicts[key] = {"passed": passed, "said": detail, "seconds": time.monotonic() - began}
    return _verdicts[key]


class Candidate:
    """A backend on the device, in the process that is thrown away; ``settings`` name both."""

    def __init__(self, config: dict, trusted: Sequence[str], settings: RuntimeSettings):
        self.where = runtime.start(settings)
        plan = plan_run(OmegaConf.create(config), trusted=tuple(trusted))
        self.plan = dataclasses.replace(plan, runtime=settings)

    def agrees(self) -> tuple[bool, str]:
        return agreement(self.plan, self.where)
