"""The verdicts on the claims of papers (``bench/claims.yaml``), for ``docs/results.md``."""

import math

import pandas as pd

from bench.published_runs import STATE, TEST, pooled_bits, text_table
from bench.tables import read_yaml
from bench.tables.estimate import MIN_SEEDS, TOO_FEW, Pooled, estimate_mean
from harness.record.table import Table

MEASURES = {
    "bits per byte": TEST,
    "carried state, %": STATE,
    "FLOPs per byte, %": "flops_per_byte.executed",
}
"""The column of the frame for each measure in ``claims.yaml``."""
HOLDS = "holds"
FAILS = "does not hold"
UNDECIDED = "not separated"
CLAIM_HEADINGS = [
    "claim",
    "mechanism, baseline",
    "measure",
    "expected",
    "n",
    "difference, 95% interval",
    "verdict",
]


def claims_table(runs: pd.DataFrame) -> Table:
    """Return a table of the claims of ``bench/claims.yaml``. The mean of each difference over
    common seeds has a 95% interval, of bits by the pooled variance; it is not corrected for the
    number of claims."""
    bits = pooled_bits(runs)
    rows = []
    for claim in read_yaml("claims.yaml"):
        parts = []
        for part in claim["parts"]:
            all_seeds = seed_differences(runs, part["variant"], part["baseline"], part["measure"])
            scored = all_seeds.dropna().tolist()
            margin = part.get("margin", 0.0)
            pooled = bits
            if part["measure"].endswith("%"):
                pooled = None
            verdict, interval = judge(
                scored, expected=part["expected"], margin=margin, pooled=pooled
            )
            n = str(len(scored))
            if all_seeds.hasnans:
                n += f", {all_seeds.isna().sum()} without a score"
            names = f"`{part['variant']}`, `{part['baseline']}`"
            expected = f"below {margin:g}"
            if part["expected"] == "equal":
                expected = f"-{margin:g} to {margin:g}"
            parts.append(["", names, part["measure"], expected, n, interval, verdict])
        verdicts = [part[-1] for part in parts]
        overall = next(
            (verdict for verdict in (FAILS, TOO_FEW, UNDECIDED) if verdict in verdicts), HOLDS
        )
        rows += [[f"**{claim['claim']}**", *[""] * 5, f"**{overall}**"], *parts]
    return text_table(CLAIM_HEADINGS, rows)


def seed_differences(runs: pd.DataFrame, variant: str, baseline: str, measure: str) -> pd.Series:
    """Return for each common seed the difference from the baseline, in bits or in percent; NaN if a
    run has no number."""
    column = MEASURES[measure]
    columns = [
        runs[runs["variant"] == name].set_index("seed")[column] for name in (variant, baseline)
    ]
    compared, base = pd.concat(columns, axis=1, join="inner").sort_index().T.to_numpy()
    return pd.Series(100 * (compared / base - 1) if measure.endswith("%") else compared - base)


def judge(
    differences: list[float], *, expected: str, margin: float, pooled: Pooled | None = None
) -> tuple[str, str]:
    """Return the verdict on the mean of differences, and the mean with its 95% interval as text.
    The mean is expected below the margin (``lower``), or between minus and plus the margin
    (``equal``). ``HOLDS``: the whole interval lies in this range. ``FAILS``: it lies outside.
    ``UNDECIDED``: neither. ``TOO_FEW``: fewer than ``MIN_SEEDS`` differences."""
    if len(differences) < 2:
        return TOO_FEW, "".join(f"{difference:+.4f}" for difference in differences)
    estimate = estimate_mean(differences, pooled)
    low = estimate.mean - estimate.half_width
    high = estimate.mean + estimate.half_width
    min_expected = -margin if expected == "equal" else -math.inf
    verdict = FAILS if low >= margin or high <= min_expected else UNDECIDED
    if min_expected < low and high < margin:
        verdict = HOLDS
    return (
        verdict if estimate.n >= MIN_SEEDS else TOO_FEW,
        f"{estimate.mean:+.4f} ± {estimate.half_width:.4f}",
    )
