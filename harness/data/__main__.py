"""``python -m harness.data enwik8``: fetch a corpus ahead of time, say where it is and what its digest is."""

import sys

from harness.data import corpora
from harness.data.sources import KNOWN, fetch


def main(arguments: list[str]) -> int:
    """0 if the corpus that is named, or enwik8, is in the cache and checked; 2 if it cannot be had."""
    name = [*arguments, "enwik8"][0]
    try:
        if name not in KNOWN:
            raise ValueError(f"{name}: is not fetched; allowed are {', '.join(KNOWN)}")
        corpus = corpora.load(name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{fetch(KNOWN[name].part_of or name)}\n{corpus.n_bytes:,} bytes, sha256 {corpus.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
