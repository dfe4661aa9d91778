"""Will it fit? ``python -m bench.fit variant=V model=base device_memory=24GiB``, without the hardware.

The trainer's update runs on fake tensors, which have shapes but no data, under torch's ``MemTracker``. This gives peak
memory by cause, and the largest batch within the device's memory. Learned spans have their initial values.

The prediction is for one process, not compiled. On a CPU it is within 10% of the measured peak (``tests/test_fit.py``).
For a GPU (any ``runtime.device`` but ``cpu``) it is a CPU's memory at the GPU's precision, with chunked attention in
place of kernels. This is not verified, as the table says. Left out: memory of kernels, libraries and allocators (a CUDA
context is about half a GiB), and on a CPU the corpus and freed blocks of the C library.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated

import hydra
import torch
from annotated_types import Ge
from omegaconf import DictConfig
from pydantic import ByteSize
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed._tools.mem_tracker import MemTracker

from bench import CONF
from bench.cost_worker import full_state
from bench.planning import own_keys
from harness.compose.cli import run_command
from harness.count.memory import tensors_of
from harness.device.runtime import Runtime, resolve_auto
from harness.loop.admission import admission
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.plan.build import Plan, hydra_arguments, plan_run
from harness.plan.settings import parse_setting
from harness.plan.small import contract_plan
from harness.record import cells
from harness.record.table import Column, Table, print_table

VERB_KEYS = ("device_memory", "devices")
CPU = torch.device("cpu")
MOST_STREAMS = 2**12
"""The search for the most streams ends here."""
CAUSES = {
    "parameters": "weights and buffers",
    "gradients": "those that are there at the peak",
    "optimizer": "moments, momentum, sums",
    "state": "the bytes that are read, and the streams' past, carried in",
    "activations": "what the forward pass makes",
    "temporary": "all else alive at the peak",
}


@hydra.main(version_base="1.3", config_path=CONF, config_name="fit")
def main(cfg: DictConfig) -> None:
    memory = own_keys(cfg, *VERB_KEYS)["device_memory"]
    limit_bytes = None if memory is None else parse_memory(memory)
    plan = plan_run(cfg, **hydra_arguments())
    kind = kind_of(plan)
    admission(contract_plan(plan, kind))
    prediction = predict(plan)
    peak, batch = prediction["predicted_peak_bytes"], f"{plan.batch.streams} streams of {plan.batch.segment} bytes"
    lines = [("peak, MiB", cells.mib(peak).text, f"of a training step of {batch}, {prediction['backend']}")]
    lines += [(f"{cause}, MiB", cells.mib(prediction["split"][cause]).text, what) for cause, what in CAUSES.items()]
    if limit_bytes:
        lines.append(("fits", "yes" if peak <= limit_bytes else "no", f"in {limit_bytes / 2**20:,.0f} MiB"))
        how = {"limit_bytes": limit_bytes, "least": plan.batch.accumulate}
        most = most_streams(lambda streams: predict(plan, streams=streams)["predicted_peak_bytes"], **how)
        lines.append(("most streams", f"{most:,}", f"that fit; sought to {MOST_STREAMS:,}"))
    verified = kind == "cpu" and plan.runtime.compile is not True
    title = f"Predicted memory of {plan.variant} on {kind}, {eager(plan).runtime.precision}, "
    title += "within 10% of the measured peak" if verified else "not verified"
    columns = (Column("", numeric=False), Column(""), Column("what it is", numeric=False))
    rows = tuple(tuple(map(cells.text, line)) for line in lines)
    print_table(Table(name="fit", title=title, caption="", columns=columns, rows=rows))


def parse_memory(value: object) -> int:
    """Bytes of ``24GiB``, ``80GB`` or a number; ValueError naming the key."""
    try:
        return int(parse_setting(value, Annotated[ByteSize, Ge(1)], key="device_memory"))
    except ValueError as error:
        allowed = "allowed are bytes above 0, as in 24GiB (2^30), 80GB (10^9) or 25769803776"
        raise ValueError(f"device_memory={value}: {allowed}") from error


def most_streams(peak_bytes: Callable[[int], int], *, limit_bytes: int, least: int) -> int:
    """The most streams, from ``least`` to ``MOST_STREAMS``, whose peak stays within the limit; 0 if none."""
    number = bisect_right(range(least, MOST_STREAMS + 1), limit_bytes, key=peak_bytes)
    return least + number - 1 if number else 0


def predict(plan: Plan, *, streams: int | None = None) -> dict:
    """Peak memory of a training step with a full past and initial parameters, for ``streams`` or the plan's number.
    Returns ``backend``, ``split`` by ``CAUSES`` and its sum ``predicted_peak_bytes``. ValueError if not predictable."""
    batch = plan.batch if streams is None else dataclasses.replace(plan.batch, streams=streams)
    device, plan = torch.device(kind_of(plan)), dataclasses.replace(eager(plan), batch=batch)
    with torch.random.fork_rng(devices=[]):
        model = plan.make_model()
    backends = {name: sublayer.backend(device, training=True) for name, sublayer in model.sublayers()}
    if device.type != "cpu":  # a GPU's kernels have no code for a CPU's fake tensors
        backends = {name: "chunked" if code in ("fused", "kernel") else code for name, code in backends.items()}
        for name, sublayer in model.sublayers():
            sublayer.backend = lambda device, *, training, name=name: backends[name]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            make_fake(model)
            split = _split(plan, model)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reason = f"its memory depends on values of tensors ({error.func})"
        raise ValueError(f"variant={plan.variant}: {reason}") from error
    backend = "+".join(sorted({*backends.values()} - {"plain"} or {"plain"}))
    return {"backend": backend, "split": split, "predicted_peak_bytes": sum(split.values())}


def kind_of(plan: Plan) -> str:
    """``cpu`` or ``cuda``: the kind of device that the prediction is for."""
    return "cpu" if plan.runtime.device.partition(":")[0] == "cpu" else "cuda"


def eager(plan: Plan) -> Plan:
    """The plan on a CPU and not compiled, at the precision that ``auto`` means on its device."""
    runtime = plan.runtime
    if kind_of(plan) == "cpu":
        runtime = resolve_auto(runtime)
    elif runtime.precision == "auto":
        runtime = dataclasses.replace(runtime, precision="bfloat16")
    return dataclasses.replace(plan, runtime=dataclasses.replace(runtime, device="cpu", compile=False))


def make_fake(model: nn.Module) -> None:
    """Replace parameters and buffers by fake ones, still shared if they were; call this under a ``FakeTensorMode``."""
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            fakes[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: fake(tensor) for name, tensor in tensors.items() if tensor is not None}


def _split(plan: Plan, model: LanguageModel) -> dict[str, int]:
    """Bytes of each cause at the peak of a step after warm-up."""
    b, span = plan.batch, plan.model.span
    runtime = Runtime(device=CPU, precision=plan.runtime.precision, compile=False)
    model.project_ = lambda: None  # on this instance: it is already projected, and fake parameters have no values
    optimizers = plan.make_optimizers(model)
    optimizers.may_update = lambda: True  # fake gradients have no value to test
    update = Update(model, optimizers, runtime, accumulate=b.accumulate)
    inputs, targets = (torch.zeros(b.streams, b.segment, dtype=torch.int64) for _ in range(2))
    past = torch.zeros(b.streams, max(span, b.segment), dtype=torch.int64)
    state = full_state(model, past, span=span, where=runtime) if b.carry else None
    after = update(inputs, targets, state, fraction=0.5)[1]  # makes the optimizers' state
    state, past, after = after if b.carry else None, None, None
    tracker, forward = MemTracker(), update.forward
    tracker.track_external(model, *optimizers.optimizers.values(), inputs, targets, *tensors_of(state))
    state_bytes = tracker.get_tracker_snapshot()[CPU]["Optstate"]

    def tracked(*args, **kwargs):
        tracker.reset_mod_stats()  # the tracker follows one forward of a model; accumulation makes several
        return forward(*args, **kwargs)

    update.forward = tracked
    with tracker:
        update(inputs, targets, state, fraction=0.5)
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    optimizer_bytes = min(state_bytes, peak["Optstate"])  # temporary tensors of an update count as Optstate, too
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
