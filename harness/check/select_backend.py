"""Selection of the backend, the code that computes attention, on a device for which the kernels
have no tests.

The first backend that agrees with plain PyTorch in float64 is selected, in the sublayers' order of
preference. Each is compared in a process of its own: an illegal read makes the device's context
unusable, and a hang must not stop the run. A passed comparison is cached by source, sizes, device
and versions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from harness import source
from harness.check.passed import marker, recall, remember
from harness.check.small import ON_CPU, reduce_depth
from harness.device.runtime import Runtime
from harness.device.torch_settings import configure_torch
from harness.device.worker_process import WorkerError, WorkerProcess
from harness.failures import first_line, note
from harness.plan.build import Plan, literal, plan_run, replan
from variants.conformance import perturb
from variants.conformance.agreement import compare, logits_and_gradients
from variants.conformance.fixture import spread_projected

PLAIN = "plain"
TESTED_DEVICES = ("cpu",)  # types of devices for which the kernels have tests
SEGMENTS = (300, 301, 1, 65)
"""Lengths of the compared segments, in bytes: longer and shorter than the kernels' blocks, and
no multiples of them."""
TOLERANCE = 1e-4  # relative error that is always allowed
# longest time of a comparison; the run's processes wait ten minutes for each other
LIMIT_SECONDS = 120.0
DROPOUT_SEED = 0x123456789ABCDEF
_comparisons: dict[Path, tuple[bool, str]] = {}
"""Whether a backend agreed, and its error, for each comparison that this process has finished
without an exception."""


def with_backend(plan: Plan, runtime: Runtime, *, recorded_choice: dict | None = None) -> Plan:
    """Return the plan with the backend for the run's device: ``recorded_choice`` of a resumed run,
    or what the main process selects. ValueError if ``runtime.backend`` names a backend that
    fails its comparison."""
    if plan.runtime.backend == PLAIN or runtime.device.type in TESTED_DEVICES:
        return plan
    choice = recorded_choice or runtime.processes.on_main(lambda: select(plan, runtime))
    if choice is None:
        return plan
    settings = dataclasses.replace(plan.runtime, backend=choice["backend"])
    return dataclasses.replace(plan, runtime=settings, backend_choice=choice)


def select(plan: Plan, runtime: Runtime) -> dict | None:
    """Return the ``backend`` that agrees with plain PyTorch on the device, and the ``errors`` of
    all compared backends. None if no backend can be compared; ``Trainer`` then raises ValueError
    unless ``runtime.backend`` can run."""
    requested = plan.runtime.backend
    errors = {}
    offered, small = candidates(plan, runtime)
    if not offered or requested not in ("auto", *offered):
        return None
    for backend in offered if requested == "auto" else [requested]:
        try:
            passed, errors[backend] = _compare_in_worker(backend, small, runtime)
        except (WorkerError, ValueError) as error:
            passed = False
            errors[backend] = first_line(error)[:300]
        if passed:
            return {"backend": backend, "errors": errors}
        if requested != "auto":
            raise ValueError(
                f"runtime.backend={requested}: failed with {errors[backend]}; allowed are auto, "
                f"{PLAIN}"
            )
        note(f"WARNING: runtime.backend=auto: {backend} failed: {errors[backend]}")
    note(
        f"WARNING: runtime.backend=auto: {PLAIN} runs, which is slow and keeps all scores in memory"
    )
    return {"backend": PLAIN, "errors": errors}


def _compare_in_worker(backend: str, small: Plan, runtime: Runtime) -> tuple[bool, str]:
    """Return what ``agreement`` returns for a backend, computed in a worker process once for equal
    arguments. If it has passed, this holds for later processes, too."""
    settings = {"backend": backend, "device": str(runtime.device), "compile": False}
    config = small.config | {"runtime": vars(small.runtime) | settings}
    conditions = [backend, runtime.describe() | {"compile": False, "threads": None}]
    conditions += [small.config[name] for name in ("variant", "position", "model")]
    file = marker("agreed", *conditions, source.digest(small.config, trust=small.trust))
    if (error := recall(file)) is not None:
        return True, error
    if file not in _comparisons:
        compared = f"{backend} with plain PyTorch on {runtime.device}"
        note(f"runtime.backend: comparing {compared}, at most {LIMIT_SECONDS:g} s")
        with WorkerProcess(_comparison, config, small.trust) as worker:
            _comparisons[file] = worker.call("__call__", limit_seconds=LIMIT_SECONDS)
    passed, error = _comparisons[file]
    if passed:
        remember(file, error)
    return passed, error


def candidates(plan: Plan, runtime: Runtime) -> tuple[list[str], Plan]:
    """Return the backends, without plain, that all sublayers with a choice offer on the device, by
    preference, and the plan to compare them on, which has the run's heads and widths in few
    layers."""
    with torch.random.fork_rng(devices=[]):
        sublayers = dict(replan(plan, runtime=ON_CPU).make_model().sublayers())
    offers = {}
    for name, sublayer in sublayers.items():
        backends = sublayer.backends(runtime.device, training=True)
        if backends != (PLAIN,):
            offers[name.rpartition(".")[2]] = backends
    preferred = next(iter(offers.values()), ())
    common = [
        name
        for name in preferred
        if name != PLAIN and all(name in backends for backends in offers.values())
    ]
    small = plan
    if common:
        small = reduce_depth(plan, sublayers=offers.keys(), max_span=sum(SEGMENTS) // 2)
    return common, dataclasses.replace(small, runtime=plan.runtime)


def _comparison(config: dict, trust: tuple[str, ...]) -> Callable[[], tuple[bool, str]]:
    """Return ``agreement`` with its arguments; a worker process makes and calls it."""
    plan = plan_run(literal(config), trusted=trust)
    return partial(agreement, plan, configure_torch(plan.runtime))


def agreement(
    plan: Plan,
    runtime: Runtime,
    *,
    segments: Sequence[int] = SEGMENTS,
    tolerance: float = TOLERANCE,
) -> tuple[bool, str]:
    """Compare logits and gradients of the plan's model on the device with plain PyTorch in float64
    on a CPU, from equal weights, token ids and dropout masks. Returns whether they agree, and the
    largest error. ``tolerance`` is a relative error that is allowed even if plain PyTorch has a
    smaller one in the runtime's precision."""
    # Plain draws dropout masks from torch's generator; chunked draws the masks that the kernels
    # draw.
    host_plan = replan(
        plan, runtime=ON_CPU | ({"backend": "chunked"} if plan.model.dropout else {})
    )
    torch.manual_seed(plan.seed)
    reference = spread_projected(perturb(host_plan.make_model(dropout_seed=DROPOUT_SEED)), 0.0, 1.0)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    shape = (plan.batch.streams, sum(segments) + 1)
    tokens = torch.randint(plan.data.vocabulary, shape, generator=torch.Generator().manual_seed(1))

    def outcome_of(model_plan: Plan, model_runtime: Runtime) -> dict[str, torch.Tensor]:
        model = model_plan.make_model(dropout_seed=DROPOUT_SEED)
        model.load_state_dict(weights)
        model.project_()
        forward = model_runtime.forward(model.to(model_runtime.device).train())
        on_device = tokens.to(model_runtime.device)
        return logits_and_gradients(
            model, on_device, segments, forward=forward, autocast=model_runtime.autocast
        )

    # Plain PyTorch shows how large the errors of a lower precision are: of bfloat16 on a CPU, of
    # TF32 on the device.
    rounding = None
    if runtime.precision != "float32":
        rounding = Runtime(device=torch.device("cpu"), precision=runtime.precision, compile=False)
    elif runtime.tf32:
        rounding = dataclasses.replace(runtime, compile=False)

    expected = logits_and_gradients(reference.double().train(), tokens, segments)
    actual = outcome_of(plan, runtime)
    plain = None
    if rounding is not None:
        plain = outcome_of(host_plan, rounding)
    return compare(actual, expected, tolerance=tolerance, plain=plain)
