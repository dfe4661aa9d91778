"""``python -m harness.data enwik8``: download a corpus, and print its path and digest."""

import argparse
import sys
from collections.abc import Sequence

from harness.data import corpora
from harness.data.sources import PUBLISHED, fetch
from harness.failures import note


def main(words: Sequence[str] | None = None) -> int:
    """Download the named corpus, by default enwik8. Returns 0 if it is in the cache and verified,
    else 2."""
    about = "Download a corpus into the user's cache."
    parser = argparse.ArgumentParser(prog="python -m harness.data", description=about)
    allowed = ", ".join(PUBLISHED)
    parser.add_argument("name", nargs="?", default="enwik8", help=f"one of {allowed}")
    name = parser.parse_args(words).name
    try:
        if name not in PUBLISHED:
            raise ValueError(f"{name}: cannot be downloaded; allowed are {allowed}")
        corpus = corpora.load(name)
    except ValueError as error:
        note(error)
        return 2
    print(fetch(PUBLISHED[name].part_of or name))
    print(f"{corpus.n_bytes:,} bytes, sha256 {corpus.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
