"""Tables of what ``bench.peers`` timed, one for each job of a call; the verb prints them, too."""

from collections.abc import Sequence
from pathlib import PurePath

from bench.report.columns import VOID, columns
from bench.report.compare import busy_notes, by
from bench.report.frame import frame_of
from bench.report.words import data_words, ground_words
from harness.record.cells import busy_mark, count_of, filled_table, listed, spread
from harness.record.closing_table import short_commit
from harness.record.comparison import ground, tree_of
from harness.record.table import Table

DISTURBED = 1.5
"""Times of one step that vary more than so, from the 20th to the 80th percentile, are remarked upon."""


def peer_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each call of the verb, job and reference model, the fastest first; calls are never mixed."""

    def together(row: dict) -> tuple:
        about = (row.get(key) for key in ("read_from", "job", "streams", "segment", "relative_to"))
        return (
            tree_of(row),
            *about,
            ground(row, without=("allocator",)),
            row["data"]["sha256"],
            row["protocol"]["vocabulary"],
        )

    tables = []
    for index, same in enumerate(by(rows, key=together).values(), start=1):
        row, frame = same[-1], frame_of(same)
        void = {one["freed"]: one["invalid"] for _, one in frame.iterrows() if isinstance(one.get("invalid"), str)}
        shown = [one.dropna().to_dict() for _, one in frame.iterrows()]
        for one in shown:
            one["label"] = f"{one['name']}{busy_mark(one.get('load'))}"
            one["invalid"] = void.get(one.get("freed"))
            if one["invalid"]:
                one.pop("range_words", None)
        shown.sort(key=lambda row: (row["status"] != "measured", -(row.get("bytes_per_second") or 0.0)))
        about = (
            f"{ground_words(row)}. Data: {data_words([row])}.",
            f"Job: {row['job']}, {count_of(row['streams'], 'stream')} of {row['segment']:,} bytes. Held equal: job, "
            "streams, segment, threads, precision and data, not parameters.",
            ", commit ".join(filter(None, (f"One call: {PurePath(row['read_from']).name}", short_commit(row)))) + ".",
        )
        against = f"; shares are of {row['relative_to']}" if row.get("relative_to") else ""
        caption = f"The rows differ in who wrote the code{against}."
        title = f"{f'{VOID}: ' if void else ''}Peers: {row['job']}, {row['device']}, {row['precision']}"
        styles = tuple("dim" if one["status"] != "measured" else "dim strike" * bool(one["invalid"]) for one in shown)
        same = {"caption": caption, "about": about, "notes": tuple(_peer_notes(shown)), "styles": styles}
        tables.append(filled_table(shown, columns("peers"), name=f"peers-{index}", title=title, **same))
    return tables


def _peer_notes(rows: Sequence[dict]) -> list[str]:
    """What is true of the rows."""
    measured = [row for row in rows if row["status"] == "measured"]
    notes = [f"{VOID}: {reason}." for reason in dict.fromkeys(row["invalid"] for row in rows if row["invalid"])]
    notes += [
        f"{_name(row)}: {row['status']} ({row.get('reason') or 'no reason given'})."
        for row in rows
        if row not in measured
    ]
    checked = by((row for row in measured if "reference_in_check" in row), key=lambda row: row["reference_in_check"])
    for share, same in checked.items():
        ends = same[0]["row"].get("reference_in_check_range")
        told = f"{share:.3f}{f' ({spread(ends).text})' if ends else ''} of the speed of x-transformers"
        notes.append(f"The reference model runs at {told}, beside {listed(map(_name, same))}.")
    shaken = [row for row in measured if row.get("time.train_ms.p80", 0) > DISTURBED * row.get("time.train_ms.p20", 0)]
    if shaken:
        names = listed(map(_name, shaken))
        notes.append(f"DISTURBED: steps of {names} vary more than {DISTURBED}-fold: is the machine busy?")
    notes += busy_notes(row.get("load") for row in measured)
    cut = [f"{_name(row)} ({count_of(int(row.get('rounds') or 0), 'round')})" for row in rows if row.get("interrupted")]
    return notes + ([f"INTERRUPTED, so of fewer rounds than planned: {listed(cut)}."] if cut else [])


def _name(row: dict) -> str:
    return ", ".join(filter(None, (row["name"], row.get("freed"))))
