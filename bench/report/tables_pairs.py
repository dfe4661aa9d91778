"""Differences, and whether they are real: each setting against a reference, over matched seeds.

The reference is that of the contrast named in advance, else the best setting of the variant that ``variants.yaml`` names,
else the setting of the best validation bits. A verdict needs seeds: blocks of one text under one set of weights depend on
each other, and say nothing of another initialisation.
"""

from collections.abc import Sequence

from bench.report.comparison import VARIANTS, Arm
from bench.report.uncertainty import CONFIDENCE, Paired, holm, paired
from harness.record.cells import CAPPED, NOTHING, count_of, fixed, text, whole
from harness.record.table import Cell, Column, Table, words

Contrast = tuple[str, str]
"""Two rows by label or variant: the first less the second."""
REFERENCE = VARIANTS["reference"]
SPLITS = ("valid", "test")
COLUMNS = (
    words("variant", "What is compared with the reference."),
    words("split"),
    Column("n", "Pairs of runs of one seed."),
    Column("difference, bits per byte", "Mean of the pairs, variant less reference: below 0 is better."),
    words("95% interval", "Student's t, paired, of this row alone; n = 1 has none."),
    Column("smallest visible", "Half the interval: a true difference smaller than this could not have been seen."),
    Column("p", "Of a difference as large if there is none; by Holm, corrected for the other rows."),
    words("verdict", "'not separated' where p is above 0.05."),
)


def pairs_table(
    arms: Sequence[Arm], *, mark, name: str, title: str, caption: str, notes: Sequence[str], contrast: Contrast | None
) -> list[Table]:
    """The table, or none where there is nothing to compare.

    Args:
        arms: settings whose bits may be compared, the best first.
        mark: from ``compare.marks``.
        contrast: the one that was named in advance; it counts where its two are among the arms.
    """
    own, other = (named(arms, name) for name in contrast) if contrast else (None, None)
    reference = other if own and other else choose_reference(arms)
    if reference is None or len(arms) < 2:
        return []
    found = [(arm, split, pairs) for arm in arms if arm is not reference for split, pairs in _splits(arm, reference)]
    judged = [place for place, (_, _, pairs) in enumerate(found) if pairs and pairs.p is not None]
    in_advance = [place for place in judged if other is reference and found[place][0] is own][
        -1:
    ]  # test, if it was scored
    corrected = [place for place in judged if place not in in_advance]
    p = {place: found[place][2].p for place in in_advance}
    p |= dict(zip(corrected, holm([found[place][2].p for place in corrected]), strict=True))
    rows = []
    for place, (arm, split, pairs) in enumerate(found):
        capped = CAPPED if any((run.row.get("capped") or {}).get(split) for run in arm.members) else ""
        rows.append((text(f"{arm.label}{mark(arm.row)}"), text(f"{split}{capped}"), *_cells(pairs, p.get(place))))
    told = f"p and verdicts are corrected for {count_of(len(corrected), 'difference')} in this table, by Holm."
    said = [told] if corrected else []
    for place in in_advance:
        said.append(
            f"{own.label} less {reference.label} on {found[place][1]} was named in advance: it is not corrected."
        )
    caption = f"Reference: {reference.label}{mark(reference.row)}. {caption}"
    table = Table(name=name, title=title, caption=caption, columns=COLUMNS, rows=tuple(rows), notes=(*notes, *said))
    return [table] if rows else []


def named(arms: Sequence[Arm], name: str) -> Arm | None:
    """The one arm of that label or variant; None where there are several, or none."""
    found = [arm for arm in arms if name in (arm.label, arm.variant)]
    return found[0] if len(found) == 1 else None


def choose_reference(arms: Sequence[Arm]) -> Arm | None:
    """The first reference variant of ``arms``, which come best first, or the first of all; None where none has bits."""
    scored = [arm for arm in arms if _bits(arm, split="valid")]
    return next((arm for arm in scored if arm.variant == REFERENCE), scored[0] if scored else None)


def _bits(arm: Arm, *, split: str) -> dict[int, float]:
    """Bits per byte of each seed, where there are some."""
    found = {run.row["seed"]: run.row.get(f"{split}_bits_per_byte") for run in arm.newest_of_each_seed}
    return {seed: value for seed, value in found.items() if value is not None}


def _splits(arm: Arm, reference: Arm) -> list[tuple[str, Paired | None]]:
    """Each split that both have bits of; None where no seed is matched."""
    found = []
    for split in SPLITS:
        own, theirs = _bits(arm, split=split), _bits(reference, split=split)
        seeds = sorted(own.keys() & theirs.keys())
        if own and theirs:
            found.append((split, paired([own[seed] - theirs[seed] for seed in seeds]) if seeds else None))
    return found


def _cells(found: Paired | None, p: float | None) -> tuple[Cell, ...]:
    """All after the split; ``p`` as it is judged by."""
    if found is None:
        return (whole(0), *[NOTHING] * 4, text("no matched seeds"))
    start = (whole(found.n), Cell(text=f"{found.mean:+.4f}", value=found.mean))
    if p is None:
        return (*start, *[NOTHING] * 3, text("n = 1"))
    interval = f"{found.mean - found.half_width:+.4f} to {found.mean + found.half_width:+.4f}"
    verdict = "not separated" if p > 1 - CONFIDENCE else "better" if found.mean < 0 else "worse"
    return (*start, text(interval), fixed(found.half_width, digits=4), fixed(p, digits=4), text(verdict))
