"""Rates of the front page: ``python -m bench.picks`` reads ``bench/results/rates.jsonl`` and prints lines for ``conf/variant``.

A best factor of ``optim.lr`` at an end of those tried is marked; ``python -m bench.evidence stage=a2`` tries one step beyond.
"""

import math
import sys
from pathlib import Path

from harness.record.rows import read_rows

RATE = "++variant.lr_scale.muon"
LEAST = 3  # rates of a mechanism before one is picked


def cell_of(line: dict) -> dict[str, str]:
    """The words of a line of ``bench.evidence``, by key."""
    return dict(word.split("=", 1) for word in line["cell"])


def tried(file: Path) -> dict[str, dict[float, float]]:
    """Bits per byte of valid by mechanism and factor, infinite for a failed run; nothing where the file is not there."""
    scores: dict[str, dict[float, float]] = {}
    for line in read_rows(file):
        cell, summary = cell_of(line), line["summary"]
        bits = summary["valid_bits_per_byte"] if summary["status"] == "finished" else math.inf
        scores.setdefault(cell["variant"], {})[float(cell[RATE])] = bits
    return scores


def beyond(scores: dict[float, float]) -> float | None:
    """The factor beyond the best one where that is an end of at least ``LEAST``."""
    best = min(scores, key=scores.get)
    if len(scores) < LEAST or min(scores) < best < max(scores):
        return None
    return best * 2 if best == max(scores) else best / 2


if __name__ == "__main__":
    for name, scores in tried(Path(sys.argv[1] if sys.argv[1:] else "bench/results/rates.jsonl")).items():
        step, tries = beyond(scores), ", ".join(f"{rate:g} gave {bits:.4f}" for rate, bits in sorted(scores.items()))
        end = "; too few rates" if len(scores) < LEAST else f"; an end: {step:g} is next" if step else ""
        print(f"{name}: lr_scale: {{muon: {min(scores, key=scores.get):g}}}  # {tries}{end}")
