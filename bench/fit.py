"""Will it fit? ``python -m bench.fit variant=V model=base device_memory=24GiB``, without the hardware.

The trainer's very update runs on fake tensors, which have shapes and no data, under torch's ``MemTracker``: peak memory by
cause, and the largest batch or span that stays within the device's memory. The model is built on real tensors and
projected first, because spans need values; learned spans are as they start, or ``spans``.

Predicted is one process and code that is not compiled; on a CPU within 10% of the measured peak (``tests/test_fit.py``).
For a GPU (``runtime.device`` is any word but ``cpu``) it is what a CPU keeps at the GPU's precision, but of attention what
a kernel keeps: not verified, and its row says so. In no figure: what kernels, libraries and allocators take for themselves
(a CUDA context is about half a GiB), and on a CPU the corpus and freed blocks that the C library keeps.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from bench import CONF
from bench.cost_worker import full_state
from bench.planning import own_keys, provenance, typed_command
from bench.report.columns import for_terminal
from bench.report.tables_costs import fit_tables
from bench.rows import RowFile
from bench.weights import place_spans
from harness.compose.cli import run_command
from harness.count.memory import tensors_of
from harness.data import corpora
from harness.device import choice
from harness.device.runtime import Runtime
from harness.loop.admission import admission
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.plan.build import Plan, hydra_facts, plan_run
from harness.plan.settings import checked
from harness.plan.small import of_mechanism
from harness.record.table import print_table

OWN = ("hardware", "device_memory", "largest", "spans", "devices")
CPU = torch.device("cpu")
LARGE = MAX_SIZE = 2**20
"""Elements from which on a parameter gets no data when the model is built; streams or span at which a search ends."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="fit")
def main(cfg: DictConfig) -> None:
    keys = own_keys(cfg, *OWN)
    plan = plan_run(cfg, **hydra_facts())
    kind = kind_of(plan)
    name, limit_bytes = device_limit(keys, kind=kind)
    names = [keys["largest"]] if isinstance(keys["largest"], str) else keys["largest"] or []
    if not isinstance(names, list) or not set(names) <= {"streams", "span"}:
        raise ValueError(f"largest={keys['largest']}: allowed are streams, span, [streams,span] and []")
    spans = checked(keys["spans"], list | None, key="spans")
    admission(of_mechanism(plan, kind))
    file, prediction = RowFile(Path(cfg.outputs), verb="fit"), predict(plan, spans=spans)

    def largest(size: str) -> int | None:
        least = plan.batch.accumulate if size == "streams" else 1
        if size not in names or not limit_bytes:
            return None
        return search(
            lambda number: predict(plan, spans=spans, **{size: number})["predicted_peak_bytes"],
            limit_bytes=limit_bytes,
            least=least,
        )

    runtime = Runtime(device=CPU, precision=eager(plan).runtime.precision, compile=False)
    row = provenance(plan, kind="fit", corpus=corpora.load(**plan.data), runtime=runtime, command=typed_command("fit"))
    verified = kind == "cpu" and plan.runtime.compile is not True
    row |= {"device": f"{name}, {'predicted' if verified else 'not verified'}", "device_kind": kind, **prediction}
    row |= {"device_memory_bytes": limit_bytes, "verified": verified}
    row["largest"] = {size: largest(size) for size in ("streams", "span")}
    (table,) = fit_tables([file.append(row)])
    print_table(for_terminal(table))
    if names and not limit_bytes:
        print("device_memory=null: the largest that fits is sought where it is set, as in device_memory=24GiB")
    print(f"rows: {file.path}")


def kind_of(plan: Plan) -> str:
    """``cpu`` or ``cuda``: what ``runtime.device`` is predicted as."""
    return "cpu" if plan.runtime.device.partition(":")[0] == "cpu" else "cuda"


def device_limit(keys: dict, *, kind: str) -> tuple[str, int | None]:
    """The device's name and the bytes of its memory, where the verb's own keys say; ValueError where they are at odds."""
    hardware, devices = keys["hardware"], keys["devices"]
    if hardware is not None and (hardware not in devices or kind == "cpu"):
        allowed = "null with runtime.device=cpu" if kind == "cpu" else f"null, {', '.join(devices)}"
        raise ValueError(f"hardware={hardware}: allowed are {allowed}")
    device = devices[hardware] if hardware else {"name": kind, "memory": None}
    memory = device["memory"] if keys["device_memory"] is None else keys["device_memory"]
    return device["name"], None if memory is None else parse_memory(memory)


def parse_memory(value: object) -> int:
    """Bytes of ``24GiB``, ``80GB``, ``24e9`` or a number; ValueError naming the key."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*(?:([KMGT]?)(I?)B)?\s*", str(value), re.IGNORECASE)
    unit = (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()) if match else 0
    if isinstance(value, bool) or not match or not 1 <= float(match[1]) * unit < 2**63:
        raise ValueError(
            f"device_memory={value}: allowed are bytes above 0, as in 24GiB (2^30), 80GB (10^9) or 25769803776"
        )
    return int(float(match[1]) * unit)


def search(peak_bytes: Callable[[int], int], *, limit_bytes: int, least: int = 1, most: int = MAX_SIZE) -> int:
    """The largest size from ``least`` to ``most`` whose peak stays within the limit and that of the next does not; 0 if
    none. Memory is nearly affine in the size: each guess lies on the line through the two last ones; every fourth halves
    or doubles, which ends the search whatever the shape."""
    peaks, low, high, guess = {0: 0}, least - 1, most + 1, least
    while high - low > 1:
        peaks[guess] = peak_bytes(guess)
        low, high = (guess, high) if peaks[guess] <= limit_bytes else (low, guess)
        *_, (before, before_bytes), (last, last_bytes) = peaks.items()
        slope = (last_bytes - before_bytes) / (last - before)
        guess = last + int((limit_bytes - last_bytes) // slope) if slope > 0 else most
        if len(peaks) % 4 == 0:
            guess = 2 * low if high > most else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return 0 if low < least else low


def predict(plan: Plan, *, spans: Sequence[float] | None = None, **sizes: int) -> dict:
    """Peak memory of a training step in warm state at initial parameters, as a row has it: ``split`` is by cause.

    Args:
        spans: keys that the heads of each layer see, where they learn that, in place of where they start.
        sizes: ``streams``, ``segment`` or ``span`` in place of the plan's own.

    Raises:
        ValueError: naming the key, for what cannot be predicted.
    """
    for key, value in sizes.items():
        section = "model" if key == "span" else "batch"
        plan = dataclasses.replace(plan, **{section: dataclasses.replace(getattr(plan, section), **{key: value})})
    device, plan = torch.device(kind_of(plan)), eager(plan)
    model, asked = build(plan), plan.runtime.backend
    if spans is not None:
        place_spans(model, [spans], heads=plan.model.heads)
    context = nullcontext() if device.type == "cpu" else on_gpu(model, asked=asked)
    try:
        with context, FakeTensorMode(allow_non_fake_inputs=True):
            make_fake(model)
            split = _split(plan, model)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"variant={plan.variant}: its memory depends on values that are not known before it runs ({error.func})"
        ) from error
    backends = {sublayer.backend(device, training=True) for _, sublayer in model.sublayers()}
    backend = "+".join(sorted(backends - {"plain"} or backends))
    if device.type != "cpu" and asked != "chunked":
        backend = backend.replace("chunked", "kernel")  # for which it stands
    sizes = {"streams": plan.batch.streams, "segment": plan.batch.segment, "span": plan.model.span}
    return {**sizes, "backend": backend, "split": split, "predicted_peak_bytes": sum(split.values())}


def eager(plan: Plan) -> Plan:
    """The plan on a CPU and not compiled, at the precision that ``auto`` means on its device."""
    runtime = plan.runtime
    if kind_of(plan) == "cpu":
        runtime = choice.settled(runtime)
    elif runtime.precision == "auto":
        runtime = dataclasses.replace(runtime, precision="bfloat16")
    return dataclasses.replace(plan, runtime=dataclasses.replace(runtime, device="cpu", compile=False))


@torch.random.fork_rng(devices=[])
def build(plan: Plan) -> LanguageModel:
    """The plan's model with its spans' real values, and without data for large parameters, where that is possible."""
    try:
        with LargeWithoutData():
            return plan.make_model()
    except (NotImplementedError, RuntimeError):  # a mechanism that reads the values of a large parameter when built
        return plan.make_model()


class LargeWithoutData(TorchDispatchMode):
    """Makes large tensors on the meta device: a table of a gigabyte is then built in no time, and spans have values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        makes = args and isinstance(args[0], list | tuple) and any(a.name == "device" for a in func._schema.arguments)
        if makes and all(isinstance(n, int) for n in args[0]) and prod(args[0]) >= LARGE:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def on_gpu(model: LanguageModel, *, asked: str) -> AbstractContextManager:
    """Takes for each sublayer the code that a GPU has, whatever device the fake tensors are on: attention's kernels are one
    operation, unless ``runtime.backend`` is ``chunked`` or ``plain``."""
    for _, sublayer in model.sublayers():
        name = sublayer.backend(torch.device("cuda"), training=True)
        name = "chunked" if name in ("fused", "kernel") else name
        sublayer.backend = lambda device, *, training, name=name: name
    if asked == "chunked":
        return nullcontext()
    kernel = partial(resolve_name("variants.kernels.operation:attend"), "kernel")
    return patch("variants.kernels.chunked.attend", kernel)


def make_fake(model: nn.Module) -> None:
    """Parameters and buffers without data, shared ones still shared; call it under a ``FakeTensorMode``."""
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
    model.project_ = lambda: None  # on the instance: it was projected, and fake parameters have no values
    optimizers = plan.make_optimizers(model)
    optimizers.may_update = lambda: True  # there is no value to ask for
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
        tracker.reset_mod_stats()  # it follows one forward of a model, and accumulation makes several
        return forward(*args, **kwargs)

    update.forward = tracked
    with tracker:
        update(inputs, targets, state, fraction=0.5)
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    optimizer_bytes = min(state_bytes, peak["Optstate"])  # what an update makes for itself is counted there, too
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
