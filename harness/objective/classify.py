"""Classes of texts: the class of each text is predicted from the mean of its positions."""

import math

import torch
from torch import Tensor

from harness.data.bag_of_bytes import baseline_accuracy
from harness.data.sequences import spread
from harness.data.streams import Batches
from harness.data.texts import TextBatches, Texts, scored_texts
from harness.model import LanguageModel
from harness.objective.objective import Objective
from harness.objective.scoring import Score

LABEL = "label"
"""The key of ``answer_accuracy`` that the model has; the others are its interval and baselines."""
Z = 1.959963984540054  # of a normal distribution, 97.5%


class Classify(Objective):
    scored = "texts"

    def prepare(self, *, segment: int, **layout: int) -> None:
        self.texts = {name: texts.cut(segment) for name, texts in self.corpus.texts.items()}
        train = self.texts["train"]
        self.batches = TextBatches(train, segment=segment, **layout)
        self.train_bytes = int(train.lengths.sum())

    def reported_part(self, split: str, *, capped: bool = True) -> Texts:
        """Return the texts within the bytes that are scored at the end."""
        return self.texts[split].within(super().reported_part(split, capped=capped))

    def selection_part(self) -> Texts:
        """Return the texts within the bytes of valid that select the best weights."""
        return self.texts["valid"].within(super().selection_part())

    def scored_batches(self, part: Texts, **layout) -> Batches:
        """Return all texts of a part, of which each has one prediction."""
        return scored_texts(part, **layout)

    def score_sample(self, model: LanguageModel, part: Texts, *, pairs: int) -> tuple[Score, dict]:
        """Score texts, spread over the part."""
        n_sampled = pairs * part.number // len(part)
        score = self.score(model, part.select(spread(n_sampled, part.number)))
        return score, {"answer_accuracy": {LABEL: score.correct.double().mean().item()}}

    def final(self, model: LanguageModel, part: Texts, *, trained_bytes: int) -> tuple[Score, dict]:
        """Score a part. Returns also the accuracy with its interval, and that of baselines, fitted
        to all of train."""
        score, row = super().final(model, part, trained_bytes=trained_bytes)
        baselines = baseline_accuracy(self.texts["train"], part, classes=len(self.corpus.classes))
        return score, row | {"answer_accuracy": wilson_interval(score.correct) | baselines}

    def replace(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, lengths: Tensor
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the inputs ``[B, T]`` of texts with other bytes as padding, which must not matter;
        and those with another byte at the end of each text."""
        distance = torch.arange(inputs.shape[1]) - lengths[:, None]
        others = (inputs + 128) % 256
        places = (distance >= 0, distance == -1)
        return tuple((torch.where(place, others, inputs), mask) for place in places)

    def baselines(self, part: Texts, *, trained_bytes: int) -> dict[str, float]:
        """Return none in bits."""
        return {}


def wilson_interval(correct: Tensor) -> dict[str, float]:
    """Return the share of true entries of ``correct [n]``, and its 95% interval (Wilson, 1927)."""
    n = len(correct)
    share = correct.double().mean().item()
    centre = n * share + Z**2 / 2
    half = Z * math.sqrt(n * share * (1 - share) + Z**2 / 4)
    lower, upper = ((centre + end) / (n + Z**2) for end in (-half, half))
    # rounded, the ends may lie outside of 0 and 1
    return {LABEL: share, "lower": max(0.0, lower), "upper": min(1.0, upper)}
