"""Data: corpora, verified by their digests, and the order in which their bytes are read."""
