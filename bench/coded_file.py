"""The file format of ``bench.compress``, under the name by which its test imports it."""

from bench.compress import CONDITIONS, MAGIC, pack, unpack  # noqa: F401
