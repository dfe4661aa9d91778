"""Scoring: cross-entropy of the bytes of a split, in streams with carried state or in windows without."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.sequences import scored_sequences
from harness.data.streams import Batches, round_context, samples, segments, shard_slice, windows
from harness.device.runtime import Runtime
from harness.hashing import integer_hash
from harness.model import LanguageModel, ModelOut, add_stats

WINDOWS = (8, 1024)  # windows in a batch, and bytes in a window, of the score without state
CHECKED_POSITIONS = 64  # in each score, by CausalityCheck
NOT_CAUSAL = "not causal"
MAX_FUTURE_NATS = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest mean absolute change of a pair's nats by later bytes in a causal row. Rounding in float32: at most 4e-7."""
MAX_BITS_BELOW_FLOOR = 40
"""Most bits by which a causal row's total may be below the corpus's floor. More has a probability of at most 2^-40."""
_BATCH_KEY, _POSITION_KEY = 3, 4  # first keys of the hash, other than those of harness/data/streams.py


class Score(NamedTuple):
    """The score of a split."""

    nats: Tensor  # cross-entropy of each scored (input, target) pair in the split's order, float32 [pairs]
    correct: Tensor  # whether the target is the likeliest byte, bool [pairs]
    stats: dict[str, dict[str, Tensor]]  # the sublayers' summed statistics
    future_nats: float = 0.0  # mean absolute change of a pair's nats if later bytes are replaced, by CausalityCheck

    @property
    def bits_per_byte(self) -> float:
        return self.nats.double().sum().item() / math.log(2) / len(self.nats)

    def bits_by_label(self, masks: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return the mean bits of the pairs where a mask, bool ``[pairs]``, is true; None if it is true nowhere."""
        scores = {label: self._replace(nats=self.nats[mask]) for label, mask in masks.items()}
        return {label: score.bits_per_byte if len(score.nats) else None for label, score in scores.items()}

    def answers(self, masks: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
        """Return the keys of a row for answers, whose masks are those of ``bits_by_label``: mean
        bits, and the share of answers that are the likeliest byte; NaN if a mask is true nowhere,
        and no key without masks."""
        if not masks:
            return {}
        correct = {label: self.correct[mask].double() for label, mask in masks.items()}
        accuracy = {label: answers.mean().item() for label, answers in correct.items()}
        return {"bits_per_copy": self.bits_by_label(masks), "answer_accuracy": accuracy}


def check_causality(scores: Sequence[Score], *, floor: float | None, precision: str) -> tuple[float, bool]:
    """Return the largest ``future_nats`` of scores, NaN if one is NaN, and whether all scores are possible for a causal
    model on a corpus whose lowest expected bits per byte are ``floor``."""
    future_nats = max((score.future_nats for score in scores), key=lambda nats: (nats != nats, nats))
    below = max(((floor or 0.0) - score.bits_per_byte) * len(score.nats) for score in scores)
    return future_nats, future_nats <= MAX_FUTURE_NATS[precision] and not below > MAX_BITS_BELOW_FLOOR


def score_stream(
    model: LanguageModel,
    split: Tensor,
    *,
    runtime: Runtime,
    streams: int,  # number of streams that read the split side by side
    segment: int,  # bytes of each stream in a forward pass
    context: int = 0,  # bytes that a stream reads before its first scored byte; without ``pairs``: ``round_context``
    pairs: int | None = None,  # number of pairs in a sample spread over the split; None scores each pair once
    collect_stats: bool = False,  # sum statistics of sublayers, from the first batch in which all streams are scored
    future_seed: int | None = None,  # seed of a ``CausalityCheck``, or None for no check
) -> Score:
    """Score pairs of ``split`` (uint8 ``[n]``) with carried state. Processes divide the streams; each returns all scores."""
    layout = {"streams": streams, "segment": segment, "shard": (shard := runtime.processes.shard)}
    if pairs is None:
        context = round_context(context, n_pairs=max(len(split) - 1, 0), streams=streams, segment=segment)
    make = segments if pairs is None else partial(samples, pairs=pairs)
    batches = make(split, context=context, **layout) if len(range(streams)[shard_slice(streams, shard)]) else ()
    first = context // segment
    check = CausalityCheck(future_seed, batches, rows=streams, vocabulary=model.head.out_features, first=first)
    return _score(model, batches, runtime, stats_from=first if collect_stats else None, check=check)


def score_windows(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, batch: int = WINDOWS[0], future_seed: int | None = None
) -> Score:
    """Score each pair once in windows of 1024 bytes, stride 512. ``future_seed`` is that of ``score_stream``."""
    batches = windows(split, window=WINDOWS[1], batch=batch, shard=runtime.processes.shard)
    return _score_rows(model, batches, runtime, batch=batch, future_seed=future_seed)


def score_sequences(
    model: LanguageModel,
    split: Tensor,
    *,
    sequence: int,
    runtime: Runtime,
    batch: int,
    future_seed: int | None = None,
) -> Score:
    """Score all bytes of ``split``, whole sequences (uint8 ``[n T]``), ``batch`` of them in a
    forward pass. A sequence is read without state from before it. ``future_seed`` is that of
    ``score_stream``."""
    batches = scored_sequences(split, sequence=sequence, batch=batch, shard=runtime.processes.shard)
    return _score_rows(model, batches, runtime, batch=batch, future_seed=future_seed, stats_from=0)


def _score_rows(
    model: LanguageModel,
    batches: Batches,
    runtime: Runtime,
    *,
    batch: int,
    future_seed: int | None,
    **options,
) -> Score:
    """Return the score of batches of rows that are read without carried state."""
    rows = batch * runtime.processes.world_size
    check = CausalityCheck(future_seed, batches, rows=rows, vocabulary=model.head.out_features)
    return _score(model, batches, runtime, carry=False, check=check, **options)


def score_context(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, longest: int, segment: int, batch: int = 8
) -> list[dict]:
    """Return ``{from_bytes, to_bytes, bits_per_byte}`` by the number of bytes before a target, in ranges 1, 2, 3-4, ...
    Windows of ``longest`` pairs begin without state; segments of ``segment`` bytes are read with carried state."""
    longest = min(longest, len(split) - 1)
    nats_sums, counts = torch.zeros(longest, dtype=torch.float64), torch.zeros(longest)
    for inputs, targets, mask in windows(split, window=longest, stride=longest, batch=batch):
        pieces = zip(*(tensor.split(segment, dim=1) for tensor in (inputs, targets, mask)), strict=True)
        nats = torch.cat([nats for nats, *_ in _predictions(model, pieces, runtime)], dim=1)
        nats_sums += (nats * mask).double().sum(0)
        counts += mask.sum(0)
    edges = [1, *(2**i + 1 for i in range((longest - 1).bit_length())), longest + 1]  # 1, 2, 3 to 4, 5 to 8, ...
    curve = []
    for begin, end in pairwise(edges):
        total, count = (x[begin - 1 : end - 1].sum() for x in (nats_sums, counts))
        if count > 0:
            bits = (total / count).item() / math.log(2)
            curve.append({"from_bytes": begin, "to_bytes": end - 1, "bits_per_byte": bits})
    return curve


def _score(model: LanguageModel, batches: Iterable, runtime: Runtime, *, carry: bool = True, **options) -> Score:
    """Return the score of all processes' streams or windows, in order. ``options`` are those of ``_predictions``."""
    predicted, masks, stats, processes = [], [], {}, runtime.processes
    predictions = _predictions(model, batches, runtime, carry=carry, **options)
    for nats, correct, mask, batch_stats in predictions:
        predicted.append(torch.stack([nats, correct], dim=-1))
        masks.append(mask)
        stats = add_stats(stats, batch_stats)
    dim = 1 if carry else 0  # batches continue the same streams, or have further windows
    scored = torch.cat(predicted, dim)[torch.cat(masks, dim)] if predicted else torch.empty(0, 2)
    if processes.world_size > 1:
        stats = {name: {key: tensor.cpu() for key, tensor in tensors.items()} for name, tensors in stats.items()}
    stats = functools.reduce(add_stats, processes.all_gather(stats, long_wait=True))
    changes = processes.concatenate(torch.cat(options["check"].changes))
    nats, correct = processes.concatenate(scored).unbind(1)
    return Score(nats, correct.bool(), stats, changes.mean().item() if len(changes) else 0.0)


class CausalityCheck:
    """Checks that a trained model's predictions do not depend on later bytes. It draws about ``CHECKED_POSITIONS``
    positions, replaces all input bytes after each, and predicts its target again.

    Args:
        seed: draws batches, and in each of them one position of each row. None checks nothing.
        rows: number of streams or windows in a batch, of all processes.
        first: index of the first batch in which all streams are scored."""

    def __init__(self, seed: int | None, batches: Sized, *, rows: int, vocabulary: int, first: int = 0):
        self.seed, self.vocabulary = seed, vocabulary
        self.changes = [torch.empty(0)]  # absolute changes of the nats at checked positions
        scored = range(len(batches))[first:] or range(len(batches))
        repeats = range(-(-CHECKED_POSITIONS // rows))
        draws = integer_hash(_BATCH_KEY, seed, repeats) if scored and seed is not None else ()
        self.draws_of_batch = Counter(scored[int(draw) % len(scored)] for draw in draws)

    def compare(self, batch: int, inputs: Tensor, mask: Tensor, nats: Tensor, predict: Callable) -> None:
        """Compare ``nats [L, T]`` of a batch with those that ``predict`` returns if later bytes are replaced."""
        for repeat in range(self.draws_of_batch[batch]):
            draws = integer_hash(_POSITION_KEY, self.seed, batch, repeat, range(len(inputs)))
            positions = []  # -1 for a row without a scored position
            for row_mask, draw in zip(mask[:, :-1], draws, strict=True):  # no byte follows the last position
                scored = row_mask.nonzero().flatten()
                positions.append(int(scored[int(draw) % len(scored)]) if len(scored) else -1)
            later = torch.arange(inputs.shape[1]) > torch.tensor(positions)[:, None]
            replaced = torch.where(later, (inputs + self.vocabulary // 2) % self.vocabulary, inputs)
            change = (predict(replaced)[0] - nats).abs()
            changes = [change[row, position] for row, position in enumerate(positions) if position >= 0]
            self.changes.append(torch.tensor(changes))


@torch.no_grad()
def _predictions(
    model: LanguageModel,
    batches: Iterable,
    runtime: Runtime,
    *,
    carry: bool = True,
    stats_from: int | None = None,
    check: CausalityCheck | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, dict]]:
    """Yield nats ``[L, T]``, whether the target is the likeliest byte, and mask on the CPU, and
    statistics, of each batch; statistics from batch ``stats_from`` on. ``carry`` carries state from
    one batch to the next."""
    model.eval()
    state, forward = None, runtime.forward(model)

    def predict(targets: Tensor, collect_stats: bool, inputs: Tensor) -> tuple[Tensor, ModelOut]:
        inputs, targets = runtime.to_device(inputs, targets)
        with runtime.autocast():
            out = forward(inputs, state if carry else None, collect_stats=collect_stats)
        nats = F.cross_entropy(out.logits.transpose(1, 2), targets, reduction="none")
        return nats.float().cpu(), out

    for index, (inputs, targets, mask) in enumerate(batches):
        predict_batch = partial(predict, targets, stats_from is not None and index >= stats_from)
        nats, out = predict_batch(inputs)
        correct = out.logits.argmax(-1).cpu() == targets
        if check is not None:
            check.compare(index, inputs, mask, nats, predict_batch)
        state = out.state
        yield nats, correct, mask, out.stats
