"""Tests; a package, so that they can import ``tests.reference``."""
