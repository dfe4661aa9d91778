"""Claims: what others say of models that nobody here has run, beside runs on the same bytes.

``bench.score`` has counted and summed their losses. No mean, no difference and no verdict is drawn from them.
"""

from collections.abc import Iterator, Sequence

from harness.record.cells import NOTHING, bits, listed, text
from harness.record.table import Cell

SPLITS = ("valid", "test")


def claims_beside(row: dict, claims: Sequence[dict]) -> list[dict]:
    """Claims on the splits of a run's data, the best first."""
    cut, dropped = (row["config"].get("data") or {}).get("split"), row["protocol"]["drop_newlines"]
    same = [
        claim
        for claim in claims
        if claim["data"]["sha256"] == row["data"]["sha256"]
        and (claim["shares"], claim["drop_newlines"]) == (cut, dropped)
        and claim["split"] in SPLITS
    ]
    return sorted(same, key=lambda claim: claim["bits_per_byte"])


def claimed_rows(claims: Sequence[dict], *, before: int, after: int) -> Iterator[list[Cell]]:
    """A row a claim, with bits in the column of its split."""
    for claim in claims:
        scores = [bits(claim["bits_per_byte"]) if claim["split"] == split else NOTHING for split in SPLITS]
        yield [text(f"{claim['variant']} (claimed)"), *[NOTHING] * before, *scores, *[NOTHING] * after]


def claimed_words(claims: Sequence[dict]) -> list[str]:
    """The note of a table with claims."""
    if not claims:
        return []
    names = listed(dict.fromkeys(claim["variant"] for claim in claims))
    return [
        f"Claimed: {names}. Summed by bench.score over the whole split from losses that others sent; the model, what it "
        "had seen before, how it was scored and what it cost are not known here."
    ]


def claim_line(claim: dict) -> str:
    """One claim in words."""
    where = f"{claim['split']} of {claim['data']['name']} (sha256 {claim['data']['sha256'][:8]})"
    return f"claimed, not measured: {claim['variant']}, {claim['bits_per_byte']:.4f} bits per byte on {where}"
