"""Entrants of ``bench.speed``: a model whose carried memory is full and whose spans stay where they were put, and the
trainer's loop around such a model.

A stream's first steps have little past and are cheap; what a long run pays for is the steady state, in which every query
may look back as far as its head does.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench.baselines.entrants import OurModel, Task
from bench.baselines.proof import Probe
from bench.subject import MIDDLE, full_state
from harness.data import corpora
from harness.loop.run import Run
from harness.model import LanguageModel
from harness.record.rows import Record
from variants.contract import State


@dataclass(frozen=True, kw_only=True)
class SteadyTask(Task):
    """A model of ours in steady state.

    Attributes:
        spans: keys of every head, the same in each layer; None where the variant has no spans to set.
        scratch: a folder where the trainer's record may go.
    """

    spans: tuple[int, ...] | None = None
    scratch: str | None = None


class SteadyModel(OurModel):
    """The trainer's step in a bare loop, with a full past."""

    def __init__(self, task: SteadyTask):
        super().__init__(task)
        self.state: State = None
        if task.spans is not None:
            set_spans(self.model, task.spans)

    def probe(self) -> Probe:
        """With spans that end within what is looked at: a ramp that no key stands on has no gradient to check."""
        probe = super().probe()
        if self.task.spans is not None:
            heads, half = len(self.task.spans), probe.inputs.shape[1] // 2
            set_spans(self.model, tuple(half * head // heads for head in range(heads)))
        return probe

    def train(self) -> None:
        if self.state is None:
            self.state = self.past()
        _, self.state = self.trainer.step(*self.batch(), self.state, fraction=MIDDLE)

    def past(self) -> State:
        """What streams carry that have seen as many bytes as a query may see."""
        return full_state(self.model, self.inputs[0], span=self.plan.model.span, where=self.runtime)


class TrainerLoop(SteadyModel):
    """What ``train.py`` does at every step: ``Run.step``, and every ``record.every_steps`` a row of the record."""

    def __init__(self, task: SteadyTask):
        super().__init__(task)
        self.run = Run(self.plan, corpora.load(**self.plan.data), self.runtime)
        self.run.optimizers.lr = 0.0
        self.model, self.trainer = self.run.model, self.run.trainer
        if task.spans is not None:
            set_spans(self.model, task.spans)
        self.record = Record(Path(tempfile.mkdtemp(dir=task.scratch)))

    def train(self) -> None:
        begins = self.run.spent.steps == 0
        self.run.step()
        if begins:
            self.run.state = self.past()
        if self.run.spent.steps % self.plan.record.every_steps == 0:
            self.record.append(self.run.train_row())


@torch.no_grad()
def set_spans(model: LanguageModel, spans: tuple[int, ...]) -> None:
    """Put every head's learned span at so many keys, in each layer.

    Args:
        spans: one a head, from 0 to S.

    Raises:
        ValueError: the model learns no spans.
    """
    reaches = [getattr(sublayer, "reach", None) for _, sublayer in model.sublayers()]
    reaches = [reach for reach in reaches if isinstance(getattr(reach, "fraction", None), nn.Parameter)]
    if not reaches:
        raise ValueError("spans cannot be set: no sublayer's reach has a learned fraction")
    for reach in reaches:
        reach.fraction.copy_(torch.tensor(spans) / reach.span)
    model.project_()
