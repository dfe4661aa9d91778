"""Commands on finished runs: ``windtunnel compare``, ``generate`` and ``export``."""

import argparse
import codecs
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from bench.tables.columns import print_runs
from bench.tables.frame import Rows
from bench.tables.runs import run_tables
from harness.device.output import contained_output
from harness.failures import exit_code, first_line, note
from harness.record.exported import export as export_weights
from harness.trained import load, open_trained


def run_verb(words: Sequence[str]) -> int:
    """Run the command of ``words``, and return its exit code: 0, or that of an error."""
    options = _parser().parse_args(words)
    with contained_output():
        try:
            options.verb(options)
        except (ValueError, OSError) as error:
            note(f"error: {first_line(error)}")
            return exit_code(error)
    return 0


def compare(options: Namespace) -> None:
    """Print the tables of runs, with the intervals of differences. Nothing is written."""
    rows = Rows([*map(Path, options.folders)])
    if rows.frame.empty:
        raise ValueError("nothing to compare; " + "; ".join(rows.omitted))
    print_runs(run_tables(rows))
    for line in rows.omitted:
        print(line)


def generate(options: Namespace) -> None:
    """Print the prompt and its continuation, byte by byte."""
    model = load(options.run, trust=options.trust)
    prompt = options.prompt.encode()
    continuation = model.stream(
        prompt,
        n_bytes=options.bytes,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for byte in chain(prompt, continuation):
        print(decoder.decode(bytes([byte])), end="", flush=True)
    print()


def export(options: Namespace) -> None:
    """Write the folder, and print the names of its files."""
    run = open_trained(options.run, key="run", trust=options.trust)
    out = Path(options.out)
    for path in export_weights(run.folder, run.model(), n_bytes=run.best["bytes"], out=out):
        print(f"{path}  {path.stat().st_size:,} bytes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="windtunnel")
    verbs = parser.add_subparsers(required=True)

    def add(verb, about: str, run: str | None = "run folder, such as outputs/latest"):
        words = verbs.add_parser(verb.__name__, help=about, description=about)
        words.set_defaults(verb=verb)
        if run:
            words.add_argument("run", help=run)
            words.add_argument(
                "--trust", action="append", default=[], help="a module of yours that the run names"
            )
        return words

    words = add(compare, "Compare finished runs in a table, with intervals.", run=None)
    about = "run folders, or folders with runs at any depth (default: outputs)"
    words.add_argument("folders", nargs="*", default=["outputs"], help=about)
    words = add(generate, "Continue a text with a trained model.")
    words.add_argument(
        "prompt", nargs="?", default="\n", help="text to continue (default: a newline)"
    )
    words.add_argument(
        "--bytes", type=int, default=400, help="bytes to generate (default: %(default)s)"
    )
    about = "0 for the likeliest byte (default: %(default)s)"
    words.add_argument("--temperature", type=float, default=0.8, help=about)
    words.add_argument("--top-k", type=int, help="draw from so many bytes only (default: all)")
    words.add_argument("--seed", type=int, help="for the same text again")
    about = (
        "Write the best weights of a run as safetensors, with its configuration; "
        "windtunnel.load reads the folder."
    )
    words = add(export, about)
    words.add_argument("--out", default="exported", help="folder to write (default: %(default)s)")
    return parser
