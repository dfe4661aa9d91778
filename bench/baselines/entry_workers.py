"""Entry worker: one entry of ``bench.peers`` in a process of its own, which proves itself, says what it takes, and trains
when asked.

Every entry gets the same bytes in the same order, and takes the whole training step: forward, loss, backward,
optimizer, gradients dropped. Ours take the trainer's own step. The learning rate is 0: the optimizer does all its work,
and spans stay where they were put. What carries a state begins with a full one: a stream's first steps have little past
and are cheap; what a long run pays for is the steady state, in which every query looks back as far as its head does.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from bench.baselines.packages import MEMORY_PACKAGE, Peer, Sizes, library, touched_parameters
from bench.baselines.proof import Probe, prove
from bench.baselines.reference_model import fused_adamw
from bench.cost_worker import MEASURED_STEPS, MIDDLE, WARM_STEPS, full_state
from bench.measure import peak_bytes, times
from bench.weights import learned_spans, place_spans, shake_
from harness.count.flops import count_flops
from harness.count.memory import PeakMemory
from harness.data import corpora
from harness.device import runtime
from harness.loop.settle import settled
from harness.loop.step import Trainer
from harness.loop.train_state import TrainState, backend_of
from harness.model import LanguageModel
from harness.plan.build import plan_run
from harness.record.rows import Record
from variants.contract import State

PROOF_STREAMS = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an entry is made of: plain values, so that they can be sent to another process."""

    config: dict  # of a training run, resolved: sizes, streams, segment, runtime, and for ours the variant
    trusted: tuple[str, ...]  # packages that it may name beside its trust
    batches: Tensor  # uint8 [n, B, T + 1], read in a circle
    peer: Peer | None = None  # for a peer, with sizes and optimizer
    sizes: Sizes | None = None
    optimizer: str = "fused adamw"  # or adam, as its documentation has it
    layer: str | None = None  # the variant's sublayer that is measured alone, or None for the whole model
    proof_positions: int | None = None  # of a segment that are enough to prove it; None for all
    spans: tuple[int, ...] | None = None  # keys of every head, the same in each layer; None: as they start
    scratch: str | None = None  # a folder where the trainer's record may go


class EntryWorker:
    """What a cell is asked: ``prove`` in a process that is thrown away, in another ``weigh``, then ``round`` by round.

    A subclass makes ``model`` on the run's device, and ``moved_by``, its optimizers: above the memory's baseline, below
    which lies what is imported. What is weighed and timed has its weights shaken, ours and packages' alike.
    """

    model: nn.Module
    moved_by: Iterable[torch.optim.Optimizer]

    def __init__(self, task: Task):
        self.task, self.plan = task, plan_run(OmegaConf.create(task.config), trusted=task.trusted)
        self.runtime = runtime.start(self.plan.runtime)
        if not task.peer:
            self.plan = settled(self.plan, self.runtime)
        self.device = self.runtime.device
        load_libraries(self.device)
        if task.peer:
            task.peer.built(task.sizes)
        self.meter = PeakMemory(self.device)
        runtime.seed(self.plan.seed)

    def train(self) -> None:
        """One whole training step."""
        raise NotImplementedError

    def probe(self) -> Probe:
        """What is checked."""
        raise NotImplementedError

    def backend(self) -> str:
        """``plain``, ``fused``, ..."""
        return self.task.peer.backend

    def prove(self) -> dict[str, str]:
        """The checks: name to ``ok`` or the reason of the failure."""
        ours = self.task.peer is None and self.plan.runtime.backend != "plain"
        return prove(replace(self.probe(), plain=self._plain_probe if ours else None))

    def _plain_probe(self) -> Probe:
        """The same in plain PyTorch."""
        own = self.task.config["runtime"] | {"backend": "plain"}
        return type(self)(replace(self.task, config=self.task.config | {"runtime": own})).probe()

    def weigh(self) -> dict:
        """Parameters, optimizer, backend, FLOPs of a training step, and its peak of memory after warm-up.

        Ask it first: it shakes the weights, which start in part at zero, where hardware is quicker.
        """

        def steps(number: int) -> None:
            for _ in range(number):
                self.train()

        shake_(self.model)
        steps(WARM_STEPS)
        peak = peak_bytes(lambda: steps(MEASURED_STEPS), device=self.device, meter=self.meter)
        backend, seen = self.backend(), self.device.type == "cpu" and not self.runtime.compile
        names = [("fused " if o.defaults.get("fused") else "") + type(o).__name__ for o in self.moved_by]
        touched = touched_parameters(self.model) if self.task.peer else self.model.touched_parameters()
        return {
            "parameters": {"total": sum(p.numel() for p in self.model.parameters()), "touched": touched},
            "optimizer": " + ".join(dict.fromkeys(names)),
            "step_flops": count_flops(self.train, gradients=True).total if seen else None,  # not of compiled kernels
            "backend": f"{backend}, compiled" if self.runtime.compile and "compiled" not in backend else backend,
            "memory": {
                "train_peak_bytes": peak.bytes,
                "peak_reserved_bytes": peak.reserved_bytes,
                "approximate": peak.approximate,
            },
        }

    def round(self, seconds: float) -> list[float]:
        """Milliseconds of each training step, for so long, two steps at least; one before them is not counted, because
        others have used the caches since the last round."""
        clock = {"synchronise": self.runtime.synchronise, "most_seconds": seconds}
        return times(self.train, **clock, least_calls=2, warm_calls=1)

    def make_peer(self) -> None:
        """Model and optimizer of a peer."""
        self.model = self.task.peer.built(self.task.sizes).to(self.device).train()
        if self.task.optimizer == "adam":
            groups = library(MEMORY_PACKAGE).fetch_optimizer_parameters(self.model, pkm_learning_rate=0.0)
            self.optimizer = torch.optim.Adam(groups, lr=0.0)
        else:
            self.optimizer = fused_adamw(list(self.model.parameters()), lr=0.0)
        self.moved_by = [self.optimizer]
        self.forward = self.runtime.forward(self.model)


class LanguageWorker(EntryWorker):
    """A language model; a subclass says how it is made, called and trained."""

    def __init__(self, task: Task):
        super().__init__(task)
        pairs = task.batches.to(self.device).long()
        self.inputs, self.targets, self.taken = pairs[:, :, :-1], pairs[:, :, 1:], 0

    def logits(self, tokens: Tensor) -> Tensor:
        """``[B, T, V]`` from ``tokens [B, T]``."""
        raise NotImplementedError

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 ``[B, T]``."""
        number = self.taken % len(self.inputs)
        self.taken += 1
        return self.inputs[number], self.targets[number]

    def probe(self) -> Probe:
        few = (slice(PROOF_STREAMS), slice(self.task.proof_positions))
        targets = self.targets[0][few]
        return Probe(
            model=self.model,
            outputs=self.logits,
            inputs=self.inputs[0][few],
            loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            vocabulary=self.plan.data["vocabulary"],
        )


class OurModel(LanguageWorker):
    """A variant of the configuration, with the trainer's step and optimizers, and a full past where it carries one."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.state: State = None
        self.model = self.plan.make_model().to(self.device)
        optimizers = self.plan.make_optimizers(self.model)
        self.trainer = Trainer(self.model, optimizers, self.runtime)
        self.settle()

    def settle(self) -> None:
        """Rates at 0, spans where they are to stay."""
        self.trainer.optimizers.lr = 0.0
        self.moved_by = self.trainer.optimizers.optimizers.values()
        if self.task.spans is not None:
            set_spans(self.model, self.task.spans)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits

    def probe(self) -> Probe:
        """With spans that end within what is looked at: a ramp that no key stands on has no gradient to check."""
        probe = super().probe()
        if self.task.spans is not None:
            heads, half = len(self.task.spans), probe.inputs.shape[1] // 2
            set_spans(self.model, tuple(half * head // heads for head in range(heads)))
        return probe

    def train(self) -> None:
        carry = self.plan.batch.carry
        if carry and self.state is None:
            self.state = self.past()
        _, after = self.trainer.step(*self.batch(), self.state, fraction=MIDDLE)
        self.state = after if carry else None

    def past(self) -> State:
        """What streams carry that have seen as many bytes as a query may see."""
        return full_state(self.model, self.inputs[0], span=self.plan.model.span, where=self.runtime)

    def backend(self) -> str:
        return backend_of(self.model, self.runtime)


class TrainerLoop(OurModel):
    """What ``train.py`` does at every step: ``TrainState.step``, and every ``record.every_steps`` a row of the record."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.training = TrainState(self.plan, corpora.load(**self.plan.data), self.runtime)
        self.model, self.trainer = self.training.model, self.training.trainer
        self.settle()
        self.record = Record(Path(tempfile.mkdtemp(dir=task.scratch)))

    def train(self) -> None:
        begins = self.training.spent.steps == 0
        self.training.step()
        if begins:
            self.training.state = self.past()
        if self.training.spent.steps % self.plan.record.every_steps == 0:
            self.record.append(self.training.train_row())


class PeerModel(LanguageWorker):
    """A peer."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.make_peer()

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def train(self) -> None:
        inputs, targets = self.batch()
        with self.runtime.autocast():
            logits = self.forward(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def load_libraries(device: torch.device) -> None:
    """What torch loads and allocates at its first products belongs to no model."""
    x = torch.ones(1, 2, 64, 32, device=device, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x @ x.mT @ x).softmax(-1).sum().backward()
    torch.optim.AdamW([x]).step()


def set_spans(model: LanguageModel, spans: tuple[int, ...]) -> None:
    """Put each head's learned span at so many keys, from 0 to S, in every layer; ValueError if none is learned."""
    if not learned_spans(model):
        raise ValueError("spans cannot be set: no sublayer has learned spans")
    place_spans(model, [spans], heads=len(spans))
