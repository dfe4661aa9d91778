"""Attacks as a table, attack | tried | survived: ``python -m tests.faults`` tries what CI tries, ``python -m tests.faults all``
thousands. Further words are pytest's, as in ``python -m tests.faults all -k kills``.

Nothing is written here: the tests say what they attack, and how often they did.
"""

import sys
from pathlib import Path

import pytest

CHOICES = {"quick": "not gpu and not faults", "all": "not gpu"}


class Table:
    """Tries and survivors by attack, in the order of the tests; below them what tests have measured."""

    def __init__(self):
        self._counts: dict[str, list[int]] = {}
        self._measured: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "attack":
                attack, *more = value
                self._counts[attack] = [sum(both) for both in zip(self._counts.get(attack, (0, 0)), more, strict=True)]
            elif report.when == "call":
                self._measured.append(f"\n{name}: {value}")

    def __str__(self) -> str:
        total = [sum(counts) for counts in zip(*self._counts.values(), strict=True)] or [0, 0]
        lines = [(attack, f"{tried:,}", f"{survived:,}") for attack, (tried, survived) in self._counts.items()]
        lines += [("all", *(f"{count:,}" for count in total))]
        table = [f"| {' | '.join(line)} |" for line in [("attack", "tried", "survived"), ["---"] * 3, *lines]]
        return "\n".join(table + self._measured)


def main() -> int:
    which, *words = sys.argv[1:] or ["quick"]
    if which not in CHOICES:
        print(f"error: {which}: allowed are {', '.join(CHOICES)}, then words of pytest", file=sys.stderr)
        return 2
    table = Table()
    code = pytest.main(["-m", CHOICES[which], str(Path(__file__).parent), *words], plugins=[table])
    print(table)
    return code


if __name__ == "__main__":
    sys.exit(main())
