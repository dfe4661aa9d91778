"""Tables of the rows of ``bench.fit``: one for each ground."""

import json
from collections.abc import Sequence

from bench.report.compare import arms_of, by, data_words, differences, ground_words, marks, newest_of_each
from bench.report.grouping import number
from bench.rows import ground
from harness.record.cells import NOTHING, count_of, fixed, keep_filled, mib, text, whole
from harness.record.table import Cell, Column, Table

FITS = (
    Column(heading="variant", number=False),
    Column(heading="path", number=False),
    Column(heading="lanes"),
    Column(heading="segment, bytes"),
    Column(heading="span, bytes"),
    Column(
        heading="predicted peak, MiB", explained="Peak of a training step, without the hardware (MiB = 2^20 bytes)."
    ),
    Column(heading="measured peak, MiB", explained="Where it could be measured."),
    Column(heading="error, %", explained="Predicted less measured, of measured."),
)
LIMITS = (
    Column(heading="device memory, MiB", explained="What has to hold the peak."),
    Column(heading="fits", explained="Whether the predicted peak does.", number=False),
    Column(heading="most lanes", explained="The largest batch that fits, at this span."),
    Column(heading="longest span", explained="The longest span that fits, at these lanes."),
    Column(heading="roofline", explained="The device whose peak rates bound the time.", number=False),
    Column(heading="bound, ms", explained="Least time of a training step at those peak rates."),
)


def fit_tables(rows: Sequence[dict]) -> list[Table]:
    """A table for each ground on which predictions were made; ``rows`` the oldest first."""

    def together(row: dict) -> str:
        return json.dumps([ground(row), row["data"]["sha256"], row["protocol"]["vocabulary"]])

    return [_fits(same, index=index) for index, same in enumerate(by(rows, key=together).values(), start=1)]


def _fits(rows: list[dict], *, index: int) -> Table:
    named = ("config_hash", "path", "lanes", "segment", "span", "source", "device_memory_bytes", "warm")
    limits = ("largest", "roofline")
    rows, older = newest_of_each(
        rows, key=lambda row: json.dumps([row.get(key) for key in named + limits], sort_keys=True)
    )
    without = ("model.span", "batch.segment", "batch.lanes", "runtime.path")
    arms, notes = arms_of(rows, row=lambda row: row | {"path": None}, without=without)
    mark, of_source = marks(rows)
    causes = list(dict.fromkeys(cause for row in rows for cause in row.get("split") or {}))
    split = [Column(heading=f"{cause}, MiB", explained="A part of the predicted peak.") for cause in causes]
    labelled = [(f"{arm.label}{mark(row)}", row) for arm in arms for row in arm.members]
    columns, cells = keep_filled((*FITS, *split, *LIMITS), [_fit(label, row, causes=causes) for label, row in labelled])
    if older:
        notes.append(f"{count_of(older, 'older row')} of an equal prediction left out: the newest counts.")
    caption = (
        f"Predicted for {ground_words(rows[-1])}. Data: {data_words(rows[-1])}. "
        f"The rows differ in: {differences(rows, without=without)}."
    )
    title = f"Predicted training memory, {rows[-1]['precision']}"
    about = {"title": title, "caption": caption, "notes": (*of_source, *notes)}
    return Table(name=f"fit-{index}", columns=columns, rows=cells, **about)


def _fit(label: str, row: dict, *, causes: Sequence[str]) -> list[Cell]:
    predicted, measured = row.get("predicted_peak_bytes"), row.get("measured_peak_bytes")
    error = 100 * (predicted - measured) / measured if predicted is not None and measured else None
    roofline, held = row.get("roofline") or {}, row.get("device_memory_bytes")
    return [
        text(label),
        text(row["path"]),
        *(whole(row[key]) for key in ("lanes", "segment", "span")),
        mib(predicted),
        mib(measured),
        NOTHING if error is None else Cell(text=f"{error:+.1f}", value=error),
        *(mib((row.get("split") or {}).get(cause)) for cause in causes),
        mib(held),
        NOTHING if held is None or predicted is None else text("yes" if predicted <= held else "no"),
        *(whole(number(row, "largest", key)) for key in ("lanes", "span")),
        text(roofline.get("name")),
        fixed(roofline.get("train_ms"), digits=3),
    ]
