"""Difference of two runs: their configurations key by key, and the code, data and machine behind them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.report.comparison import flat
from bench.report.gather import RunRow, provenance_of, run_folders
from bench.rows import GROUND
from harness.record.rows import RECORD

BESIDE = ("source", "commit", "backend", *GROUND)
"""What a row knows of a run beside its configuration and its data."""
MOST_CANDIDATES = 20


def facts(provenance: dict) -> dict[str, str]:
    """All that makes a run, as flat keys and words: the configuration under its own keys, the rest under two of words."""
    found = {key: _words(value) for key, value in flat(provenance["config"]).items()} | {
        "seed": str(provenance["seed"])
    }
    beside = {f"data read: {key}": value for key, value in provenance["data"].items()}
    beside |= flat({f"made with: {key}": provenance.get(key) for key in BESIDE})
    return found | {key: value if isinstance(value, str) else json.dumps(value) for key, value in beside.items()}


def _words(value: object) -> str:
    """Text as it stands, unless it would read like something else: the text ``"1"`` is not the number."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return value
    return json.dumps(value)


def differing(first: dict[str, str], second: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Keys whose values differ, with both; None where a run does not have the key."""
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def diff_lines(folders: Sequence[Path], *, names: Sequence[str]) -> list[str]:
    """What to print of two runs.

    Args:
        folders: where runs are looked for.
        names: of the two: a run folder's name, the beginning of one, or a path.

    Raises:
        ValueError: a name fits no run or several; the message has the candidates.
    """
    there = run_folders(folders)
    first, second = (_named(name, there) for name in names)
    rows = differing(*(facts(provenance_of(folder)) for folder in (first, second)))
    lines = [f"A: {first}", f"B: {second}"]
    if not rows:
        return [*lines, "no difference in configuration, code, data or machine"]
    shown = [(key, *("not there" if value is None else _line(value) for value in pair)) for key, pair in rows.items()]
    table = [("", "A", "B"), *((_line(key), a, b) for key, a, b in shown)]
    widths = [max(len(row[place]) for row in table) for place in (0, 1)]
    return [*lines, "", *(f"{key.ljust(widths[0])}  {a.ljust(widths[1])}  {b}" for key, a, b in table)]


def facts_by_run(runs: Iterable[RunRow]) -> dict[Path, dict[str, str]]:
    """Facts of each run folder, less those that all runs share: enough to tell any two of them apart."""
    found = {run.folder: facts(run.provenance) for run in runs}
    keys = dict.fromkeys(key for one in found.values() for key in one)
    kept = [key for key in keys if len({one.get(key) for one in found.values()}) > 1]
    return {folder: {key: one[key] for key in kept if key in one} for folder, one in found.items()}


def _line(words: str) -> str:
    """One line: text from rows may hold anything."""
    return "".join(letter if letter.isprintable() else " " for letter in words)


def _named(name: str, there: Sequence[Path]) -> Path:
    """The run folder that a name means."""
    if (Path(name) / RECORD).is_file():
        return Path(name)
    exact = [folder for folder in there if folder.name == name]
    found = exact or [folder for folder in there if folder.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    shown = found or there
    candidates = ", ".join(str(folder) for folder in sorted(shown)[:MOST_CANDIDATES]) or "none"
    more = f" and {len(shown) - MOST_CANDIDATES} more" if len(shown) > MOST_CANDIDATES else ""
    why = "fits several runs" if found else "fits no run"
    raise ValueError(f"--diff {name}: {why}; runs here are {candidates}{more}")
