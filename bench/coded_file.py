"""The format of coded files, under the name by which tests import it."""

from bench.compress import CONDITIONS, MAGIC, pack, unpack

__all__ = ["CONDITIONS", "MAGIC", "pack", "unpack"]
