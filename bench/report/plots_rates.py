"""Bits per byte of a tuning sweep's trials against their learning rates: a mark a run, the picked trials larger.

What diverged lies far above the rest and would flatten it: it leaves the frame and is drawn at its top as an arrow, and a
trial that failed as a cross.
"""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from bench.report.comparison import comparable, number, tag
from bench.report.plot_style import FILLS, Look, entry, finish, legend_below
from bench.report.tuning import Pick
from bench.report.words import budget_words, data_words, scored_words
from harness.record.drawing import GREY, panels
from harness.record.shapes import LARGEST
from harness.record.table import Drawing

MOST_SETTINGS = 8
"""Of one panel; more get panels of their own."""
HEADROOM = 4
"""The frame reaches so many times the spread of the good half of all scores above its lowest."""


def draw_rates(found: Sequence[Sequence[Pick]], *, look: dict[str, Look]) -> list[Drawing]:
    """One drawing for each tuning sweep; ``found`` from ``picks``."""
    drawings = []
    for some in found:
        some = [pick for pick in some if any(_scores(pick, trial) for trial in pick.setting.numbers)]
        if some:
            ended = next(run for pick in some for run in pick.setting.runs if run.summary["status"] == "finished")
            drawings.append(_draw(some, look=look, name=f"rates-{tag(comparable(ended))}"))
    return drawings


def top_of_frame(found: Sequence[Pick]) -> tuple[float, float]:
    """Lowest and highest bits shown: all picks and the good half, but not what diverged."""
    every = sorted(bits for pick in found for trial in pick.setting.numbers for bits in _scores(pick, trial))
    picked = [max(_scores(pick, pick.choice.trial)) for pick in found if pick.choice]
    low, good = every[0], median(every)
    high = min(every[-1], max(low + HEADROOM * (good - low), *picked)) if picked else every[-1]
    margin = 0.08 * (high - low) or 0.05
    return low - margin, high + margin


def _scores(pick: Pick, trial: int) -> list[float]:
    own = pick.setting.trials[trial]
    return [bits for seed in own if (bits := pick.setting.bits(trial, seed)) is not None]


def _rate(pick: Pick, trial: int) -> float:
    """``optim.lr`` of a trial; 1 where it is no rate, so that a hostile row does not stop the figure."""
    found = number(pick.setting.any_run(trial).provenance["config"], "optim", "lr")
    return found if found is not None and 0 < found < LARGEST else 1.0


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
    capped = (found[-1].setting.newest.summary.get("capped") or {}).get("valid")
    for ax, some in zip(axes, shares, strict=True):
        for pick in some:
            handles.append(_marks(ax, pick, look=look[pick.setting.arm.variant], limits=limits))
        _axes(ax, limits=limits)
        ax.set_ylabel(f"valid bits per byte{'*' if capped else ''}")
    legend_below(figure, [*handles, *_key(found)])
    return finish(figure, name=name, title=title, caption=_caption(found, row, capped=capped))


def _marks(ax: Axes, pick: Pick, *, look: Look, limits: tuple[float, float]) -> Line2D:
    setting, choice, top = pick.setting, pick.choice, limits[1]
    style = {"color": look.colour, "marker": look.marker, "linestyle": "none"}
    at_top = {"color": look.colour, "linestyle": "none", "clip_on": False, "zorder": 5}
    for trial in setting.numbers:
        rate, scores = _rate(pick, trial), _scores(pick, trial)
        inside = [bits for bits in scores if bits <= top]
        ax.plot([rate] * len(inside), inside, **style, markersize=4, alpha=0.55)
        if len(inside) < len(scores):
            ax.plot([rate], [top], marker="^", markersize=7, **at_top)
        if len(scores) < len(setting.trials[trial]):
            ax.plot([rate], [top], marker="x", markersize=8, markeredgewidth=2, **at_top)
    if choice:
        fill = "none" if choice.edges else FILLS[0]
        place = {"markersize": 11, "zorder": 6, "clip_on": False}
        place |= {"markeredgewidth": 2} if choice.edges else {"markeredgewidth": 0.8, "markeredgecolor": "white"}
        ax.plot([_rate(pick, choice.trial)], [choice.bits], **style, **place, fillstyle=fill)
    told = f"{_rate(pick, choice.trial):g}{', at an end' if choice.edges else ''}" if choice else "no pick"
    return entry(f"{setting.arm.label}: {told}", **style, markersize=6)


def _axes(ax: Axes, *, limits: tuple[float, float]) -> None:
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.08)
    ax.set_ylim(*limits)
    ax.set_xlabel("optim.lr, which scales the rates of all groups")


def _key(found: Sequence[Pick]) -> list[Line2D]:
    """What marks mean, of those that are drawn."""
    top = top_of_frame(found)[1]
    every = [(pick, trial) for pick in found for trial in pick.setting.numbers]
    counts = " or ".join(map(str, sorted({len(pick.setting.seeds) for pick in found})))
    keys = [entry(f"one run (n = {counts} a trial)", color=GREY, marker="o", markersize=4, alpha=0.7)]
    if any(pick.choice and not pick.choice.edges for pick in found):
        keys.append(entry("picked", color=GREY, marker="o", markersize=10))
    if any(pick.choice and pick.choice.edges for pick in found):
        open_mark = {"marker": "o", "markersize": 10, "fillstyle": "none", "markeredgewidth": 2}
        keys.append(entry("picked at an end of the space: not bracketed", color=GREY, **open_mark))
    if any(bits > top for pick, trial in every for bits in _scores(pick, trial)):
        keys.append(entry("beyond the frame", color=GREY, marker="^", markersize=7))
    if any(len(_scores(pick, trial)) < len(pick.setting.trials[trial]) for pick, trial in every):
        keys.append(entry("failed", color=GREY, marker="x", markersize=8, markeredgewidth=2))
    return keys


def _caption(found: Sequence[Pick], row: dict, *, capped: object) -> str:
    scored = scored_words("valid", capped)
    return (
        f"Bits per byte of {scored} at the end of each trial against its learning rate, on a logarithmic axis; what else was "
        "tuned is in the table of trials. Small marks are single runs, the large mark is the mean of the picked trial. An open "
        "one lies at an end of its space, so that a better one may lie beyond. What lies above the frame is drawn at its top. "
        "Held equal: data, protocol and the "
        f"budget of each trial ({budget_words(row['budget'])})."
    )
