"""Learning curves: bits per byte against bytes seen, FLOPs spent and seconds, all comparable runs together.

Scores on the way are often of a shorter prefix of the valid split than the last one: they are joined by a line, and the
last stands apart. Rows of training are many: long curves are averaged in bins, so that a page stays light.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.report.grouping import (
    Arm,
    arms,
    budget_words,
    comparable,
    data_words,
    ground_words,
    grouped,
    number,
    split_by_ground,
    tag,
)
from bench.report.plot_style import GREY, LINES, Look, count_axis, finish, legend_below, panels, plain_axis
from bench.report.plots_runs import provenance
from bench.report.shown import Drawing

BINS = 200
"""Most points of one run's training curve."""
FREE = (("bytes seen", "bytes"), ("FLOPs spent in training (3 x ideal forward)", "flops"))
MEASURED = (("time of training [s]", "seconds"),)


def draw_curves(runs: list, *, look: dict[str, Look]) -> list[Drawing]:
    """One drawing for each group of comparable runs, told apart also by how much of the split is scored on the way."""
    drawings = []
    for key, group in grouped(runs, key=lambda run: (comparable(run), prefixes(run.rows))).items():
        usable = [run for run in group if points(run.rows, kind="valid") or points(run.rows, kind="train")]
        if not usable:
            continue
        for suffix, some, free, measured in split_by_ground(usable, row=provenance):
            scales = (*(FREE if free else ()), *(MEASURED if measured else ()))
            drawings.append(_curves(some, scales=scales, look=look, name=f"curves-{tag(key)}{suffix}"))
    return drawings


def prefixes(rows: list[dict]) -> tuple:
    """Bytes of the valid split that are scored on the way; None is all of them."""
    found = {row.get("capped_bytes") for row in rows if row["kind"] == "valid" and not row.get("final")}
    return tuple(sorted(found, key=str))


def points(rows: list[dict], *, kind: str) -> list[tuple[float, float]]:
    """Bytes seen and bits per byte of rows on the way; the last score stands in the summary."""
    return [
        (row["bytes_seen"], bits)
        for row in rows
        if row["kind"] == kind
        and not row.get("final")
        and "bytes_seen" in row
        and (bits := number(row, "bits_per_byte")) is not None
    ]


def scale_of(run, unit: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Bytes seen, from 0, and what had been spent by then in ``bytes``, ``flops`` or ``seconds``; None if unknown.

    FLOPs are summed over the training rows, whose ideal changes as spans do, and agree at the end with the trainer's
    own sum, which has every step.
    """
    train = [row for row in run.rows if row["kind"] == "train" and "bytes_seen" in row]
    end = number(run.summary, "bytes_seen")
    total = {"bytes": end, "flops": number(run.summary, "training_flops"), "seconds": number(run.summary, "seconds")}[
        unit
    ]
    if end is None or total is None:
        return None
    at = np.array([0.0, *(row["bytes_seen"] for row in train)])
    if unit == "seconds":
        spent = np.array([0.0, *(number(row, "clock", "seconds") or np.nan for row in train)])
        known = np.isfinite(spent)
        return np.append(at[known], end), np.append(spent[known], total)
    if unit == "flops" and train and all(number(row, "ideal_flops_per_byte") for row in train):
        rate = np.array([row["ideal_flops_per_byte"] for row in train])
        spent = np.append(np.cumsum(np.diff(at) * rate), 0.0)
        spent = np.concatenate([[0.0], spent[:-1], [spent[-2] + (end - at[-1]) * rate[-1]]])
        return np.append(at, end), spent * total / spent[-1]
    return np.array([0.0, end]), np.array([0.0, total])


def thinned(found: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """At most ``BINS`` points: means over equal numbers of neighbours."""
    bins = np.array_split(np.array(found), min(BINS, len(found)))
    middle = np.array([part.mean(axis=0) for part in bins])
    return middle[:, 0], middle[:, 1]


def _curves(runs: list, *, scales: tuple, look: dict[str, Look], name: str) -> Drawing:
    compared = arms(runs, row=provenance)
    scales = [(label, unit) for label, unit in scales if any(scale_of(run, unit) for run in runs)] or [FREE[0]]
    title = "Learning curves"
    subtitle = data_words(run.summary for run in runs)
    if any(unit == "seconds" for _, unit in scales):
        subtitle += f"\n{ground_words(runs[0].provenance)}"
    figure, axes = panels(1, len(scales), width=max(4.6 * len(scales), 6.5), height=4.9, title=title, subtitle=subtitle)
    for ax, (label, unit) in zip(axes, scales, strict=True):
        for arm in compared:
            for run in arm.members:
                _draw_run(ax, run, arm=arm, unit=unit, look=look[arm.variant])
        ax.set_xlabel(label)
        ax.set_ylabel("bits per byte")
        ax.set_xlim(left=0)
        ax.set_ylim(*_limits(runs))
        if unit == "seconds":
            plain_axis(ax.xaxis)
        else:
            count_axis(ax.xaxis, unit="B" if unit == "bytes" else "")
    handles = [
        Line2D(
            [], [], color=look[arm.variant].colour, linestyle=_line(arm), linewidth=1.8, marker=look[arm.variant].marker
        )
        for arm in compared
    ]
    for handle, arm in zip(handles, compared, strict=True):
        handle.set_label(f"{arm.label} (n={len(arm.members)})")
    handles += [
        Line2D([], [], color=GREY, linewidth=1.6, label="valid, on the way"),
        Line2D([], [], color=GREY, linewidth=0.6, alpha=0.6, label="train"),
        Line2D([], [], color=GREY, marker="o", markersize=8, linestyle="none", label="valid, at the end"),
    ]
    legend_below(figure, handles)
    return finish(figure, name=name, title=title, caption=_caption(runs, compared=compared))


def _draw_run(ax: Axes, run, *, arm: Arm, unit: str, look: Look) -> None:
    scale = scale_of(run, unit)
    if scale is None:
        return
    train, valid = (points(run.rows, kind=kind) for kind in ("train", "valid"))
    if train:
        at, bits = thinned(train)
        ax.plot(np.interp(at, *scale), bits, color=look.colour, linewidth=0.6, alpha=0.45)
    if valid:
        at, bits = np.array(valid).T
        ax.plot(np.interp(at, *scale), bits, color=look.colour, linewidth=1.4, linestyle=_line(arm), alpha=0.9)
    last = number(run.summary, "valid_bits_per_byte")
    if last is not None:
        ax.plot(scale[1][-1], last, color=look.colour, marker=look.marker, markersize=6, alpha=0.8, clip_on=False)


def _line(arm: Arm) -> str:
    return LINES[arm.order % len(LINES)]


def _limits(runs: list) -> tuple[float, float]:
    """From the lowest to where a fifth of the bytes has been seen: the fall from 8 bits would flatten the rest."""
    reached = [number(run.summary, "valid_bits_per_byte") for run in runs]
    for run in runs:
        found = points(run.rows, kind="train") + points(run.rows, kind="valid")
        end = max((at for at, _ in found), default=0)
        reached += [bits for at, bits in found if at >= 0.2 * end]
    known = [bits for bits in reached if bits is not None]
    margin = 0.05 * (max(known) - min(known)) or 0.1
    return min(known) - margin, max(known) + margin


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
        f"({budget_words(first.get('budget'))})."
    )
