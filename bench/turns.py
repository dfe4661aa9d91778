"""Turns of several processes that are asked one after the other, A B A B, so that nothing else runs and all share the
machine's moods."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.progress import Steps
from bench.worker import Cell, CellError


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
        if self.status is not None:
            return None
        try:
            return self.cell.ask(method, *arguments, **keywords)
        except CellError as error:
            self.status, self.reason = error.status, str(error)
            return None


def in_turn(
    asked: Sequence[Asked], *question, rounds: int, progress: Steps, **keywords
) -> Iterator[tuple[Asked, object]]:
    """Ask all that have not failed the same question, ``rounds`` times.

    Another one begins each round, so that nobody always follows the same neighbour's heat.

    Yields:
        who was asked, and the answer or None.
    """
    for number in range(rounds):
        ready = [one for one in asked if one.status is None]
        first = number % max(len(ready), 1)
        for one in ready[first:] + ready[:first]:
            progress.doing(f"{one.name}: {question[0]}, round {number + 1} of {rounds}")
            yield one, one.ask(*question, **keywords)
