"""Scoring: nats of pairs of a split: in streams with carried state, in windows without, of a sample, or by context."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.data.streams import round_context, samples, segments, shard_slice, windows
from harness.device.runtime import Runtime
from harness.hashing import integer_hash
from harness.model import LanguageModel, ModelOut, add_stats

WINDOWS = (8, 1024)
"""Windows at a time, and bytes of each, of the score without state."""
PLACES = 64
NOT_CAUSAL = "not causal"
MOST_NATS = 0.02
"""Mean absolute change of a pair's nats above which a row is not causal; rounding is far below."""
MOST_LUCKY_BITS = 40
"""In total, below a corpus's floor: a causal model gets there with a probability of at most 2^-40."""
_BATCH, _PLACE = 3, 4  # first key of the hash, so that draws are unrelated to those of streams


class Score(NamedTuple):
    """Nats of each scored (input, target) pair in the split's order, float32 ``[pairs]``; summed statistics; and by how
    much later bytes change a pair's nats on average (0 where ``look`` is None): rounding, or the model saw them."""

    nats: Tensor
    stats: dict[str, dict[str, Tensor]]
    future_nats: float = 0.0

    @property
    def bits_per_byte(self) -> float:
        return self.nats.double().sum().item() / math.log(2) / len(self.nats)

    def bits_of(self, where: Tensor) -> float | None:
        """Mean bits of the pairs that ``where``, bool ``[pairs]``, names; None if it names none."""
        return self.nats[where].double().mean().item() / math.log(2) if where.any() else None


def score_stream(
    model: LanguageModel,
    split: Tensor,
    *,
    runtime: Runtime,
    streams: int,
    segment: int,
    context: int = 0,
    pairs: int | None = None,
    collect_stats: bool = False,
    look: int | None = None,
) -> Score:
    """Score pairs of ``split`` (uint8 ``[n]``) with carried state; each process has some streams, and the whole score.

    Args:
        streams, segment, context: how the split is cut, and the bytes that each stream reads unscored before its own,
            in whole segments and as far as ``round_context`` allows; part of the number.
        pairs: a sample of so many, spread over the split; None for every pair once.
        collect_stats: also collect the sublayers' statistics, from the first batch in which all streams are scored.
        look: a seed for ``Futures``.
    """
    cut = {"streams": streams, "segment": segment, "shard": runtime.processes.shard}
    if pairs is None:
        context = round_context(context, n_pairs=max(len(split) - 1, 0), streams=streams, segment=segment)
    make = segments if pairs is None else partial(samples, pairs=pairs)
    batches = make(split, context=context, **cut) if len(range(streams)[shard_slice(streams, cut["shard"])]) else ()
    first = context // segment
    futures = Futures(look, batches, rows=streams, vocabulary=model.head.out_features, first=first)
    return _score(model, batches, runtime, stats_from=first if collect_stats else None, futures=futures)


def score_windows(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, batch: int = WINDOWS[0], look: int | None = None
) -> Score:
    """Score every pair once in windows of 1024 bytes, stride 512, without state; ``look`` as in ``score_stream``."""
    batches = windows(split, window=WINDOWS[1], batch=batch, shard=runtime.processes.shard)
    rows = batch * runtime.processes.world_size
    futures = Futures(look, batches, rows=rows, vocabulary=model.head.out_features)
    return _score(model, batches, runtime, carry=False, futures=futures)


def score_context(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, longest: int, segment: int, batch: int = 8
) -> list[dict]:
    """Bits per byte by the bytes seen before, in powers of two, ``{from_bytes, to_bytes, bits_per_byte}``: windows of
    ``longest`` pairs start cold, and are scored ``segment`` bytes at a time with carried state."""
    longest = min(longest, len(split) - 1)
    sums, counts = torch.zeros(longest, dtype=torch.float64), torch.zeros(longest)
    for window in windows(split, window=longest, stride=longest, batch=batch):
        pieces = zip(*(part.split(segment, dim=1) for part in window), strict=True)
        nats = torch.cat([nats for nats, _, _ in _predicted(model, pieces, runtime)], dim=1)
        sums += (nats * window[2]).double().sum(0)
        counts += window[2].sum(0)
    edges = [1, *(2**i + 1 for i in range((longest - 1).bit_length())), longest + 1]  # 1, 2, 3 to 4, 5 to 8, ...
    curve = []
    for low, high in pairwise(edges):
        total, number = (x[low - 1 : high - 1].sum() for x in (sums, counts))
        if number > 0:
            bits = (total / number).item() / math.log(2)
            curve.append({"from_bytes": low, "to_bytes": high - 1, "bits_per_byte": bits})
    return curve


def _score(model: LanguageModel, batches: Iterable, runtime: Runtime, *, carry: bool = True, **how) -> Score:
    """The score of all processes' streams or windows, in their order; ``how`` as ``_predicted`` has it."""
    nats, masks, stats, processes = [], [], {}, runtime.processes
    for batch_nats, mask, batch_stats in _predicted(model, batches, runtime, carry=carry, **how):
        nats.append(batch_nats)
        masks.append(mask)
        stats = add_stats(stats, batch_stats)
    along = 1 if carry else 0
    scored = torch.cat(nats, along)[torch.cat(masks, along)] if nats else torch.empty(0)
    if processes.world_size > 1:
        stats = {name: {key: tensor.cpu() for key, tensor in tensors.items()} for name, tensors in stats.items()}
    stats = functools.reduce(add_stats, processes.all_gather(stats))
    changes = processes.gather(how["futures"].changes)
    return Score(processes.gather(scored), stats, changes.mean().item() if len(changes) else 0.0)


class Futures:
    """Predicts 64 places again with other bytes after them, to see whether the trained model saw these: one place in
    each stream of batches that a seed draws (None for none).

    Args:
        rows: streams or windows of a batch, of all processes.
        first: number of the first batch in which all streams are scored.
    """

    def __init__(self, seed: int | None, batches: Sized, *, rows: int, vocabulary: int, first: int = 0):
        self.seed, self.vocabulary, self._changes = seed, vocabulary, [torch.empty(0)]
        scored = range(len(batches))[first:] or range(len(batches))
        draws = integer_hash(_BATCH, seed, range(-(-PLACES // rows))) if scored and seed is not None else ()
        self.chosen = Counter(scored[int(draw) % len(scored)] for draw in draws)

    def look(self, number: int, inputs: Tensor, mask: Tensor, nats: Tensor, again: Callable[[Tensor], tuple]) -> None:
        """Compare ``nats [L, T]`` of batch ``number`` with those ``again`` gives for other ``inputs``, on the CPU."""
        for turn in range(self.chosen[number]):
            draws = integer_hash(_PLACE, self.seed, number, turn, range(len(inputs)))
            scored = [row.nonzero().flatten() for row in mask[:, :-1]]  # after the last byte there is none to replace
            at = [int(row[int(draw) % len(row)]) if len(row) else -1 for row, draw in zip(scored, draws, strict=True)]
            later = torch.arange(inputs.shape[1]) > torch.tensor(at)[:, None]
            replaced = torch.where(later, (inputs + self.vocabulary // 2) % self.vocabulary, inputs)
            change = (again(replaced)[0] - nats).abs()
            self._changes.append(torch.tensor([change[row, place] for row, place in enumerate(at) if place >= 0]))

    @property
    def changes(self) -> Tensor:
        """Of each place's nats, ``[n]``."""
        return torch.cat(self._changes)


@torch.no_grad()
def _predicted(
    model: LanguageModel,
    batches: Iterable,
    runtime: Runtime,
    *,
    carry: bool = True,
    stats_from: int | None = None,
    futures: Futures | None = None,
) -> Iterator[tuple[Tensor, Tensor, dict]]:
    """Nats ``[L, T]`` and mask on the CPU, and statistics, of each batch; statistics from batch ``stats_from`` on."""
    model.eval()
    state, forward = None, runtime.forward(model)

    def predict(targets: Tensor, collect_stats: bool, inputs: Tensor) -> tuple[Tensor, ModelOut]:
        inputs, targets = runtime.send(inputs, targets)
        with runtime.autocast():
            out = forward(inputs, state if carry else None, collect_stats=collect_stats)
        nats = F.cross_entropy(out.logits.transpose(1, 2), targets, reduction="none")
        return nats.float().cpu(), out

    with runtime.processes.uneven():
        for number, (inputs, targets, mask) in enumerate(batches):
            again = partial(predict, targets, stats_from is not None and number >= stats_from)
            nats, out = again(inputs)
            if futures is not None:
                futures.look(number, inputs, mask, nats, again)
            state = out.state
            yield nats, mask, out.stats
