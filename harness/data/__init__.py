"""Bytes: which corpus, from where, proven by its digest, and in which order they are read."""
