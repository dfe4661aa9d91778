"""Entries that do the same job, timed in turn: ``python -m bench.peers model=small context=512``.

``lineup=packages``: our variants beside the packages that a user would otherwise install, all with the same bytes in
the same order, width, layers, heads, context, streams, threads and precision, no dropout, no carried state, AdamW.
``lineup=layer``: a product-key memory alone, the package's and ours. ``lineup=attention``: attention alone, several packages'
and ours, and what sees later bytes is named. ``lineup=targets`` and ``targets_cuda``: does cost
follow what the mechanisms need? The cases of a fixed workload in steady state, each with what it must reach;
``only=[mixed,pkm_256]`` takes some of them.

Whole training steps are timed, with weights that are shaken, because hardware is quicker on zeros. On a CPU every entry
is there twice: freed memory is kept by the process, or returned to the system; a ratio is of equal settings, that of a
case of ``keep``. Before that gradients and causality of each entry are checked, and ours must keep the contract; what
fails is shown with the reason, and not timed. ``baselines/packages.py`` says what the peers are. Speeds beside a
reference model that reaches less than 0.97 of x-transformers in the same run are void.

Rows are added to ``rows=FILE``, or go to ``outputs/bench/<time>-peers/rows.jsonl``.
"""

import sys
import tempfile
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="peers")
def main(cfg: DictConfig) -> None:
    from bench.baselines.cases import rows_of
    from bench.baselines.lineup import FREE, PeerSettings, make_comparisons, typed_words
    from bench.baselines.rounds import compete
    from bench.planning import own_keys
    from bench.progress import Steps
    from bench.report.tables_peers import peer_tables
    from bench.rows import RowFile
    from harness.plan.settings import parse
    from harness.record.table import print_table

    settings = parse(PeerSettings, own_keys(cfg, *PeerSettings.__dataclass_fields__), key="")
    file = RowFile(Path(cfg.outputs), verb="peers", path=None if settings.rows is None else Path(settings.rows))
    judged = {word.partition("=")[0] for word in typed_words()} <= set(FREE)
    shown, interrupted = [], False
    with tempfile.TemporaryDirectory() as scratch:
        comparisons = make_comparisons(settings, scratch=scratch)
        with Steps(_steps(comparisons, rounds=settings.rounds)) as progress:
            for comparison in comparisons:
                rounds = settings.rounds * comparison.longer
                try:
                    compete(comparison.entries, rounds=rounds, seconds=settings.seconds, progress=progress)
                except KeyboardInterrupt:
                    interrupted = True
                shown += [file.append(row) for row in rows_of(comparison, judged=judged, planned_rounds=rounds)]
                if interrupted:
                    break
    found = [row | {"read_from": str(file.path.parent)} for row in shown]
    for table in peer_tables([row for row in found if row["kind"] == "peers"]):
        print_table(table)
    print(f"rows: {file.path}" if shown else "nothing was measured")
    if interrupted:
        sys.exit(130)


def _steps(comparisons, *, rounds: int) -> int:
    """Of progress."""
    return sum(1 + rounds * one.longer * entry.timed for one in comparisons for entry in one.entries)


if __name__ == "__main__":
    run_command(main)
