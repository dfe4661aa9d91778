"""Synthetic text: made-up bytes with the statistics of a Wikipedia dump, for measurements of cost.

What a step costs depends on its bytes: a table that is looked up for 32 letters is read from a cache. These bytes are
the same on every machine, with nothing to download, and nearer to text:

- a lexicon of 8191 words, made of syllables in which common sounds come first, one in 128 of Greek letters;
- words by Zipf's law: a rank's octave is drawn, then a rank in it, so that rank r has a chance of about 1 / (9 r);
- one word in 16 a number, one with a capital; after each a blank, punctuation, or a piece of markup.

Everything is drawn by an integer hash of the seed and the word's number: no floating point, no state.
"""

import numpy as np

from harness.hashing import integer_hash

OCTAVES = 13
"""Of ranks: 1, 2 to 3, 4 to 7, ... to 8191."""
ONSETS = [*"tsnrdlhmcpbwfg", "th", *"ykv", "st", "tr", "ch", "pr", "sh", "z", "qu", "x"]
NUCLEI = [*"eaiou", "ea", "ou", "io", "ai", "y"]
CODAS = ["", "", "n", "r", "s", "t", "l", "d", "ng", "m", "nd", "st", "ck", "x"]
GREEK = ["α", "ει", "ον", *"τσρκ", "πλ", *"μη", "υς", "δ", "θω", "χ"]
GAPS = [" "] * 96 + [", "] * 10 + [". "] * 7 + ["\n"] * 3 + [" [[", "]] "] * 3
GAPS += ["]], ", " (", ") ", " ''", "'' ", "|", ":", "-", "/", " = ", "\n\n== ", " ==\n", "\n* ", " {{", "}}\n"]
GAPS += ["&nbsp;", " &quot;", "&quot; ", " &lt;br&gt;", "</text>\n<text xml:space=#", "\t"]
FORMS = 16
"""One word in so many is a number of one to four digits, and as many have a capital."""
_LEXICON, _TEXT = 1, 2  # first key of the hash, so that the two kinds of draws are unrelated


def synthetic_text(n_bytes: int = 1_000_000, *, seed: int = 0) -> np.ndarray:
    """The first ``n_bytes`` bytes of the stream: uint8 ``[n_bytes]``.

    Args:
        seed: another seed is another text in the same words.

    Raises:
        ValueError: naming ``data.bytes``.
    """
    if n_bytes < 2:
        raise ValueError(f"data.bytes={n_bytes}: allowed is an integer of at least 2")
    words = _lexicon()
    numbers = [str(number).encode() for number in range(10_000)]
    pieces = [*words, *(word.capitalize() for word in words), *numbers, *(gap.encode() for gap in GAPS)]
    place = np.arange(n_bytes // 2 + 1)  # a word and the gap after it have two bytes at the least

    def draw(what: int, below: int | np.ndarray) -> np.ndarray:
        return (integer_hash(_TEXT, seed, what, place) % np.asarray(below, np.uint64)).astype(np.int64)

    octave, form = 1 << draw(0, OCTAVES), draw(1, FORMS)
    word = octave - 1 + draw(2, octave) + len(words) * (form == 1)
    number = 2 * len(words) + draw(3, 10 ** (1 + draw(4, 4)))
    gap = len(pieces) - len(GAPS) + draw(5, len(GAPS))
    return _joined(pieces, np.stack([np.where(form == 0, number, word), gap], axis=1).ravel(), n_bytes)


def _lexicon() -> list[bytes]:
    """Words by rank; common ones are short."""
    ranks, kinds = np.arange(1, 2**OCTAVES), (ONSETS, NUCLEI, CODAS)
    rank, syllable, part, of_two = np.ix_(ranks, range(1 + OCTAVES // 5), range(len(kinds)), range(2))
    drawn = integer_hash(_LEXICON, rank, syllable, part, of_two).tolist()  # [rank][syllable][part], two draws

    def sound(sounds: list[str], draws: list[int]) -> str:
        """The smaller of two draws: the first sound is the likeliest."""
        return sounds[min(draw % len(sounds) for draw in draws)]

    words = []
    for rank, draws in zip(ranks.tolist(), drawn, strict=True):
        used = (GREEK, GREEK) if rank % 128 == 127 else kinds
        parts = [pair for part in draws[: 1 + rank.bit_length() // 5] for pair in zip(used, part, strict=False)]
        words.append("".join(sound(*pair) for pair in parts).encode())
    return words


def _joined(pieces: list[bytes], order: np.ndarray, n_bytes: int) -> np.ndarray:
    """The pieces one after the other in ``order``, as far as ``n_bytes``."""
    lengths = np.array([len(piece) for piece in pieces])
    begins = np.cumsum(lengths) - lengths
    ends = np.cumsum(lengths[order])
    used = order[: np.searchsorted(ends, n_bytes) + 1]
    sizes = lengths[used]
    inside = np.arange(sizes.sum()) - np.repeat(ends[: len(used)] - sizes, sizes)
    return np.frombuffer(b"".join(pieces), np.uint8)[np.repeat(begins[used], sizes) + inside][:n_bytes]
