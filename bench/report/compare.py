"""Which rows may stand in one table, and what a caption has to say of it: what is held equal and what differs.

Bits per byte compare on equal data, split, protocol, capping and budget; a budget of seconds is equal on equal ground
only. Time and memory compare on equal ``bench.rows.ground``. Rows of other source code stand together, so that nothing is
lost, but marked: ``+`` where the source is not that of the newest row.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.report.gather import RunRow
from bench.report.grouping import Arm, arms, settings_of
from bench.rows import GROUND, ground_value
from harness.record.cells import OLDER, count_of, listed
from harness.record.closing_table import data_label

Row = Callable[[object], dict]
MOST_KEYS = 8


def by(items: Iterable, *, key: Callable[[object], object]) -> dict[object, list]:
    """Items by key, in the order in which the keys first came."""
    found: dict[object, list] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def newest_of_each(items: Sequence, *, key: Callable[[object], object]) -> tuple[list, int]:
    """The last item of each key, and how many older ones of equal keys there are."""
    found = by(items, key=key)
    return [same[-1] for same in found.values()], len(items) - len(found)


def one_a_seed(arm: Arm) -> list[RunRow]:
    """The newest run of each seed."""
    return newest_of_each(arm.members, key=lambda run: run.summary["seed"])[0]


def marks(items: Sequence, *, row: Row = dict) -> tuple[Callable[[dict], str], list[str]]:
    """What to write behind the name of a row of other source than the newest, and the note that explains it.

    Args:
        items: of one table, the oldest first.
    """
    newest = row(items[-1])
    others = by((row(item) for item in items), key=lambda found: found["source"])
    others.pop(newest["source"])
    if not others:
        return lambda found: "", []
    told = listed(source_words(found[-1]) for found in others.values())
    note = f"{OLDER} made by other source code ({told}) than the newest rows ({source_words(newest)})."
    return lambda found: "" if found["source"] == newest["source"] else f" {OLDER}", [note]


def source_words(row: dict) -> str:
    """``source 9dd51721 of commit b81edb0d-dirty``."""
    commit, _, state = (row["commit"] or "").partition("-")
    of_commit = f" of commit {commit[:8]}{state and '-'}{state}" if commit else ""
    return f"source {row['source'][:8]}{of_commit}"


def arms_of(items: Iterable, *, row: Row, without: tuple[str, ...] = ()) -> tuple[list[Arm], list[str]]:
    """Items that differ by their seed only, together; with a note for each arm whose label cannot say how it differs."""
    found = arms(items, row=row, without=without)
    notes = []
    for same in by(found, key=lambda arm: arm.variant).values():
        settings = [_settings(row(arm.members[0]), without=without) for arm in same]
        keys = _differing(settings)
        for arm, own in zip(same, settings, strict=True):
            if " no. " in arm.label and keys:
                told = listed((f"{key}={own.get(key, 'not there')}" for key in keys), most=MOST_KEYS)
                notes.append(f"{arm.label}: {told}.")
    return found, notes


def differences(rows: Sequence[dict], *, without: tuple[str, ...] = ()) -> str:
    """What the configurations of a table's rows do not share; all that makes a variant counts as one."""
    keys = _differing([_settings(row, without=without) for row in rows])
    named = dict.fromkeys("variant" if key.startswith("variant.") else key for key in keys)
    seeds = {row["seed"] for row in rows}
    named |= {"seed": None} if len(seeds) > 1 else {}
    return listed(named, most=MOST_KEYS)


def protocol_of(rows: Sequence[dict]) -> dict:
    """The protocol of rows that compare: of one span, or of each row's own."""
    spans = sorted({row["protocol"]["span"] for row in rows})
    own = spans[0] if len(spans) == 1 else f"of each row's own ({spans[0]} to {spans[-1]})"
    return rows[-1]["protocol"] | {"span": own}


def protocol_words(protocol: Mapping) -> str:
    """How bits per byte were scored: all that is part of the number."""
    lanes = count_of(protocol["lanes"], "lane")
    part = f"the first {protocol['bytes']:,} bytes of a split" if protocol.get("bytes") else "every byte of a split"
    newlines = "dropped" if protocol["drop_newlines"] else "kept"
    return (
        f"{part} scored once, streamed with carried state in {lanes}, segment {protocol['segment']}, span "
        f"{protocol['span']}, vocabulary {protocol['vocabulary']}, newlines {newlines}"
    )


def data_words(row: dict) -> str:
    """What was really read."""
    return data_label(row["data"])


def ground_words(row: dict) -> str:
    """All that time and memory depend on beside the code."""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    compiled = "compiled" if row["compile"] else "not compiled"
    where = f"{row['device']} ({row['device_kind']}), {count_of(row['threads'], 'thread')}"
    if (row.get("processes") or 1) > 1:
        where = f"{row['processes']} processes on {where} each"
    environment = [f"{name}={value}" for name, value in (row.get("environment") or {}).items()]
    beside = ", ".join(filter(None, [row.get("instruction_set"), *environment]))
    return f"{where}, {row['precision']}, {compiled}, {versions}{beside and ', '}{beside}"


def ground_differences(rows: Sequence[dict]) -> str:
    """In what the grounds of some rows differ, for a note."""
    return listed(key for key in GROUND if len({ground_value(row, key) for row in rows}) > 1)


def _settings(row: dict, *, without: tuple[str, ...]) -> dict[str, object]:
    """A configuration as flat keys, with the path that was taken."""
    return settings_of(row, without=without) | {"path": row["path"]}


def _differing(settings: Sequence[dict[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in settings}) > 1]
