"""Columns of runs, each stated once, over ``Means``: what the runs of one row reached and cost."""

from collections.abc import Sequence

from bench.report.comparison import Arm, busy_notes, number, other_in_evaluation
from bench.report.gather import RunRow
from bench.report.heads import Heads
from harness.record.cells import (
    BUSY,
    NOTHING,
    bits,
    busy_mark,
    fixed,
    keep_filled,
    listed,
    mean,
    mib,
    millions,
    significant,
    text,
    whole,
)
from harness.record.closing_table import WINDOWS
from harness.record.table import Cell, Column, Table, words

SCORES = {
    "valid": "valid, bits per byte",
    "test": "test, bits per byte",
    "valid_windows": f"valid, {WINDOWS}",
    "test_windows": f"test, {WINDOWS}",
}
EXPLAINED = {
    "valid": "Of the validation split less the bytes that choose the best weights, with these, streamed with carried state.",
    "test": "Of the test split, scored once, at the end, with the same weights; where every seed was.",
    "valid_windows": "Bits per byte of windows of 1024 bytes, stride 512, no state, the last 512 scored.",
    "test_windows": "The same of the test split.",
}


class Means:
    """Means over the runs of one row.

    Args:
        runs: one or more, the newest last.
    """

    def __init__(self, runs: Sequence[RunRow]):
        self.runs, self.newest = list(runs), runs[-1].row

    def __call__(self, *keys: str) -> float | None:
        """Of the number at ``keys``, over the runs that have it."""
        return mean(number(run.summary, *keys) for run in self.runs)

    def score(self, name: str) -> Cell:
        """Bits per byte, of a key of ``SCORES``; none of a split that only some of the runs were scored on."""
        split = name.partition("_")[0]
        scored = [number(run.summary, "valid_bits_per_byte") is not None for run in self.runs]
        if split == "test" and sum(scored) > sum(
            number(run.summary, "test_bits_per_byte") is not None for run in self.runs
        ):
            return NOTHING
        capped = any((run.row.get("capped") or {}).get(split) for run in self.runs)
        return bits(self(f"{name}_bits_per_byte"), capped=capped)

    def memory(self, name: str) -> Cell:
        about = any((run.summary.get("memory") or {}).get("approximate") for run in self.runs)
        return mib(self("memory", name), about=about and "peak" in name)

    def timed(self, *keys: str, digits: int = 0) -> Cell:
        """The same of a time or a speed, marked where others were busy on the machine of a run."""
        return fixed(self(*keys), digits=digits, mark=max(busy_mark(run.row.get("load")) for run in self.runs))

    def optimizers(self) -> str | None:
        return optimizer_words(self.newest.get("optimizers"))


def optimizer_words(optimizers: Sequence[dict] | None) -> str | None:
    """``Muon 92%, AdamW 8%``: shares of the parameters."""
    shares: dict[str, float] = {}
    for group in optimizers or []:
        shares[group["optimizer"]] = shares.get(group["optimizer"], 0.0) + group["share"]
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in ordered) or None


def _score(name: str, heading: str) -> Column:
    return Column(heading, EXPLAINED[name], lambda of: of.score(name))


def _memory(heading: str, name: str, explained: str) -> Column:
    return Column(heading, explained, lambda of: of.memory(name))


def _count(heading: str, explained: str, *keys: str) -> Column:
    return Column(heading, explained, lambda of: whole(of(*keys)))


SEEDS = Column("n", "Seeds that the means of this row are over.", lambda of: whole(len(of.runs)))
QUALITY = tuple(_score(name, heading) for name, heading in SCORES.items())


def copies(runs: Sequence[RunRow]) -> list[Column]:
    """A column for each distance that the corpus of these runs copies from."""
    found = {distance for run in runs for distance in run.summary.get("valid_bits_per_copy") or {}}
    explained = (
        "Mean bits of those bytes of the validation split that repeat the one so many bytes before; 4 without memory."
    )
    return [
        Column(
            f"copies from {distance}, bits",
            explained,
            lambda of, distance=distance: bits(of("valid_bits_per_copy", distance)),
        )
        for distance in sorted(found, key=lambda distance: (len(distance), distance))
    ]


PARAMETERS = _count("parameters", "All trained numbers.", "parameters", "total")
BYTES = _count("trained on, bytes", "Bytes predicted in training.", "bytes_seen")
EXECUTED = Column(
    "executed, MFLOP/byte",
    "FLOPs (2 a multiply-add, 10^6) that the forward ran for one byte, warm.",
    lambda of: millions(of("flops_per_byte", "executed")),
)
IDEAL = Column(
    "ideal, MFLOP/byte",
    "FLOPs that the mechanism needs for one byte at its learned parameters.",
    lambda of: millions(of("flops_per_byte", "ideal")),
)
SIZES = (
    PARAMETERS,
    _count("touched", "Parameters that one byte makes use of.", "parameters", "touched"),
    words("optimizers", "The share of the parameters that each optimizer moves.", lambda of: of.optimizers()),
    EXECUTED,
    IDEAL,
    Column(
        "mean span",
        "Mean of the learned spans of all heads, in positions.",
        lambda of: fixed(of("spans", "mean"), digits=1),
    ),
    BYTES,
)
BACKEND = words(
    "backend", "Which code ran: plain PyTorch, fused, compiled, an own kernel.", lambda of: of.newest["backend"]
)
IN_EVALUATION = words(
    "in evaluation",
    "The same of scores, executed FLOPs and the inference peak, where it is other code.",
    lambda of: other_in_evaluation(of.newest),
)
SECONDS = Column("training, s", "Seconds in training steps, scoring apart.", lambda of: of.timed("seconds", digits=1))
PEAK = _memory("training peak, MiB", "peak_bytes", "Highest memory of training (MiB = 2^20 bytes); ~ is approximate.")
HELD = (
    "Most that the GPU's allocator held for that and for scoring, freed blocks too: it decides what runs out of memory."
)
RESERVED = _memory("reserved peak, MiB", "peak_reserved_bytes", HELD)
STATE = _memory("carried state, MiB", "state_bytes", "What one stream carries from segment to segment.")
COMPILING = Column(
    "compiling, s",
    "Seconds of compiling beside them, in no budget.",
    lambda of: fixed(of("compile_seconds") or None, digits=1),
)
SPEED = Column("bytes/s", "Bytes predicted in training per second of it.", lambda of: of.timed("bytes_per_second"))
COSTS = (
    BACKEND,
    SECONDS,
    COMPILING,
    SPEED,
    PEAK,
    RESERVED,
    IN_EVALUATION,
    _memory("inference peak, MiB", "inference_peak_bytes", "Highest memory while scoring."),
    _memory("parameters, MiB", "parameter_bytes", "Memory of the parameters."),
    _memory("gradients, MiB", "gradient_bytes", "Memory of the gradients."),
    _memory("optimizer, MiB", "optimizer_bytes", "Memory of the optimizers' state."),
    STATE,
)


def flops_estimated_3x(runs: Sequence[RunRow]) -> bool:
    """Whether training FLOPs of any of these runs are in part three times a forward."""
    return any(run.summary.get("flops_estimated_3x") for run in runs)


def _gflops(of: Means) -> Cell:
    flops = of("training_flops")
    about = "~" if flops_estimated_3x(of.runs) else ""
    return text(None) if flops is None else Cell(text=about + significant(flops / 1e9), value=flops / 1e9)


NEEDED = "FLOPs that forward and backward of all bytes need (10^9); ~: where a mechanism does not say, 3 x ideal."
GFLOPS = Column("training, GFLOPs", NEEDED, _gflops)


def thrice_notes(arms: Sequence[Arm]) -> list[str]:
    """Whose training FLOPs are in part a guess."""
    labels = [arm.label for arm in arms if flops_estimated_3x(arm.newest_of_each_seed)]
    told = f"Training FLOPs of {listed(labels)}: a mechanism does not say what it needs and is charged 3 x ideal."
    return [told] if labels else []


def table_of_arms(
    rows: Sequence[tuple[Arm, object]],
    *,
    heads: Heads,
    columns: Sequence[Column],
    more: Sequence[Sequence[Cell]] = (),
    **about,
) -> Table:
    """A table whose rows are an arm's head and then one cell a column; empty columns are left out.

    Args:
        rows: arms with what the columns' cells are made of: ``Means``, or what has ``runs``.
        more: rows below, of as many cells.
        about: name, title, caption, notes.
    """
    columns = (*heads.columns, *columns)
    cells = [[*heads.of(arm), *(column.cell(of) for column in columns[len(heads.columns) :])] for arm, of in rows]
    if any(cell.text.endswith(f" {BUSY}") for row in cells for cell in row):
        about["notes"] = [*about["notes"], *busy_notes(run for _, of in rows for run in of.runs)]
    columns, cells = keep_filled(columns, [*cells, *more])
    return Table(columns=columns, rows=cells, **about | {"notes": tuple(about["notes"])})
