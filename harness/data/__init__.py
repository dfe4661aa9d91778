"""Data: corpora, their digests, and the order in which their bytes are read."""
