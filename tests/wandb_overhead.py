"""What W&B costs a training, measured in turns: ``python -m tests.wandb_overhead [ROUNDS]``, on a quiet machine.

In each round the same training runs without W&B, offline, and against each misbehaving server. Printed are seconds per step
in percent of the run without W&B in the same round: the median over rounds, and the lowest and highest. Noise is what
``disabled again`` shows. This is no test: two runs of equal work differ by more than a percent where anything else runs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.command import MADE, ROOT, run_folders
from tests.wandb_runs import MODES, PRETENDED_KEY, MisbehavingServer, lonely_environment, python

WORDS = (
    *MADE,
    "model.d_model=64",
    "model.layers=2",
    "model.heads=2",
    "model.span=64",
    "batch.segment=64",
    "variant=mhsa",
)
WORDS += ("budget.steps=1500", "eval.every=0", "eval.bytes=300", "eval.progress_bytes=200", "eval.context512=false")
WORDS += ("eval.lanes=2", "runtime.device=cpu", "runtime.threads=1", "record.figures=false", "record.every_steps=5")
KINDS = ("disabled", "disabled again", "offline", *MODES)


def seconds_per_step(kind: str) -> float:
    """Of one training; only the steps themselves are counted."""
    with tempfile.TemporaryDirectory() as folder, MisbehavingServer(kind if kind in MODES else "refuses") as server:
        given = {"WANDB_MODE": kind.partition(" ")[0]} if kind not in MODES else {"WANDB_API_KEY": PRETENDED_KEY}
        given |= {"WANDB_BASE_URL": server.url, "WANDB_FINISH_TIMEOUT": "2", "WANDB_HTTP_TIMEOUT": "1"}
        python(ROOT / "train.py", *WORDS, environment=lonely_environment(Path(folder), **given))
        (run,) = run_folders(Path(folder) / "outputs")
        summary = json.loads((run / "summary.json").read_text())
        return summary["seconds"] / summary["steps"]


def main(rounds: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    percents: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    for number in range(rounds):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        found = {kind: seconds_per_step(kind) for kind in order}
        for kind, values in percents.items():
            values.append(100 * (found[kind] / found["disabled"] - 1))
    for kind, values in percents.items():
        print(f"{kind:15} {median(values):+6.2f} %   from {min(values):+.2f} to {max(values):+.2f}, n={len(values)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
