"""Selection of the code that computes attention on a device for which the kernels have no tests.

Candidates are compared with plain PyTorch in float64, in the sublayers' order of preference; the first that agrees
runs. Each has its own process: an illegal read makes a device's context unusable, and a hang must not stop the run.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

from harness.device import runtime
from harness.device.cell import Cell, CellError
from harness.device.runtime import Runtime
from harness.plan.build import Plan, plan_run, varied
from harness.plan.settings import RuntimeSettings
from harness.plan.small import ON_CPU, at_own_width
from variants.conformance import perturb
from variants.conformance.agreement import compare, logits_and_gradients
from variants.conformance.fixture import spread_projected

PLAIN = "plain"
TESTED = ("cpu",)
"""Types of devices for which the kernels have tests."""
SEGMENTS = (300, 301, 1, 65)
"""Bytes: longer than blocks of kernels, and no multiples of them."""
LEAST = 1e-4
"""Relative error that is always allowed."""
LIMIT_SECONDS = 120.0
"""Of a comparison: other processes of the run wait for ten minutes at most."""
SEED = 0x123456789ABCDEF
_compared: dict[str, tuple[bool, str]] = {}
"""Comparisons that this process has finished. A timeout or an error is not among them."""


def settled(plan: Plan, where: Runtime, *, recorded: dict | None = None) -> Plan:
    """The plan with the backend for the run's device, and how it was chosen; of several processes, the first chooses.

    Args:
        recorded: the choice in the record of a run that goes on.

    Raises:
        ValueError: the backend that was asked for by name fails its comparison.
    """
    if plan.runtime.backend == PLAIN or where.device.type in TESTED:
        return plan
    choice = recorded or where.processes.on_main(lambda: select(plan, where))
    if choice is None:
        return plan
    chosen = dataclasses.replace(plan.runtime, backend=choice["backend"])
    return dataclasses.replace(plan, runtime=chosen, backend_choice=choice)


def select(plan: Plan, where: Runtime) -> dict | None:
    """The ``backend`` that agrees with plain PyTorch on the device, and the ``errors`` of all candidates that were
    compared. None where no sublayer offers what was asked for: building the model then raises the ValueError."""
    asked, errors, (possible, small) = plan.runtime.backend, {}, candidates(plan, where)
    if not possible or asked not in ("auto", *possible):
        return None
    for backend in possible if asked == "auto" else [asked]:
        settings = dataclasses.replace(small.runtime, backend=backend, device=str(where.device), compile=False)
        key = json.dumps(
            [backend, where.describe(), *(small.config[name] for name in ("variant", "position", "model"))]
        )
        try:
            if key not in _compared:
                line = f"comparing {backend} with plain PyTorch on {where.device}, up to a minute"
                print(f"runtime.backend: {line}", file=sys.stderr)
                with Cell(_comparison, small.config, small.trust, settings) as cell:
                    _compared[key] = cell.ask("__call__", limit_seconds=LIMIT_SECONDS)
            passed, errors[backend] = _compared[key]
        except (CellError, ValueError) as error:
            passed, errors[backend] = False, str(error).strip().partition("\n")[0][:300]
        if passed:
            return {"backend": backend, "errors": errors}
        if asked != "auto":
            raise ValueError(f"runtime.backend={asked}: failed with {errors[backend]}; allowed are auto, {PLAIN}")
        print(f"WARNING: runtime.backend=auto: {backend} failed: {errors[backend]}", file=sys.stderr)
    print(f"WARNING: runtime.backend=auto: {PLAIN}, which is slow and keeps all scores in memory", file=sys.stderr)
    return {"backend": PLAIN, "errors": errors}


def candidates(plan: Plan, where: Runtime) -> tuple[list[str], Plan]:
    """Backends beside plain that all sublayers with a choice offer on the device, in order of preference, and the plan
    on which they are compared: the run's heads and widths, few layers."""
    with torch.random.fork_rng(devices=[]):
        sublayers = dict(varied(plan, runtime=ON_CPU).make_model().sublayers())
    offers = {name.rpartition(".")[2]: s.backends(where.device, training=True) for name, s in sublayers.items()}
    offers = {name: names for name, names in offers.items() if names != (PLAIN,)}
    first = next(iter(offers.values()), ())
    common = [backend for backend in first if backend != PLAIN and all(backend in names for names in offers.values())]
    small = at_own_width(plan, sublayers=offers.keys(), longest=sum(SEGMENTS) // 2) if common else plan
    return common, dataclasses.replace(small, runtime=plan.runtime)


def _comparison(config: dict, trust: Sequence[str], settings: RuntimeSettings) -> Callable[[], tuple[bool, str]]:
    """``agreement``, ready to be called in a process of its own."""
    where, plan = runtime.start(settings), plan_run(OmegaConf.create(config), trusted=tuple(trust))
    return partial(agreement, dataclasses.replace(plan, runtime=settings), where)


def agreement(
    plan: Plan, where: Runtime, *, segments: Sequence[int] = SEGMENTS, least: float = LEAST
) -> tuple[bool, str]:
    """Whether logits and all gradients of the plan's model on the device agree with plain PyTorch's in float64 on a
    CPU, from equal weights, bytes and dropout masks of attention; and the worst error.

    Args:
        segments: bytes of each, read one after the other with carried state.
        least: error that is allowed even where plain PyTorch errs less in the precision of ``where``.
    """
    host = varied(plan, runtime=ON_CPU | ({"backend": "chunked"} if plan.model.dropout else {}))
    torch.manual_seed(plan.seed)
    reference = spread_projected(perturb(host.make_model()), 0.0, 1.0)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    shape = (plan.batch.streams, sum(segments) + 1)
    tokens = torch.randint(plan.data["vocabulary"], shape, generator=torch.Generator().manual_seed(1))

    def outcome_of(made: Plan, mode: Runtime) -> dict[str, torch.Tensor]:
        model = made.make_model()
        model.load_state_dict(weights)
        model.project_()
        forward = mode.forward(model.to(mode.device).train())
        return logits_and_gradients(model, tokens.to(mode.device), segments, forward=forward, autocast=mode.autocast)

    rounding = None  # where plain PyTorch shows what the precision costs: bfloat16 on a CPU, TF32 on the device
    if where.precision != "float32":
        rounding = Runtime(device=torch.device("cpu"), precision=where.precision, compile=False)
    elif where.tf32:
        rounding = dataclasses.replace(where, compile=False)
    with patch("variants.backends.draw_seed", lambda device: torch.full((), SEED, dtype=torch.int64, device=device)):
        expected, actual = logits_and_gradients(reference.double().train(), tokens, segments), outcome_of(plan, where)
        return compare(
            actual, expected, tolerance=least, plain=None if rounding is None else outcome_of(host, rounding)
        )
