"""Synthetic text: made-up bytes with the statistics of a Wikipedia dump, to measure costs, which depend on bytes (a
table that is read for 32 letters alone stays in a cache). Integer hashes of the seed and the word's number draw:

- a lexicon of 8191 words, made of syllables in which common sounds come first, one in 128 of Greek letters;
- words by Zipf's law: a rank's octave is drawn, then a rank in it, so that rank r has a chance of about 1 / (9 r);
- one word in 16 a number, one with a capital; after each a blank, punctuation, or a piece of markup.
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
    """The stream's first ``n_bytes`` bytes, uint8 ``[n_bytes]``; another seed is another text in the same words."""
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
    order = np.stack([np.where(form == 0, number, word), gap], axis=1).ravel().tolist()
    sizes = np.cumsum([len(pieces[piece]) for piece in order])
    text = b"".join(pieces[piece] for piece in order[: np.searchsorted(sizes, n_bytes) + 1])
    return np.frombuffer(bytearray(text[:n_bytes]), np.uint8)


def _lexicon() -> list[bytes]:
    """Words by rank; common ones are short. Of two draws for a sound the smaller counts: the first is the likeliest."""
    ranks, kinds = np.arange(1, 2**OCTAVES), (ONSETS, NUCLEI, CODAS)
    rank, syllable, part, of_two = np.ix_(ranks, range(1 + OCTAVES // 5), range(len(kinds)), range(2))
    drawn = integer_hash(_LEXICON, rank, syllable, part, of_two).tolist()  # [rank][syllable][part], two draws
    words = []
    for rank, draws in zip(ranks.tolist(), drawn, strict=True):
        sounds = (GREEK, GREEK) if rank % 128 == 127 else kinds
        parts = [pair for part in draws[: 1 + rank.bit_length() // 5] for pair in zip(sounds, part, strict=False)]
        words.append("".join(some[min(draw % len(some) for draw in two)] for some, two in parts).encode())
    return words
