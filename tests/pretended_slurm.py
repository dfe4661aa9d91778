#!/usr/bin/env python3
"""As much of Slurm as submitit asks for, on this machine: installed as sbatch, srun, sacct and scontrol.

``sbatch FILE`` starts every task of the array at once; ``$PRETENDED_SLURM`` is the folder of its notes.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE, JOB = Path(os.environ["PRETENDED_SLURM"]), "77"


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    (HERE / "submitted.sh").write_text(text)
    first, last = re.search(r"--array=(\d+)-(\d+)", text).groups()
    for task in range(int(first), int(last) + 1):
        own = {"SLURM_JOB_ID": f"{JOB}{task}", "SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(task)}
        own |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
        own |= {"SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "here", "SLURM_JOBID": f"{JOB}{task}"}
        with open(HERE / f"{task}.log", "w") as log:
            subprocess.Popen(["bash", script], env=os.environ | own, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {JOB}")


def srun(*words: str) -> None:
    """Runs the command behind the options."""
    words = list(words)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            words.pop(0)
    os.execvp(words[0], words)


def sacct(*_: str) -> None:
    print("JobID|State|NodeList")
    for task in range(9):
        print(f"{JOB}_{task}|RUNNING|here")


def scontrol(*words: str) -> None:
    with open(HERE / "scontrol", "a") as notes:
        print(shlex.join(words), file=notes)


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scontrol": scontrol}[Path(sys.argv[0]).name](*sys.argv[1:])
