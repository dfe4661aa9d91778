"""Next bytes: each byte is predicted from those before it, in streams with carried state, or in
whole sequences."""

from torch import Tensor

from harness.data.byte_counts import compressed_bits
from harness.data.sequences import Sequences, sample_sequences, scored_sequences
from harness.data.streams import Streams, sample_layout, score_ranges
from harness.model import LanguageModel
from harness.objective import scoring
from harness.objective.checks import NOT_CAUSAL, not_causal
from harness.objective.objective import Objective
from harness.objective.scoring import (
    Score,
    check_causality,
    score_rows,
    score_stream,
    score_windows,
)


class CausalLM(Objective):
    scored = "bytes"
    failed = NOT_CAUSAL
    explain = staticmethod(not_causal)

    def prepare(self, **layout: int) -> None:
        b = self.plan.batch
        e = self.plan.eval
        self.scored_segment = e.segment
        train = self.corpus.splits["train"]
        if sequence := self.corpus.sequence:
            self.batches = Sequences(train, **layout | {"segment": sequence})
        else:
            self.batches = Streams(train, carry=b.carry, order=b.order, **layout)
        for split in self.splits:
            score_ranges(len(self.reported_part(split)) - 1, e.streams)

    def score(
        self,
        model: LanguageModel,
        part: Tensor,
        *,
        pairs: int | None = None,
        **check: int,
    ) -> Score:
        """Score a part, uint8 ``[n]``, in streams as the configuration's ``eval`` says, or all of
        its sequences. ``pairs`` and ``check`` (``future_seed``, ``cuts``) are those of
        ``score_stream``."""
        if sequence := self.corpus.sequence:
            rows = self.scored_rows
            shard = self.runtime.processes.shard
            batches = scored_sequences(part, sequence=sequence, batch=rows, shard=shard)
            return score_rows(model, batches, self.runtime, rows=rows, stats_from=0, **check)
        layout = {name: self.plan.protocol()[name] for name in ("streams", "segment", "context")}
        if pairs is not None:
            pairs = min(pairs, len(part) - 1)
            streams, context = sample_layout(pairs, **layout | {"context": self.plan.model.span})
            layout |= {"pairs": pairs, "streams": streams, "context": context}
        return score_stream(
            model, part, runtime=self.runtime, collect_stats=True, **layout, **check
        )

    def score_sample(self, model: LanguageModel, part: Tensor, *, pairs: int) -> tuple[Score, dict]:
        """Score a sample of ``pairs`` pairs, or of whole sequences; return also the scores of
        answers in sequences."""
        sequence = self.corpus.sequence
        if not sequence:
            return self.score(model, part, pairs=pairs), {}
        sample = sample_sequences(part, sequence=sequence, n_bytes=pairs)
        score = self.score(model, sample)
        return score, score.answers(self.corpus.answer_masks(sample))

    def final(
        self, model: LanguageModel, part: Tensor, *, trained_bytes: int
    ) -> tuple[Score, dict]:
        """Score a part, also in windows, and check causality in the scores."""
        plan = self.plan
        corpus = self.corpus
        stream_cuts, window_cuts = self._cuts(len(part), trained_bytes=trained_bytes)
        score = self.score(model, part, future_seed=plan.seed, cuts=stream_cuts)
        scores = [score]
        keys = {}
        if plan.eval.windows and not corpus.sequence:
            scores.append(
                score_windows(
                    model, part, runtime=self.runtime, future_seed=plan.seed, cuts=window_cuts
                )
            )
            keys["windows_bits_per_byte"] = scores[-1].bits_per_byte
        floor = corpus.floor_bits(part)
        future, causal = check_causality(
            model, scores, floor=floor, precision=self.runtime.precision
        )
        keys |= score.answers(corpus.answer_masks(part)) | future.row()
        if repeats := score.bits_by_label(corpus.repeat_masks(part)):
            keys["bits_per_repeat"] = repeats
        if floor:
            keys["floor_bits_per_byte"] = floor
        if not causal:
            keys["check"] = self.failed
        return score, keys

    def _cuts(self, n_bytes: int, *, trained_bytes: int) -> tuple[int, int]:
        """Return the number of cuts in the streams and in the windows of a final score of
        ``n_bytes``: ``CUTS`` together, or as many as ``CUTS_SHARE`` of the run's time allows, but
        at least ``MIN_CUTS``. The backward pass counts twice."""
        e = self.plan.eval
        splits = len(self.splits)
        window_share = 0.0
        if e.windows:
            window_share = scoring.WINDOW_CUTS_SHARE
        bytes_per_cut = e.segment * (1 - window_share) + scoring.WINDOWS[1] * window_share
        run_bytes = 3 * trained_bytes + splits * n_bytes * (3 if e.windows else 1)
        affordable = int(scoring.CUTS_SHARE * run_bytes / (splits * bytes_per_cut))
        cuts = min(scoring.CUTS, max(scoring.MIN_CUTS, affordable))
        window_cuts = round(cuts * window_share)
        return cuts - window_cuts, window_cuts

    def baselines(self, part: Tensor, *, trained_bytes: int) -> dict[str, float]:
        """Return bits per byte of a part under compressors, and by counts of as many bytes as the
        model read."""
        return compressed_bits(part, train=self.corpus.splits["train"][:trained_bytes])
