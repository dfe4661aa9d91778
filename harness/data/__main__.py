"""``python -m harness.data enwik8``: download a corpus, and print its path and digest."""

import sys

from harness.data import corpora
from harness.data.sources import KNOWN, fetch


def main(arguments: list[str]) -> int:
    """Fetch the named corpus, by default enwik8: 0 if it is in the cache and checked, else 2."""
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
