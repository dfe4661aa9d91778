"""The cut into streams, under the name by which tests import it."""

from bench.compress import stream_lengths

__all__ = ["stream_lengths"]
