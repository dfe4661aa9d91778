"""Classes of texts: the class of each text is predicted from the mean of its positions."""

import math

import torch
from torch import Tensor

from harness.data.bag_of_bytes import baseline_accuracy
from harness.data.corpora import Corpus
from harness.data.texts import TextBatches, Texts, scored_texts
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.objective.checks import Replaced
from harness.objective.objective import Objective
from harness.objective.scoring import Score, score_reads
from harness.plan.build import Plan

LABEL = "label"
"""The key of ``answer_accuracy`` that the model has; the others are its interval and baselines."""
Z = 1.959963984540054  # of a normal distribution, 97.5%


class Classify(Objective):
    scored = "texts"

    def __init__(self, plan: Plan, corpus: Corpus, runtime: Runtime):
        super().__init__(plan, corpus, runtime)
        b = plan.batch
        self.texts = {name: texts.cut(b.segment) for name, texts in corpus.texts.items()}
        train = self.texts["train"]
        self.batches = TextBatches(train, streams=b.streams, segment=b.segment, seed=plan.seed)
        self.train_bytes = int(train.lengths.sum())

    def reported_part(self, split: str, *, limit: int | None = None) -> Texts:
        """Return the texts within the bytes that are scored at the end."""
        return self.texts[split].between(0, len(super().reported_part(split, limit=limit)))

    def selection_part(self) -> Texts:
        """Return the texts within the bytes of valid that select the best weights."""
        end = len(self.corpus.splits["valid"])
        return self.texts["valid"].between(end - len(super().selection_part()), end)

    def score(self, model: LanguageModel, texts: Texts, **check) -> Score:
        """Score texts, of which each has one prediction."""
        layout = {"batch": self.scored_rows, "shard": self.runtime.processes.shard}
        batches = scored_texts(texts, longest=self.scored_segment, **layout)
        return score_reads(model, batches, self.runtime, **check)

    def score_sample(self, model: LanguageModel, part: Texts, *, pairs: int) -> tuple[Score, dict]:
        """Score texts, spread over the part."""
        n_sampled = max(1, min(part.number, pairs * part.number // len(part)))
        sample = part.select(torch.arange(n_sampled) * part.number // n_sampled)
        score = self.score(model, sample)
        return score, {"answer_accuracy": {LABEL: score.correct.double().mean().item()}}

    def final(self, model: LanguageModel, part: Texts, *, trained_bytes: int) -> tuple[Score, dict]:
        """Score a part. Padding must not matter, and bytes of a text must. Returns also the
        accuracy with its interval, and that of baselines, fitted to all of train."""
        score = self.score(model, part, replace=self.replace)
        accuracy = wilson_interval(score.correct) | baseline_accuracy(
            self.texts["train"], part, classes=len(self.corpus.classes)
        )
        return score, score.future.row() | {"answer_accuracy": accuracy}

    def replace(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, lengths: Tensor
    ) -> tuple[Replaced, ...]:
        """Return the inputs ``[B, T]`` of texts with other bytes as padding; and those with another
        byte at the end of each text."""
        distance = torch.arange(inputs.shape[1]) - lengths[:, None]
        others = (inputs + 128) % 256
        padding, last = (
            torch.where(places, others, inputs) for places in (distance >= 0, distance == -1)
        )
        return (padding, mask), (last, mask)

    def baselines(self, part: Texts, *, trained_bytes: int) -> dict[str, float]:
        """Return none in bits."""
        return {}


def wilson_interval(correct: Tensor) -> dict[str, float]:
    """Return the share of true entries of ``correct [n]``, and its 95% interval (Wilson, 1927)."""
    n = len(correct)
    share = correct.double().mean().item()
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    # rounded, the ends may lie outside of 0 and 1
    return {LABEL: share, "lower": max(0.0, centre - half), "upper": min(1.0, centre + half)}
