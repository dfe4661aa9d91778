"""Trainer: model, optimizers, data, carried state and what was spent; what a step does, and how all goes into a checkpoint."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from harness.data.corpora import Corpus
from harness.data.streams import Streams, sample_cut, score_streams, share
from harness.device import random_state
from harness.device.runtime import Runtime
from harness.device.units import gathered, is_divided
from harness.failures import Diverged
from harness.loop.scoring import Score, score_stream
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.optim.budget import Spent
from harness.optim.optimizers import BY_ROWS
from harness.plan.build import Plan
from variants.contract import cat_streams, map_state


class Trainer:
    """What trains in one run, or in one of the processes that make it together.

    Parameters, optimizers and what is spent are the same in all processes; the carried state is of this one's streams.

    Attributes:
        backend, evaluation_backend: which code attention runs in training, and in scoring: dropout may forbid a faster one.
        spent: bytes, seconds, steps and FLOPs so far, of all processes together. Seconds are by the first one's clock, without
            those of compiling, which are ``compile_seconds``, and whole after ``settle``: until then, what the device has yet
            to do is not in them.

    Raises:
        ValueError: the streams cannot be divided among the processes, or a split is too short to be scored.
    """

    def __init__(self, plan: Plan, corpus: Corpus, device: Runtime):
        self.plan, self.corpus, self.runtime = plan, corpus, device
        random_state.seed(plan.seed)
        b, processes = plan.batch, device.processes
        cut = {"streams": b.streams, "segment": b.segment, "carry": b.carry}
        self.stream = Streams(corpus.splits["train"], seed=plan.seed, **cut)
        self.model = plan.make_model()
        if processes.world_size == 1 or plan.runtime.shard == "none":  # divided, it may be too large for a device
            self.model.to(device.device)
        self.optimizers = plan.make_optimizers(self.model)
        self.update = Update(self.model, self.optimizers, device, accumulate=b.accumulate)
        _ = self.backend, self.evaluation_backend  # ValueError where one is impossible
        self.spent, self.state, self.compile_seconds = Spent(), None, 0.0
        self._last = Spent(bytes=self.stream.bytes_per_step, steps=1, flops=self._step_flops())
        self._nats, self._steps, self._unread = 0.0, 0, []  # since the last train row; of the last steps, on the device
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        self._timed, self._ahead = plan.budget.unit == "seconds", False  # whether the device may have steps to do
        self._unchecked: deque[tuple[Callable[[], float], int, float]] = deque()
        for split in self.splits:
            score_streams(len(self.reported(split)) - 1, plan.eval.streams)
        self.choosing()
        if processes.world_size > 1:
            if reason := next(self._refusals(), None):
                raise ValueError(reason)
            # From here on, draws are dropout's.
            random_state.seed_apart(plan.seed, step=0, rank=processes.rank)

    def spread(self) -> None:
        """Have the processes train together, from the first one's weights; all call it, before anything else."""
        self.update.spread(shard=self.plan.runtime.shard)

    @property
    def backend(self) -> str:
        return backend_of(self.model, self.runtime)

    @property
    def evaluation_backend(self) -> str:
        return backend_of(self.model, self.runtime, training=False)

    @property
    def fraction(self) -> float:
        """Of the budget spent."""
        return self.plan.budget.fraction(self.spent)

    @property
    def finished(self) -> bool:
        return self.plan.budget.done(self.spent)

    def step(self) -> None:
        """One training step.

        Raises:
            Diverged: the loss or a gradient of the step before is not finite: the host looks while the device has this one
                to do.
        """
        began, number, flops = time.perf_counter(), self.spent.steps, self._step_flops()
        inputs, targets = self._sent.get(number) or self.send(number)
        self._sent = {number + 1: self.send(number + 1)}
        state = None if self.stream.begins(number) else self.state
        # The rate of the middle of the step, so that neither the first nor the last update is made at rate 0.
        middle = (self.fraction + self.plan.budget.fraction(self.spent + self._last)) / 2
        with self.runtime.compile_clock() as compiling:
            nats, after = self.update(inputs, targets, state, fraction=middle)
        if not self.optimizers.skip_nonfinite:
            rate = self.optimizers.lr * self.optimizers.schedule.factor(middle, step=number)
            self._unchecked.append((self.runtime.to_host(self.optimizers.found_inf), number, rate))
        self._check_steps(but=1)
        self.state = after if self.plan.batch.carry else None
        if self._timed:
            self.runtime.synchronise()
        self._ahead = not self._timed
        seconds = time.perf_counter() - began - compiling.seconds
        if self._timed:  # what follows from them must be the same everywhere
            seconds = self.runtime.processes.all_gather(seconds)[0]
        self.compile_seconds += compiling.seconds
        self._unread.append(nats)
        self._steps += 1
        self._last = Spent(bytes=self.stream.bytes_per_step, seconds=seconds, steps=1, flops=flops)
        self.spent += self._last

    def send(self, number: int) -> tuple[Tensor, Tensor]:
        """This process's share of a step's inputs and targets sets out for the device."""
        return self.runtime.send(*self.stream.batch(number, part=self.runtime.processes.shard))

    def _step_flops(self) -> int:
        """Training FLOPs that the next step needs, with what its streams carry and at the present parameters, as spans move."""
        needed = self.model.needed_flops(self.stream.segment, carried=self.stream.carried(self.spent.steps))
        return round(needed.training * self.stream.bytes_per_step)

    def _check_steps(self, *, but: int = 0) -> None:
        """Raise Diverged for the first step that was not finite, whose update the optimizers left out; the last ``but`` steps
        are not read, which would wait for the device. All processes check the same steps at the same time."""
        while len(self._unchecked) > but:
            left_out, number, rate = self._unchecked.popleft()
            if left_out():
                self._unchecked.clear()
                self._diverge(
                    f"step {number + 1:,} diverged at a learning rate of {rate:.3g}: its loss or a gradient is not finite. The "
                    "weights are as they were before it, and optim.skip_nonfinite=true goes on without such steps"
                )

    def _check_weights(self) -> None:
        """Raise Diverged as ``_check_steps``, and where a finite gradient led to a parameter that is not finite."""
        self._check_steps()
        units, names = self.update.units, [name for name, _ in self.model.named_parameters()]
        bad = units.total(torch.stack([~p.isfinite().all() for p in units.parameters]).float(), of="max").tolist()
        if any(bad):
            self._diverge(f"an update left the parameter {names[bad.index(1)]} with numbers that are not finite")

    def _diverge(self, message: str) -> None:
        """In all processes, of which the first one speaks."""
        clip = "" if self.optimizers.clip is None else f" or optim.clip={self.optimizers.clip:g}"
        with self.runtime.processes.fail_together():
            if self.runtime.processes.is_main:
                raise Diverged(f"{message}. Lower optim.lr={self.optimizers.lr:g}{clip}")

    def settle(self) -> None:
        """Wait for the device, so that its seconds count to the steps that it was given; and read their losses."""
        if self._ahead:
            began, self._ahead = time.perf_counter(), False
            self.runtime.synchronise()
            self.spent += Spent(seconds=time.perf_counter() - began)
        for nats in torch.stack(self._unread).tolist() if self._unread else ():
            if math.isfinite(nats):
                self._nats += nats
            else:  # a step that is left out, or the run ends
                self._steps -= 1
        self._unread = []

    def place(self) -> dict:
        """Where in the run a row stands: in bytes, steps, FLOPs and seconds of training."""
        self.settle()
        epochs = self.spent.bytes / len(self.corpus.splits["train"])
        place = {"bytes_seen": self.spent.bytes, "step": self.spent.steps, "epochs": epochs}
        place |= {} if self._timed else {"fraction": self.fraction}
        clock = {"seconds": self.spent.seconds, "bytes_per_second": self.spent.bytes / max(self.spent.seconds, 1e-9)}
        clock |= {"compile_seconds": self.compile_seconds}
        return place | {"training_flops": self.spent.flops, "clock": clock}

    def train_row(self) -> dict:
        """The mean since the last such row, and where the parameters are."""
        place = self.place()
        self._check_steps()
        bits = self._nats / self._steps / math.log(2) if self._steps else 0.0
        self._nats, self._steps = 0.0, 0
        shape = self.optimizers.schedule.factor(self.fraction, step=self.spent.steps)
        row = {"kind": "train", **place, "bits_per_byte": bits, "learning_rate": self.optimizers.lr * shape}
        row |= {"ideal_flops_per_byte": self.model.ideal_flops(), **self.skipped_steps()}
        return row | {"metrics": self.model.metrics({})}

    def skipped_steps(self) -> dict[str, int]:
        """So far, where they are skipped at all."""
        return {"skipped_steps": int(self.optimizers.skipped)} if self.optimizers.skip_nonfinite else {}

    def evaluate(self, part: Tensor, *, pairs: int | None = None, look: int | None = None) -> Score:
        """Score bytes, uint8 ``[n]``, with the present weights: all, streamed as ``eval`` says, or a sample of ``pairs`` from all
        over, for a page of a text is no measure of the rest; ``look`` as ``score_stream`` has it."""
        self.settle()  # or the steps before it would count to the scoring
        self._check_weights()
        cut = {name: self.plan.protocol()[name] for name in ("streams", "segment", "context")}
        if pairs is not None:
            pairs = min(pairs, len(part) - 1)
            streams, context = sample_cut(pairs, **cut | {"context": self.plan.model.span})
            cut |= {"pairs": pairs, "streams": streams, "context": context}
        with self.update.units.gathered():
            return score_stream(self.model, part, runtime=self.runtime, collect_stats=True, look=look, **cut)

    @property
    def splits(self) -> tuple[str, ...]:
        """What is scored at the end."""
        return ("valid", "test") if self.plan.eval.test else ("valid",)

    def reported(self, split: str) -> Tensor:
        """The bytes of a split that are scored at the end."""
        e = self.plan.eval
        return self.corpus.reported(split, selection_bytes=e.selection_bytes, limit=e.bytes)

    def choosing(self) -> Tensor:
        """The bytes of valid that choose the weights, and are in no reported score; ValueError where there are not two."""
        number, valid = self.plan.eval.selection_bytes, self.corpus.splits["valid"]
        part = self.corpus.choosing(number)
        if len(part) < 2:
            raise ValueError(
                f"eval.selection_bytes={number}: leaves less than a pair of valid's {len(valid)} bytes to choose the weights "
                "by; allowed are 2 or more, or null, of a valid split of 4 or more"
            )
        return part

    def _refusals(self) -> Iterator[str]:
        """Why several processes cannot divide the work."""
        b, number = self.plan.batch, self.runtime.processes.world_size
        if b.streams % number:
            yield f"batch.streams={b.streams}: {number} processes take as many streams each; allowed are multiples of {number}"
        if b.accumulate > b.streams // number:
            share = f"each of {number} processes has {b.streams // number} of batch.streams={b.streams} to split"
            yield f"batch.accumulate={b.accumulate}: {share}; allowed is at most as many"
        for name, optimizer in self.optimizers.optimizers.items():
            if self.plan.runtime.shard == "full" and not isinstance(optimizer, BY_ROWS):
                who = f"{type(optimizer).__name__}, the optimizer of {name}, may need whole parameters"
                yield f"runtime.shard=full: {who}; allowed is none, or one of {', '.join(kind.__name__ for kind in BY_ROWS)}"
        for name, sublayer in self.model.sublayers():
            norms = [m for m in sublayer.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if norms or "streams_apart" in sublayer.limits:
                what = type(norms[0]).__name__ if norms else "streams that influence each other"
                yield (
                    f"variant={self.plan.variant}: {name} has {what}, and each of {number} processes would see a part of "
                    "the batch only; allowed are one process, or a norm of each byte, such as LayerNorm"
                )

    def content(self) -> dict:
        """What an exact resume needs of it, in the first process: all must call it. Where parameters are divided, they and the
        optimizers' tensors are so here, in each."""
        self.settle()
        self._check_weights()
        processes = self.runtime.processes
        state = cat_streams(processes.all_gather(map_state(lambda s: s.cpu(), self.state)))
        random, *randoms = processes.all_gather(random_state.random_state())
        content = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict(), "state": state}
        content |= {"spent": vars(self.spent), "last": vars(self._last), "compile_seconds": self.compile_seconds}
        content |= {"nats": self._nats, "steps": self._steps, "random": random, "random_others": randoms}
        return content if self.update.units.parts else gathered(content)

    def restore(self, content: dict) -> None:
        """Go on from a checkpoint's ``content``, which may be of another number of processes."""
        device, processes = self.runtime.device, self.runtime.processes
        self.take_weights(content["model"])
        self.optimizers.load_state_dict(content["optimizers"])
        self.spent, self._last = Spent(**content["spent"]), Spent(**content["last"])
        self.state = map_state(lambda s: s[share(len(s), processes.shard)].to(device), content["state"])
        self._nats, self._steps, self.compile_seconds = (content[key] for key in ("nats", "steps", "compile_seconds"))
        randoms = [content["random"], *content.get("random_others", ())]
        if len(randoms) == processes.world_size:
            random_state.set_random_state(randoms[processes.rank])
        else:
            random_state.seed_apart(self.plan.seed, step=self.spent.steps, rank=processes.rank)

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """The parameters of another run; ValueError if the models differ."""
        load_weights(self.model, weights, what=f"init_from.run={self.plan.init_from.run}")


def load_weights(model: LanguageModel, weights: dict[str, Tensor], *, what: str) -> None:
    """Put saved weights into a model; ValueError naming ``what`` where sizes or types differ: none is cut or rounded."""
    state = model.state_dict()
    ours, theirs = ({n: f"{tuple(t.shape)} of {t.dtype}" for n, t in each.items()} for each in (state, weights))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{what}: its model is another one, {name} is {theirs.get(name, 'absent')} there and "
                f"{ours.get(name, 'absent')} here; allowed is a run of the same variant and sizes"
            )
    if any(map(is_divided, state.values())):
        from harness.device.spread import divided_like  # late: slow to import

        weights = {name: divided_like(state[name], tensor) for name, tensor in weights.items()}
    model.load_state_dict(weights)
    model.project_()


def backend_of(model: LanguageModel, device: Runtime, *, training: bool = True) -> str:
    """Which code the sublayers run, in training or in evaluation; ValueError where ``runtime.backend`` is impossible."""
    backends = {sublayer.backend(device.device, training=training) for _, sublayer in model.sublayers()}
    name = "+".join(sorted(backends - {"plain"} or backends))
    if not device.compile:
        return name
    return f"{name}, compiled" if device.forward(model).whole else f"{name}, compiled in part"
