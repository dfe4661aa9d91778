"""Data: corpora, checked by their digest, and the order in which their bytes are read."""
