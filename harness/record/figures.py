"""Two figures of one run, drawn from its record alone: what it learned, and how far its heads look.

``learning_curve.png``: bits per byte against bytes seen, with general compressors as lines.
``spans.png``: the learned span of each head by layer at the end, and of all heads over the run.
A row's ``metrics`` may hold ``layers.3.attention.span``, one entry a head: every name that ends with ``.span`` is
drawn, with ``.span_with_ramp`` of the same name, if there, as a thin line up from the dot.
"""

from pathlib import Path

# Okabe and Ito's colours, told apart with any colour vision, and a map whose lightness rises evenly
_BLUE, _ORANGE, _GREY, _LAYERS = "#0072B2", "#D55E00", "#7F7F7F", "viridis"


def draw_figures(
    rows: list[dict],
    *,
    folder: Path,
    label: str,
    compressors: dict[str, float] | None = None,
    span_limit: int | None = None,
) -> list[Path]:
    """Draw what the rows have data for and return the files.

    Args:
        rows: of the record, in order.
        folder: where to.
        label: title, naming the run and the data really read.
        compressors: bits per byte of the valid split by compressor, ``{"gzip": 3.04}``.
        span_limit: S, the longest possible span, drawn as a line.
    """
    drawn = [draw_learning_curve(rows, path=folder / "learning_curve.png", label=label, compressors=compressors)]
    drawn.append(draw_spans(rows, path=folder / "spans.png", label=label, span_limit=span_limit))
    return [path for path in drawn if path is not None]


def draw_learning_curve(
    rows: list[dict], *, path: Path, label: str, compressors: dict[str, float] | None = None
) -> Path | None:
    """Train and valid bits per byte against bytes seen; None, and no file, if no row has either.

    Valid rows with a true ``capped_bytes`` scored a prefix of the split only: hollow dots.
    """
    train, valid = (_points(rows, kind=kind) for kind in ("train", "valid"))
    capped = _points([row for row in rows if row.get("capped_bytes")], kind="valid")
    if not train and not valid:
        return None
    figure, axes = _figure(width=7.0, panels=1)
    ax = axes[0]
    if train:
        ax.plot(*zip(*train, strict=True), color=_BLUE, linewidth=0.8, alpha=0.7, label="train")
    if valid:
        ax.plot(*zip(*valid, strict=True), color=_ORANGE, linewidth=1.6, marker="o", markersize=4, label="valid")
    if capped:
        ax.plot(
            *zip(*capped, strict=True),
            "o",
            markersize=4,
            color=_ORANGE,
            markerfacecolor="w",
            label="valid, of a prefix*",
        )
    for index, (name, bits) in enumerate(sorted((compressors or {}).items(), key=lambda item: -item[1])):
        ax.axhline(bits, color=_GREY, linewidth=1, linestyle=(":", "--", "-.")[index % 3], label=f"{name} {bits:.2f}")
    reached = [bits for _, bits in train[len(train) // 10 :] + valid] + list((compressors or {}).values())
    low, high = min(reached), max(reached)
    margin = 0.05 * (high - low) or 0.1
    ax.set_ylim(low - margin, high + margin)  # the first steps fall from 8 bits and would flatten the rest
    ax.set_ylabel("bits per byte")
    _bytes_axis(ax)
    ax.legend(frameon=False)
    return _save(figure, path=path, label=label)


def draw_context(curve: list[dict], *, path: Path, label: str) -> Path:
    """Bits per byte against bytes of context: rows ``{from_bytes, to_bytes, bits_per_byte}``, drawn as steps."""
    figure, axes = _figure(width=7.0, panels=1)
    ax = axes[0]
    for point in curve:
        ax.hlines(point["bits_per_byte"], point["from_bytes"], point["to_bytes"] + 1, color=_BLUE, linewidth=2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("bytes of context")
    ax.set_ylabel("bits per byte")
    return _save(figure, path=path, label=label)


def draw_spans(rows: list[dict], *, path: Path, label: str, span_limit: int | None = None) -> Path | None:
    """Spans by layer at the end, and over the run; None, and no file, if no row has spans."""
    history = [(row, found) for row in rows if "bytes_seen" in row and (found := spans_of(row))]
    if not history:
        return None
    last_row, last = history[-1]
    names = list(last)
    figure, (now, over) = _figure(width=11.0, panels=2)
    colours = _colours(len(names))
    for index, name in enumerate(names):
        _draw_layer(now, index=index, spans=last[name], ramped=_ramped(last_row, name), colour=colours[index])
        seen = [(row["bytes_seen"], found[name]) for row, found in history if name in found]
        over.plot(*zip(*seen, strict=True), color=colours[index], linewidth=0.9, alpha=0.8)
    labels = _layer_labels(names)
    step = -(-len(names) // 12)
    now.set_xticks(range(0, len(names), step), labels[::step])
    now.set_xlim(-0.5, len(names) - 0.5)
    now.set_xlabel("layer")
    now.set_title("at the end: one dot a head, thin line: its ramp", fontsize="medium")
    over.set_title("over the run: one line a head", fontsize="medium")
    _bytes_axis(over)
    for ax in (now, over):
        _span_axis(ax, span_limit=span_limit)
    if len(names) > 1:
        for index in sorted({0, len(names) // 2, len(names) - 1}):
            over.plot([], [], color=colours[index], label=f"layer {labels[index]}")
        over.legend(frameon=False, fontsize="small")
    return _save(figure, path=path, label=label)


def spans_of(row: dict) -> dict[str, list[float]]:
    """Spans of a row by name, without the ``.span``; an entry that is not finite is NaN and leaves a gap."""
    found = {}
    for name, value in (row.get("metrics") or {}).items():
        if name.endswith(".span"):
            heads = value if isinstance(value, list) else [value]
            found[name.removesuffix(".span")] = [float("nan") if span is None else span for span in heads]
    return found


def _ramped(row: dict, name: str) -> list[float | None] | None:
    value = row["metrics"].get(f"{name}.span_with_ramp")
    return value if value is None or isinstance(value, list) else [value]


def _draw_layer(ax, *, index: int, spans: list[float], ramped: list[float | None] | None, colour) -> None:
    """One layer's heads side by side, in order of head, within its column."""
    places = [index + 0.7 * ((head + 0.5) / len(spans) - 0.5) for head in range(len(spans))]
    if ramped is not None:
        tops = [float("nan") if top is None else top for top in ramped]
        ax.vlines(places, spans, tops, color=colour, linewidth=1, alpha=0.35)
    ax.scatter(places, spans, color=colour, s=18, zorder=3)


def _layer_labels(names: list[str]) -> list[str]:
    """``layers.3.attention`` as ``3``, unless a layer has two such sublayers."""
    numbers = [name.split(".")[1] if name.startswith("layers.") else name for name in names]
    return numbers if len(set(numbers)) == len(names) else [name.removeprefix("layers.") for name in names]


def _points(rows: list[dict], *, kind: str) -> list[tuple[int, float]]:
    return [
        (row["bytes_seen"], row["bits_per_byte"])
        for row in rows
        if row["kind"] == kind and row.get("bits_per_byte") is not None and "bytes_seen" in row
    ]


def _figure(*, width: float, panels: int):
    # the object-oriented interface: no window system, no global state, nothing left behind in a sweep
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    for ax in axes:
        ax.tick_params(labelleft=True)
        ax.grid(axis="y", color="0.9", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colours(count: int):
    from matplotlib import colormaps

    return [colormaps[_LAYERS](0.9 * index / max(count - 1, 1)) for index in range(count)]


def _bytes_axis(ax) -> None:
    from matplotlib.ticker import EngFormatter

    ax.set_xlabel("bytes seen")
    ax.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))


def _span_axis(ax, *, span_limit: int | None) -> None:
    """Powers of two; linear below one, because spans start at 0."""
    ax.set_yscale("symlog", base=2, linthresh=1, linscale=0.5)
    ax.set_ylabel("span [positions]")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if span_limit is not None:
        ax.axhline(span_limit, color=_GREY, linewidth=1, linestyle="--")
        ax.annotate(
            f"longest possible: {span_limit}",
            (0.01, span_limit),
            xycoords=("axes fraction", "data"),
            fontsize="small",
            va="bottom",
            color=_GREY,
        )
    ax.set_ylim(bottom=0)


def _save(figure, *, path: Path, label: str) -> Path:
    figure.suptitle(label.replace("$", r"\$"), fontsize="medium", wrap=True)
    figure.savefig(path)
    return path
