"""Two mechanisms explained, drawn from their formulas: the soft mask of adaptive spans, and product keys.

Soft mask (1905.07799, section 2.2): m_z(x) = clamp((R + z - x) / R, 0, 1) for the key x steps back. Product keys
(1907.05242, section 3.1): with two halves of a query and two sets of C half-keys, slot (i, j) scores s1[i] + s2[j]. The
best k of C^2 slots are among the k x k pairs of the best k of each set; and a pair of ranks i, j, counted from 1, has at
least i * j - 1 pairs that score no less, so only pairs with i * j <= k can win.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.report.plot_style import (
    BLACK,
    BLUE,
    FAINT,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILLION,
    finish,
    legend_below,
    panels,
)
from bench.report.shown import Drawing

LONGEST, SPAN, RAMP = 256, 96, 32
HEADS = (0, 5, 12, 20, 48, 96, 160, 224)
"""Made-up spans of eight heads."""
HALF_KEYS, BEST, SEED = 512, 32, 0
"""C, k, and what the example's half-scores are drawn with."""


def soft_mask(x: np.ndarray, *, span: float, ramp: float) -> np.ndarray:
    """m_z(x) at keys ``x`` steps back, for span z and ramp R."""
    return np.clip((ramp + span - x) / ramp, 0, 1)


def kept_columns(span: float, *, ramp: int, longest: int) -> int:
    """Keys that have a weight or a gradient: x = 0 ... z + R, both ends, of ``longest`` visible ones."""
    return min(longest, int(span + ramp) + 1)


def draw_explained() -> list[Drawing]:
    """Both figures; they need no rows."""
    return [_soft_mask(), _product_keys()]


def _soft_mask() -> Drawing:
    title = "Adaptive span: the soft mask, and what trimming saves"
    figure, (mask, saved) = panels(1, 2, width=11, height=4.6, title=title)
    x = np.arange(LONGEST)
    mask.axvspan(SPAN, SPAN + RAMP, color=ORANGE, alpha=0.3, linewidth=0)
    mask.axvspan(SPAN + RAMP, LONGEST - 1, facecolor="white", edgecolor=GREY, hatch="//", alpha=0.35, linewidth=0)
    mask.plot(x, soft_mask(x, span=SPAN, ramp=RAMP), color=BLUE, linewidth=2.2)
    mask.set(xlim=(0, LONGEST - 1), ylim=(0, 1.32), xlabel="key, x steps back", ylabel="weight m_z(x)")
    mask.set_xticks(
        [0, SPAN, SPAN + RAMP, LONGEST - 1], ["0", f"z = {SPAN}", f"z + R = {SPAN + RAMP}", f"S - 1 = {LONGEST - 1}"]
    )
    for label, side in zip(mask.get_xticklabels()[1:3], ("right", "left"), strict=True):
        label.set_ha(side)
    mask.set_yticks([0, 0.5, 1])
    mask.annotate("", (SPAN, 1.07), xytext=(SPAN + RAMP, 1.07), arrowprops={"arrowstyle": "<->", "color": INK})
    mask.text(SPAN + RAMP / 2, 1.1, f"R = {RAMP}", ha="center")
    mask.text(SPAN / 2, 1.1, "full weight,\nno gradient to z", ha="center", va="bottom", fontsize=9, bbox=_BOX)
    mask.text(
        (SPAN + RAMP + LONGEST) / 2,
        1.1,
        "no weight, no gradient:\nnot computed",
        ha="center",
        va="bottom",
        fontsize=9,
        bbox=_BOX,
    )
    mask.text(SPAN + RAMP + 6, 0.5, "gradient to z:\ndm/dz = 1/R on the ramp", va="center", fontsize=9, bbox=_BOX)
    _draw_saving(saved)
    handles = [
        Patch(color=BLUE, label="full weight"),
        Patch(color=ORANGE, alpha=0.6, label="ramp"),
        Patch(facecolor="white", edgecolor=GREY, hatch="//", label="trimmed"),
    ]
    legend_below(figure, handles)
    caption = (
        f"Left: m_z(x) = clamp((R + z - x) / R, 0, 1) at z = {SPAN}, R = {RAMP}, S = {LONGEST}; only keys on the ramp, both ends "
        "included, teach the span. Right: eight heads with made-up spans; keys beyond z + R are not computed (the code rounds "
        "up, so that moving spans make few shapes). Drawn from the formula, nothing here is measured."
    )
    return finish(figure, name="explained-soft-mask", title=title, caption=caption)


_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}


def _draw_saving(ax: Axes) -> None:
    """Keys of every head: of full weight, on the ramp, and trimmed."""
    kept = [kept_columns(span, ramp=RAMP, longest=LONGEST) for span in HEADS]
    places = range(1, len(HEADS) + 1)
    ax.barh(places, HEADS, color=BLUE, height=0.7)
    on_ramp = [columns - span for columns, span in zip(kept, HEADS, strict=True)]
    ax.barh(places, on_ramp, left=HEADS, color=ORANGE, alpha=0.6, height=0.7)
    rest = [LONGEST - columns for columns in kept]
    ax.barh(places, rest, left=kept, facecolor="white", edgecolor=GREY, hatch="//", linewidth=0, height=0.7)
    for place, columns in zip(places, kept, strict=True):
        ax.text(LONGEST + 4, place, f"{columns}", va="center", fontsize=9)
    ax.text(LONGEST + 4, len(HEADS) + 0.75, "keys", va="center", fontsize=9)
    share = 1 - sum(kept) / (LONGEST * len(HEADS))
    ax.set_title(f"{sum(kept):,} of {LONGEST * len(HEADS):,} keys are computed: {share:.0%} saved", fontsize=10)
    ax.set(xlim=(0, LONGEST * 1.13), ylim=(0.4, len(HEADS) + 1.1), xlabel="key, x steps back", ylabel="head")
    ax.set_xticks([0, 64, 128, 192, 256])
    ax.set_yticks(list(places))
    ax.grid(axis="y", visible=False)


def can_win(best: int) -> np.ndarray:
    """``[k, k]``: whether the pair of ranks i, j (from 1) can be among the best k: i * j <= k."""
    ranks = np.arange(1, best + 1)
    return ranks[:, None] * ranks[None, :] <= best


def chosen_pairs(first: np.ndarray, second: np.ndarray, *, best: int) -> np.ndarray:
    """``[k, 2]``: ranks from 0 of the best k pairs, of scores sorted from the largest."""
    sums = first[:best, None] + second[None, :best]
    order = np.argsort(-sums, axis=None, kind="stable")[:best]
    return np.stack(np.unravel_index(order, sums.shape), axis=1)


def example_scores() -> tuple[np.ndarray, np.ndarray]:
    """Scores of a random query's halves with C half-keys each, from the largest."""
    drawn = np.random.default_rng(SEED).standard_normal((2, HALF_KEYS))
    first, second = -np.sort(-drawn, axis=1)
    return first, second


def _product_keys() -> Drawing:
    title = f"Product keys: the best {BEST} of {HALF_KEYS**2:,} slots from {2 * HALF_KEYS:,} half-keys"
    figure, (scores, grid) = panels(1, 2, width=11, height=5.4, title=title)
    first, second = example_scores()
    for half, colour, line, name in ((first, BLUE, "-", "first"), (second, VERMILLION, "--", "second")):
        scores.plot(
            np.arange(1, HALF_KEYS + 1),
            half,
            color=colour,
            linestyle=line,
            linewidth=1.8,
            label=f"{name} half of the query",
        )
    scores.axvspan(1, BEST, color=SKY, alpha=0.3, linewidth=0, label=f"the best k = {BEST} of each set")
    scores.set(xlabel="rank of the half-key", ylabel="score of the half-key", xlim=(1, HALF_KEYS))
    scores.set_xscale("log", base=2)
    scores.set_xticks([2**power for power in range(10)], [str(2**power) for power in range(10)])
    scores.minorticks_off()
    scores.set_title(f"1. two sets of C = {HALF_KEYS} half-keys", fontsize=10)
    scores.legend(loc="lower left")
    winners = _draw_grid(grid, first, second)
    caption = (
        f"Left: scores of a random query's halves with two sets of C = {HALF_KEYS} half-keys. Right: slot (i, j) scores the sum "
        f"of both, so the best k = {BEST} of C² slots are among k² = {BEST**2:,} candidates; of these only {winners} pairs with "
        "i · j <= k can win, because all pairs of no worse ranks score no less. Dots: the chosen slots of this example."
    )
    return finish(figure, name="explained-product-keys", title=title, caption=caption)


def _draw_grid(ax: Axes, first: np.ndarray, second: np.ndarray) -> int:
    """The k x k candidates, those that can win, and the chosen; how many can win."""
    possible, ranks = can_win(BEST), np.arange(1, BEST + 1)
    shade = np.where(possible, 0.75, 0.96)
    ax.imshow(shade, cmap="gray", vmin=0, vmax=1, origin="lower", extent=(0.5, BEST + 0.5, 0.5, BEST + 0.5))
    curve = np.linspace(1, BEST, 400)
    ax.plot(curve, BEST / curve, color=BLACK, linewidth=1.5)
    pairs = chosen_pairs(first, second, best=BEST) + 1
    ax.plot(pairs[:, 1], pairs[:, 0], "o", color=ORANGE, markeredgecolor=BLACK, markeredgewidth=0.6, markersize=6)
    ax.set(xlabel="rank j in the second set", ylabel="rank i in the first set", aspect="equal")
    ax.set_xticks([1, *ranks[7::8]])
    ax.set_yticks([1, *ranks[7::8]])
    ax.grid(visible=False)
    ax.set_title(f"2. {BEST} x {BEST} = {BEST**2:,} candidates, {possible.sum()} can win", fontsize=10)
    handles = [
        Line2D([], [], color=BLACK, linewidth=1.5, label=f"i · j = k = {BEST}"),
        Patch(color="0.75", label=f"can win: {possible.sum()} pairs"),
        Line2D([], [], color=ORANGE, marker="o", markeredgecolor=BLACK, linestyle="none", label="chosen here"),
        Patch(facecolor="0.96", edgecolor=FAINT, label="cannot win"),
    ]
    ax.legend(handles=handles, loc="upper right")
    return int(possible.sum())
