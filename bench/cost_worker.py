"""Measures for ``bench.cost`` and ``bench.peers`` in its own process: a plan's training update, scoring and generation.

``harness.loop.update.Update`` runs on bytes of the corpus at a learning rate of 0, so that weights and spans stay.
Weights have noise: hardware is faster on zeros, and a matrix of zeros stops the gradients of all that is before it.
"""

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from bench.planning import provenance
from bench.turns import times
from harness.count.flops import count_flops, forward_flops_per_byte
from harness.count.memory import PeakMemory, optimizer_bytes, state_bytes, tensor_bytes
from harness.data import corpora
from harness.data.streams import Streams
from harness.device import random_state, runtime
from harness.device.runtime import Runtime
from harness.loop import summary
from harness.loop.select_backend import with_backend
from harness.loop.trainer import backend_of
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.plan.build import Plan, plan_run
from variants.contract import Spans, State

WARM_STEPS, MEASURED_STEPS, REHEARSED_BYTES = 2, 3, 16
MIDDLE = 0.5
"""Fraction of the budget, for the schedule; the rate is 0 at any fraction."""
NOISE = 0.02
"""Standard deviation of the noise, usual for initial weights."""
ONCE = 2**20
"""Numbers drawn at a time, to keep the noise of a large table out of the memory peak."""
LEARNED = yaml.safe_load((Path(__file__).parent / "learned_spans.yaml").read_text(encoding="utf-8"))["spans"]
LEARNED = [sorted(layer, reverse=True) for layer in LEARNED]  # longest first: then few heads have the longest, too
"""Spans of a trained run in keys, a list for each layer with a number for each head."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A measurement as plain values, to be sent to another process.

    Attributes:
        config: the resolved configuration of a training run; with ``batch.carry`` the streams carry a full state.
        spans: values of learned spans: those of a trained run, or the configuration's initial ones.
        command: the command as typed.
        peer: a peer of ``bench.peers`` that replaces the plan's model.
    """

    config: dict
    spans: Literal["learned", "initial"] = "initial"
    command: str = ""
    peer: str | None = None


class Subject:
    """Takes one measurement per call: identity, build, and memory before the others, which leave freed blocks.
    ``memory`` names its methods, in order; ``timed`` the quantities of ``times``; ``kind`` the kind of its rows."""

    kind = "cost"
    memory = ("inference_memory", "train_memory")
    timed = ("train", "evaluate", "generate")

    def __init__(self, task: Task):
        self.task, self.plan = task, plan_run(OmegaConf.create(task.config))
        self.runtime = runtime.start(self.plan.runtime)
        self.plan = with_backend(self.plan, self.runtime) if task.peer is None else self.plan
        self.device, b = self.runtime.device, self.plan.batch
        self.span, self.warm = self.plan.model.span, b.carry and task.peer is None
        self.corpus, self.steps = corpora.load(**self.plan.data), 0
        train = self.corpus.splits["train"]
        self.batches = Streams(train, streams=b.streams, segment=b.segment, seed=self.plan.seed, carry=False)

    def identity(self) -> dict:
        """Provenance; on a GPU without the C library's allocator."""
        how = {"corpus": self.corpus, "runtime": self.runtime, "command": self.task.command}
        facts = provenance(self.plan, kind=self.kind, **how)
        return facts | ({"allocator": None} if self.device.type == "cuda" else {})

    def build(self) -> dict:
        """Make the model, and in stream mode the streams' past; returns ``facts``."""
        _rehearse(self.plan, self.runtime)
        self.meter = PeakMemory(self.device)  # its baseline is taken before the model exists
        random_state.seed(self.plan.seed)
        self.model = self._model().to(self.device)
        self.forward = self.runtime.forward(self.model)
        self.state = self._full_state(self._batch()[0]) if self.warm else None
        self._generated: tuple[Tensor, State] | None = None  # a stream's last byte, and its state before this byte
        self._warmed: set[str] = set()
        return self.facts()

    def facts(self) -> dict:
        """Backends, sizes and spans."""
        m = self.model
        return {
            "backend": backend_of(m, self.runtime),
            "evaluation_backend": backend_of(m, self.runtime, training=False),
            "backend_choice": self.plan.backend_choice,
            "parameters": summary.parameters(m),
            "spans": summary.spans(m.metrics({})),
            "spans_from": self.task.spans if learned_spans(m) else None,
        }

    def inference_memory(self) -> dict:
        """Peak memory of an evaluation, before anything for training exists, and size of a stream's carried state."""
        self._evaluate()
        gc.collect()
        self.meter.reset()
        self._evaluate()
        self.runtime.synchronise()
        peak = self.meter.read()
        self._generate()
        carried, self._generated = state_bytes(self._generated[1]), None
        return {"inference_peak_bytes": peak.bytes, "state_bytes": carried}

    def train_memory(self) -> dict:
        """Peak memory of a training step, and its parts."""
        optimizers = self.plan.make_optimizers(self.model)
        optimizers.lr = 0.0
        self.update = Update(self.model, optimizers, self.runtime, accumulate=self.plan.batch.accumulate)
        peak = self.step_peak()
        sizes = {"parameter_bytes": tensor_bytes(self.model.parameters()), "gradient_bytes": self.update.gradient_bytes}
        return sizes | {"optimizer_bytes": optimizer_bytes(optimizers.optimizers.values())} | peak

    def step_peak(self) -> dict:
        """Peak memory of training steps after warm-up."""
        for number in range(WARM_STEPS + MEASURED_STEPS):
            if number == WARM_STEPS:
                self.meter.reset()
            self._train()
        self.runtime.synchronise()
        peak = self.meter.read()
        memory = {"train_peak_bytes": peak.bytes, "peak_reserved_bytes": peak.reserved_bytes}
        return memory | {"approximate": peak.approximate}

    def times(self, kind: str, *, seconds: float) -> list[float]:
        """Milliseconds of each call of ``train``, ``evaluate`` or ``generate`` within ``seconds``, at least one. The
        first round's first call is left out unless it is the only one. ``generate`` first reads the prompt untimed."""
        call: Callable = {"train": self._train, "evaluate": self._evaluate, "generate": self._generate}[kind]
        if kind == "generate" and self._generated is None:
            call()
        times_ms = times(call, synchronise=self.runtime.synchronise, most_seconds=seconds)
        warm = kind in self._warmed or len(times_ms) == 1
        self._warmed.add(kind)
        return times_ms if warm else times_ms[1:]

    def flops(self) -> dict:
        """Counted and needed FLOPs, per byte of a warm forward pass and of the timed step."""
        segment = self.plan.batch.segment
        with self.runtime.autocast():
            warm = forward_flops_per_byte(self.model, segment=segment, max_bytes=self.span + 4 * segment)
        eager, accumulate = dataclasses.replace(self.runtime, compile=False), self.plan.batch.accumulate
        update = Update(self.model, self.update.optimizers, eager, accumulate=accumulate)
        backward = partial(update.gradients, *self._batch(), self.state)
        step = count_flops(backward, gradients=True)
        needed = self.model.needed_flops(segment, carried=self.span if self.warm else 0)
        self.update.optimizers.zero_grad()
        counted = {"executed_per_byte": warm.per_byte, "ideal_per_byte": self.model.ideal_flops()}
        counted |= {"training_per_byte": needed.training, "flops_estimated_3x": self.model.flops_estimated_3x()}
        return {"flops": counted | {"step": step.total, "unknown": step.unknown}}

    def _model(self) -> LanguageModel:
        model = self.plan.make_model()
        shake_(model)
        if self.task.spans == "learned":
            place_spans(model, heads=self.plan.model.heads)
        return model

    def _batch(self) -> tuple[Tensor, Tensor]:
        self.steps += 1
        return self.runtime.send(*self.batches.batch(self.steps - 1))

    def _train(self) -> None:
        inputs, targets = self._batch()
        _, after = self.update(inputs, targets, self.state, fraction=MIDDLE)
        self.state = after if self.state is not None else None

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        inputs, targets = self._batch()
        with self.runtime.autocast():
            logits = self.forward(inputs, self.state).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _generate(self) -> None:
        """Generate the likeliest next byte of one stream."""
        self.model.eval()
        if self._generated is None:
            inputs = self._batch()[0][:1]
            self._generated = inputs[:, -1:], self._full_state(inputs)
        byte, state = self._generated
        with self.runtime.autocast():
            out = self.model(byte, state)
        self._generated = out.logits.argmax(-1), out.state

    def _full_state(self, inputs: Tensor) -> State:
        return full_state(self.model, inputs, span=self.span, where=self.runtime)


@torch.no_grad()
def full_state(model: LanguageModel, inputs: Tensor, *, span: int, where: Runtime) -> State:
    """The state of streams that have read ``inputs [B, T]`` repeatedly, ``span`` bytes or more."""
    model.eval()
    state = None
    for _ in range(0, span, inputs.shape[1]):
        with where.autocast():
            state = model(inputs, state).state
    return state


def _rehearse(plan: Plan, where: Runtime) -> None:
    """Run a counted step of 16 bytes on another model first, so that no peak contains the libraries that it loads."""
    model = plan.make_model().to(where.device)
    tokens = torch.zeros(1, REHEARSED_BYTES, dtype=torch.int64, device=where.device)
    update = Update(model, plan.make_optimizers(model), where)
    count_flops(lambda: update(tokens, tokens, None, fraction=MIDDLE), gradients=True)
    forward_flops_per_byte(model, segment=REHEARSED_BYTES, max_bytes=REHEARSED_BYTES)


@torch.no_grad()
def shake_(model: nn.Module) -> None:
    """Add normal noise, the same at every call, to all parameters but ``Spans``, and project them into their range."""
    spans = {p for part in model.modules() if isinstance(part, Spans) for p in part.parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for parameter in model.parameters() if parameter not in spans):
        for piece in parameter.view(-1).split(ONCE):
            piece.add_(NOISE * torch.randn(piece.shape, generator=generator).to(piece))
    if hasattr(model, "project_"):
        model.project_()


def learned_spans(model: LanguageModel) -> list[Spans]:
    """Parts of sublayers with learned spans."""
    parts = [part for _, sublayer in model.sublayers() for part in sublayer.modules() if isinstance(part, Spans)]
    return [part for part in parts if part.placeable]


def place_spans(model: LanguageModel, *, heads: int) -> None:
    """Set learned spans to ``LEARNED`` keys, at most the model's span. Layers and heads repeat if it has more."""
    for number, part in enumerate(learned_spans(model)):
        keys = LEARNED[number % len(LEARNED)]
        part.place_([keys[head % len(keys)] for head in range(heads)])
