"""``python -m harness.data enwik8``: fetch a corpus ahead of time, say where it is and what its digest is."""

import argparse
import sys

from harness.data import corpora
from harness.data.sources import KNOWN, fetch


def main(arguments: list[str] | None = None) -> int:
    """0 if the corpus is in the cache and checked, 2 if it cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m harness.data", description="Fetch a corpus into the user's cache.")
    parser.add_argument("name", nargs="?", default="enwik8", choices=sorted(KNOWN))
    name = parser.parse_args(arguments).name
    try:
        corpus = corpora.load(name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{fetch(KNOWN[name].part_of or name)}\n{corpus.n_bytes:,} bytes, sha256 {corpus.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
