"""Objective: what the objectives have in common."""

from torch import Tensor

from harness.data.corpora import Corpus
from harness.data.streams import Rows
from harness.data.texts import Texts
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.objective import scoring
from harness.objective.checks import MISREAD, ReadCheck, misread
from harness.objective.scoring import Score
from harness.plan.build import Plan

Part = Tensor | Texts
"""The part of a split that is scored: token ids, uint8 ``[n]``, or texts."""


class Objective:
    """What a run is trained for, made once from its plan, corpus and device. ``scored`` is what its
    scores are means of. ``batches`` are those of training. ``failed`` is
    the value of ``check`` in the row of a final score whose check fails, and ``explain(row)`` what
    shows it. ValueError if the corpus is too short.

    ``prepare(streams=.., segment=.., seed=..)`` sets ``batches``, and may change sizes.
    ``score_sample(model, part, pairs=..)``, of about so many bytes, and ``final(model, part,
    trained_bytes=..)``, with the check, return the score of a part and further keys of its row.
    ``baselines(part, trained_bytes=..)`` returns bits per prediction by compressors, or by counts
    of so many bytes of train.

    An objective that predicts single rows has ``scored_batches(part, batch=.., shard=..)``, and
    ``replace``, that of a ``ReadCheck``."""

    scored: str
    failed = MISREAD
    explain = staticmethod(misread)
    batches: Rows

    def __init__(self, plan: Plan, corpus: Corpus, runtime: Runtime):
        self.plan = plan
        self.runtime = runtime
        self.corpus = corpus
        # those that are scored at the end
        self.splits = ("valid", "test") if plan.eval.test else ("valid",)
        self.train_bytes = len(corpus.splits["train"])  # of an epoch
        # bytes of a row in a forward pass of scores, and number of rows
        b = plan.batch
        self.scored_segment = b.segment
        self.scored_rows = max(1, plan.eval.streams * plan.eval.segment // b.segment)
        self.prepare(streams=b.streams, segment=b.segment, seed=plan.seed)
        self.selection_part()

    def score(self, model: LanguageModel, part: Part, *, check: ReadCheck | None = None) -> Score:
        """Score all rows of a part."""
        shard = self.runtime.processes.shard
        batches = self.scored_batches(part, batch=self.scored_rows, shard=shard)
        return scoring.score(model, batches, self.runtime, check=check, stats_from=0)

    def final(self, model: LanguageModel, part: Part, *, trained_bytes: int) -> tuple[Score, dict]:
        """Score a part, and check what the model reads."""
        check = ReadCheck(model, self.runtime, replace=self.replace)
        score = self.score(model, part, check=check)
        return score, score.future.row()

    def reported_part(self, split: str, *, capped: bool = True) -> Part:
        """Return the part of a split that is scored at the end; ``capped`` by ``eval.bytes``, if
        this is set."""
        e = self.plan.eval
        limit = e.bytes if capped else None
        return self.corpus.scored_part(split, selection_bytes=e.selection_bytes, limit=limit)

    def selection_part(self) -> Part:
        """Return the part of valid that selects the best weights. ValueError if it has fewer than
        two bytes."""
        selection_bytes = self.plan.eval.selection_bytes
        part = self.corpus.selection_part(selection_bytes)
        if len(part) < 2:
            raise ValueError(
                f"eval.selection_bytes={selection_bytes}: leaves {len(part)} of the "
                f"{len(self.corpus.splits['valid'])} bytes of valid for selecting weights; allowed "
                "are 2 or more, or null, with at least 4 bytes of valid"
            )
        return part
