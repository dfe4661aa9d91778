"""Horizontal bars: speed of peers beside the reference model, and predicted peak memory by cause.

What failed stays in the picture with its reason instead of a bar, and a table that is void is printed over.
"""

import textwrap

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from bench.report.comparison import grouped, number, tag
from bench.report.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Look,
    entry,
    finish,
    legend_below,
    memory_unit,
)
from bench.report.words import data_words, freed_words, machine_words
from bench.rows import ground
from harness.record.drawing import GREY, INK, panels
from harness.record.table import Drawing

CAUSES = {
    "parameters": (BLUE, ""),
    "gradients": (SKY, "//"),
    "optimizer": (GREEN, ".."),
    "activations": (ORANGE, "\\\\"),
    "temporary": (VERMILLION, "xx"),
}
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
_BESIDE = {"va": "center", "fontsize": 8.5, "color": INK, "bbox": _BOX}
OTHER_CAUSE = (PURPLE, "++")
FAR = 2.5
"""Times the longest bar from which on the device's memory is named at the edge, so that bars stay readable."""


def draw_peers(peers: list[dict], *, look: dict[str, Look]) -> list[Drawing]:
    """Bytes per second relative to the reference model; one drawing for each job on equal ground and with the same setting
    of freed memory, void ones apart."""

    def same(row: dict) -> tuple:
        return (
            (*ground(row), freed_words(row)),
            row["job"],
            row["streams"],
            row["segment"],
            row["data"]["sha256"],
            str(row.get("invalid")),
        )

    return [_peers(rows, look=look, name=f"peers-{tag(found)}") for found, rows in grouped(peers, key=same).items()]


def _peers(rows: list[dict], *, look: dict[str, Look], name: str) -> Drawing:
    first, void = rows[0], rows[0].get("invalid")
    title = f"Training speed of peers: {first['job']}"
    subtitle = f"{machine_words(first)}; {first['streams']} x {first['segment']} bytes a step\n{data_words(rows)}"
    rows = sorted(rows, key=lambda row: (number(row, "relative_to_reference") or 0.0, row["name"]))
    figure, (ax,) = panels(1, 1, width=9.5, height=1.9 + 0.42 * len(rows), title=title, subtitle=subtitle)
    longest = max((_range(row)[1] for row in rows if number(row, "relative_to_reference")), default=1.0)
    for place, row in enumerate(rows):
        speed = number(row, "relative_to_reference")
        if speed is None:
            reason = textwrap.shorten(_without_bar(row), 90, placeholder=" ...")
            ax.text(0.015 * longest, place, reason, **_BESIDE | {"color": VERMILLION, "style": "italic"})
            continue
        low, high = _range(row)
        colour = look[row["name"]].colour if row["name"] in look else GREY
        ax.barh(place, speed, height=0.66, color=colour, alpha=0.55)
        ax.errorbar(speed, place, xerr=[[speed - low], [high - speed]], color=INK, linewidth=1.2, capsize=3)
        ax.text(high + 0.015 * longest, place, _beside(row), **_BESIDE)
    ax.axvline(1, color=INK, linestyle="--", linewidth=1)
    ax.set(
        xlim=(0, 1.5 * max(longest, 1)),
        ylim=(-0.6, len(rows) - 0.4),
        xlabel="bytes per second relative to the reference model (dashed)",
    )
    ax.set_yticks(range(len(rows)), [_peer_label(row) for row in rows])
    ax.grid(axis="y", visible=False)
    if void:
        style = {"fontsize": 60, "rotation": 15, "weight": "bold", "ha": "center", "va": "center"}
        ax.text(0.5, 0.5, "VOID", transform=ax.transAxes, color=VERMILLION, alpha=0.35, zorder=10, **style)
    caption = (
        "Bytes per second of the same training step, as a multiple of the reference model's in the same run; whiskers "
        "from the least to the greatest of its rounds, parameters and bytes per second beside. A peer that failed a check or "
        "crashed has its reason instead of a bar." + (f" VOID: {void}." if void else "")
    )
    return finish(figure, name=name, title=title, caption=caption)


def _range(row: dict) -> tuple[float, float]:
    """The least and the greatest of the rounds' speeds; the speed itself where they were not recorded."""
    speed = number(row, "relative_to_reference") or 0.0
    found = [speed, *(row.get("relative_range") or [])]
    return min(found), max(found)


def _without_bar(row: dict) -> str:
    if row["status"] == "measured":
        return f"measured at {number(row, 'bytes_per_second') or 0:,.0f} B/s, without a reference model"
    return f"{row['status']}: {row.get('reason') or 'no reason given'}"


def _beside(row: dict) -> str:
    total, speed = number(row, "parameters", "total"), number(row, "bytes_per_second")
    words = [f"{row['relative_to_reference']:.2f}x"]
    words += [f"{total / 1e6:.2f} M parameters"] if total is not None else []
    words += [f"{speed:,.0f} B/s"] if speed is not None else []
    return ", ".join(words)


def _peer_label(row: dict) -> str:
    version = f" {row['package_version']}" if row.get("package_version") else ""
    return "\n".join(textwrap.wrap(f"{row['name']}{version}", 30))


def draw_fits(fits: list[dict]) -> list[Drawing]:
    """Predicted peak memory by cause; one drawing for each ground and data digest."""
    with_split = [row for row in fits if any(value for value in (row.get("split") or {}).values())]
    found = grouped(with_split, key=lambda row: (ground(row), row["data"]["sha256"]))
    return [_fits(rows, name=f"fit-{tag(key)}") for key, rows in found.items()]


def _fits(rows: list[dict], *, name: str) -> Drawing:
    title = "Predicted peak memory of a training step, by cause"
    size = {"width": 9.5, "height": 2.3 + 0.5 * len(rows)}
    figure, (ax,) = panels(1, 1, title=title, subtitle=f"{machine_words(rows[0])}\n{data_words(rows)}", **size)
    rows = sorted(rows, key=lambda row: (sum(row["split"].values()), row["variant"]), reverse=True)
    peaks = [max(sum(row["split"].values()), number(row, "measured_peak_bytes") or 0) for row in rows]
    divisor, unit = memory_unit(max(peaks))
    given = {cause for row in rows for cause, value in row["split"].items() if value}
    causes = [*(cause for cause in CAUSES if cause in given), *sorted(given - set(CAUSES))]
    for place, row in enumerate(rows):
        _draw_stack(ax, place, row, causes=causes, divisor=divisor)
    _draw_devices(ax, rows, peaks=peaks, divisor=divisor)
    ax.set(xlabel=f"peak memory [{unit}]", ylim=(-0.6, len(rows) - 0.4))
    ax.set_yticks(range(len(rows)), [_fit_label(row) for row in rows])
    ax.grid(axis="y", visible=False)
    handles = [_patch(cause) for cause in causes]
    if any(number(row, "device_memory_bytes") for row in rows):
        handles.append(entry("memory of the device", color=INK, linestyle="-", linewidth=2))
    if any(number(row, "measured_peak_bytes") for row in rows):
        handles.append(entry("measured peak", color=INK, marker="D", fillstyle="none"))
    legend_below(figure, handles)
    caption = (
        "Peak memory of one training step as predicted without running it, split by cause. GiB = 2^30 bytes, MiB = 2^20. The "
        "upright line is the memory of the device, named at the edge with an arrow where it lies far outside."
    )
    return finish(figure, name=name, title=title, caption=caption)


def _draw_stack(ax: Axes, place: int, row: dict, *, causes: list[str], divisor: float) -> None:
    left = 0.0
    for cause in causes:
        width = (row["split"].get(cause) or 0) / divisor
        colour, hatch = CAUSES.get(cause, OTHER_CAUSE)
        ax.barh(place, width, left=left, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        left += width
    measured = number(row, "measured_peak_bytes")
    if measured is not None:
        ax.plot(measured / divisor, place, "D", color=INK, fillstyle="none", markersize=8)


def _draw_devices(ax: Axes, rows: list[dict], *, peaks: list[float], divisor: float) -> None:
    """Each row's device as an upright line; one beyond reach as an arrow with its size."""
    longest = max(peaks) / divisor
    devices = [number(row, "device_memory_bytes") for row in rows]
    near = [device / divisor for device in devices if device and device / divisor <= FAR * longest]
    edge = max([longest * 1.12, *(device * 1.08 for device in near)])
    far = any(device and device / divisor > FAR * longest for device in devices)
    ax.set_xlim(0, edge * (1.3 if far else 1))
    for place, device in enumerate(devices):
        if device is None:
            continue
        if device / divisor <= FAR * longest:
            ax.vlines(device / divisor, place - 0.45, place + 0.45, color=INK, linewidth=2)
        else:
            ax.text(edge * 1.285, place, f"device: {device / 2**30:,.4g} GiB →", ha="right", va="center", fontsize=8.5)


def _fit_label(row: dict) -> str:
    return f"{row['variant']}, {row['backend']}\n{row['streams']} x {row['segment']} bytes, span {row['span']}"


def _patch(cause: str) -> Patch:
    colour, hatch = CAUSES.get(cause, OTHER_CAUSE)
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=cause)
