"""Figures of one run, drawn from its record alone: ``learning_curve.png`` with general compressors as lines, ``spans.png``
of every metric whose name ends with ``.span``, one entry a head, and ``context.png`` of a later evaluation."""

from collections.abc import Iterator
from pathlib import Path

from harness.cache import written_whole
from harness.record import drawing
from harness.record.drawing import GREY, panels, points

COLOUR = "#0072B2"  # of Okabe and Ito's, told apart with any colour vision


def draw_figures(
    rows: list[dict],
    *,
    folder: Path,
    label: str,
    compressors: dict[str, float] | None = None,
    span_limit: int | None = None,
) -> Iterator[Path]:
    """Draw what the rows have data for: each file when it is there, so that one that fails costs none before it.

    Args:
        label: title, naming the run and the data really read.
        compressors: bits per byte of the valid split by compressor, ``{"gzip": 3.04}``.
        span_limit: S, the longest possible span.
    """
    if path := draw_learning_curve(rows, path=folder / "learning_curve.png", label=label, compressors=compressors):
        yield path
    if path := draw_spans(rows, path=folder / "spans.png", label=label, span_limit=span_limit):
        yield path


def draw_learning_curve(
    rows: list[dict], *, path: Path, label: str, compressors: dict[str, float] | None = None
) -> Path | None:
    """Train and valid bits per byte against bytes seen; None, and no file, if no row has either.

    Scores of a prefix of the split only, valid rows with a true ``capped_bytes``, have a star in the legend.
    """
    scored = [row for row in rows if row["kind"] == "valid" and row.get("final")]
    last = (scored[-1]["bytes_seen"], scored[-1]["bits_per_byte"]) if scored else (0, None)
    if not points(rows, kind="train") and not points(rows, kind="valid") and last[1] is None:
        return None
    figure, (ax,) = panels(1, 1, width=7.0, height=4.2, **_titles(label))
    drawing.draw_bits(ax, rows, last=last, colour=COLOUR)
    for index, (name, bits) in enumerate(sorted((compressors or {}).items(), key=lambda item: -item[1])):
        ax.axhline(bits, color=GREY, linewidth=1, linestyle=(":", "--", "-.")[index % 3], label=f"{name} {bits:.2f}")
    drawing.bits_axis(ax, [rows], others=[last[1], *(compressors or {}).values()])
    ax.set(xlabel="bytes seen", xlim=(0, None))
    drawing.count_axis(ax.xaxis, unit="B")
    handles, labels = ax.get_legend_handles_labels()
    capped = {bool(row.get("final")) for row in rows if row["kind"] == "valid" and row.get("capped_bytes")}
    stars = {"valid, on the way": False in capped, "valid, at the end": True in capped}
    ax.legend(handles, [f"{name}, of a prefix*" if stars.get(name) else name for name in labels], frameon=False)
    return save(figure, path)


def draw_context(curve: list[dict], *, path: Path, label: str) -> Path:
    """Bits per byte against bytes of context: rows ``{from_bytes, to_bytes, bits_per_byte}``, drawn as steps."""
    figure, (ax,) = panels(1, 1, width=7.0, height=4.2, **_titles(label))
    for point in curve:
        ax.hlines(point["bits_per_byte"], point["from_bytes"], point["to_bytes"] + 1, color=COLOUR, linewidth=2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("bytes of context")
    ax.set_ylabel("bits per byte")
    return save(figure, path)


def draw_spans(rows: list[dict], *, path: Path, label: str, span_limit: int | None = None) -> Path | None:
    """Spans by layer at the end; None, and no file, if no row has spans."""
    spans = next(filter(None, (drawing.spans_of(row.get("metrics")) for row in reversed(rows))), None)
    if spans is None:
        return None
    figure, (ax,) = panels(1, 1, width=7.0, height=max(4.2, 1.5 + 0.32 * len(spans)), **_titles(label))
    drawing.draw_span_cells(ax, spans, limit=span_limit)
    return save(figure, path)


def _titles(label: str) -> dict[str, str]:
    """The run, and below it the data. A dollar is a dollar: nothing in a label is a formula."""
    run, _, data = label.replace("$", r"\$").partition(": ")
    return {"title": run, "subtitle": data}


def save(figure, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    with written_whole(path) as file:
        figure.savefig(file, format="png")
    return path
