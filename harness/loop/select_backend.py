"""Selection of the code that computes attention: on a CPU it has its tests, elsewhere it is proven where it first runs.

Candidates are taken in the order in which the sublayers prefer them; the first that agrees with plain PyTorch in float64
runs. Each computes in a process that is thrown away: one that reads where it must not leaves a device's context unusable, and
one that hangs must not hang the run. Finished comparisons are remembered under everything that they depend on, so that all
jobs of a sweep, and all later runs, share one.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from omegaconf import OmegaConf

from harness import source
from harness.cache import cache_folder, locked, write_whole
from harness.device import runtime
from harness.device.cell import Cell, CellError
from harness.device.runtime import Runtime
from harness.plan.build import Plan, plan_run, varied
from harness.plan.settings import RuntimeSettings
from harness.plan.small import ON_CPU, at_own_width
from variants.conformance import move
from variants.conformance.agreement import compare, outcome
from variants.conformance.fixture import open_
from variants.contract import KernelSublayer

PLAIN = "plain"
TESTED = ("cpu",)
"""Types of devices whose code has its tests."""
SEGMENTS = (300, 301, 1, 65)
"""Bytes: more than blocks of kernels, and what divides nothing."""
LEAST = 1e-4
"""Relative error that is always allowed."""
LIMIT_SECONDS, ALL_SECONDS = 120.0, 480.0
"""The longest that a candidate, and that all, may take: other processes of the run wait for ten minutes, and no longer."""
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
SEED = 0x123456789ABCDEF
HOST = Runtime(device=torch.device("cpu"), precision="float32", compile=False)


def settled(plan: Plan, where: Runtime, *, recorded: dict | None = None) -> Plan:
    """The plan with the backend that is right on the run's device, and with how it was chosen. Of several processes, the first
    decides.

    Args:
        recorded: the choice that the run's record has, which a run that goes on must keep.

    Raises:
        ValueError: what was asked for by name, or recorded, fails its proof.
    """
    if plan.runtime.backend == PLAIN or where.device.type in TESTED:
        return plan
    choice = where.processes.on_main(lambda: select(plan, where, recorded=recorded))
    if choice is None:
        return plan
    chosen = dataclasses.replace(plan.runtime, backend=choice["backend"])
    return dataclasses.replace(plan, runtime=chosen, backend_choice=choice)


def select(plan: Plan, where: Runtime, *, recorded: dict | None = None) -> dict | None:
    """``backend``; ``why``, in lines for a reader; and ``verdicts`` by candidate: ``passed``, ``said`` and ``seconds``.

    None where no sublayer has a choice, or none has what was asked for: then the sublayers say so.
    """
    asked, because = plan.runtime.backend, "asked for by name"
    if recorded is not None and asked == "auto":
        asked, because = recorded["backend"], "this run has recorded it, and goes on with no other"
        if asked == PLAIN:
            return recorded
    possible, small = candidates(plan, where)
    if asked != "auto" and asked not in possible and recorded is not None and plan.runtime.backend == "auto":
        raise ValueError(f"runtime.backend={asked}: {because}; it cannot run here now; force=true begins anew")
    if not possible or asked not in ("auto", *possible):
        return None
    verdicts, why, ends = {}, [], time.monotonic() + ALL_SECONDS
    for backend in possible if asked == "auto" else [asked]:
        verdict = verdicts[backend] = prove(small, where, backend, seconds=min(LIMIT_SECONDS, ends - time.monotonic()))
        if verdict["passed"]:
            why.append(f"{backend}: {verdict['said']}" if asked == "auto" else because)
            return {"backend": backend, "why": why, "verdicts": verdicts}
        failure = f"{backend} failed: {verdict['said']}"
        if asked != "auto":
            raise ValueError(f"runtime.backend={asked}: {because}; {failure}; allowed are auto, {PLAIN}")
        why.append(failure)
        _warn(failure)
    why.append(f"{PLAIN}, because no other code is proven here: slow, with all scores in memory")
    _warn(why[-1])
    return {"backend": PLAIN, "why": why, "verdicts": verdicts}


def candidates(plan: Plan, where: Runtime) -> tuple[list[str], Plan]:
    """Backends beside plain that every sublayer with a choice may take there, in order of preference, and the plan on which they
    are proven."""
    with torch.random.fork_rng(devices=[]):
        sublayers = dict(varied(plan, runtime=ON_CPU).make_model().sublayers())
    sublayers = {name.rpartition(".")[2]: s for name, s in sublayers.items() if isinstance(s, KernelSublayer)}
    offers = {name: s.backends(where.device, training=True) for name, s in sublayers.items()}
    offers = {name: names for name, names in offers.items() if names != (PLAIN,)}
    first, *others = offers.values() or [()]
    common = [one for one in first if one != PLAIN and all(one in names for names in others)]
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

    def of(made: Plan, mode: Runtime, *, twice: bool = False) -> list[dict[str, torch.Tensor]]:
        model = made.make_model()
        model.load_state_dict(weights)
        model.project_()
        forward = mode.forward(model.to(mode.device).train())
        same = {"forward": forward, "autocast": mode.autocast}
        return [outcome(model, tokens.to(mode.device), segments, **same) for _ in range(1 + twice)]

    with patch("variants.backends.draw_seed", lambda device: torch.full((), SEED, dtype=torch.int64, device=device)):
        expected = outcome(reference.double().train(), tokens, segments)
        actual, *again = of(plan, where, twice=plan.runtime.deterministic)
        mode = _rounding(where)
        (plain,) = [None] if mode is None else of(host, mode)
    passed, detail = compare(actual, expected, least=least, plain=plain)
    for name, x in actual.items() if passed and again else ():
        if not torch.equal(x, again[0][name]):
            return False, f"two runs differ in {name}"
    return passed, detail


def _rounding(where: Runtime) -> Runtime | None:
    """Where plain PyTorch shows what the mode costs: bfloat16 on a CPU, TF32 on the device; None for IEEE float32."""
    if where.precision != "float32":
        return dataclasses.replace(HOST, precision=where.precision)
    exact = where.device.type == "cpu" or _products() in ("highest", "ieee", "none")
    return None if exact else dataclasses.replace(where, compile=False)


def _products() -> str:
    """How float32 factors are multiplied, which torch says by one of two interfaces and refuses by the other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision


def prove(small: Plan, where: Runtime, backend: str, *, seconds: float = LIMIT_SECONDS) -> dict:
    """A verdict, remembered, or found out and, where the comparison ended, remembered."""
    key = _facts(small, where) | {"backend": backend}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_folder() / "verdicts" / f"{digest}.json"
    with locked(path, waiting=f"runtime.backend: waiting for another process that proves {backend}, verdict in"):
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))["verdict"]
        print(f"runtime.backend: proving {backend} on {where.device}, once for this machine", file=sys.stderr)
        settings = dataclasses.replace(small.runtime, backend=backend, device=str(where.device), compile=False)
        began = time.monotonic()
        try:
            with Cell(Candidate, small.config, small.trust, settings) as cell:
                passed, detail = cell.ask("agrees", limit_seconds=max(0.0, seconds))
        except (CellError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:300]
            return {"passed": False, "said": reason, "seconds": time.monotonic() - began}
        detail += "" if passed else f" (remembered in {path})"
        verdict = {"passed": passed, "said": detail, "seconds": time.monotonic() - began}
        try:
            write_whole(path, json.dumps({"key": key, "verdict": verdict}, indent=1).encode())
        except OSError as error:
            _warn(f"the verdict is not remembered ({error})")
        return verdict


def _facts(small: Plan, where: Runtime) -> dict[str, object]:
    """What a verdict depends on beside the backend, as JSON gives it back."""
    there = where.describe()
    facts = {key: there[key] for key in ("device", "device_kind", "versions", "precision", "tf32")}
    facts |= {"deterministic": small.runtime.deterministic, "products": _products()}
    facts["capability"] = torch.cuda.get_device_capability(where.device) if where.device.type == "cuda" else None
    facts["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    facts["source"] = source.digest_of(source.mechanism_files(small.config, trust=small.trust))
    facts |= {section: small.config[section] for section in ("variant", "position", "model")}
    return json.loads(json.dumps(facts))


def _warn(line: str) -> None:
    print(f"WARNING: runtime.backend=auto: {line}", file=sys.stderr)


class Candidate:
    """A backend on the device, in the process that is thrown away; ``settings`` name both."""

    def __init__(self, config: dict, trusted: Sequence[str], settings: RuntimeSettings):
        self.where = runtime.start(settings)
        plan = plan_run(OmegaConf.create(config), trusted=tuple(trusted))
        self.plan = dataclasses.replace(plan, runtime=settings)

    def agrees(self) -> tuple[bool, str]:
        return agreement(self.plan, self.where)
