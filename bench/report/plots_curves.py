"""Learning curves: bits per byte against bytes seen, FLOPs spent and seconds, all comparable runs together.

How one run's line is drawn is in ``harness.record.drawing``; here is which runs share a drawing, and what they had spent.
"""

import numpy as np
from matplotlib.axes import Axes

from bench.report.columns import thrice_notes
from bench.report.comparison import Arm, arms, comparable, grouped, number, split_by_ground, tag
from bench.report.plot_style import LINES, Look, entry, entry_of, finish, legend_below, plain_axis
from bench.report.words import budget_words, data_words, machine_words
from harness.record.drawing import BINS, GREY, bits_axis, count_axis, draw_bits, panels, points
from harness.record.table import Drawing

FREE = (("bytes seen", "bytes"), ("FLOPs needed in training", "flops"))
MEASURED = (("time of training [s]", "seconds"),)


def draw_curves(runs: list, *, look: dict[str, Look]) -> list[Drawing]:
    """One drawing for each group of comparable runs, told apart also by how much of the split is scored on the way."""
    drawings = []
    for key, group in grouped(runs, key=lambda run: (comparable(run), prefixes(run.rows))).items():
        usable = [run for run in group if points(run.rows, kind="valid") or points(run.rows, kind="train")]
        if not usable:
            continue
        for suffix, some, free, measured in split_by_ground(usable):
            scales = (*(FREE if free else ()), *(MEASURED if measured else ()))
            drawings.append(_curves(some, scales=scales, look=look, name=f"curves-{tag(key)}{suffix}"))
    return drawings


def prefixes(rows: list[dict]) -> tuple:
    """Bytes of the valid split that are scored on the way; None is all of them."""
    found = {row.get("capped_bytes") for row in rows if row["kind"] == "valid" and not row.get("final")}
    return tuple(sorted(found, key=str))


def scale_of(run, unit: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Bytes seen, from 0, and what had been spent by then in ``bytes``, ``flops`` or ``seconds``; None if unknown."""
    train = [row for row in run.rows if row["kind"] == "train" and "bytes_seen" in row]
    end = number(run.summary, "bytes_seen")
    total = number(run.summary, {"bytes": "bytes_seen", "flops": "training_flops", "seconds": "seconds"}[unit])
    if end is None or total is None:
        return None
    at = np.array([0.0, *(row["bytes_seen"] for row in train)])
    if unit == "bytes":
        return np.array([0.0, end]), np.array([0.0, total])
    keys = {"seconds": ("clock", "seconds"), "flops": ("training_flops",)}[unit]
    spent = np.array([0.0, *(number(row, *keys) or np.nan for row in train)])
    known = np.isfinite(spent)
    return np.append(at[known], end), np.append(spent[known], total)


def _curves(runs: list, *, scales: tuple, look: dict[str, Look], name: str) -> Drawing:
    compared = arms(runs)
    scales = [(label, unit) for label, unit in scales if any(scale_of(run, unit) for run in runs)] or [FREE[0]]
    title = "Learning curves"
    subtitle = data_words(run.summary for run in runs)
    if any(unit == "seconds" for _, unit in scales):
        subtitle += f"\n{machine_words(runs[0].provenance)}"
    figure, axes = panels(1, len(scales), width=max(4.6 * len(scales), 6.5), height=4.9, title=title, subtitle=subtitle)
    for ax, (label, unit) in zip(axes, scales, strict=True):
        for arm in compared:
            for run in arm.members:
                _draw_run(ax, run, arm=arm, unit=unit, look=look[arm.variant])
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        bits_axis(ax, (run.rows for run in runs), others=[number(run.summary, "valid_bits_per_byte") for run in runs])
        if unit == "seconds":
            plain_axis(ax.xaxis)
        else:
            count_axis(ax.xaxis, unit="B" if unit == "bytes" else "")
    handles = [entry_of(arm, look=look[arm.variant], linestyle=_line(arm), linewidth=1.8) for arm in compared]
    handles.append(entry("valid, on the way", color=GREY, linestyle="-", linewidth=1.6))
    handles.append(entry("train", color=GREY, linestyle="-", linewidth=0.6, alpha=0.6))
    handles.append(entry("valid, at the end", color=GREY, marker="o", markersize=8))
    legend_below(figure, handles)
    return finish(figure, name=name, title=title, caption=_caption(runs, compared=compared))


def _draw_run(ax: Axes, run, *, arm: Arm, unit: str, look: Look) -> None:
    scale = scale_of(run, unit)
    if scale is not None:
        last = (scale[0][-1], number(run.summary, "valid_bits_per_byte"))
        style = {"colour": look.colour, "marker": look.marker, "line": _line(arm)}
        draw_bits(ax, run.rows, last=last, scale=scale, **style)


def _line(arm: Arm) -> str:
    return LINES[arm.order % len(LINES)]


def _caption(runs: list, *, compared: list[Arm]) -> str:
    first = runs[0].summary

    def scored(capped: int | None) -> str:
        return f"a prefix of {capped:,} bytes*" if capped else "the whole split"

    on_the_way = " or ".join(scored(capped) for capped in prefixes(runs[0].rows)) or "nothing"
    at_end = scored((first.get("capped") or {}).get("valid"))
    return (
        f"Bits per byte of the valid split while training, one line a seed. On the way {on_the_way} is scored, at the end "
        f"(large marks) {at_end}, so that marks need not lie on their lines. Thin: training bytes, averaged in at most "
        f"{BINS} bins. The first fifth of the bytes may leave the frame above. Held equal: data, protocol and budget "
        f"({budget_words(first.get('budget'))})." + "".join(f" {note}" for note in thrice_notes(compared))
    )
