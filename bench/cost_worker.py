"""Measurements of one entry of ``bench.cost`` or ``bench.peers``, in a process of its own: a plan's
training step (``harness.loop.step.train_step`` on bytes of the corpus), evaluation and generation.

The learning rate is 0, so that weights and spans do not change. Noise is added to the initial
weights, because hardware is faster on zeros, and because a weight matrix of zeros passes no
gradient to the layers before it."""

import dataclasses
import gc
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from bench.planning import row_digests
from bench.turns import time_calls
from harness.check.select_backend import with_backend
from harness.count.flops import count_flops, forward_flops_per_byte
from harness.count.memory import PeakMemory, optimizer_bytes, state_bytes, tensor_bytes
from harness.data import corpora
from harness.data.streams import Streams
from harness.device import seeds
from harness.device.runtime import Runtime
from harness.device.torch_settings import configure_torch
from harness.loop import summary
from harness.loop.step import train_step
from harness.loop.trainer import backend_of
from harness.model import LanguageModel
from harness.plan.build import Plan, literal, plan_run
from variants.contract import Spans, State, map_state

# training steps before and during the measurement of peak memory
WARMUP_STEPS = 2
MEASURED_STEPS = 3
WARMUP_BYTES = 16  # bytes of the step that loads libraries
# of the budget, for the schedule; has no effect, because the learning rate is 0
SCHEDULE_FRACTION = 0.5
NOISE = 0.02  # standard deviation, as usual for initial weights
NOISE_CHUNK = 2**20
"""Elements whose noise is drawn at a time, so that the noise of a large table does not raise the
memory peak."""
_LEARNED = yaml.safe_load(Path(__file__).with_name("learned_spans.yaml").read_text())
LEARNED_SPANS = [sorted(layer, reverse=True) for layer in _LEARNED["spans"]]
"""Spans of a trained run in keys: a list for each layer with one span for each head, the longest
first, which a model with fewer heads gets."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A measurement as plain values, to be sent to another process."""

    # the resolved configuration of a training run; with ``batch.carry`` the streams carry a full
    # state
    config: dict
    # values of learned spans: a trained run's, or the configuration's
    spans: Literal["learned", "initial"] = "initial"
    command: str = ""  # the command line as typed
    # key of ``peer_workers.PACKAGES``, to measure its model instead of the configuration's
    peer: str | None = None


class CostWorker:
    """Makes one measurement per method, called in this order: ``identity``, ``build``, the methods
    named by ``memory``, and last those whose freed blocks would raise a peak."""

    kind = "cost"  # of its rows
    memory = ("inference_memory", "train_memory")

    def __init__(self, task: Task):
        self.task = task
        plan = plan_run(literal(task.config))
        self.runtime = configure_torch(plan.runtime)
        if task.peer is None:
            plan = with_backend(plan, self.runtime)
        self.plan = plan
        self.device = self.runtime.device
        b = plan.batch
        self.span = plan.model.span
        self.carry = b.carry and task.peer is None
        self.corpus = corpora.load(**vars(plan.data))
        train = self.corpus.splits["train"]
        streams = Streams(train, streams=b.streams, segment=b.segment, seed=plan.seed, carry=False)
        self.batches = map(streams.batch, count())

    def identity(self) -> dict:
        """Return the row's provenance: plan, code, data and machine. On a GPU ``allocator`` is
        None, because it is a setting of the CPU's memory."""
        plan = self.plan
        origin = summary.origin(
            plan,
            corpus=self.corpus,
            runtime=self.runtime,
            command=self.task.command,
            measuring=True,
            **row_digests(plan.config, trust=plan.trust),
        )
        facts = {"kind": self.kind, "config": plan.config, **vars(origin)}
        if self.device.type == "cuda":
            facts["allocator"] = None
        return facts

    def build(self) -> dict:
        """Make the model, and with ``batch.carry`` the state that the streams carry; return
        ``facts``."""
        _load_libraries(self.plan, self.runtime)
        self.meter = PeakMemory(self.device)  # its baseline is taken before the model exists
        seeds.seed(self.plan.seed)
        self.model = self._model().to(self.device)
        self.forward = self.runtime.forward(self.model)
        self.state = self._full_state(self._batch()[0]) if self.carry else None
        self._prompted: State = None  # of one stream that has read a prompt
        # last byte of each stream, and the state before these
        self._generated: tuple[Tensor, State] | None = None
        self._timed_before: set[str] = set()
        return self.facts()

    def facts(self) -> dict:
        """Return the row's backends, numbers of parameters and spans."""
        model = self.model
        return {
            "backend": backend_of(model, self.runtime),
            "evaluation_backend": backend_of(model, self.runtime, training=False),
            "backend_choice": self.plan.backend_choice,
            "parameters": summary.parameters(model),
            "spans": summary.spans(model.metrics({})),
            "spans_from": self.task.spans if learned_spans(model) else None,
        }

    def inference_memory(self) -> dict:
        """Return the peak bytes of an evaluation, before gradients and optimizers exist, and the
        bytes of one stream's state."""
        self._evaluate()
        gc.collect()
        self.meter.reset()
        self._evaluate()
        self.runtime.synchronise()
        peak = self.meter.read()
        carried = 0
        if self.plan.objective.predicts_next:
            self._start_generation(streams=1)
            self._generate()
            carried = state_bytes(self._generated[1])
        self._prompted = self._generated = None
        return {"inference_peak_bytes": peak.bytes, "state_bytes": carried}

    def train_memory(self) -> dict:
        """Return the peak bytes of a training step, and the bytes of parameters, gradients and
        optimizer state."""
        optimizers = self.plan.make_optimizers(self.model)
        optimizers.lr = 0.0
        self.optimizers = optimizers
        peak = self.step_peak()
        return {
            "parameter_bytes": tensor_bytes(self.model.parameters()),
            "gradient_bytes": optimizers.gradient_bytes,
            "optimizer_bytes": optimizer_bytes(optimizers.optimizers.values()),
            **peak,
        }

    def step_peak(self) -> dict:
        """Return the peak bytes of ``MEASURED_STEPS`` training steps after ``WARMUP_STEPS``
        others."""
        for step in range(WARMUP_STEPS + MEASURED_STEPS):
            if step == WARMUP_STEPS:
                self.meter.reset()
            self._train()
        self.runtime.synchronise()
        peak = self.meter.read()
        torch.cuda.empty_cache()  # which the processes of other entries need; nothing on a CPU
        return {
            "train_peak_bytes": peak.bytes,
            "peak_reserved_bytes": peak.reserved_bytes,
            "approximate": peak.approximate,
        }

    def times(self, quantity: str, *, seconds: float) -> list[float]:
        """Return milliseconds of each training step (``train``), evaluation (``evaluate``) or
        generated byte of one stream (``generate``) or of each of 64 (``generate_64``) within
        ``seconds``, at least one. If others follow it, the first call is dropped of a quantity's
        first round and, on a GPU, where it allocates memory, of each round."""
        name, _, streams = quantity.partition("_")
        call = {"train": self._train, "evaluate": self._evaluate, "generate": self._generate}[name]
        if name == "generate":
            self._start_generation(streams=int(streams or 1))
        times_ms = time_calls(call, synchronise=self.runtime.synchronise, max_seconds=seconds)
        self._generated = None
        is_first = quantity not in self._timed_before or self.device.type == "cuda"
        self._timed_before.add(quantity)
        torch.cuda.empty_cache()
        if is_first and len(times_ms) > 1:
            return times_ms[1:]
        return times_ms

    def flops(self) -> dict:
        """Return FLOPs per byte: executed and ideal ones of a forward pass with a full state, and
        those that the training step needs. ``step`` has the executed FLOPs of a whole training
        step, without the optimizer's."""
        segment = self.plan.batch.segment
        accumulate = self.plan.batch.accumulate
        with self.runtime.autocast():
            sizes = {"segment": segment, "max_bytes": self.span + 4 * segment}
            forward = forward_flops_per_byte(self.model, **sizes, text=self.corpus.splits["valid"])
        eager = dataclasses.replace(self.runtime, compile=False)
        gradients = partial(
            train_step, self.model, None, eager, *self._batch(), self.state, accumulate=accumulate
        )
        step = count_flops(gradients, gradients=True)
        needed = self.model.needed_flops(segment, carried=self.span if self.carry else 0)
        self.optimizers.zero_grad()
        counted = {
            "executed_per_byte": forward.per_byte,
            "ideal_per_byte": self.model.ideal_flops(text=segment),
            "training_per_byte": needed.training,
            "flops_estimated_3x": self.model.flops_estimated_3x(),
            "step": step.total,
            "unknown": step.unknown,
        }
        return {"flops": counted}

    def _model(self) -> LanguageModel:
        model = self.plan.make_model(classes=len(self.corpus.classes))
        add_noise_(model)
        if self.task.spans == "learned":
            place_spans(model, heads=self.plan.model.heads)
        return model

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets; a text has any of the classes, and no padding."""
        inputs, targets = next(self.batches)
        if self.plan.objective.name == "classify":
            targets = targets[:, :1] % self.model.head.out_features
        return self.runtime.to_device(inputs, targets)

    def _train(self) -> None:
        inputs, targets = self._batch()
        _, state = train_step(
            self.model,
            self.optimizers,
            self.runtime,
            inputs,
            targets,
            self.state,
            fraction=SCHEDULE_FRACTION,
            accumulate=self.plan.batch.accumulate,
        )
        if self.state is not None:
            self.state = state

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        inputs, targets = self._batch()
        with self.runtime.autocast():
            logits = self.forward(inputs, self.state).logits
        F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def _start_generation(self, *, streams: int) -> None:
        """Make ``streams`` streams that have read the same prompt, and end in different bytes."""
        self.model.eval()
        if self._prompted is None:
            self._prompted = self._full_state(self._batch()[0][:1])
        last = torch.arange(streams, device=self.device)[:, None] % self.plan.data.vocabulary
        self._generated = (
            last,
            map_state(lambda s: s.repeat_interleave(streams, dim=0), self._prompted),
        )

    @torch.no_grad()
    def _generate(self) -> None:
        """Generate the most probable next byte of each stream."""
        last, state = self._generated
        with self.runtime.autocast():
            out = self.model(last, state)
        self._generated = out.logits.argmax(-1), out.state

    def _full_state(self, inputs: Tensor) -> State:
        return full_state(self.model, inputs, span=self.span, runtime=self.runtime)


@torch.no_grad()
def full_state(model: LanguageModel, inputs: Tensor, *, span: int, runtime: Runtime) -> State:
    """Return the state of streams that have read ``inputs [B, T]`` repeatedly, ``span`` bytes or
    more in all."""
    model.eval()
    state = None
    for _ in range(0, span, inputs.shape[1]):
        with runtime.autocast():
            state = model(inputs, state).state
    return state


def _load_libraries(plan: Plan, runtime: Runtime) -> None:
    """Load libraries by counting the FLOPs of a small step of a second model, so that they raise
    no measured peak."""
    model = plan.make_model().to(runtime.device)
    tokens = torch.zeros(1, WARMUP_BYTES, dtype=torch.int64, device=runtime.device)
    optimizers = plan.make_optimizers(model)
    step = partial(
        train_step, model, optimizers, runtime, tokens, tokens, None, fraction=SCHEDULE_FRACTION
    )
    count_flops(step, gradients=True)
    forward_flops_per_byte(model, segment=WARMUP_BYTES, max_bytes=WARMUP_BYTES)


@torch.no_grad()
def add_noise_(model: nn.Module) -> None:
    """Add normal noise, equal in every call, to all parameters but those of ``Spans``; then
    project the parameters."""
    spans = {p for part in model.modules() if isinstance(part, Spans) for p in part.parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for parameter in model.parameters() if parameter not in spans):
        for chunk in parameter.view(-1).split(NOISE_CHUNK):
            chunk.add_(NOISE * torch.randn(chunk.shape, generator=generator).to(chunk))
    if hasattr(model, "project_"):
        model.project_()


def learned_spans(model: LanguageModel) -> list[Spans]:
    """Return the ``Spans`` modules whose spans are learned lengths, one for each head, in the order
    of the sublayers."""
    return [
        part
        for _, sublayer in model.sublayers()
        for part in sublayer.modules()
        if isinstance(part, Spans) and part.placeable
    ]


def place_spans(model: LanguageModel, *, heads: int) -> None:
    """Set learned spans to ``LEARNED_SPANS``, clipped to the model's span. For more layers or
    heads they repeat."""
    for part, spans in zip(learned_spans(model), cycle(LEARNED_SPANS)):
        part.place_([*islice(cycle(spans), heads)])
