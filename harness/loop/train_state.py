"""Train state, which is a run between two steps: all that changes, what is done in a step, and how it goes into a
checkpoint and comes back."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.data.corpora import Corpus
from harness.data.streams import Streams, sample_cut, score_streams, share
from harness.device import random_state
from harness.device.runtime import Runtime
from harness.device.units import gathered, is_divided
from harness.loop.divergence import FiniteCheck
from harness.loop.step import Score, Trainer, score_samples, score_stream
from harness.model import LanguageModel
from harness.optim.budget import Spent
from harness.optim.optimizers import BY_ROWS
from harness.plan.build import Plan
from variants.contract import cat_streams, map_state

TRAINED_PER_SCORED = 10
"""Bytes that are trained on for each that a validation on the way scores: a count, so that what is chosen does not depend
on the machine's speed."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """The last validation: bytes and fraction of the budget spent before it, and pairs read in each, once known."""

    bytes: int = 0
    fraction: float = 0.0
    size: int | None = None


class TrainState:
    """Model, optimizers and stream of one run, or of one of the processes that make it together.

    Parameters, optimizers and what is spent are the same in all processes; the carried state is of its own streams.

    Attributes:
        backend, evaluation_backend: which code attention runs in training, and in scoring: dropout may forbid a faster one.
        spent: bytes, seconds, steps and FLOPs so far, of all processes together; seconds by the first one's clock, without
            those of compiling, which are ``compile_seconds``.
        best_bits: lowest bits per byte of the validations on the way, or infinity.
        validated: where the last validation was, and how many pairs each of them reads.
            Whole after ``settle``: until then what the device has yet to do is not in them.
        agreed: the largest of all processes' flags in the last step.
        wandb_id: kept for the checkpoint.
    """

    def __init__(self, plan: Plan, corpus: Corpus, device: Runtime):
        self.plan, self.corpus, self.runtime = plan, corpus, device
        random_state.seed(plan.seed)
        b = plan.batch
        self.stream = Streams(
            corpus.splits["train"], streams=b.streams, segment=b.segment, seed=plan.seed, carry=b.carry
        )
        self.model = plan.make_model()
        if (
            device.processes.world_size == 1 or plan.runtime.shard == "none"
        ):  # divided, it may be too large for a device
            self.model.to(device.device)
        self.optimizers = plan.make_optimizers(self.model)
        self.trainer = Trainer(self.model, self.optimizers, device, accumulate=b.accumulate)
        self.backend, self.evaluation_backend = (backend_of(self.model, device, training=now) for now in (True, False))
        self.spent, self.state = Spent(), None
        self.best_bits, self.wandb_id, self.validated = math.inf, None, Validated()
        self.agreed: list[int] = []
        self._last = Spent(bytes=self.stream.bytes_per_step, steps=1, flops=self._step_flops())
        self._nats, self._steps, self._unread, self._sent = 0.0, 0, [], {}
        # Each step where all processes exchange it, or where the seconds decide what follows; else only to report.
        self._waits = plan.budget.unit == "seconds" or device.processes.world_size > 1
        self._ahead = False
        self._finite = FiniteCheck(self.trainer, self.stream, span=plan.model.span)
        self._exchange_seconds = self.compile_seconds = 0.0
        self._check_scoring()
        self._check_division()
        if device.processes.world_size > 1:  # from here on, draws are dropout's
            random_state.seed_apart(plan.seed, step=0, rank=device.processes.rank)

    def spread(self) -> None:
        """Have the processes train together, from the first one's weights; all call it, before anything else."""
        self.trainer.spread(shard=self.plan.runtime.shard)

    @property
    def fraction(self) -> float:
        """Of the budget spent."""
        return self.plan.budget.fraction(self.spent)

    @property
    def bytes_per_second(self) -> float:
        """Of training, so far."""
        self.settle()
        return self.spent.bytes / max(self.spent.seconds, 1e-9)

    @property
    def finished(self) -> bool:
        return self.plan.budget.done(self.spent)

    def step(self, *flags: int) -> None:
        """One training step.

        Args:
            flags: whole numbers that this process would have the others know, equally many in each.

        Raises:
            Diverged: the loss or a gradient of the step before is not finite: the host looks while the device has this one
                to do.
        """
        began, before = time.perf_counter(), self.fraction
        flops = self._step_flops()
        inputs, targets = self._batch()
        state = None if self.stream.begins(self.spent.steps) else self.state
        # The rate of the middle of the step, so that neither the first nor the last update is made at rate 0.
        middle = (before + self.plan.budget.fraction(self.spent + self._last)) / 2
        random = random_state.dropout_state()
        with self.runtime.compile_clock() as compiling:
            nats, after = self.trainer.step(inputs, targets, state, fraction=middle)
        self._finite.add(self.spent.steps, fraction=middle, random=random)
        self._finite.check(but=1)
        self.state = after if self.plan.batch.carry else None
        if self._waits:
            self.runtime.synchronise()
        self._ahead = not self._waits
        ended = time.perf_counter()
        seconds = ended - began - compiling.seconds + self._exchange_seconds
        several = self.runtime.processes.world_size > 1
        known = [nats.item() if several else 0.0, seconds, compiling.seconds, *flags]
        gathered = self.runtime.processes.all_gather(known)
        each_nats, each_seconds, each_compiling, *each_flag = zip(*gathered, strict=True)
        if several:
            self._exchange_seconds = time.perf_counter() - ended  # belongs to the step, and is known after it
            nats = torch.tensor(sum(each_nats) / len(gathered), dtype=torch.float64)
        self.compile_seconds += each_compiling[0]
        self._unread.append(nats)
        self._steps += 1
        # By one clock and for the same flags everywhere: what follows from them must be the same, too.
        self._last = Spent(bytes=self.stream.bytes_per_step, seconds=each_seconds[0], steps=1, flops=flops)
        self.agreed = [int(max(flag)) for flag in each_flag]
        self.spent += self._last

    def _batch(self) -> tuple[Tensor, Tensor]:
        """This process's share of the next step's inputs and targets; those of the one after it set out for the device."""
        step = self.spent.steps
        now = self._sent.get(step) or self._send(step)
        self._sent = {step + 1: self._send(step + 1)}
        return now

    def _send(self, step: int) -> tuple[Tensor, Tensor]:
        return self.runtime.send(*self.stream.batch(step, part=self.runtime.processes.shard))

    def settle(self) -> None:
        """Wait for the device, so that its seconds count to the steps that it was given; and read their losses."""
        if self._ahead:
            began, self._ahead = time.perf_counter(), False
            self.runtime.synchronise()
            self.spent += Spent(seconds=time.perf_counter() - began)
        if self._unread:
            for nats in torch.stack(self._unread).tolist():
                if math.isfinite(nats):
                    self._nats += nats
                else:  # a step that is left out, or the run ends
                    self._steps -= 1
            self._unread = []

    def _step_flops(self) -> int:
        """Training FLOPs that the next step needs, with what its streams carry and at the present parameters, as spans move."""
        needed = self.model.needed_flops(self.stream.segment, carried=self.stream.carried(self.spent.steps))
        return round(needed.training * self.stream.bytes_per_step)

    def train_row(self) -> dict:
        """The mean since the last such row, and where the parameters are."""
        bits = self.recent_bits(0.0)
        self._finite.check()
        self._nats, self._steps = 0.0, 0
        shape = self.optimizers.schedule.factor(self.fraction, step=self.spent.steps)
        return {
            "kind": "train",
            **self.place(),
            "bits_per_byte": bits,
            "learning_rate": self.optimizers.lr * shape,
            "ideal_flops_per_byte": self.model.ideal_flops(),
            **self.skipped_steps(),
            "metrics": self.model.metrics({}),
        }

    def skipped_steps(self) -> dict[str, int]:
        """So far, where they are skipped at all."""
        return {"skipped_steps": int(self.optimizers.skipped)} if self.optimizers.skip_nonfinite else {}

    def recent_bits(self, default: float) -> float:
        """Mean bits per byte since the last train row, or ``default`` right after one."""
        self.settle()
        return self._nats / self._steps / math.log(2) if self._steps else default

    def place(self) -> dict:
        """Where in the run a row stands: in bytes, steps, FLOPs and seconds of training."""
        self.settle()
        epochs = self.spent.bytes / len(self.corpus.splits["train"])
        place = {"bytes_seen": self.spent.bytes, "step": self.spent.steps, "epochs": epochs}
        place |= {} if self.plan.budget.unit == "seconds" else {"fraction": self.fraction}
        clock = {"seconds": self.spent.seconds, "bytes_per_second": self.bytes_per_second}
        clock |= {"compile_seconds": self.compile_seconds}
        return place | {"training_flops": self.spent.flops, "clock": clock}

    def score(self, part: Tensor, *, look: int | None = None) -> Score:
        """Stream some bytes, uint8 ``[n]``, through the model as ``eval`` says; ``look`` as ``score_stream`` has it."""
        how = {name: self.plan.protocol()[name] for name in ("streams", "segment", "context")}
        with self.trainer.units.gathered():
            return score_stream(self.model, part, runtime=self.runtime, collect_stats=True, look=look, **how)

    def reported(self, split: str) -> Tensor:
        """The bytes of a split that are scored at the end."""
        e = self.plan.eval
        return self.corpus.reported(split, selection_bytes=e.selection_bytes, limit=e.bytes)

    def capped(self, split: str) -> bool:
        """Whether ``eval.bytes`` leaves out some of what a split would report."""
        whole = self.corpus.reported(split, selection_bytes=self.plan.eval.selection_bytes)
        return len(self.reported(split)) < len(whole)

    @property
    def bytes_to_score(self) -> int:
        """Those of the validations and the final scores that are still to come; a window is read twice."""
        e, last = self.plan.eval, self.validated
        validations = 1 + (_marks(1 - 1e-6, e.every) - _marks(self.fraction, e.every) if e.every > 0 else 0)
        final = sum(len(self.reported(split)) for split in self.splits) * (3 if e.windows else 1)
        return final + validations * (last.size or self._most_validated())

    @property
    def splits(self) -> tuple[str, ...]:
        """What is scored at the end."""
        return ("valid", "test") if self.plan.eval.test else ("valid",)

    def validation_due(self) -> bool:
        """Whether another ``eval.every`` of the budget is spent, and enough read since the last validation; the end has
        its own."""
        every, last = self.plan.eval.every, self.validated
        if every <= 0 or self.finished or _marks(self.fraction, every) <= _marks(last.fraction, every):
            return False
        return self.spent.bytes - last.bytes >= TRAINED_PER_SCORED * (last.size or 1)

    def validate(self) -> Score:
        """The next validation, of places all over what chooses: a page of a text is no measure of the others. The first decides
        how many pairs each of them reads, or they would not compare."""
        self.settle()  # or the steps before it would count to the scoring
        self._finite.check_weights()
        e, last = self.plan.eval, self.validated
        size = last.size or max(1, min(self._most_validated(), (self.spent.bytes - last.bytes) // TRAINED_PER_SCORED))
        streams, context = sample_cut(size, streams=e.streams, segment=e.segment, context=self.plan.model.span)
        cut = {"pairs": size, "streams": streams, "segment": e.segment, "context": context}
        with self.trainer.units.gathered():
            score = score_samples(self.model, self.corpus.choosing(e.selection_bytes), runtime=self.runtime, **cut)
        self.validated = Validated(bytes=self.spent.bytes, fraction=self.fraction, size=size)
        return score

    def _most_validated(self) -> int:
        """Pairs that a validation may read, however much was trained."""
        e = self.plan.eval
        return min(len(self.corpus.choosing(e.selection_bytes)), e.bytes or math.inf) - 1

    def _check_scoring(self) -> None:
        """ValueError, before the first step, if a split is too short for ``eval.streams``, or for what chooses."""
        for split in self.splits:
            score_streams(len(self.reported(split)) - 1, self.plan.eval.streams)
        e = self.plan.eval
        if len(self.corpus.choosing(e.selection_bytes)) < 2:
            raise ValueError(
                f"eval.selection_bytes={e.selection_bytes}: leaves less than a pair of "
                f"valid's {len(self.corpus.splits['valid'])} "
                "bytes to choose the weights by; allowed are 2 or more, or null, of a valid split of 4 or more"
            )

    def _check_division(self) -> None:
        """ValueError, before the first step, if the streams cannot be divided among the processes."""
        b, number = self.plan.batch, self.runtime.processes.world_size
        if number == 1:
            return
        if b.streams % number:
            raise ValueError(
                f"batch.streams={b.streams}: {number} processes take as many streams each; "
                f"allowed are multiples of {number}"
            )
        if b.accumulate > b.streams // number:
            raise ValueError(
                f"batch.accumulate={b.accumulate}: each of {number} processes has {b.streams // number} of "
                f"batch.streams={b.streams} to split; allowed is at most as many"
            )
        for name, optimizer in self.optimizers.optimizers.items():
            if self.plan.runtime.shard == "full" and not isinstance(optimizer, BY_ROWS):
                raise ValueError(
                    f"runtime.shard=full: {type(optimizer).__name__}, the optimizer of {name}, may need whole parameters; "
                    f"allowed is none, or one of {', '.join(own.__name__ for own in BY_ROWS)}"
                )
        for name, sublayer in self.model.sublayers():
            norms = [m for m in sublayer.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if norms or "streams_apart" in sublayer.limits:
                what = type(norms[0]).__name__ if norms else "streams that influence each other"
                raise ValueError(
                    f"variant={self.plan.variant}: {name} has {what}, and each of {number} processes would see a part of "
                    "the batch only; allowed are one process, or a norm of each byte, such as LayerNorm"
                )

    def content(self, *, rows: int) -> dict:
        """Everything an exact resume needs, in the first process: all must call it. Where parameters are divided, they and the
        optimizers' tensors are so here, in each."""
        self.settle()
        self._finite.check_weights()
        processes = self.runtime.processes
        state = cat_streams(processes.all_gather(map_state(lambda s: s.cpu(), self.state)))
        randoms = processes.all_gather(random_state.random_state())
        content = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "spent": vars(self.spent),
            "last": vars(self._last),
            "state": state,
            "nats": self._nats,
            "steps": self._steps,
            "best_bits": self.best_bits,
            "validated": vars(self.validated),
            "compile_seconds": self.compile_seconds,
            "random": randoms[0],
            "random_others": randoms[1:],
            "rows": rows,
            "wandb_id": self.wandb_id,
        }
        return content if self.trainer.units.parts else gathered(content)

    def restore(self, content: dict) -> None:
        """Go on from a checkpoint's ``content``, which may be of another number of processes."""
        device, processes = self.runtime.device, self.runtime.processes
        self.take_weights(content["model"])
        self.optimizers.load_state_dict(content["optimizers"])
        self.spent, self._last = Spent(**content["spent"]), Spent(**content["last"])
        self.state = map_state(lambda s: s[share(len(s), processes.shard)].to(device), content["state"])
        self._nats, self._steps, self.best_bits = (content[key] for key in ("nats", "steps", "best_bits"))
        self.wandb_id, self.validated = content["wandb_id"], Validated(**content["validated"])
        self.compile_seconds = content["compile_seconds"]
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
    own, theirs = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
        for found in (model.state_dict(), weights)
    )
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            there, here = (" of ".join(map(str, found.get(name, ("absent",)))) for found in (theirs, own))
            raise ValueError(
                f"{what}: its model is another one, {name} is {there} there and {here} here; "
                "allowed is a run of the same variant and sizes"
            )
    held = model.state_dict()
    if any(map(is_divided, held.values())):
        from harness.device.spread import divided_like  # late: slow to import

        weights = {name: divided_like(held[name], tensor) for name, tensor in weights.items()}
    model.load_state_dict(weights)
    model.project_()


def _marks(fraction: float, every: float) -> int:
    """Validations that are due in this fraction of the budget."""
    return int(fraction / every + 1e-9)


def backend_of(model: LanguageModel, device: Runtime, *, training: bool = True) -> str:
    """Which code the sublayers run, in training or in evaluation; ValueError where ``runtime.backend`` is impossible."""
    backends = {sublayer.backend(device.device, training=training) for _, sublayer in model.sublayers()}
    name = "+".join(sorted(backends - {"plain"} or backends))
    return f"{name}, compiled" if device.compile else name
