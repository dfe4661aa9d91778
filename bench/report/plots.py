"""Figures of a report, from rows alone: neither torch nor a server.

What may stand in one drawing is decided in ``comparison``, how it looks in ``plot_style``; the drawings themselves are in
``plots_runs``, ``plots_curves``, ``plots_inside``, ``plots_rates``, ``plots_costs`` and ``plots_bars``.
"""

from collections.abc import Sequence

from bench.report.gather import Found
from bench.report.plot_style import looks, styled
from bench.report.plots_bars import draw_fits, draw_peers
from bench.report.plots_costs import draw_costs
from bench.report.plots_curves import draw_curves
from bench.report.plots_inside import draw_memories, draw_spans
from bench.report.plots_rates import draw_rates
from bench.report.plots_runs import draw_trade_offs
from bench.report.tuning import Pick
from harness.record.table import Drawing


def draw_all(found: Found, swept: Sequence[Sequence[Pick]]) -> list[Drawing]:
    """Every figure that the rows allow; equal rows give equal files.

    Names are distinct, and of a group they stay what they are whatever else is found.

    Args:
        swept: from ``picks``.
    """
    every = [pick for some in swept for pick in some]
    no_results = {id(run) for pick in every for run in (*pick.setting.arm.members, *pick.spoilt)}
    runs = [run for run in found.runs if id(run) not in no_results]
    look = looks(
        [run.provenance["variant"] for run in [*found.runs, *found.failed_runs]]
        + [row["variant"] for row in found.costs]
    )
    with styled():
        return [
            *draw_trade_offs(runs, look=look),
            *draw_rates(swept, look=look),
            *draw_curves(runs, look=look),
            *draw_spans(runs),
            *draw_memories(runs, look=look),
            *draw_costs(found.costs, look=look),
            *draw_peers(found.peers, look=look),
            *draw_fits(found.fits),
        ]
