"""Scoring: cross-entropy of the bytes of a split, in streams with carried state or in windows
without."""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from harness.data.streams import (
    Batches,
    round_context,
    samples,
    segments,
    shard_slice,
    windows,
)
from harness.device.runtime import Runtime
from harness.model import LanguageModel, ModelOut, add_stats
from harness.objective.checks import CausalityCheck, Future, ReadCheck, Reads, allows_rounding
from harness.plan.settings import WINDOWS

CUTS = 512  # in the scores of a split, by CausalityCheck
MIN_CUTS = 64  # of a short run
# largest share of a run's time that goes into cuts, if these are more than ``MIN_CUTS``
CUTS_SHARE = 0.05
# of the cuts, if windows are scored as well; a cut of a window costs twice a cut of a stream
WINDOW_CUTS_SHARE = 1 / 8
MAX_BITS_BELOW_FLOOR = 40
"""Most bits by which a causal row's total may be below the corpus's floor. More has a
probability of at most 2^-40."""


class Score(NamedTuple):
    """The score of a split."""

    # cross-entropy of each scored (input, target) pair in the split's order, float32 [pairs]
    nats: Tensor
    correct: Tensor  # whether the target is the likeliest byte, bool [pairs]
    stats: dict[str, dict[str, Tensor]]  # the sublayers' summed statistics
    future: Future | Reads = Future()  # what the check has found

    @property
    def bits_per_byte(self) -> float:
        return self.nats.double().sum().item() / math.log(2) / len(self.nats)

    def bits_by_label(self, masks: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return the mean bits of the pairs where a mask, bool ``[pairs]``, is true; None if it
        is true nowhere."""
        return {
            label: self._replace(nats=self.nats[mask]).bits_per_byte if mask.any() else None
            for label, mask in masks.items()
        }

    def answers(self, masks: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
        """Return the keys of a row for answers, whose masks are those of ``bits_by_label``: mean
        bits, and the share of answers that are the likeliest byte; NaN if a mask is true nowhere,
        and no key without masks."""
        if not masks:
            return {}
        correct = self.correct.double()
        accuracy = {label: correct[mask].mean().item() for label, mask in masks.items()}
        return {"bits_per_copy": self.bits_by_label(masks), "answer_accuracy": accuracy}


def check_causality(
    model: LanguageModel, scores: Sequence[Score], *, floor: float | None, precision: str
) -> tuple[Future, bool]:
    """Return what later bytes changed in all scores, and whether the scores are possible for a
    causal model on a corpus whose lowest expected bits per byte are ``floor``."""
    future = functools.reduce(Future.__add__, (score.future for score in scores))
    rounding = allows_rounding(model)
    below = max(((floor or 0.0) - score.bits_per_byte) * len(score.nats) for score in scores)
    return future, future.causal(
        precision=precision, rounding=rounding
    ) and not below > MAX_BITS_BELOW_FLOOR


def score_stream(
    model: LanguageModel,
    split: Tensor,
    *,
    runtime: Runtime,
    streams: int,  # number of streams that read the split side by side
    segment: int,  # bytes of each stream in a forward pass
    # bytes that a stream reads before its first scored byte; without ``pairs``: ``round_context``
    context: int = 0,
    # number of pairs in a sample spread over the split; None scores each pair once
    pairs: int | None = None,
    # sum statistics of sublayers, from the first batch in which all streams are scored
    collect_stats: bool = False,
    **check: int,  # ``future_seed`` and ``cuts`` of a ``CausalityCheck``
) -> Score:
    """Score pairs of ``split`` (uint8 ``[n]``) with carried state. Processes divide the streams;
    each returns all scores."""
    shard = runtime.processes.shard
    if pairs is None:
        context = round_context(
            context, n_pairs=max(len(split) - 1, 0), streams=streams, segment=segment
        )
    make = segments if pairs is None else partial(samples, pairs=pairs)
    batches = ()
    if len(range(streams)[shard_slice(streams, shard)]):
        batches = make(split, streams=streams, segment=segment, context=context, shard=shard)
    first = context // segment
    causality = CausalityCheck(batches, model, runtime, rows=streams, first=first, **check)
    stats_from = first if collect_stats else None
    return score(model, batches, runtime, carry=True, stats_from=stats_from, check=causality)


def score_windows(
    model: LanguageModel,
    split: Tensor,
    *,
    runtime: Runtime,
    batch: int = WINDOWS[0],
    **check: int,
) -> Score:
    """Score each pair once in windows of 1024 bytes, stride 512. ``check`` is that of
    ``score_stream``."""
    batches = windows(split, window=WINDOWS[1], batch=batch, shard=runtime.processes.shard)
    return score_rows(model, batches, runtime, rows=batch, **check)


def score_rows(
    model: LanguageModel,
    batches: Batches,
    runtime: Runtime,
    *,
    rows: int,
    stats_from: int | None = None,
    **check: int,
) -> Score:
    """Score batches of at most ``rows`` rows that are read without carried state. ``check`` is that
    of ``score_stream``."""
    rows *= runtime.processes.world_size
    causality = CausalityCheck(batches, model, runtime, rows=rows, **check)
    return score(model, batches, runtime, stats_from=stats_from, check=causality)


def score_context(
    model: LanguageModel,
    split: Tensor,
    *,
    runtime: Runtime,
    longest: int,
    segment: int,
    batch: int = 8,
) -> list[dict]:
    """Return ``{from_bytes, to_bytes, bits_per_byte}`` by the number of bytes before a target, in
    ranges 1, 2, 3-4, ... Windows of ``longest`` pairs begin without state; segments of
    ``segment`` bytes are read with carried state."""
    longest = min(longest, len(split) - 1)
    nats_sums = torch.zeros(longest, dtype=torch.float64)
    counts = torch.zeros(longest)
    for inputs, targets, mask in windows(split, window=longest, stride=longest, batch=batch):
        pieces = zip(
            *(tensor.split(segment, dim=1) for tensor in (inputs, targets, mask)), strict=True
        )
        nats = torch.cat([nats for nats, *_ in _predictions(model, pieces, runtime)], dim=1)
        nats_sums += (nats * mask).double().sum(0)
        counts += mask.sum(0)
    # 1, 2, 3 to 4, 5 to 8, ...
    edges = [1, *(2**i + 1 for i in range((longest - 1).bit_length())), longest + 1]
    curve = []
    for begin, end in pairwise(edges):
        total, count = (x[begin - 1 : end - 1].sum() for x in (nats_sums, counts))
        if count > 0:
            bits = (total / count).item() / math.log(2)
            curve.append({"from_bytes": begin, "to_bytes": end - 1, "bits_per_byte": bits})
    return curve


def score(
    model: LanguageModel,
    batches: Iterable,
    runtime: Runtime,
    *,
    carry: bool = False,
    check: CausalityCheck | ReadCheck | None = None,
    **options: int | None,
) -> Score:
    """Return the score of all processes' streams or windows, in order. ``carry`` and ``options``
    are those of ``_predictions``."""
    predicted = []
    masks = []
    stats = {}
    processes = runtime.processes
    options |= {"carry": carry, "check": check}
    for nats, correct, mask, batch_stats in _predictions(model, batches, runtime, **options):
        predicted.append(torch.stack([nats, correct], dim=-1))
        masks.append(mask)
        stats = add_stats(stats, batch_stats)
    # batches continue the same streams, or have further windows
    dim = int(carry)
    scored = torch.cat(predicted, dim)[torch.cat(masks, dim)] if predicted else torch.empty(0, 2)
    if processes.world_size > 1:
        stats = tree_map_only(Tensor, Tensor.cpu, stats)
    stats = functools.reduce(add_stats, processes.all_gather(stats, long_wait=True))
    found = Future()
    if check is not None:
        found = functools.reduce(operator.add, processes.all_gather(check.result()))
    nats, correct = processes.concatenate(scored).unbind(1)
    return Score(nats, correct.bool(), stats, found)


@torch.no_grad()
def _predictions(
    model: LanguageModel,
    batches: Iterable,
    runtime: Runtime,
    *,
    carry: bool = True,
    stats_from: int | None = None,
    check: CausalityCheck | ReadCheck | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, dict]]:
    """Yield nats ``[L, T]``, whether the target is the likeliest byte, and mask on the CPU, and
    statistics, of each batch; statistics from batch ``stats_from`` on. ``carry`` carries state from
    one batch to the next."""
    model.eval()
    state = None
    forward = runtime.forward(model)

    def predict(
        targets: Tensor, lengths: list[Tensor], collect_stats: bool, inputs: Tensor
    ) -> tuple[Tensor, ModelOut]:
        inputs, targets, *valid = runtime.to_device(inputs, targets, *lengths)
        keywords = dict(zip(("valid",), valid, strict=False))
        with runtime.autocast():
            out = forward(inputs, state, collect_stats=collect_stats, **keywords)
        # one prediction for each target, also of a pooled model
        logits = out.logits.view(*targets.shape, -1)
        nats = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return nats.float().cpu(), out._replace(logits=logits)

    for index, segment in enumerate(batches):
        inputs, targets, mask, *lengths = segment
        # statistics would count padding
        collect_stats = stats_from is not None and index >= stats_from and not lengths
        predict_batch = partial(predict, targets, lengths, collect_stats)
        nats, out = predict_batch(inputs)
        correct = out.logits.argmax(-1).cpu() == targets
        if check is not None:
            check.compare(index, segment, nats, predict_batch)
        if carry:
            state = out.state
        yield nats, correct, mask, out.stats
