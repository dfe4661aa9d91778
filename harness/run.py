"""A run between two steps: all that changes, what it does in a step, and how it goes into a checkpoint and comes back."""

import math
import time
from pathlib import Path

import torch
from torch import Tensor

from harness import checkpoint, runtime
from harness.budget import Progress
from harness.build import Plan
from harness.data import Corpus, Lanes, score_lanes
from harness.model import LanguageModel
from harness.record import RECORD, read_rows
from harness.runtime import Runtime
from harness.step import Score, Trainer, score_stream
from variants.contract import map_state


class Run:
    """Model, optimizers and stream of one run.

    Attributes:
        spent: bytes, seconds, steps and FLOPs so far.
        best_bits: lowest bits per byte of the validations on the way, or infinity.
        wandb_id, rows: of the record, kept for the checkpoint.
    """

    def __init__(self, plan: Plan, corpus: Corpus, device: Runtime):
        self.plan, self.corpus, self.runtime = plan, corpus, device
        runtime.seed(plan.seed)
        b = plan.batch
        self.stream = Lanes(corpus.splits["train"], lanes=b.lanes, segment=b.segment, seed=plan.seed, carry=b.carry)
        self.model = plan.make_model().to(device.device)
        self.optimizers = plan.make_optimizers(self.model)
        self.trainer = Trainer(self.model, self.optimizers, device, accumulate=b.accumulate)
        self.path = path_of(self.model, device)
        self.spent, self.state = Progress(), None
        self.best_bits, self.wandb_id = math.inf, None
        self._last = Progress(bytes=self.stream.bytes_per_step, steps=1, flops=self._step_flops())
        self._nats, self._steps = torch.zeros((), dtype=torch.float64, device=device.device), 0
        self._check_scoring()

    @property
    def fraction(self) -> float:
        """Of the budget spent."""
        return self.plan.budget.fraction(self.spent)

    @property
    def finished(self) -> bool:
        return self.plan.budget.done(self.spent)

    def step(self) -> float:
        """One training step. Returns the fraction of the budget spent before it."""
        began, before = time.perf_counter(), self.fraction
        flops = self._step_flops()
        inputs, targets = (x.to(self.runtime.device) for x in self.stream.batch(self.spent.steps))
        state = None if self.stream.begins(self.spent.steps) else self.state
        # The rate of the middle of the step, so that neither the first nor the last update is made at rate 0.
        middle = (before + self.plan.budget.fraction(self.spent + self._last)) / 2
        nats, after = self.trainer.step(inputs, targets, state, fraction=middle)
        self.state = after if self.plan.batch.carry else None
        self._nats += nats.double()
        self._steps += 1
        self.runtime.synchronise()  # or the time that the device takes would be counted to whoever waits next
        seconds = time.perf_counter() - began
        self._last = Progress(bytes=self.stream.bytes_per_step, seconds=seconds, steps=1, flops=flops)
        self.spent += self._last
        return before

    def _step_flops(self) -> int:
        """Training FLOPs of one step: 3 x forward, at the present parameters, because spans move."""
        return 3 * self.model.ideal_flops() * self.stream.bytes_per_step

    def train_row(self) -> dict:
        """The mean since the last such row, and where the parameters are."""
        bits = self._nats.item() / max(self._steps, 1) / math.log(2)
        self._nats.zero_()
        self._steps = 0
        shape = self.optimizers.schedule.factor(self.fraction, step=self.spent.steps)
        return {
            "kind": "train",
            **self.place(),
            "bits_per_byte": bits,
            "learning_rate": self.optimizers.lr * shape,
            "ideal_flops_per_byte": self.model.ideal_flops(),
            "metrics": self.model.metrics({}),
        }

    def recent_bits(self, default: float) -> float:
        """Mean bits per byte since the last train row, or ``default`` right after one; waits for the device."""
        return self._nats.item() / self._steps / math.log(2) if self._steps else default

    def place(self) -> dict:
        """Where in the run a row stands: in bytes, steps, FLOPs and seconds of training."""
        epochs = self.spent.bytes / len(self.corpus.splits["train"])
        budget = self.plan.budget
        timed = budget.unit == "seconds"
        place = {"bytes_seen": self.spent.bytes, "step": self.spent.steps, "epochs": epochs}
        place |= {} if timed else {"fraction": self.fraction}
        speed = self.spent.bytes / max(self.spent.seconds, 1e-9)
        clock = {"seconds": self.spent.seconds, "bytes_per_second": speed}
        return place | {"training_flops": self.spent.flops, "clock": clock}

    def score(self, split: str, *, limit: int | None, look: bool = True) -> Score:
        """Stream a split, or its first ``limit`` bytes, through the model as ``eval`` says."""
        e = self.plan.eval
        part = self.corpus.splits[split][:limit]
        return score_stream(self.model, part, runtime=self.runtime, lanes=e.lanes, segment=e.segment, look=look)

    def _check_scoring(self) -> None:
        """ValueError, before the first step, if a split is too short for ``eval.lanes``."""
        e = self.plan.eval
        limits = [("valid", e.progress_bytes), ("valid", e.bytes)] + [("test", e.bytes)] * e.test
        for split, limit in limits:
            score_lanes(len(self.corpus.splits[split][:limit]) - 1, e.lanes)

    def capped(self, split: str, limit: int | None) -> bool:
        return limit is not None and limit < len(self.corpus.splits[split])

    def content(self, *, rows: int) -> dict:
        """Everything an exact resume needs."""
        return {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "spent": vars(self.spent),
            "last": vars(self._last),
            "state": map_state(lambda s: s.clone(), self.state),
            "nats": self._nats.item(),
            "steps": self._steps,
            "best_bits": self.best_bits,
            "random": runtime.random_state(),
            "rows": rows,
            "wandb_id": self.wandb_id,
        }

    def restore(self, content: dict) -> None:
        """Go on from a checkpoint's ``content``."""
        device = self.runtime.device
        self.take_weights(content["model"])
        self.optimizers.load_state_dict(content["optimizers"])
        self.spent, self._last = Progress(**content["spent"]), Progress(**content["last"])
        self.state = map_state(lambda s: s.to(device), content["state"])
        self._nats.fill_(content["nats"])
        self._steps, self.best_bits, self.wandb_id = content["steps"], content["best_bits"], content["wandb_id"]
        runtime.set_random_state(content["random"])

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """The parameters of another run; ValueError if the models differ."""
        own = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                raise ValueError(
                    f"start.run={self.plan.start.run}: its model is another one, {name} is {theirs.get(name)} there and "
                    f"{own.get(name)} here; allowed is a run of the same variant and sizes"
                )
        self.model.load_state_dict(weights)
        self.model.project_()


def begin_from(run: Run) -> None:
    """``start.run``: another run's weights with a new schedule, or everything with a larger budget.

    Rates, decays and clips are this run's own; moments and sums are the other's.

    Raises:
        ValueError: naming ``start.run``, what differs and what is allowed.
    """
    start, plan = run.plan.start, run.plan
    if start.run is None:
        return
    folder = Path(start.run)
    newest = checkpoint.newest(folder)
    if newest is None or folder.is_symlink():  # a link such as outputs/latest is soon another run
        raise ValueError(f"start.run={start.run}: must be a run folder that has a checkpoint, and no link to one")
    content, theirs = checkpoint.load(newest), read_rows(folder / RECORD)[0]
    if start.take == "weights":
        run.take_weights(content["model"])
        _must_agree(plan, _model_facts(theirs["config"]), _model_facts(plan.config))
        return
    unit = plan.budget.unit
    if content["spent"][unit] >= plan.budget.amount:
        raise ValueError(
            f"budget.{unit}={plan.budget.amount}: start.run={start.run} has spent {content['spent'][unit]} already; "
            "allowed with start.take=everything is more"
        )
    now = {"config": plan.config, "data": {"sha256": run.corpus.sha256}, "optimizers": run.optimizers.describe()}
    _must_agree(plan, _stream_facts(theirs), _stream_facts(now))
    for name, optimizer in run.optimizers.optimizers.items():
        content["optimizers"]["groups"][name]["param_groups"] = optimizer.state_dict()["param_groups"]
    run.restore(content | {"nats": 0.0, "steps": 0, "best_bits": math.inf, "wandb_id": None})


def _model_facts(config: dict) -> dict[str, object]:
    """What makes two models of equal shapes compute differently, by configuration key; rates of dropout may change."""
    free = ("dropout", "embedding_dropout", "embedding_std", "head_zero_init", "default_bytes")
    facts = {f"model.{name}": value for name, value in config["model"].items() if name not in free}
    return facts | {f"position.{name}": value for name, value in config["position"].items()}


def _stream_facts(row: dict) -> dict[str, object]:
    """What must also be the same to go on where a run ended: what it reads, in which order, and what moves it."""
    config = row["config"]
    facts = {f"batch.{name}": config["batch"][name] for name in ("lanes", "segment", "carry")}
    facts |= {"seed": config["seed"], "data.sha256": row["data"]["sha256"]}
    facts |= {f"optim {o['name']}": (o["optimizer"], o["parameters"]) for o in row["optimizers"]}
    return _model_facts(config) | facts


def _must_agree(plan: Plan, theirs: dict[str, object], own: dict[str, object]) -> None:
    differ = [
        f"{key} was {theirs.get(key)}, is {own.get(key)}" for key in own | theirs if theirs.get(key) != own.get(key)
    ]
    if differ:
        start = plan.start
        raise ValueError(f"start.run={start.run}: cannot be taken up with start.take={start.take}: {'; '.join(differ)}")


def path_of(model: LanguageModel, device: Runtime) -> str:
    """Which code the sublayers run; ValueError where ``runtime.path`` is impossible."""
    paths = {sublayer.path(device.device, training=True) for _, sublayer in model.sublayers()}
    name = "+".join(sorted(paths - {"plain"} or paths))
    return f"{name}, compiled" if device.compile else name
