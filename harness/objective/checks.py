"""Checks of a final score: what bytes that a prediction must not see have changed."""

from collections import Counter
from collections.abc import Callable, Sized
from typing import NamedTuple

import torch
from torch import Tensor

from harness.data.streams import Segment
from harness.device.runtime import Runtime
from harness.hashing import integer_hash
from harness.model import LanguageModel

NOT_CAUSAL = "not causal"
MISREAD = "misread"
EVERY = 16  # batches, of which a ``ReadCheck`` reads one twice more
NOISE_FACTOR = 4.0
MAX_NOISE_NATS = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest change of a prediction's nats that may count as noise: mean over the changed
predictions."""
MAX_ROUNDING = 10  # largest change that may count as rounding, as a multiple of the largest mean
# first keys of the hash, other than those of harness/data/streams.py
_BATCH_KEY = 3
_POSITION_KEY = 4


class Future(NamedTuple):
    """What later bytes changed. At a cut, all input bytes after one of a stream are replaced, and
    all predictions up to this byte are compared, bit for bit on a CPU."""

    cuts: int = 0
    changed: int = 0  # predictions that changed by more than noise
    max_nats: float = 0.0  # largest change of a prediction, NaN if one is NaN
    sum_nats: float = 0.0  # of all changes

    def __add__(self, other: "Future") -> "Future":
        largest = max(self.max_nats, other.max_nats, key=lambda nats: (nats != nats, nats))
        sums = Future(*map(sum, zip(self, other, strict=True)))
        return sums._replace(max_nats=largest)

    def causal(self, *, precision: str, rounding: bool) -> bool:
        """Return whether a causal model is possible. With ``rounding``, later bytes may change the
        rounding of predictions."""
        if not rounding:
            return self.changed == 0
        max_mean = MAX_NOISE_NATS[precision]
        return (
            self.sum_nats <= max_mean * max(1, self.changed)
            and self.max_nats <= MAX_ROUNDING * max_mean
        )

    def row(self) -> dict:
        """Return the keys of a row. Of the places at which a prediction could see later bytes, a
        share above ``missed_share`` would have been found with a probability of 95% (the rule of
        three)."""
        missed_share = 1.0
        if self.cuts:
            missed_share = min(1.0, 3 / self.cuts)
        counts = {"future_cuts": self.cuts, "future_changed": self.changed}
        return counts | {"future_nats": self.max_nats, "future_missed_share": missed_share}


def not_causal(row: dict) -> str:
    """Return what shows that the row of a score cannot be that of a causal model."""
    change = f"bytes after a position change {row['future_changed']:,} earlier predictions"
    change += f" by up to {row['future_nats']:.2g} nats, in {row['future_cuts']:,} cuts"
    floor = row.get("floor_bits_per_byte")
    if isinstance(floor, float):  # not every corpus has one
        change += f"; the data's floor is {floor:.4f}"
    return change


class Reads(NamedTuple):
    """What a ``ReadCheck`` has found, as numbers of predictions."""

    hidden_changed: int = 0  # that changed with bytes which they must not see
    visible_changed: int = 0  # that changed with bytes which they see

    def __add__(self, other: "Reads") -> "Reads":
        return Reads(*map(sum, zip(self, other, strict=True)))

    def row(self) -> dict:
        """Return the keys of a row, ``check`` if it has failed."""
        failed = {} if self.hidden_changed == 0 < self.visible_changed else {"check": MISREAD}
        return self._asdict() | failed


def misread(row: dict) -> str:
    """Return what shows that a model reads what it must not, or not what it must."""
    hidden = f"other hidden bytes or padding change {row['hidden_changed']:,} predictions"
    return f"{hidden} (must be 0), other visible bytes {row['visible_changed']:,} (must be more)"


def allows_rounding(model: LanguageModel) -> bool:
    """Return whether a sublayer declares that other bytes may change its rounding."""
    return any("rounding" in sublayer.limits for _, sublayer in model.sublayers())


def repeats_exactly(runtime: Runtime) -> bool:
    """Return whether equal inputs give predictions that are equal bit for bit."""
    return runtime.device.type == "cpu" and torch.are_deterministic_algorithms_enabled()


class CausalityCheck:
    """Checks that a trained model's predictions do not depend on later bytes, in the run's
    precision. It draws distinct cuts, replaces all input bytes after each, and compares all
    predictions up to it.

    On a device other than a CPU, or without ``runtime.deterministic``, equal inputs may give
    unequal predictions. There each batch with cuts is predicted again without a replaced byte, and
    changes up to ``NOISE_FACTOR`` times the largest that this makes are noise.

    Args:
        rows: number of streams or windows in a batch, of all processes.
        first: index of the first batch in which all streams are scored.
        future_seed: draws batches, and in each of them positions of each row.
        cuts: the number of cuts of all processes, rounded up to a multiple of ``rows``; 0 checks
            nothing."""

    def __init__(
        self,
        batches: Sized,
        model: LanguageModel,
        runtime: Runtime,
        *,
        rows: int,
        first: int = 0,
        future_seed: int = 0,
        cuts: int = 0,
    ):
        self.seed = future_seed
        self.vocabulary = model.head.out_features
        self.exact = repeats_exactly(runtime)
        self.max_noise = MAX_NOISE_NATS[runtime.precision]
        self.cuts = 0
        self.noise = 0.0
        self.changes = [torch.empty(0)]  # absolute changes of nats, other than 0
        scored = range(len(batches))[first:] or range(len(batches))
        passes = range(-(-cuts // rows))
        draws = integer_hash(_BATCH_KEY, future_seed, passes) if scored else ()
        self.passes_of_batch = Counter(scored[int(draw) % len(scored)] for draw in draws)

    def compare(self, batch: int, segment: Segment, nats: Tensor, predict: Callable) -> None:
        """Compare ``nats [L, T]`` of a batch with those that ``predict`` returns if later bytes
        are replaced."""
        inputs, _, mask = segment
        passes = min(self.passes_of_batch[batch], inputs.shape[1] - 1)
        if passes < 1:
            return
        if not self.exact:
            self.noise = max(self.noise, (predict(inputs)[0] - nats).abs().max().item())
        positions = torch.full((passes, len(inputs)), -1)  # -1 for a row that has fewer places
        for row, row_mask in enumerate(mask[:, :-1]):  # no byte follows the last position
            places = row_mask.nonzero().flatten()
            draws = integer_hash(_POSITION_KEY, self.seed, batch, row, range(len(places)))
            chosen = places[draws.argsort()[:passes].tolist()]
            positions[: len(chosen), row] = chosen
        byte = torch.arange(inputs.shape[1])
        other_bytes = (inputs + self.vocabulary // 2) % self.vocabulary
        for at in positions[..., None]:
            changes = (predict(torch.where(byte > at, other_bytes, inputs))[0] - nats).abs()[
                byte <= at
            ]
            self.changes.append(changes[changes != 0])
            self.cuts += int((at >= 0).sum())

    def result(self) -> Future:
        """Return what later bytes changed in this process's streams, without noise."""
        changes = torch.cat(self.changes)
        changes = changes[~(changes <= min(NOISE_FACTOR * self.noise, self.max_noise))].double()
        largest = 0.0
        if len(changes):
            largest = changes.max().item()
        return Future(self.cuts, len(changes), largest, changes.sum().item())


class ReadCheck:
    """Checks of each ``EVERY``-th batch that predictions do not change if bytes are replaced that
    they must not see, bit for bit on a CPU, and that some change if bytes are replaced that they
    see.

    Args:
        replace: returns, from a segment, inputs with other bytes at places that must not matter,
            and a mask of the predictions to compare; and the same for places that must."""

    def __init__(
        self,
        model: LanguageModel,
        runtime: Runtime,
        *,
        replace: Callable[..., tuple[tuple[Tensor, Tensor], ...]],
    ):
        self.tolerance = MAX_NOISE_NATS[runtime.precision]
        if repeats_exactly(runtime) and not allows_rounding(model):
            self.tolerance = 0.0
        self.replace = replace
        self.found = Reads()

    def compare(self, batch: int, segment: Segment, nats: Tensor, predict: Callable) -> None:
        """Compare ``nats`` of a batch with those that ``predict`` returns for replaced bytes."""
        if batch % EVERY:
            return
        changed = []
        for inputs, mask in self.replace(*segment):
            changes = (predict(inputs)[0] - nats).abs()[mask]
            changed.append(int((~(changes <= self.tolerance)).sum()))
        self.found += Reads(*changed)

    def result(self) -> Reads:
        """Return what was found in this process's batches."""
        return self.found
