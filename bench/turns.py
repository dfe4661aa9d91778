"""Turns of several processes that are asked one after the other, A B A B, so that nothing else runs and all share the
machine's moods."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.device.cell import Cell, CellError
from harness.loop.progress import Steps

REFERENCE = "reference_model"
"""The entry of ``bench.peers`` that the others are compared with."""
MOST_MS = 60_000.0
"""Of one quantity: after that no further round is begun, whatever ``rounds`` says."""


@dataclass(kw_only=True)
class Asked:
    """Who answers in a cell of its own, until it fails.

    Attributes:
        name: in tables and on the terminal.
        cell: its process, or None where it has none yet.
        status, reason: None, or how it ended and why: ``failed``, ``out of memory``, ``measured``.
    """

    name: str
    cell: Cell | None = None
    status: str | None = None
    reason: str | None = None

    def ask(self, method: str, *arguments, **keywords):
        """The cell's answer, or None where it has failed, now or before. ValueError for a user's mistake."""
        try:
            return None if self.status else self.cell.ask(method, *arguments, **keywords)
        except CellError as error:
            self.status, self.reason = error.status, str(error)


def in_turn(
    asked: Sequence[Asked], *question, rounds: int, progress: Steps, **keywords
) -> Iterator[tuple[Asked, list[float]]]:
    """Ask all that have not failed for milliseconds of calls, ``rounds`` times, or until theirs are ``MOST_MS``.

    Another one begins each round, so that nobody always follows the same neighbour's heat. Yields who was asked, and
    the answer, nothing of one that failed.
    """
    spent_ms = dict.fromkeys(map(id, asked), 0.0)
    for number in range(rounds):
        ready = [one for one in asked if one.status is None and spent_ms[id(one)] < MOST_MS]
        first = number % max(len(ready), 1)
        for one in ready[first:] + ready[:first]:
            progress.doing(f"{one.name}: {question[0]}, round {number + 1} of {rounds}")
            times_ms = one.ask(*question, **keywords) or []
            spent_ms[id(one)] += sum(times_ms)
            yield one, times_ms
