"""Hidden bytes: of each window, some bytes are predicted from all others."""

import torch
from torch import Tensor

from harness.data.corpora import Corpus
from harness.data.masked import (
    MaskedWindows,
    hide,
    scored_windows,
    select_scored,
    whole_windows,
)
from harness.data.neighbour_counts import neighbour_bits
from harness.device.runtime import Runtime
from harness.model import LanguageModel
from harness.objective.checks import Replaced
from harness.objective.objective import Objective
from harness.objective.scoring import Score, score_reads
from harness.plan.build import Plan


class MaskedLM(Objective):
    scored = "masked bytes"

    def __init__(self, plan: Plan, corpus: Corpus, runtime: Runtime):
        super().__init__(plan, corpus, runtime)
        b = plan.batch
        allowed = "allowed with objective=masked_lm"
        if corpus.sequence or corpus.generated.floor_bits:
            raise ValueError(
                f"data={corpus.name}: is made to be predicted from earlier bytes; {allowed} are "
                "corpora of text"
            )
        self.options = {"rate": plan.objective.rate, "vocabulary": corpus.vocabulary}
        layout = {"streams": b.streams, "segment": b.segment, "order": b.order}
        train = corpus.splits["train"]
        self.batches = MaskedWindows(train, seed=plan.seed, **layout, **self.options)
        parts = [self.reported_part(split, limit=plan.eval.bytes) for split in self.splits]
        shortest = min(map(len, [*parts, self.selection_part()]))
        if shortest < b.segment:
            raise ValueError(
                f"batch.segment={b.segment}: {allowed} are at most the {shortest:,} bytes that are "
                "scored, or that select weights"
            )

    def score(self, model: LanguageModel, windows: Tensor, **check) -> Score:
        """Score ``windows [N, T]``."""
        layout = {"batch": self.scored_rows, "shard": self.runtime.processes.shard}
        batches = scored_windows(windows, **layout, **self.options)
        return score_reads(model, batches, self.runtime, **check)

    def score_sample(self, model: LanguageModel, part: Tensor, *, pairs: int) -> tuple[Score, dict]:
        """Score whole windows, spread over the part."""
        windows = whole_windows(part, window=self.scored_segment, n_bytes=pairs)
        return self.score(model, windows), {}

    def final(
        self, model: LanguageModel, part: Tensor, *, trained_bytes: int
    ) -> tuple[Score, dict]:
        """Score a part. Its hidden bytes must not matter, and later visible ones must."""
        windows = whole_windows(part, window=self.scored_segment)
        score = self.score(model, windows, replace=self.replace)
        return score, score.future.row()

    def replace(self, inputs: Tensor, tokens: Tensor, selected: Tensor) -> tuple[Replaced, ...]:
        """Return the inputs ``[B, T]`` of windows with other hidden bytes; and those with other
        visible bytes in the second half, for predictions of the first."""
        vocabulary = self.corpus.vocabulary
        others = (tokens + vocabulary // 2) % vocabulary
        hidden = hide(torch.where(selected, others, tokens), selected, vocabulary=vocabulary)
        later = (torch.arange(inputs.shape[1]) >= inputs.shape[1] // 2).expand_as(selected)
        visible = torch.where(later & (inputs < vocabulary), others, inputs)
        return (hidden.int(), selected), (visible.int(), selected & ~later)

    def baselines(self, part: Tensor, *, trained_bytes: int) -> dict[str, float]:
        """Return bits per masked byte of a part by counts of visible neighbours, of as many bytes
        as the model read."""
        windows = whole_windows(part, window=self.scored_segment)
        rows = torch.arange(len(windows))
        selected = select_scored(rows, width=self.scored_segment, rate=self.options["rate"])
        train = self.corpus.splits["train"][:trained_bytes]
        return neighbour_bits(train, windows, selected, vocabulary=self.corpus.vocabulary)
