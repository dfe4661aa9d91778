"""Verdicts on the papers' claims, as a Markdown table: ``python -m bench.verdicts [bench/results/front_page.jsonl ..]``.

Each part of a claim of ``bench/claims.yaml`` is the mean of paired differences over the seeds that both mechanisms have finished,
with its 95% t-interval. *holds*: the interval lies where it must; *does not*: wholly elsewhere; *not separated*: it covers both.
Fewer than three seeds give no verdict. Intervals are not corrected for their number.
"""

import json
import sys
from pathlib import Path

import yaml

from bench.report.uncertainty import paired
from harness.record.comparison import UNCOMPARED
from harness.record.rows import read_rows

SEEDS = 3
MEASURES = {
    "bits per byte": ("test_bits_per_byte",),
    "carried state, %": ("memory", "state_bytes"),
    "FLOPs of a byte, %": ("flops_per_byte", "executed"),
}
NOT, FEW, OPEN, HOLDS = "does not", "too few seeds", "not separated", "holds"
HEAD = "| claim | compared | in | must be | n | difference, 95% interval | verdict |\n|---|---|---|---|---|---|---|"


def verdict_table(lines: list[dict]) -> str:
    """The table of one file of ``bench.evidence``; ValueError where its runs are not of one protocol."""
    words = ((dict(word.split("=", 1) for word in line["cell"]), line["summary"]) for line in lines)
    runs = {(cell["variant"], int(cell["seed"])): summary for cell, summary in words}
    if len(grounds := sorted({_ground(run) for run in runs.values() if run["status"] == "finished"})) > 1:
        raise ValueError("rows differ in data, protocol, budget or arithmetic:\n" + "\n".join(grounds))
    table = [HEAD]
    for claim in yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")):
        verdicts, rows = [], []
        for part in claim["parts"]:
            every = _differences(runs, part["variant"], part["beside"], part["measure"])
            differences = [one for one in every if one is not None]
            verdict, interval = judge(differences, must=part["must"], margin=part.get("margin", 0.0))
            lost = f", {every.count(None)} without a score" if None in every else ""
            must = part["must"] + (f" within {part['margin']:g}" if "margin" in part else "")
            names = f"`{part['variant']}`, `{part['beside']}` | {part['measure']} | {must} | {len(differences)}{lost}"
            rows.append(f"| | {names} | {interval} | {verdict} |")
            verdicts.append(verdict)
        whole = next((one for one in (NOT, FEW, OPEN) if one in verdicts), HOLDS)
        table += [f"| **{claim['claim']}** | | | | | | **{whole}** |", *rows]
    return "\n".join(table)


def judge(differences: list[float], *, must: str, margin: float) -> tuple[str, str]:
    """The verdict on differences that must be less than the margin, or both less and not further below 0 (*the same*), and
    their interval in words."""
    if len(differences) < 2:
        return FEW, "".join(f"{one:+.4f}" for one in differences)
    pairs = paired(differences)
    low, high = pairs.mean - pairs.half_width, pairs.mean + pairs.half_width
    lowest = -margin if must == "the same" else float("-inf")
    verdict = HOLDS if lowest < low and high < margin else NOT if low >= margin or high <= lowest else OPEN
    return verdict if pairs.n >= SEEDS else FEW, f"{pairs.mean:+.4f} ± {pairs.half_width:.4f}"


def _differences(runs: dict[tuple[str, int], dict], variant: str, rival: str, measure: str) -> list[float | None]:
    """Of all matched seeds, in bits or percent; None for one without a score."""
    seeds = sorted(seed for name, seed in runs if name == variant and (rival, seed) in runs)
    pairs = [[_value(runs[name, seed], measure) for name in (variant, rival)] for seed in seeds]
    return [None if None in (a, b) else 100 * (a / b - 1) if measure.endswith("%") else a - b for a, b in pairs]


def _value(summary: dict, measure: str) -> float | None:
    """A number of a finished run that may be compared."""
    number = summary if summary["status"] == "finished" and summary.get("check") not in UNCOMPARED else {}
    for key in MEASURES[measure]:
        number = number.get(key) or {}
    return number or None


def _ground(summary: dict) -> str:
    """What all runs of a table have in common; context and span follow from a mechanism's sizes."""
    protocol = {key: value for key, value in summary["protocol"].items() if key not in ("context", "span")}
    held = [summary["data"]["sha256"], protocol, *(summary[key] for key in ("budget", "precision"))]
    return json.dumps([*held, summary["numerics"]["shared"]], sort_keys=True)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or ["bench/results/front_page.jsonl"]):
        print(f"{path.stem}\n\n{verdict_table(read_rows(path))}\n")
