"""Objective: what the objectives have in common."""

from torch import Tensor

from harness.data.corpora import Corpus
from harness.data.masked import MaskedWindows
from harness.data.sequences import Sequences
from harness.data.streams import Streams
from harness.data.texts import TextBatches, Texts
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.objective.scoring import Score
from harness.plan.build import Plan

Part = Tensor | Texts
"""The part of a split that is scored: token ids, uint8 ``[n]``, or texts."""


class Objective:
    """What a run is trained for, made once from its plan and corpus. ``unit`` is that of its
    scores, ``scored`` what they are means of. ``batches`` are those of training. ``failed`` is the
    value of ``check`` in the row of a final score whose check fails. ValueError if the corpus is
    too short."""

    unit: str
    scored: str
    failed: str
    batches: Streams | Sequences | MaskedWindows | TextBatches

    def __init__(self, plan: Plan, corpus: Corpus):
        self.plan = plan
        self.corpus = corpus
        self.train_bytes = len(corpus.splits["train"])  # of an epoch
        self.scored_segment = plan.batch.segment  # bytes of a row in a forward pass

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are scored at the end."""
        if self.plan.eval.test:
            return ("valid", "test")
        return ("valid",)

    def reported_part(self, split: str, *, limit: int | None = None) -> Part:
        """Return the part of a split that is scored at the end, or at most its first ``limit``
        bytes."""
        selection_bytes = self.plan.eval.selection_bytes
        return self.corpus.scored_part(split, selection_bytes=selection_bytes, limit=limit)

    def selection_part(self) -> Part:
        """Return the part of valid that selects the best weights."""
        return self.corpus.selection_part(self.plan.eval.selection_bytes)

    def score_sample(
        self, model: LanguageModel, part: Part, runtime: Runtime, *, pairs: int
    ) -> tuple[Score, dict]:
        """Score a sample of ``pairs`` bytes of a part. Returns also further keys of the row."""
        raise NotImplementedError

    def final(
        self, model: LanguageModel, part: Part, runtime: Runtime, *, trained_bytes: int
    ) -> tuple[Score, dict]:
        """Score a part and check the score. Returns also further keys of the row; ``check`` is
        ``failed`` if the check fails."""
        raise NotImplementedError

    def explain(self, row: dict) -> str:
        """Return what shows that the check of a final row failed."""
        raise NotImplementedError

    def baselines(self, part: Part, *, trained_bytes: int) -> dict[str, dict[str, float]]:
        """Return keys of a summary for a part: bits per prediction by ``compressors``, or counts of
        ``trained_bytes`` bytes of train; and their ``baseline_accuracy``, if there is one."""
        raise NotImplementedError
