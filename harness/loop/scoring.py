"""Scoring: nats of every pair of a split, in streams with carried state, in windows without, of a sample, or by context."""

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

from harness.data.streams import samples, segments, share, whole_context, windows
from harness.device.runtime import Runtime
from harness.hashing import integer_hash
from harness.model import LanguageModel, ModelOut, add_stats

BLOCK_BYTES = 10_000
WINDOWS = (8, 1024)
"""Windows at a time, and bytes of each, of the score without state."""
PLACES = 64
NOT_CAUSAL = "not causal"
MOST_NATS = 0.02
"""Mean absolute change of a pair's nats above which a row is not causal; a causal model's is its rounding."""
MOST_LUCKY_BITS = 40
"""Bits below a corpus's floor that a causal model saves with a probability of at most 2^-40, in total."""
_BATCH, _PLACE = 3, 4  # first key of the hash, so that draws are unrelated to those of streams


class Score(NamedTuple):
    """Nats of each scored (input, target) pair in the split's order, float32 ``[pairs]``, summed statistics, and by how much,
    where that was looked for, later bytes change a pair's nats on average: rounding, or the model saw them."""

    nats: Tensor
    stats: dict[str, dict[str, Tensor]]
    future_nats: float = 0.0

    @property
    def bits_per_byte(self) -> float:
        return self.nats.double().sum().item() / math.log(2) / len(self.nats)

    def bits_of(self, where: Tensor) -> float | None:
        """Mean bits of the pairs that ``where``, bool ``[pairs]``, names; None if it names none."""
        return self.nats[where].double().mean().item() / math.log(2) if where.any() else None

    def blocks(self) -> list[float]:
        """Nats of each block of 10,000 pairs, for paired comparisons."""
        return [block.double().sum().item() for block in self.nats.split(BLOCK_BYTES)]


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
    """Score pairs of ``split`` (uint8 ``[n]``), streamed with carried state.

    Each of ``runtime.processes`` scores some of the streams, and all return the score of the whole.

    Args:
        streams, segment, context: how the split is cut, and how many bytes each stream reads unscored before its own,
            in whole segments and as far as ``whole_context`` allows; part of the number.
        pairs: so many from all over the split, of which each stream's begin after ``context``; None for every pair once.
        collect_stats: also collect the sublayers' statistics, from where all streams are scored.
        look: a seed, to find ``future_nats`` as well.
    """
    cut = {"streams": streams, "segment": segment, "part": runtime.processes.shard}
    if pairs is None:
        context = whole_context(context, n_pairs=max(len(split) - 1, 0), streams=streams, segment=segment)
    make = segments if pairs is None else partial(samples, pairs=pairs)
    batches = make(split, context=context, **cut) if len(range(streams)[share(streams, cut["part"])]) else ()
    first = context // segment
    futures = Futures(look, batches, rows=streams, vocabulary=model.head.out_features, first=first)
    return _score(model, batches, runtime, stats_from=first if collect_stats else None, futures=futures)


def score_windows(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, batch: int = WINDOWS[0], look: int | None = None
) -> Score:
    """Score every pair once in windows of 1024 bytes, stride 512, without state: the column ``window 1024, stride 512``;
    ``look`` as ``score_stream`` has it."""
    batches = windows(split, window=WINDOWS[1], batch=batch, part=runtime.processes.shard)
    rows = batch * runtime.processes.world_size
    futures = Futures(look, batches, rows=rows, vocabulary=model.head.out_features)
    return _score(model, batches, runtime, carry=False, futures=futures)


def score_context(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, longest: int, segment: int, batch: int = 8
) -> list[dict]:
    """Bits per byte against context: windows of ``longest`` pairs that start cold, by powers of two of bytes seen.

    Args:
        segment: bytes of a window that are scored at a time, with carried state: it bounds memory, not the context.

    Returns: rows ``{from_bytes, to_bytes, bits_per_byte}``; a pair at place n of its window has n + 1 bytes to go by.
    """
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
    """All processes' nats, streams or windows in their order, their statistics together, and by how much later bytes changed
    a prediction; ``how`` as ``_predicted`` has it."""
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
    changes = processes.gather(how["futures"].changes if "futures" in how else torch.empty(0))
    return Score(processes.gather(scored), stats, changes.mean().item() if len(changes) else 0.0)


class Futures:
    """Places whose later bytes are replaced, to see whether the trained model itself saw them: 64 drawn by a seed (None for no
    places), one in each stream of some batches, are predicted again in their shape and from their state.

    Args:
        rows: streams, or windows, of a batch, in all processes together.
        first: number of the first batch in which all streams are scored.
    """

    def __init__(self, seed: int | None, batches: Sized, *, rows: int, vocabulary: int, first: int = 0):
        self.seed, self.vocabulary, self._changes = seed, vocabulary, [torch.empty(0)]
        scored = range(len(batches))[first:] or range(len(batches))
        draws = integer_hash(_BATCH, seed, range(-(-PLACES // rows))) if scored and seed is not None else ()
        self.chosen = Counter(scored[int(draw) % len(scored)] for draw in draws)

    def look(self, number: int, inputs: Tensor, mask: Tensor, nats: Tensor, again: Callable[[Tensor], tuple]) -> None:
        """Compare ``nats [L, T]`` of batch ``number`` with the first that ``again`` gives for other ``inputs``, on the CPU."""
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
        """By how much each place's nats changed, ``[n]``."""
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
    """Nats ``[L, T]`` and mask on the CPU, and statistics, of each batch; these from number ``stats_from`` on."""
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
