"""Classes of texts: the class of each text is predicted from the mean of its positions."""

import math

import torch
from torch import Tensor

from harness.data.bag_of_bytes import baselines
from harness.data.corpora import Corpus
from harness.data.texts import TextBatches, Texts, scored_texts
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.objective.objective import Objective
from harness.objective.scoring import MISREAD, NoCheck, ReadCheck, Replaced, Score, score_batches
from harness.plan.build import Plan

LABEL = "label"
"""The one key of ``answer_accuracy``."""
Z = 1.959963984540054  # of a normal distribution, 97.5%


class Classify(Objective):
    unit = "bits/label"
    scored = "texts"
    failed = MISREAD

    def __init__(self, plan: Plan, corpus: Corpus):
        super().__init__(plan, corpus)
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

    def score(self, model: LanguageModel, texts: Texts, runtime: Runtime, **check) -> Score:
        """Score texts, of which each has one prediction."""
        e = self.plan.eval
        segment = self.plan.batch.segment
        batches = scored_texts(
            texts,
            longest=segment,
            batch=max(1, e.streams * e.segment // segment),
            shard=runtime.processes.shard,
        )
        check = check or {"check": NoCheck()}
        return score_batches(model, batches, runtime, carry=False, stats_from=0, **check)

    def score_sample(
        self, model: LanguageModel, part: Texts, runtime: Runtime, *, pairs: int
    ) -> tuple[Score, dict]:
        """Score texts of about ``pairs`` bytes, spread over the part, and return their accuracy."""
        n_sampled = max(1, min(part.number, pairs * part.number // len(part)))
        sample = part.select(torch.arange(n_sampled) * part.number // n_sampled)
        score = self.score(model, sample, runtime)
        return score, {"answer_accuracy": {LABEL: score.correct.double().mean().item()}}

    def final(
        self, model: LanguageModel, part: Texts, runtime: Runtime, *, trained_bytes: int
    ) -> tuple[Score, dict]:
        """Score a part. Padding must not matter, and bytes of a text must."""
        check = ReadCheck(self.replace, model, runtime)
        score = self.score(model, part, runtime, check=check)
        n_correct = int(score.correct.sum())
        keys = score.future._asdict() | {
            "answer_accuracy": {LABEL: n_correct / len(score.correct)},
            "accuracy_interval": wilson_interval(n_correct, len(score.correct)),
        }
        if not score.future.passed:
            keys["check"] = self.failed
        return score, keys

    def replace(
        self, inputs: Tensor, targets: Tensor, mask: Tensor, lengths: Tensor
    ) -> tuple[Replaced, ...]:
        """Return the inputs ``[B, T]`` of texts with other bytes as padding; and those with another
        byte at the end of each text."""
        others = (inputs + 128) % 256
        columns = torch.arange(inputs.shape[1])
        padding = torch.where(columns >= lengths[:, None], others, inputs)
        last = torch.where(columns == lengths[:, None] - 1, others, inputs)
        return (padding, mask), (last, mask)

    def explain(self, row: dict) -> str:
        """Return what the model read."""
        return (
            f"other padding changes {row['hidden_changed']:,} predictions (must be 0), and other "
            f"last bytes of texts change {row['visible_changed']:,} (must be more)"
        )

    def baselines(self, part: Texts, *, trained_bytes: int) -> dict[str, dict[str, float]]:
        """Return bits per label, and the accuracy, of the most frequent class and of logistic
        regression on the bytes, both fitted to all of train."""
        found = baselines(self.texts["train"], part, classes=len(self.corpus.classes))
        bits = {name: bits for name, (bits, _) in found.items()}
        accuracy = {name: accuracy for name, (_, accuracy) in found.items()}
        return {"compressors": bits, "baseline_accuracy": accuracy}


def wilson_interval(n_correct: int, n: int) -> list[float]:
    """Return the 95% interval of a share (Wilson, 1927)."""
    share = n_correct / n
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]
