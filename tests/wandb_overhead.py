"""What W&B takes from a training: ``python -m tests.wandb_overhead [SECONDS]``.

For W&B offline and for each misbehaving server, a process that does nothing but log a row a second, as a training does.
Printed is the processor time that W&B's thread took in it: before training begins, and then after so many seconds. As a
share of the seconds it bounds the slowdown, whatever else the machine does; two trainings in turns differ by 3%.
"""

import sys
import tempfile
from pathlib import Path

from tests.wandb_runs import MODES, PRETENDED_KEY, MisbehavingServer, lonely_environment, python

CODE = """
import sys, time
from pathlib import Path
import torch
from harness.record.wandb_run import WandbRun
seconds, metrics = int(sys.argv[1]), {"layers.0.attention.span": [1.0] * 8}
began = time.process_time()
with WandbRun(Path("."), config={"seed": 0}, project="overhead") as run:
    started = time.process_time()
    for second in range(seconds):
        time.sleep(1)
        row = {"kind": "train", "bytes_seen": second, "step": second, "bits_per_byte": 2.0, "metrics": metrics}
        run.log(row | {"clock": {"seconds": float(second), "bytes_per_second": 1.0}, "training_flops": 1})
    print(started - began, time.process_time() - started)
"""


def processor_seconds(kind: str, *, seconds: int) -> tuple[float, float]:
    """Of W&B's thread, before a training begins and in its first ``seconds``."""
    with tempfile.TemporaryDirectory() as folder, MisbehavingServer(kind if kind in MODES else "refuses") as server:
        given = {"WANDB_API_KEY": PRETENDED_KEY} if kind in MODES else {"WANDB_MODE": kind}
        environment = lonely_environment(Path(folder), WANDB_BASE_URL=server.url, WANDB_FINISH_TIMEOUT="2", **given)
        before, during = python("-c", CODE, seconds, environment=environment).stdout.split()
        return float(before), float(during)


def main(seconds: int) -> None:
    for kind in ("offline", *MODES):
        before, during = processor_seconds(kind, seconds=seconds)
        share = 100 * during / seconds
        print(f"{kind:9} {before:.2f} s before, {during:.2f} s in {seconds} s of training: {share:.2f}%", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 80)
