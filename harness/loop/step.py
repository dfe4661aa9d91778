"""Training step, and the scoring of a split: what the trainer takes and what bench measures, the very same code."""

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.count.memory import gradient_bytes
from harness.data.streams import samples, segments, share, whole_context, windows
from harness.device.runtime import Runtime
from harness.device.units import Units
from harness.loop.futures import Futures
from harness.loop.kept_whole import kept_whole
from harness.model import LanguageModel, ModelOut, add_stats
from harness.optim.optimizers import Optimizers
from variants.contract import State, cat_streams, map_state

BLOCK_BYTES = 10_000
WINDOWS = (8, 1024)
"""Windows at a time, and bytes of each, of the score without state."""


class Trainer:
    """A model with what moves it.

    Args:
        model: raw; its state and parameters are read here, its forward is called as ``runtime`` says.
        accumulate: parts into which this process's streams of a step are split; the update equals that of the whole.
    """

    def __init__(self, model: LanguageModel, optimizers: Optimizers, runtime: Runtime, *, accumulate: int = 1):
        self.model, self.optimizers, self.runtime, self.accumulate = model, optimizers, runtime, accumulate
        self.units = Units(model)
        self.forward = runtime.forward(model)
        self.gradient_bytes = 0  # known after the first step

    def spread(self, *, shard: str) -> None:
        """Have all processes of the run make each step together, from the first one's weights; ``shard``: as in the
        configuration."""
        processes = self.runtime.processes
        if processes.world_size > 1:
            from harness.device.spread import SpreadUnits  # late: slow to import

            processes.copy_first_(self.model)
            self.units = SpreadUnits(
                self.model,
                processes,
                self.model.residuals(),
                whole=kept_whole(self.model),
                tables=[(sublayer, name) for _, sublayer in self.model.sublayers() for name in sublayer.tables],
                shard=shard,
                device=self.runtime.device,
            )
            self.optimizers.units = self.units if self.units.parts else None
            self.forward = self.runtime.forward(self.model)

    def step(self, inputs: Tensor, targets: Tensor, state: State, *, fraction: float) -> tuple[Tensor, State]:
        """One update from ``inputs`` and ``targets`` (int64 ``[B, T]``), this process's share of the streams.

        Args:
            state: carried state of the streams, or None where they begin.
            fraction: of the budget spent, for the schedule.

        Returns: mean nats per byte of these (detached, on the device: reading it waits), and the state to carry.
        """
        before = [buffer.clone() for buffer in self.model.buffers()] if self.optimizers.skip_nonfinite else []
        nats, loss, after = self.backward(inputs, targets, state, forward=self.forward)
        self.runtime.processes.average_gradients_(self.units.whole, loss)
        begins = not self.gradient_bytes
        self.gradient_bytes = self.gradient_bytes or gradient_bytes(self.units.parameters)
        # An optimizer may refuse what it is given.
        with self.runtime.processes.fail_together() if begins else nullcontext():
            self.optimizers.step(fraction, loss=loss)
        if self.optimizers.skip_nonfinite:
            after = self._cleaned(after, before)
        self.optimizers.zero_grad()
        self.model.project_()
        return nats, after

    def backward(
        self, inputs: Tensor, targets: Tensor, state: State, *, forward: Callable
    ) -> tuple[Tensor, Tensor, State]:
        """Gradients of a step, part by part: mean nats per byte, what the gradients are of, and the state to carry."""
        self.model.train()
        nats, whole, states = 0.0, 0.0, []
        parts = torch.arange(len(inputs), device=inputs.device).tensor_split(self.accumulate)
        for number, part in enumerate(parts, start=1):
            self.units.begin_part(last=number == len(parts))
            own = map_state(lambda s, part=part: s[part], state) if len(parts) > 1 else state
            with self.runtime.autocast():
                out = forward(inputs[part], own)
            own_nats = F.cross_entropy(out.logits.flatten(0, 1), targets[part].flatten())
            share = len(part) / len(inputs)
            loss = (own_nats + out.loss) * share
            loss.backward()
            nats, whole = nats + own_nats.detach() * share, whole + loss.detach()
            states.append(out.state)
        return nats, whole, cat_streams(states)

    @torch.no_grad()
    def _cleaned(self, state: State, buffers: list[Tensor]) -> State:
        """The state to carry after an update that may have been left out, with zeros where it is not finite then; the
        model's buffers are put back to what they were."""
        left_out = self.optimizers.found_inf.bool()
        for now, before in zip(self.model.buffers(), buffers, strict=True):
            torch.where(left_out, before, now, out=now)
        return map_state(lambda s: s.masked_fill(left_out & ~s.isfinite(), 0), state)


class Score(NamedTuple):
    """Nats of each scored (input, target) pair in the split's order, float32 ``[pairs]``, and summed statistics.

    ``future_nats`` is by how much, on average, a pair's nats depend on bytes after it, where that was looked for: rounding, or
    it saw them.
    """

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
    collect_stats: bool = False,
    look: int | None = None,
) -> Score:
    """Score every pair of ``split`` (uint8 ``[n]``) once, streamed with carried state.

    Each of ``runtime.processes`` scores some of the streams, and all return the score of the whole.

    Args:
        streams, segment, context: how the split is cut, and how many bytes each stream reads unscored before its own,
            in whole segments and as far as ``whole_context`` allows; part of the number.
        collect_stats: also collect the sublayers' statistics, from where all streams are scored.
        look: a seed, to find ``future_nats`` as well.
    """
    pairs, processes = len(split) - 1, runtime.processes
    context = whole_context(context, n_pairs=max(pairs, 0), streams=streams, segment=segment)
    cut = {"streams": streams, "segment": segment, "context": context}
    own = share(streams, processes.shard)
    batches = segments(split, **cut, part=processes.shard) if own.start < own.stop else ()
    futures = Futures(look, batches, rows=streams, vocabulary=model.head.out_features, first=context // segment)
    return _streamed(model, batches, runtime, stats_from=context // segment if collect_stats else None, futures=futures)


def _summed(nats: list[Tensor], stats: dict, runtime: Runtime, futures: Futures | None = None) -> Score:
    """All processes' nats in order, their statistics together, and how much a change of later bytes did."""
    own, processes = torch.cat(nats) if nats else torch.empty(0), runtime.processes
    if processes.world_size > 1:
        stats = {name: {key: value.cpu() for key, value in found.items()} for name, found in stats.items()}
    stats = functools.reduce(add_stats, processes.all_gather(stats))
    changes = torch.cat(processes.gather(futures.changes if futures else torch.empty(0)))
    return Score(torch.cat(processes.gather(own)), stats, changes.mean().item() if len(changes) else 0.0)


def score_samples(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, pairs: int, streams: int, segment: int, context: int = 0
) -> Score:
    """Score some pairs from all over ``split`` (uint8 ``[n]``) with statistics: of what streams read, all but the first
    ``context`` pairs, whole segments."""
    own = share(streams, runtime.processes.shard)
    cut = {"pairs": pairs, "streams": streams, "segment": segment, "context": context}
    batches = samples(split, **cut, part=runtime.processes.shard) if own.start < own.stop else ()
    return _streamed(model, batches, runtime, stats_from=context // segment)


def _streamed(
    model: LanguageModel, batches: Iterable, runtime: Runtime, *, stats_from: int | None, futures: Futures | None = None
) -> Score:
    """The score of streams whose segments are ``batches``, in the order of the streams."""
    nats, masks, stats = [], [], {}
    for part_nats, mask, new in _scored(model, batches, runtime, stats_from=stats_from, futures=futures):
        nats.append(part_nats)
        masks.append(mask)
        stats = add_stats(stats, new)
    return _summed([torch.cat(nats, dim=1)[torch.cat(masks, dim=1)]] if nats else [], stats, runtime, futures)


def score_windows(
    model: LanguageModel, split: Tensor, *, runtime: Runtime, batch: int = WINDOWS[0], look: int | None = None
) -> Score:
    """Score every pair once in windows of 1024 bytes, stride 512, without state: the column ``window 1024, stride 512``;
    ``look`` as ``score_stream`` has it."""
    own = windows(split, window=WINDOWS[1], batch=batch, part=runtime.processes.shard)
    rows = batch * runtime.processes.world_size
    futures = Futures(look, own, rows=rows, vocabulary=model.head.out_features)
    nats = [nats[mask] for nats, mask, _ in _scored(model, own, runtime, carry=False, futures=futures)]
    return _summed(nats, {}, runtime, futures)


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
        nats = torch.cat([nats for nats, _, _ in _scored(model, pieces, runtime)], dim=1)
        mask = window[2]
        sums += (nats * mask).double().sum(0)
        counts += mask.sum(0)
    edges = [1, *(2**i + 1 for i in range((longest - 1).bit_length())), longest + 1]  # 1, 2, 3 to 4, 5 to 8, ...
    curve = []
    for low, high in pairwise(edges):
        total, number = (x[low - 1 : high - 1].sum() for x in (sums, counts))
        if number > 0:
            bits = (total / number).item() / math.log(2)
            curve.append({"from_bytes": low, "to_bytes": high - 1, "bits_per_byte": bits})
    return curve


@torch.no_grad()
def _scored(
    model: LanguageModel,
    batches: Iterable,
    runtime: Runtime,
    *,
    carry: bool = True,
    stats_from: int | None = None,
    futures: Futures | None = None,
):
    """Yields nats ``[L, T]`` and mask on the CPU, and statistics of each batch from number ``stats_from`` on."""
    model.eval()
    state, forward = None, runtime.forward(model)

    def predict(targets: Tensor, wanted: bool, inputs: Tensor) -> tuple[Tensor, ModelOut]:
        inputs, targets = runtime.send(inputs, targets)
        with runtime.autocast():
            out = forward(inputs, state if carry else None, collect_stats=wanted)
        nats = F.cross_entropy(out.logits.transpose(1, 2), targets, reduction="none")
        return nats.float().cpu(), out

    with runtime.processes.apart():
        for number, (inputs, targets, mask) in enumerate(batches):
            wanted = stats_from is not None and number >= stats_from
            again = partial(predict, targets, wanted)
            nats, out = again(inputs)
            if futures is not None:
                futures.look(number, inputs, mask, nats, again)
            state = out.state
            yield nats, mask, out.stats
