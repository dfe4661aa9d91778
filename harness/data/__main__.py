"""``python -m harness.data enwik8``: download a corpus, and print its path and digest."""

import sys

from harness.data import corpora
from harness.data.sources import KNOWN, fetch


def main(arguments: list[str]) -> int:
    """0 if the named corpus, or enwik8, is in the cache and checked; 2 if it cannot be downloaded."""
    name = [*arguments, "enwik8"][0]
    try:
        if name not in KNOWN:
            raise ValueError(f"{name}: cannot be fetched; allowed are {', '.join(KNOWN)}")
        corpus = corpora.load(name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{fetch(KNOWN[name].part_of or name)}\n{corpus.n_bytes:,} bytes, sha256 {corpus.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
