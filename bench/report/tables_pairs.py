"""Differences, and whether they are real: each setting against a reference, over matched seeds and blocks of one text.

The reference is the best setting of the variant that ``variants.yaml`` names, or, without one, the setting of the best
validation bits. Seeds say whether a difference would survive another initialisation; blocks of 10,000 bytes say whether
these very weights differ on more of such text, and nothing of other seeds.
"""

import math
from collections.abc import Sequence

from bench.report.comparison import VARIANTS, Arm
from bench.report.uncertainty import Paired, paired
from harness.record.cells import CAPPED, NOTHING, fixed, mean, text, whole
from harness.record.table import Cell, Column, Table, words

REFERENCE = VARIANTS["reference"]
BLOCK_BYTES = 10_000
SPLITS = ("valid", "test")
COLUMNS = (
    words("variant", "What is compared with the reference."),
    words("split"),
    words("over", "Pairs of runs of one seed, or of blocks of 10,000 bytes of text."),
    Column("n", "Pairs."),
    Column("difference, bits per byte", "Mean of the pairs, variant less reference: below 0 is better."),
    words("95% interval", "Student's t, paired; n = 1 has none."),
    Column("smallest visible", "Half the interval: a true difference smaller than this could not have been seen."),
    words("verdict", "'not separated' where the interval covers 0."),
)
NOTES = (
    "Intervals are of each row alone, not adjusted for the number of rows.",
    "Rows over blocks average the matched seeds first: they speak of these weights on such text, not of other seeds.",
)


def pairs_table(arms: Sequence[Arm], *, mark, name: str, title: str, caption: str, notes: Sequence[str]) -> list[Table]:
    """The table, or none where there is nothing to compare.

    Args:
        arms: settings whose bits may be compared, the best first.
        mark: from ``compare.marks``.
    """
    reference = choose_reference(arms)
    if reference is None or len(arms) < 2:
        return []
    rows = []
    for arm in arms:
        if arm is not reference:
            label = f"{arm.label}{mark(arm.row)}"
            rows += [row for split in SPLITS for row in _rows(arm, reference, split=split, label=label)]
    caption = f"Reference: {reference.label}{mark(reference.row)}. {caption}"
    table = Table(name=name, title=title, caption=caption, columns=COLUMNS, rows=tuple(rows), notes=(*notes, *NOTES))
    return [table] if rows else []


def choose_reference(arms: Sequence[Arm]) -> Arm | None:
    """The first reference variant of ``arms``, which come best first, or the first of all; None where none has bits."""
    scored = [arm for arm in arms if _bits(arm, split="valid")]
    return next((arm for arm in scored if arm.variant == REFERENCE), scored[0] if scored else None)


def _bits(arm: Arm, *, split: str) -> dict[int, float]:
    """Bits per byte of each seed, where there are some."""
    found = {run.row["seed"]: run.row.get(f"{split}_bits_per_byte") for run in arm.newest_of_each_seed}
    return {seed: value for seed, value in found.items() if value is not None}


def _rows(arm: Arm, reference: Arm, *, split: str, label: str) -> list[tuple[Cell, ...]]:
    """Over seeds, and over blocks where both have them; capped splits are marked."""
    own, theirs = _bits(arm, split=split), _bits(reference, split=split)
    seeds = sorted(own.keys() & theirs.keys())
    mark = CAPPED if (arm.row.get("capped") or {}).get(split) else ""
    if not seeds:
        start = (text(label), text(f"{split}{mark}"), text("seeds"), whole(0))
        return [(*start, *[NOTHING] * 3, text("no matched seeds"))] if own and theirs else []
    rows = [_row(paired([own[seed] - theirs[seed] for seed in seeds]), label, f"{split}{mark}", "seeds")]
    blocks = _block_differences(arm, reference, split=split, seeds=seeds)
    return [*rows, _row(paired(blocks), label, f"{split}{mark}", "blocks")] if len(blocks) > 1 else rows


def _row(found: Paired, label: str, split: str, over: str) -> tuple[Cell, ...]:
    signed = Cell(text=f"{found.mean:+.4f}", value=found.mean)
    start = [text(label), text(split), text(over), whole(found.n), signed]
    if found.half_width is None:
        return (*start, NOTHING, NOTHING, text("n = 1"))
    interval = f"{found.mean - found.half_width:+.4f} to {found.mean + found.half_width:+.4f}"
    verdict = ("better" if found.mean < 0 else "worse") if found.separated else "not separated"
    return (*start, text(interval), fixed(found.half_width, digits=4), text(verdict))


def _block_differences(arm: Arm, reference: Arm, *, split: str, seeds: Sequence[int]) -> list[float]:
    """Bits per byte of each whole block, arm less reference, a mean over seeds; the last block may be short and is left out."""
    both = [[_blocks(one, split=split, seed=seed) for one in (arm, reference)] for seed in seeds]
    both = [(own[:-1], theirs[:-1]) for own, theirs in both if len(own) == len(theirs)]
    scale = BLOCK_BYTES * math.log(2)
    each = [[(a - b) / scale for a, b in zip(own, theirs, strict=True)] for own, theirs in both]
    return [mean(of_block) for of_block in zip(*(d for d in each if d), strict=True)] if each else []


def _blocks(arm: Arm, *, split: str, seed: int) -> list[float]:
    """Nats of each block, as the final score of that split recorded them; none where one is no number."""
    run = next(run for run in arm.newest_of_each_seed if run.row["seed"] == seed)
    final = [row for row in run.rows if row["kind"] == split and row.get("final")]
    found = (final[-1].get("block_nats") or []) if final else []
    return [] if None in found else found
