"""Trainer: model, optimizers, data, carried state and budget spent; one step, one evaluation, and their checkpoint."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from harness.data.corpora import Corpus
from harness.data.streams import Streams, sample_layout, score_ranges, shard_slice
from harness.device import random_state
from harness.device.runtime import Runtime, compile_clock
from harness.device.units import is_divided
from harness.failures import Diverged
from harness.loop.scoring import Score, score_stream
from harness.loop.update import Update
from harness.model import LanguageModel
from harness.optim.budget import Spent
from harness.optim.optimizers import SHARDABLE
from harness.plan.build import Plan
from variants.contract import cat_streams, map_state


class Trainer:
    """What trains, in one process of a run. Parameters, optimizers and ``spent`` are equal in all; carried state is of
    this process's streams. ValueError where processes cannot divide the streams, or a split is too short to score.

    Attributes:
        backend, evaluation_backend: the code of attention in training and in scoring: dropout may forbid a faster one.
        spent: bytes, seconds, steps and FLOPs of all processes so far. Seconds are the first one's, without those of
            compiling, ``compile_seconds``; ``settle`` adds the work that the device has not yet done.
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
        self._timed = plan.budget.unit == "seconds"  # otherwise the host gives steps to the device and does not wait
        self._unchecked: deque[tuple[Callable[[], float], int, float]] = deque()
        for split in self.splits:
            score_ranges(len(self.reported(split)) - 1, plan.eval.streams)
        self.choosing()
        if processes.world_size > 1:
            if reason := next(self._refusals(), None):
                raise ValueError(reason)
            # From here on, draws are dropout's.
            random_state.seed_apart(plan.seed, step=0, rank=processes.rank)

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
        """One step; Diverged where the previous step's loss or gradient is not finite, read as the device works."""
        began, number, flops = time.perf_counter(), self.spent.steps, self._step_flops()
        inputs, targets = self._sent.get(number) or self._send(number)
        self._sent = {number + 1: self._send(number + 1)}
        state = None if self.stream.resets_state(number) else self.state
        # The rate at the middle of the step: neither the first nor the last update has rate 0.
        middle = (self.fraction + self.plan.budget.fraction(self.spent + self._last)) / 2
        with compile_clock(compiled=self.runtime.compile) as compiling:
            nats, after = self.update(inputs, targets, state, fraction=middle)
        rate = self.optimizers.lr * self.optimizers.schedule.factor(middle, step=number)
        self._unchecked.append((self.runtime.to_host(self.optimizers.found_inf), number, rate))
        self._check_steps(but=1)
        self.state = after if self.plan.batch.carry else None
        if self._timed:
            self.runtime.synchronise()
        seconds = time.perf_counter() - began - compiling.seconds
        if self._timed:  # all processes must end at the same step
            seconds = self.runtime.processes.all_gather(seconds)[0]
        self.compile_seconds += compiling.seconds
        self._unread.append(nats)
        self._last = Spent(bytes=self.stream.bytes_per_step, seconds=seconds, steps=1, flops=flops)
        self.spent += self._last

    def _send(self, number: int) -> tuple[Tensor, Tensor]:
        """Send this process's share of a step's inputs and targets to the device."""
        return self.runtime.send(*self.stream.batch(number, shard=self.runtime.processes.shard))

    def _step_flops(self) -> int:
        """Training FLOPs of the next step, with its carried bytes and present spans."""
        needed = self.model.needed_flops(self.stream.segment, carried=self.stream.carried_bytes(self.spent.steps))
        return round(needed.training * self.stream.bytes_per_step)

    def _check_steps(self, *, but: int = 0) -> None:
        """Raise Diverged for the first step that was not finite, whose update the optimizers left out; all processes
        check the same steps. The last ``but`` steps are not read: that would wait for the device."""
        while len(self._unchecked) > but:
            left_out, number, rate = self._unchecked.popleft()
            if left_out():
                self._unchecked.clear()
                self._diverge(
                    f"step {number + 1:,} diverged at a learning rate of {rate:.3g}: its loss or a gradient is not "
                    "finite. The weights are as they were before it"
                )

    def _check_weights(self) -> None:
        """Raise Diverged as ``_check_steps``, and for a parameter that is not finite."""
        self._check_steps()
        units, names = self.update.units, [name for name, _ in self.model.named_parameters()]
        bad = units.total(torch.stack([~p.isfinite().all() for p in units.parameters]).float(), of="max").tolist()
        if any(bad):
            self._diverge(f"an update left the parameter {names[bad.index(1)]} with numbers that are not finite")

    def _diverge(self, message: str) -> None:
        """Raise Diverged in all processes; the first one prints."""
        clip = "" if self.optimizers.clip is None else f" or optim.clip={self.optimizers.clip:g}"
        with self.runtime.processes.fail_together():
            if self.runtime.processes.is_main:
                raise Diverged(f"{message}. Lower optim.lr={self.optimizers.lr:g}{clip}")

    def settle(self) -> None:
        """Wait for the device, add its seconds to those of the steps, and read their losses."""
        if self._unread and not self._timed:
            began = time.perf_counter()
            self.runtime.synchronise()
            self.spent += Spent(seconds=time.perf_counter() - began)
        for nats in torch.stack(self._unread).tolist() if self._unread else ():
            self._nats += nats
        self._steps, self._unread = self._steps + len(self._unread), []

    def place(self) -> dict:
        """Bytes, steps, FLOPs and seconds of training so far, for a row."""
        self.settle()
        epochs = self.spent.bytes / len(self.corpus.splits["train"])
        place = {"bytes_seen": self.spent.bytes, "step": self.spent.steps, "epochs": epochs}
        place |= {} if self._timed else {"fraction": self.fraction}
        clock = {"seconds": self.spent.seconds, "bytes_per_second": self.spent.bytes / max(self.spent.seconds, 1e-9)}
        clock |= {"compile_seconds": self.compile_seconds}
        return place | {"training_flops": self.spent.flops, "clock": clock}

    def train_row(self) -> dict:
        """A row: mean bits per byte since the last such row, rate, and metrics of the parameters."""
        place = self.place()
        self._check_steps()
        bits = self._nats / self._steps / math.log(2)
        self._nats, self._steps = 0.0, 0
        shape = self.optimizers.schedule.factor(self.fraction, step=self.spent.steps)
        row = {"kind": "train", **place, "bits_per_byte": bits, "learning_rate": self.optimizers.lr * shape}
        row |= {"ideal_flops_per_byte": self.model.ideal_flops()}
        return row | {"metrics": self.model.metrics({})}

    def evaluate(self, part: Tensor, *, pairs: int | None = None, look: int | None = None) -> Score:
        """Score bytes, uint8 ``[n]``, with the present weights: all, streamed as ``eval`` says, or a sample of
        ``pairs`` spread over them; ``look`` as ``score_stream`` has it."""
        self.settle()  # or scoring's seconds would include the steps'
        self._check_weights()
        cut = {name: self.plan.protocol()[name] for name in ("streams", "segment", "context")}
        if pairs is not None:
            pairs = min(pairs, len(part) - 1)
            streams, context = sample_layout(pairs, **cut | {"context": self.plan.model.span})
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
        return self.corpus.scored_part(split, selection_bytes=e.selection_bytes, limit=e.bytes)

    def choosing(self) -> Tensor:
        """The bytes of valid that choose the weights and are in no reported score; ValueError for fewer than two."""
        number, valid = self.plan.eval.selection_bytes, self.corpus.splits["valid"]
        part = self.corpus.selection_part(number)
        if len(part) < 2:
            raise ValueError(
                f"eval.selection_bytes={number}: leaves less than a pair of valid's {len(valid)} bytes to choose the "
                "weights by; allowed are 2 or more, or null, of a valid split of 4 or more"
            )
        return part

    def _refusals(self) -> Iterator[str]:
        """Why several processes cannot divide the work."""
        b, number = self.plan.batch, self.runtime.processes.world_size
        if b.streams % number:
            yield (
                f"batch.streams={b.streams}: {number} processes take as many streams each; "
                f"allowed are multiples of {number}"
            )
        if b.accumulate > b.streams // number:
            share = f"each of {number} processes has {b.streams // number} of batch.streams={b.streams} to split"
            yield f"batch.accumulate={b.accumulate}: {share}; allowed is at most as many"
        for name, optimizer in self.optimizers.optimizers.items():
            if self.plan.runtime.shard == "full" and not isinstance(optimizer, SHARDABLE):
                who = f"{type(optimizer).__name__}, the optimizer of {name}, may need whole parameters"
                yield (
                    f"runtime.shard=full: {who}; allowed is none, "
                    f"or one of {', '.join(kind.__name__ for kind in SHARDABLE)}"
                )
        for name, sublayer in self.model.sublayers():
            norms = [m for m in sublayer.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if norms or "streams_apart" in sublayer.limits:
                what = type(norms[0]).__name__ if norms else "streams that influence each other"
                yield (
                    f"variant={self.plan.variant}: {name} has {what}, and each of {number} processes would see a part "
                    "of the batch only; allowed are one process, or a norm of each byte, such as LayerNorm"
                )

    def content(self) -> dict:
        """What an exact resume needs; all processes call it. Divided parameters and optimizer tensors stay divided."""
        self.settle()
        self._check_weights()
        processes = self.runtime.processes
        state = cat_streams(processes.all_gather(map_state(lambda s: s.cpu(), self.state)))
        random, *randoms = processes.all_gather(random_state.random_state())
        content = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict(), "state": state}
        content |= {"spent": vars(self.spent), "last": vars(self._last), "compile_seconds": self.compile_seconds}
        return content | {"nats": self._nats, "steps": self._steps, "random": random, "random_others": randoms}

    def restore(self, content: dict) -> None:
        """Go on from a checkpoint's ``content``, which may come from another number of processes."""
        device, processes = self.runtime.device, self.runtime.processes
        self.take_weights(content["model"])
        self.optimizers.load_state_dict(content["optimizers"])
        self.spent, self._last = Spent(**content["spent"]), Spent(**content["last"])
        self.state = map_state(lambda s: s[shard_slice(len(s), processes.shard)].to(device), content["state"])
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
    """Load saved weights into a model; ValueError, naming ``what``, where names, sizes or types differ."""
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
    """The code that sublayers run, in training or in evaluation; ValueError if ``runtime.backend`` is impossible."""
    backends = {sublayer.backend(device.device, training=training) for _, sublayer in model.sublayers()}
    name = "+".join(sorted(backends - {"plain"} or backends))
    if not device.compile:
        return name
    return f"{name}, compiled" if device.forward(model).whole else f"{name}, compiled in part"
