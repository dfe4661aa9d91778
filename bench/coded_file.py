"""The format of coded files, under the name by which tests import it."""

from bench.compress import CONDITIONS, MAGIC, pack, unpack  # noqa: F401
