"""Verdicts on the papers' claims, as a table of ``docs/results.md``.

Each part of a claim of ``bench/claims.yaml`` is the mean of paired differences over the seeds that both mechanisms have finished,
with its 95% t-interval. *holds*: the interval lies where it must; *does not*: wholly elsewhere; *not separated*: it covers both.
Fewer than three seeds give no verdict. Intervals are not corrected for their number.
"""

from pathlib import Path

import pandas as pd
import yaml

from bench.report.uncertainty import paired

SEEDS = 3
MEASURES = {"bits per byte": "test", "carried state, %": "state", "FLOPs of a byte, %": "flops"}
"""Columns of ``results_page.read_runs``."""
NOT, FEW, OPEN, HOLDS = "does not", "too few seeds", "not separated", "holds"
HEAD = "| claim | compared | in | must be | n | difference, 95% interval | verdict |\n|---|---|---|---|---|---|---|"


def verdict_table(runs: pd.DataFrame) -> str:
    """The table of runs as ``results_page.read_runs`` has them; ValueError where they are not of one protocol."""
    if len(grounds := sorted(runs["ground"].dropna().unique())) > 1:
        raise ValueError("rows differ in data, protocol, budget or arithmetic:\n" + "\n".join(grounds))
    table = [HEAD]
    for claim in yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")):
        verdicts, rows = [], []
        for part in claim["parts"]:
            every = differences(runs, part["variant"], part["beside"], part["measure"])
            scored = every.dropna().tolist()
            verdict, interval = judge(scored, must=part["must"], margin=part.get("margin", 0.0))
            lost = f", {every.isna().sum()} without a score" if every.hasnans else ""
            must = part["must"] + (f" within {part['margin']:g}" if "margin" in part else "")
            names = f"`{part['variant']}`, `{part['beside']}` | {part['measure']} | {must} | {len(scored)}{lost}"
            rows.append(f"| | {names} | {interval} | {verdict} |")
            verdicts.append(verdict)
        whole = next((verdict for verdict in (NOT, FEW, OPEN) if verdict in verdicts), HOLDS)
        table += [f"| **{claim['claim']}** | | | | | | **{whole}** |", *rows]
    return "\n".join(table)


def differences(runs: pd.DataFrame, variant: str, rival: str, measure: str) -> pd.Series:
    """Of all matched seeds, in bits or percent; NaN for one without a score."""
    column = MEASURES[measure]
    values = [runs[runs["variant"] == name].set_index("seed")[column].astype(float) for name in (variant, rival)]
    a, b = pd.concat(values, axis=1, join="inner").sort_index().T.to_numpy()
    return pd.Series(100 * (a / b - 1) if measure.endswith("%") else a - b)


def judge(differences: list[float], *, must: str, margin: float) -> tuple[str, str]:
    """The verdict on differences that must be less than the margin, or both less and not further below 0 (*the same*), and
    their interval in words."""
    if len(differences) < 2:
        return FEW, "".join(f"{difference:+.4f}" for difference in differences)
    pairs = paired(differences)
    low, high = pairs.mean - pairs.half_width, pairs.mean + pairs.half_width
    lowest = -margin if must == "the same" else float("-inf")
    verdict = HOLDS if lowest < low and high < margin else NOT if low >= margin or high <= lowest else OPEN
    return verdict if pairs.n >= SEEDS else FEW, f"{pairs.mean:+.4f} ± {pairs.half_width:.4f}"
