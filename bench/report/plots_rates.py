"""Bits per byte against the learning rate of a tuning sweep: a line a setting, a dot a seed, the picked rate marked.

What diverged lies far above the rest and would flatten it: it leaves the frame and is drawn at its top as an arrow, and a
trial that failed as a cross.
"""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.report.comparison import comparable, tag
from bench.report.plot_style import FILLS, LINES, Look, entry, finish, legend_below, ticks_at
from bench.report.tuning import Pick
from bench.report.words import budget_words, data_words, scored_words
from harness.record.drawing import GREY, panels
from harness.record.table import Drawing

MOST_SETTINGS = 8
"""Lines of one panel; more get panels of their own."""
HEADROOM = 4
"""The frame reaches so many times the spread of the good half of all scores above its lowest."""
MOST_TICKS = 8
ASIDE = 1.04
"""Settings stand beside one another at each rate, by this factor, so that none hides another."""


def draw_rates(found: Sequence[Sequence[Pick]], *, look: dict[str, Look]) -> list[Drawing]:
    """One drawing for each tuning sweep; ``found`` from ``picks``."""
    drawings = []
    for some in found:
        some = [pick for pick in some if any(_scores(pick, rate) for rate in pick.setting.rates)]
        if some:
            ended = next(run for pick in some for run in pick.setting.runs if run.summary["status"] == "finished")
            drawings.append(_draw(some, look=look, name=f"rates-{tag(comparable(ended))}"))
    return drawings


def top_of_frame(found: Sequence[Pick]) -> tuple[float, float]:
    """Lowest and highest bits shown: all picks and their neighbours, but not what diverged."""
    every = sorted(bits for pick in found for rate in pick.setting.rates for bits in _scores(pick, rate))
    picked = [max(_scores(pick, pick.choice.rate)) for pick in found if pick.choice]
    low, good = every[0], median(every)
    high = min(every[-1], max(low + HEADROOM * (good - low), *picked)) if picked else every[-1]
    margin = 0.08 * (high - low) or 0.05
    return low - margin, high + margin


def _scores(pick: Pick, rate: float) -> list[float]:
    own = pick.setting.trials[rate]
    return [bits for seed in own if (bits := pick.setting.bits(rate, seed)) is not None]


def _draw(found: Sequence[Pick], *, look: dict[str, Look], name: str) -> Drawing:
    row = found[-1].setting.newest.provenance
    shares = [found[start : start + MOST_SETTINGS] for start in range(0, len(found), MOST_SETTINGS)]
    title = "Validation bits against the learning rate"
    subtitle = f"{data_words([row])}; {budget_words(row['budget'])} a trial"
    height = 4.9 + 0.12 * len(shares[0])
    figure, axes = panels(
        1, len(shares), width=max(8.6, 5.4 * len(shares)), height=height, title=title, subtitle=subtitle
    )
    limits, handles = top_of_frame(found), []
    rates = sorted({rate for pick in found for rate in pick.setting.rates})
    capped = (found[-1].setting.newest.summary.get("capped") or {}).get("valid")
    for ax, some in zip(axes, shares, strict=True):
        for place, pick in enumerate(some):
            aside = ASIDE ** (place - (len(some) - 1) / 2)
            handles.append(_line(ax, pick, look=look[pick.setting.arm.variant], limits=limits, aside=aside))
        _axes(ax, rates, limits=limits)
        ax.set_ylabel(f"valid bits per byte{'*' if capped else ''}")
    legend_below(figure, [*handles, *_key(found)])
    return finish(figure, name=name, title=title, caption=_caption(found, row, capped=capped))


def _line(ax: Axes, pick: Pick, *, look: Look, limits: tuple[float, float], aside: float) -> Line2D:
    setting, choice, top = pick.setting, pick.choice, limits[1]
    style = {"color": look.colour, "marker": look.marker}
    means = [(rate * aside, bits) for rate in setting.rates if (bits := setting.mean_bits(rate)) is not None]
    line = LINES[setting.arm.order % len(LINES)]
    ax.plot(*zip(*means, strict=True), color=look.colour, linestyle=line, linewidth=1.6, alpha=0.9)
    at_top = {"color": look.colour, "linestyle": "none", "clip_on": False, "zorder": 5}
    for rate in setting.rates:
        scores = _scores(pick, rate)
        inside = [bits for bits in scores if bits <= top]
        ax.plot([rate * aside] * len(inside), inside, **style, linestyle="none", markersize=4, alpha=0.55)
        if len(inside) < len(scores):
            ax.plot([rate * aside], [top], marker="^", markersize=7, **at_top)
        if len(scores) < len(setting.trials[rate]):
            ax.plot([rate * aside], [top], marker="x", markersize=8, markeredgewidth=2, **at_top)
    if choice:
        fill = "none" if choice.edge else FILLS[0]
        place = {"markersize": 11, "zorder": 6, "linestyle": "none", "clip_on": False}
        place |= {"markeredgewidth": 2} if choice.edge else {"markeredgewidth": 0.8, "markeredgecolor": "white"}
        ax.plot([choice.rate * aside], [choice.bits], **style, **place, fillstyle=fill)
    told = f"{choice.rate:g}{', at the edge' if choice.edge else ''}" if choice else "no pick"
    label = f"{setting.arm.label}: {told}"
    return entry(label, **style, linestyle=line, linewidth=1.6, markersize=6)


def _axes(ax: Axes, rates: Sequence[float], *, limits: tuple[float, float]) -> None:
    """Ticks where rates were tried, as far as they have room."""
    ax.set_xscale("log")
    ticks_at(ax.xaxis, rates, most=MOST_TICKS, text=lambda value: f"{value:g}")
    ax.margins(x=0.08)
    ax.set_ylim(*limits)
    ax.set_xlabel("optim.lr, which scales the rates of all groups")


def _key(found: Sequence[Pick]) -> list[Line2D]:
    """What marks mean, of those that are drawn."""
    top = top_of_frame(found)[1]
    every = [(pick, rate) for pick in found for rate in pick.setting.rates]
    counts = " or ".join(map(str, sorted({len(pick.setting.seeds) for pick in found})))
    keys = [entry(f"one seed (n = {counts}); lines: means", color=GREY, marker="o", markersize=4, alpha=0.7)]
    if any(pick.choice and not pick.choice.edge for pick in found):
        keys.append(entry("picked", color=GREY, marker="o", markersize=10))
    if any(pick.choice and pick.choice.edge for pick in found):
        open_mark = {"marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 2}
        keys.append(entry("picked at the edge: not bracketed", color=GREY, **open_mark))
    if any(bits > top for pick, rate in every for bits in _scores(pick, rate)):
        keys.append(entry("beyond the frame", color=GREY, marker="^", markersize=7))
    if any(len(_scores(pick, rate)) < len(pick.setting.trials[rate]) for pick, rate in every):
        keys.append(entry("failed", color=GREY, marker="x", markersize=8, markeredgewidth=2))
    return keys


def _caption(found: Sequence[Pick], row: dict, *, capped: object) -> str:
    scored = scored_words("valid", capped)
    return (
        f"Bits per byte of {scored} at the end of each trial against its learning rate, on a logarithmic axis; settings "
        "stand a little apart, so that none hides another. Small marks are single tuning seeds, lines their means, the "
        "large mark is the rate that is picked. An open one lies at the edge of its grid, so that a better rate may lie "
        "beyond. What lies above the frame is drawn at its top. Test is not scored. Held equal: data, protocol and the "
        f"budget of each trial ({budget_words(row['budget'])})."
    )
