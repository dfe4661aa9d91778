"""The W&B dashboard's layout: sections of panels, as data. ``online`` makes W&B objects of it.

Metrics have the names that ``harness.record.wandb_rows`` gives them. In a name, ``*`` stands for a sublayer, as in
``train_span/*/mean``. A test trains runs and finds every one of these names in them, and says why each other name that a
run logs is not here.
"""

import re
from dataclasses import dataclass

CURVE, HISTOGRAM, BARS, SCATTER, PARALLEL, RUNS, IMAGES, TABLE = (
    *("curve", "histogram", "bars", "scatter", "parallel", "runs", "images", "table"),
)
OVER_THE_RUN = (CURVE, HISTOGRAM)
"""Kinds whose metrics are in rows; those of the others are in a run's summary, or are keys of its configuration."""
OF_CONFIG = "config:"
"""Begins the name of a key of the configuration: ``config:optim.lr``."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Attributes:
    title: with the unit, where that is not in an axis' name.
    kind: one of those above.
    y: metrics; a scatter has one. Of ``images`` and ``table``: what is uploaded.
    x: metric of the horizontal axis; None for kinds that have none.
    x_label: what that axis is called.
    log_x: whether it is logarithmic.
    """

    title: str
    kind: str
    y: tuple[str, ...] = ()
    x: str | None = None
    x_label: str = ""
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """Attributes:
    name: one word for a link, title: for people.
    about: what to look for, one or two sentences.
    """

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]


def _curve(title: str, *y: str, x: str = "bytes_seen", x_label: str = "bytes seen") -> Panel:
    return Panel(title=title, kind=CURVE, y=y, x=x, x_label=x_label)


def _scatter(title: str, x: str) -> Panel:
    return Panel(
        title=title, kind=SCATTER, y=("test_bits_per_byte",), x=x, x_label=title.partition(" by ")[2], log_x=True
    )


LEARNING = Section(
    name="learning",
    title="Learning",
    about="Bits per byte while training. Scores on the way are often of a prefix of valid, so they are no final result.",
    panels=(
        _curve("Valid bits per byte by bytes seen", "valid/bits_per_byte"),
        _curve(
            "Valid bits per byte by training FLOPs",
            "valid/bits_per_byte",
            x="training_flops",
            x_label="training FLOPs (3 x ideal forward)",
        ),
        _curve(
            "Valid bits per byte by time",
            "valid/bits_per_byte",
            x="seconds",
            x_label="seconds of training, not scoring",
        ),
        _curve("Train bits per byte", "train/bits_per_byte"),
        _curve("Learning rate", "train/learning_rate"),
        _curve("Bytes per second of training", "bytes_per_second"),
    ),
)
SPANS = Section(
    name="spans",
    title="Spans of adaptive attention",
    about="How far heads look, in positions: the mean over all heads with the shortest and the longest, and each layer.",
    panels=(
        _curve("Span of all heads: mean, shortest, longest", "train_span/mean", "train_span/min", "train_span/max"),
        _curve("Mean span of each layer", "train_span/*/mean"),
        Panel(title="Spans of all heads", kind=HISTOGRAM, y=("train_span/all",), x="bytes_seen", x_label="bytes seen"),
        _curve("Longest span with its ramp: what is run", "train_span_with_ramp/max"),
        Panel(title="Spans at the end", kind=BARS, y=("spans/mean", "spans/min", "spans/max")),
        _curve("Ideal FLOPs per byte at these spans", "train/ideal_flops_per_byte"),
    ),
)
MEMORIES = Section(
    name="memories",
    title="Product-key memories",
    about="Slots that a scored prefix of valid reads at all, and how uneven the reads are: 0 nats is perfectly even.",
    panels=(
        _curve("Slots used, percent", "valid_usage_percent/*"),
        _curve("Divergence from even use, reads by weight [nats]", "valid_kl_weighted_nats/*"),
        _curve("Divergence from even use, reads counted [nats]", "valid_kl_count_nats/*"),
    ),
)
COSTS = Section(
    name="costs",
    title="What a run costs",
    about="Forward FLOPs per predicted byte, as executed and as the mechanism needs them; memory in bytes; parameters.",
    panels=(
        Panel(title="FLOPs per byte", kind=BARS, y=("flops_per_byte/executed", "flops_per_byte/ideal")),
        Panel(title="Peak memory, bytes", kind=BARS, y=("memory/peak_bytes", "memory/inference_peak_bytes")),
        Panel(
            title="Kept memory, bytes",
            kind=BARS,
            y=("memory/parameter_bytes", "memory/gradient_bytes", "memory/optimizer_bytes", "memory/state_bytes"),
        ),
        Panel(title="Parameters", kind=BARS, y=("parameters/total", "parameters/touched")),
        Panel(title="Bytes per second of training", kind=BARS, y=("bytes_per_second",)),
        Panel(title="Seconds of training", kind=BARS, y=("seconds",)),
    ),
)
RESULTS = Section(
    name="results",
    title="Quality against cost",
    about="Test bits per byte of the best weights, scored once at the end; runs that tune have none. Lower left is better.",
    panels=(
        _scatter("Test bits per byte by ideal forward FLOPs per byte", "flops_per_byte/ideal"),
        _scatter("Test bits per byte by peak memory in bytes", "memory/peak_bytes"),
        _scatter("Test bits per byte by parameters", "parameters/total"),
        Panel(title="Final bits per byte", kind=BARS, y=("valid_bits_per_byte", "test_bits_per_byte")),
        Panel(
            title="Choices and results",
            kind=PARALLEL,
            y=(
                *("config:optim.lr", "config:model.span", "parameters/total", "flops_per_byte/ideal"),
                *("memory/peak_bytes", "valid_bits_per_byte"),
            ),
        ),
    ),
)
RUN_BY_RUN = Section(
    name="runs",
    title="Run by run",
    about="The runs beside each other, with what each one drew and tabulated at its end.",
    panels=(
        Panel(title="Runs", kind=RUNS),
        Panel(title="Figures", kind=IMAGES, y=("figures/learning_curve", "figures/spans")),
        Panel(title="Spans of every head", kind=TABLE, y=("tables/spans",)),
        Panel(title="Costs", kind=TABLE, y=("tables/costs",)),
    ),
)
SECTIONS = (LEARNING, SPANS, MEMORIES, COSTS, RESULTS, RUN_BY_RUN)


def pattern_of(metric: str) -> str:
    """A regular expression of the names that a panel's metric stands for; ``*`` is one sublayer, never the pool of all."""
    return "^" + re.escape(metric).replace(r"\*", r".*\..*") + "$"
