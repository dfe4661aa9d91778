"""Predicts whether a training step fits: ``python -m bench.fit variant=V model=base
device_memory=24GiB``.

The trainer's update runs on fake tensors, which have shapes but no data, under torch's
``MemTracker``, so no device is needed. The command prints the peak memory by cause, and the largest
batch that fits into ``device_memory``. Learned spans have their initial values.

The prediction is for one process without compilation. On a CPU it is within 10% of the measured
peak where freed blocks are given back (``tests/bench/test_fit.py``). For a GPU (any
``runtime.device`` but ``cpu``) it is not verified: it is what a CPU would need at the GPU's
precision, with chunked attention in place of kernels. The memory of kernels, libraries and
allocators is not predicted (a CUDA context takes about half a GiB), nor, on a CPU, the corpus and
freed blocks of the C library."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Ge
from omegaconf import DictConfig
from pydantic import ByteSize
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed._tools.mem_tracker import MemTracker

from bench.cost_worker import full_state
from bench.planning import pop_keys
from bench.progress import Progress
from harness.check.admission import admission
from harness.check.small import contract_plan
from harness.compose.cli import run_command, with_config
from harness.count.memory import tensors_of
from harness.device.runtime import Runtime
from harness.device.selection import resolve_auto
from harness.loop.step import train_step
from harness.loop.trainer import backend_of
from harness.model import LanguageModel
from harness.plan.build import Plan, is_sweep, plan_run
from harness.plan.settings import parse_setting
from harness.record import cells
from harness.record.table import Column, Table, print_table
from variants.contract import State

COMMAND_KEYS = ("device_memory", "devices")
CPU = torch.device("cpu")
MAX_STREAMS = 2**12  # the largest batch that is tried
RESIDENT = (
    "A run on a CPU reports resident memory, which has freed blocks too: 1.3 times as much in a "
    "run with runtime.allocator=return, 1.9 and 2.2 times in two with keep."
)
CAUSES = {
    "parameters": "weights and buffers",
    "gradients": "the gradients that exist at the peak",
    "optimizer": "the optimizers' moments and sums",
    "state": "inputs, targets, and the state carried from the segment before",
    "activations": "tensors that the forward pass allocates",
    "temporary": "all other tensors that exist at the peak",
}


@with_config("fit")
def main(cfg: DictConfig) -> None:
    memory = pop_keys(cfg, *COMMAND_KEYS)["device_memory"]
    limit_bytes = None
    if memory is not None:
        limit_bytes = parse_memory(memory)
    plan = plan_run(cfg, sweeping=is_sweep())
    kind = kind_of(plan)
    admission(contract_plan(plan, kind))
    with Progress() as progress:
        progress.phase(f"{plan.variant}: predicting a step of {plan.batch.streams:,} streams")
        prediction = predict(plan)
        if limit_bytes:
            progress.phase(f"{plan.variant}: searching the largest number of streams")

            def peak_bytes(streams: int) -> int:
                changed = replace(plan, batch=replace(plan.batch, streams=streams))
                return predict(changed)["predicted_peak_bytes"]

            streams = most_streams(
                peak_bytes, limit_bytes=limit_bytes, min_streams=plan.batch.accumulate
            )
    peak = prediction["predicted_peak_bytes"]
    batch = f"{plan.batch.streams} streams of {plan.batch.segment} bytes"
    lines = [
        (
            "peak, MiB",
            cells.mib(peak).text,
            f"of a training step of {batch}, {prediction['backend']}",
        )
    ]
    lines += [
        (f"{cause}, MiB", cells.mib(prediction["by_cause"][cause]).text, about)
        for cause, about in CAUSES.items()
    ]
    if limit_bytes:
        fits = "yes" if peak <= limit_bytes else "no"
        lines += [
            ("fits", fits, f"in {limit_bytes / 2**20:,.0f} MiB"),
            ("most streams", f"{streams:,}", f"that fit; up to {MAX_STREAMS:,} were tried"),
        ]
    verified = kind == "cpu" and plan.runtime.compile is not True
    title = f"Predicted memory of {plan.variant} on {kind}, {eager_plan(plan).runtime.precision}, "
    title += "within 10% of the peak of tensors" if verified else "not verified"
    columns = (Column("", numeric=False), Column(""), Column("meaning", numeric=False))
    rows = [[*map(cells.text, line)] for line in lines]
    print_table(Table(title=title, columns=columns, rows=rows, notes=[RESIDENT] * verified))


def parse_memory(value: object) -> int:
    """Return a size such as ``24GiB``, ``80GB`` or ``25769803776`` in bytes; ValueError naming
    the key."""
    try:
        return int(parse_setting(value, Annotated[ByteSize, Ge(1)], key="device_memory"))
    except ValueError as error:
        allowed = "allowed are bytes above 0, as in 24GiB (2^30), 80GB (10^9) or 25769803776"
        raise ValueError(f"device_memory={value}: {allowed}") from error


def most_streams(peak_bytes: Callable[[int], int], *, limit_bytes: int, min_streams: int) -> int:
    """Return the largest number of streams from ``min_streams`` to ``MAX_STREAMS`` whose peak is
    within the limit, or 0."""
    fitting = bisect_right(range(min_streams, MAX_STREAMS + 1), limit_bytes, key=peak_bytes)
    if fitting:
        return min_streams + fitting - 1
    return 0


def predict(plan: Plan) -> dict:
    """Predict the peak memory of a training step with a full carried state and initial parameters.
    Return ``backend``; ``by_cause``, the bytes of each of ``CAUSES``; and the sum of these,
    ``predicted_peak_bytes``. ValueError if memory depends on values of tensors, which fake tensors
    lack."""
    device = torch.device(kind_of(plan))
    if plan.objective.encoder == "frozen":  # ``MemTracker`` needs a gradient of each parameter
        raise ValueError("objective.encoder=frozen: cannot be predicted; allowed is trained")
    plan = eager_plan(plan)
    with torch.random.fork_rng(devices=[]):
        model = plan.make_model(classes=2)
        backend = backend_of(model, Runtime(device=device, precision="float32", compile=False))
        if device.type != "cpu":  # a GPU's kernels have no code for a CPU's fake tensors
            backend = "plain" if backend == "plain" else "chunked"
            plan = replace(plan, runtime=replace(plan.runtime, backend=backend))
            model = plan.make_model(classes=2)
    try:
        # ``from_tensor`` keeps shared tensors shared
        with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    tensors |= {
                        name: fake_mode.from_tensor(t)
                        for name, t in tensors.items()
                        if t is not None
                    }
            by_cause = _peak_by_cause(plan, model)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reason = f"its memory depends on values of tensors ({error.func})"
        raise ValueError(f"variant={plan.variant}: {reason}") from error
    return {
        "backend": backend,
        "by_cause": by_cause,
        "predicted_peak_bytes": sum(by_cause.values()),
    }


def kind_of(plan: Plan) -> str:
    """Return the kind of device that the prediction is for: ``cpu`` or ``cuda``."""
    if plan.runtime.device.partition(":")[0] == "cpu":
        return "cpu"
    return "cuda"


def eager_plan(plan: Plan) -> Plan:
    """Return the plan without compilation and on a CPU, at the precision that its own device
    would use."""
    runtime = plan.runtime
    if kind_of(plan) == "cpu":
        runtime = resolve_auto(runtime)
    elif runtime.precision == "auto":
        runtime = replace(runtime, precision="bfloat16")
    return replace(plan, runtime=replace(runtime, device="cpu", compile=False))


def _peak_by_cause(plan: Plan, model: LanguageModel) -> dict[str, int]:
    """Return the bytes of each of ``CAUSES`` at the peak of a training step: the second one, under
    ``MemTracker``."""
    batch = plan.batch
    span = plan.model.span
    runtime = Runtime(device=CPU, precision=plan.runtime.precision, compile=False)
    optimizers = plan.make_optimizers(model)
    tracker = MemTracker()
    forward = runtime.forward(model)

    def tracked(*args, **kwargs):
        # the tracker allows one forward pass of a model; accumulation makes several
        tracker.reset_mod_stats()
        return forward(*args, **kwargs)

    inputs, targets = (
        torch.zeros(batch.streams, batch.segment, dtype=torch.int64) for _ in range(2)
    )
    if model.pooled:
        targets = targets[:, :1]
    past = torch.zeros(batch.streams, max(span, batch.segment), dtype=torch.int64)
    state = None
    if batch.carry:
        state = full_state(model, past, span=span, runtime=runtime)

    def step(state: State) -> State:
        """Return an update, without the projection of parameters, because fake ones have no
        values."""
        accumulate = batch.accumulate
        _, next_state = train_step(
            model, None, runtime, inputs, targets, state, accumulate=accumulate, forward=tracked
        )
        optimizers.step(0.5, finite=True)
        optimizers.zero_grad()
        if batch.carry:
            return next_state
        return None

    state = step(state)  # the first step allocates the optimizers' state
    del past
    tracker.track_external(
        model, *optimizers.optimizers.values(), inputs, targets, *tensors_of(state)
    )
    state_bytes = tracker.get_tracker_snapshot()[CPU]["Optstate"]
    with tracker:
        step(state)
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    # Optstate includes temporary tensors of the optimizers
    optimizer_bytes = min(state_bytes, peak["Optstate"])
    return {
        "parameters": peak["Parameter"] + peak["Buffer"],
        "gradients": peak["Gradient"],
        "optimizer": optimizer_bytes,
        "state": peak["Other"],
        "activations": peak["Activation"],
        "temporary": peak["Temp"] + peak["Optstate"] - optimizer_bytes,
    }


if __name__ == "__main__":
    run_command(main)
