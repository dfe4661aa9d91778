"""``python -m harness.data enwik8``: download a corpus, and print its path and digest."""

import sys

from harness.data import corpora
from harness.data.sources import PUBLISHED, fetch


def main(arguments: list[str]) -> int:
    """Download the named corpus, by default enwik8. Returns 0 if it is in the cache and
    verified, else 2."""
    name = [*arguments, "enwik8"][0]
    try:
        if name not in PUBLISHED:
            raise ValueError(f"{name}: cannot be downloaded; allowed are {', '.join(PUBLISHED)}")
        corpus = corpora.load(name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{fetch(PUBLISHED[name].part_of or name)}\n{corpus.n_bytes:,} bytes, sha256 "
        f"{corpus.sha256}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
