"""Hidden bytes: of each window, some bytes are predicted from all others."""

import torch
from torch import Tensor

from harness.data.masked import MaskedWindows, hide, scored_windows
from harness.data.neighbour_counts import neighbour_bits
from harness.data.sequences import sample_sequences
from harness.data.streams import Batches
from harness.model import LanguageModel
from harness.objective.objective import Objective
from harness.objective.scoring import Score


class MaskedLM(Objective):
    scored = "masked bytes"

    def prepare(self, *, segment: int, **layout: int) -> None:
        plan = self.plan
        corpus = self.corpus
        allowed = "allowed with objective=masked_lm"
        if corpus.sequence or corpus.generated.floor_bits:
            raise ValueError(
                f"data={corpus.name}: is made to be predicted from earlier bytes; {allowed} are "
                "corpora of text"
            )
        self.options = {"rate": plan.objective.rate, "vocabulary": corpus.vocabulary}
        order = plan.batch.order
        self.batches = MaskedWindows(
            corpus.splits["train"], segment=segment, order=order, **layout, **self.options
        )
        parts = [self.selection_part(), *map(self.reported_part, self.splits)]
        shortest = min(map(len, parts))
        if shortest < segment:
            raise ValueError(
                f"batch.segment={segment}: {allowed} are at most the {shortest:,} bytes that are "
                "scored, or that select weights"
            )

    def scored_batches(self, part: Tensor, **layout) -> Batches:
        """Return the whole windows of a part."""
        return scored_windows(part, window=self.scored_segment, **layout, **self.options)

    def score_sample(self, model: LanguageModel, part: Tensor, *, pairs: int) -> tuple[Score, dict]:
        """Score whole windows, spread over the part."""
        sample = sample_sequences(part, sequence=self.scored_segment, n_bytes=pairs)
        return self.score(model, sample), {}

    def replace(
        self, inputs: Tensor, tokens: Tensor, selected: Tensor
    ) -> tuple[tuple[Tensor, Tensor], ...]:
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
        (windows,) = self.scored_batches(part, batch=len(part))
        train = self.corpus.splits["train"][:trained_bytes]
        return neighbour_bits(train, *windows, vocabulary=self.corpus.vocabulary)
