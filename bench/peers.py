"""Our variants beside the packages that a user would otherwise install: ``python -m bench.peers model=small context=512``.

All train the same job: the same bytes in the same order, width, layers, heads, context, lanes, threads and precision, no
dropout, no carried state, AdamW, the whole training step. Before anything is timed its gradients and its causality are
checked, and ours must keep the contract; what fails is shown with the reason, and not timed. ``baselines/rivals.py`` says what
the peers are. A table whose yardstick reaches less than 0.97 of x-transformers in the same run is void.

``job=layer`` times a product-key memory alone, the package's against ours. Rows: ``outputs/bench/<time>-peers/rows.jsonl``.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="peers")
def main(cfg: DictConfig) -> None:
    from bench.baselines.layer_lineup import layer_entries
    from bench.baselines.lineup import PeerSettings, language_entries
    from bench.baselines.rivals import JUDGE
    from bench.baselines.rounds import compete
    from bench.baselines.table import print_peers, rows_of
    from bench.planning import own_keys
    from bench.progress import Steps
    from bench.rows import RowFile
    from harness.plan.settings import parse

    settings = parse(PeerSettings, own_keys(cfg, *PeerSettings.__dataclass_fields__), key="")
    layer = settings.job == "layer"
    entries = (layer_entries if layer else language_entries)(cfg, settings)
    file, interrupted = RowFile(Path(cfg.outputs), verb="peers"), False
    with Steps(len(entries) * (1 + settings.rounds)) as progress:
        try:
            compete(entries, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
        except KeyboardInterrupt:
            interrupted = True
    rows = rows_of(entries, judge=None if layer else JUDGE, planned_rounds=settings.rounds)
    rows = [file.append(row) for row in rows]
    print_peers(rows)
    if rows:
        print(f"rows: {file.path}")
    if interrupted:
        sys.exit(130)


if __name__ == "__main__":
    run_command(main)
