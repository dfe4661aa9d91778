"""Training from Python, in a process of its own, so that a notebook keeps its state and its
memory."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from harness import source
from harness.trained import Model, load

FOLDER = re.compile(r"(?:run folder: +(?P<new>.+)|finished before: (?P<old>.+) \(force=true .*)\n")


def train(*words: str, trust: Sequence[str] = ()) -> Model:
    """Run ``windtunnel train`` with ``words`` such as ``"variant=mhsa"``, print what it prints, and
    return the trained model. ``trust`` names your modules. ValueError for a sweep and for a run
    that fails, with its message."""
    if {"-m", "--multirun"} & {*words}:
        raise ValueError(
            "windtunnel.train: makes one run; windtunnel train -m on the command line makes a sweep"
        )
    for word in words:
        if word.startswith("objective=") and word != "objective=causal_lm":
            raise ValueError(
                f"windtunnel.train: {word}: only models of objective=causal_lm are returned; "
                "windtunnel train on the command line trains the others"
            )
    if trust:
        words = (*words, f"trust=[{','.join(trust)}]")
    process = subprocess.Popen(
        [sys.executable, "-m", "windtunnel", "train", *words],
        env=os.environ | {"PYTHONPATH": source.python_path(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = ""
    error = "it has printed no reason"
    with process:
        for line in process.stdout:
            # also where a child's output is not seen, as in notebooks
            print(line, end="", flush=True)
            if match := FOLDER.fullmatch(line):
                folder = match["old"] or shlex.split(match["new"])[0]
            elif line.startswith("error: "):
                error = line.removeprefix("error: ").rstrip()
    if process.returncode:
        raise ValueError(error)
    return load(folder, trust=trust)
