"""Trainer: a plan, a corpus, a device and the state of training; steps, scores and checkpoints."""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from harness.data.corpora import Corpus
from harness.device import seeds
from harness.device.compiled import compile_clock
from harness.device.runtime import Runtime
from harness.failures import Diverged
from harness.loop.state import TrainState
from harness.loop.step import train_step
from harness.model import LanguageModel
from harness.objective.causal_lm import CausalLM
from harness.objective.classify import Classify
from harness.objective.masked_lm import MaskedLM
from harness.objective.objective import Objective
from harness.optim.budget import Spent
from harness.optim.optimizers import SHARDABLE
from harness.plan.build import Plan
from harness.record.row import Train

OBJECTIVES: dict[str, type[Objective]] = {
    "causal_lm": CausalLM,
    "masked_lm": MaskedLM,
    "classify": Classify,
}


class Trainer:
    """Trains a model, in one process of a run. ``state`` is what training is at a moment; ``wait``
    adds the seconds of steps that the device has not finished. ValueError if processes cannot
    divide the work, or a split is too short to score."""

    def __init__(self, plan: Plan, corpus: Corpus, runtime: Runtime):
        self.plan = plan
        self.corpus = corpus
        self.runtime = runtime
        seeds.seed(plan.seed)
        processes = runtime.processes
        self.objective = OBJECTIVES[plan.objective.name](plan, corpus, runtime)
        self.stream = self.objective.batches
        self.model = plan.make_model(classes=len(corpus.classes))
        self.model.to(runtime.device)
        if self.model.pooled:
            self._check_streams_apart("texts of a batch are padded; allowed is")
        self.optimizers = plan.make_optimizers(self.model)
        _ = self.backend, self.evaluation_backend  # raise ValueError if one is impossible
        first_step = Spent(bytes=self.stream.size(0)[1], steps=1, flops=self._step_flops(0))
        self.state = TrainState(model=self.model, optimizers=self.optimizers, last_step=first_step)
        # Only with a budget in seconds does the host wait for each step on a device.
        self._budget_in_seconds = plan.budget.unit == "seconds"
        self._batches_on_device: dict[int, tuple[Tensor, ...]] = {}  # by step
        self._losses_on_device: list[Tensor] = []  # of steps since the last train row
        # Steps that may have diverged: the function that reads whether one did, its index and
        # learning rate.
        self._unchecked_steps: deque[tuple[Callable[[], float], int, float]] = deque()
        if processes.world_size > 1:
            self._check_division()
            # from here on only dropout draws numbers
            seeds.seed_rank(plan.seed, step=0, rank=processes.rank)

    @property
    def backend(self) -> str:
        """The code that computes attention in training."""
        return backend_of(self.model, self.runtime)

    @property
    def evaluation_backend(self) -> str:
        """The code that computes attention in scoring; without dropout a faster one may be
        possible."""
        return backend_of(self.model, self.runtime, training=False)

    @property
    def fraction(self) -> float:
        """Fraction of the budget that is spent."""
        return self.plan.budget.fraction(self.state.spent)

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.plan.budget.done(self.state.spent)

    def step(self) -> None:
        """Make one step. While the device computes it, raise Diverged if the previous step was
        not finite."""
        began = time.perf_counter()
        state = self.state
        budget = self.plan.budget
        index = state.spent.steps
        flops = self._step_flops(index)
        inputs, targets, *valid = self._batches_on_device.get(index) or self._send(index)
        self._batches_on_device = {index + 1: self._send(index + 1)}
        # The learning rate is that of the middle of the step, so that neither the first nor the
        # last is 0.
        end = state.spent + state.last_step
        middle = (budget.fraction(state.spent) + budget.fraction(end)) / 2
        with compile_clock(compiled=self.runtime.compile) as compiling:
            nats, carried = train_step(
                self.model,
                self.optimizers,
                self.runtime,
                inputs,
                targets,
                state.carried if self.stream.carried_bytes(index) else None,
                valid=valid[0] if valid else None,
                fraction=middle,
                accumulate=self.plan.batch.accumulate,
            )
        optimizers = self.optimizers
        self._unchecked_steps.append(
            (self.runtime.to_host(optimizers.found_inf), index, optimizers.learning_rate)
        )
        self._check_steps(skip_last=1)
        state.carried = None
        if self.plan.batch.carry:
            state.carried = carried
        if self._budget_in_seconds:
            self.runtime.synchronise()
        seconds = time.perf_counter() - began - compiling.seconds
        if self._budget_in_seconds:  # all processes must end at the same step
            seconds = self.runtime.processes.all_gather(seconds)[0]
        state.compile_seconds += compiling.seconds
        self._losses_on_device.append(nats)
        _, n_bytes = self.stream.size(index)
        state.last_step = Spent(bytes=n_bytes, seconds=seconds, steps=1, flops=flops)
        state.spent += state.last_step

    def _send(self, step: int) -> tuple[Tensor, ...]:
        """Send the inputs and targets of this process's streams in a step to the device, and the
        lengths of padded texts."""
        return self.runtime.to_device(*self.stream.batch(step, shard=self.runtime.processes.shard))

    def _step_flops(self, step: int) -> int:
        """Return the training FLOPs of a step, at its number of carried bytes and with the
        present spans."""
        segment, n_bytes = self.stream.size(step)
        needed = self.model.needed_flops(segment, carried=self.stream.carried_bytes(step))
        return round(needed.training * n_bytes)

    def _check_steps(self, *, skip_last: int = 0) -> None:
        """Raise Diverged for the first step whose loss or gradient was not finite. The optimizers
        have skipped its update and all later ones. The last ``skip_last`` steps are not read,
        because that would wait for the device."""
        while len(self._unchecked_steps) > skip_last:
            has_diverged, index, learning_rate = self._unchecked_steps.popleft()
            if has_diverged():
                self._unchecked_steps.clear()
                self._diverge(
                    f"step {index + 1:,} diverged at a learning rate of {learning_rate:.3g}: its "
                    "loss or a gradient is not finite. The weights are those from before this step"
                )

    def check_weights(self) -> None:
        """Wait for the device; raise Diverged if a step or a parameter was not finite."""
        self.wait()
        self._check_steps()
        distributed = self.optimizers.distributed
        parameters = self.optimizers.parameters
        nonfinite = torch.stack([~p.isfinite().all() for p in parameters.values()]).float()
        if distributed:
            nonfinite = distributed.reduce_shards(nonfinite, operation="max")
        for name, is_nonfinite in zip(parameters, nonfinite.tolist(), strict=True):
            if is_nonfinite:
                self._diverge(
                    f"an update left the parameter {name} with numbers that are not finite"
                )

    def _diverge(self, message: str) -> None:
        """Raise Diverged in all processes; the main process prints it."""
        clip = ""
        if self.optimizers.clip is not None:
            clip = f" or optim.clip={self.optimizers.clip:g}"
        with self.runtime.processes.fail_together():
            if self.runtime.processes.is_main:
                raise Diverged(f"{message}. Lower optim.lr={self.optimizers.lr:g}{clip}")

    def wait(self) -> None:
        """Wait for the device, add the waiting time to ``spent``, and read the losses of
        finished steps."""
        if not self._losses_on_device:
            return
        if not self._budget_in_seconds:
            began = time.perf_counter()
            self.runtime.synchronise()
            self.state.spent += Spent(seconds=time.perf_counter() - began)
        for nats in torch.stack(self._losses_on_device).tolist():
            self.state.nats += nats
        self.state.steps += len(self._losses_on_device)
        self._losses_on_device = []

    def progress(self) -> dict:
        """Return the keys of a row that describe progress: bytes, steps, FLOPs and seconds of
        training so far."""
        self.wait()
        spent = self.state.spent
        train_bytes = self.objective.train_bytes
        row = {"bytes_seen": spent.bytes, "step": spent.steps, "epochs": spent.bytes / train_bytes}
        if not self._budget_in_seconds:
            row["fraction"] = self.fraction
        clock = {
            "seconds": spent.seconds,
            "bytes_per_second": spent.bytes / max(spent.seconds, 1e-9),
            "compile_seconds": self.state.compile_seconds,
        }
        return row | {"training_flops": spent.flops, "clock": clock}

    def train_row(self) -> Train:
        """Return a row of the steps since the last one."""
        progress = self.progress()
        self._check_steps()
        nats = self.state.nats / self.state.steps
        self.state.nats = 0.0
        self.state.steps = 0
        return Train(
            kind="train",
            **progress,
            bits_per_byte=nats / math.log(2),
            learning_rate=self.optimizers.learning_rate,
            ideal_flops_per_byte=self.model.ideal_flops(text=self.objective.scored_segment),
            metrics=self.model.metrics({}),
        )

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters are complete, for reading."""
        distributed = self.optimizers.distributed
        if distributed:
            return distributed.unsharded()
        return nullcontext()

    def _check_division(self) -> None:
        """Raise ValueError if several processes cannot divide the work."""
        b = self.plan.batch
        n_processes = self.runtime.processes.world_size
        if b.streams % n_processes:
            raise ValueError(
                f"batch.streams={b.streams}: with {n_processes} processes, allowed are multiples "
                f"of {n_processes}"
            )
        if b.accumulate > b.streams // n_processes:
            raise ValueError(
                f"batch.accumulate={b.accumulate}: each of {n_processes} processes has "
                f"{b.streams // n_processes} of batch.streams={b.streams}; allowed is at most "
                f"{b.streams // n_processes}"
            )
        for name, optimizer in self.optimizers.optimizers.items():
            if self.plan.runtime.shard == "full" and not isinstance(optimizer, SHARDABLE):
                raise ValueError(
                    f"runtime.shard=full: {type(optimizer).__name__}, the optimizer of {name}, "
                    "may need unsharded parameters; allowed is runtime.shard=none, or an "
                    "optimizer of "
                    f"{', '.join(optimizer_class.__name__ for optimizer_class in SHARDABLE)}"
                )
        self._check_streams_apart(
            f"each of {n_processes} processes sees only a part of the batch; allowed are one "
            "process, or"
        )

    def _check_streams_apart(self, reason: str) -> None:
        """Raise ValueError with the ``reason`` if streams of a batch influence each other."""
        for name, sublayer in self.model.sublayers():
            norms = [
                m for m in sublayer.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
            ]
            if norms or "streams_apart" in sublayer.limits:
                cause = "streams that influence each other"
                if norms:
                    cause = type(norms[0]).__name__
                raise ValueError(
                    f"variant={self.plan.variant}: {name} has {cause}, and {reason} a norm of each "
                    "byte, such as LayerNorm"
                )

    def load_checkpoint(self, content: dict, *, restore: str = "run") -> None:
        """Continue from the ``content`` of a checkpoint; see ``TrainState.load_checkpoint``."""
        self.state.load_checkpoint(content, self.plan, self.runtime, restore=restore)


def backend_of(model: LanguageModel, runtime: Runtime, *, training: bool = True) -> str:
    """Return the name of the code that sublayers run. ValueError if they cannot run
    ``runtime.backend``."""
    backends = {
        sublayer.backend(runtime.device, training=training) for _, sublayer in model.sublayers()
    }
    name = "+".join(sorted(backends - {"plain"} or backends))
    if not runtime.compile:
        return name
    if runtime.forward(model).fully_compiled:
        return f"{name}, compiled"
    return f"{name}, compiled in part"
