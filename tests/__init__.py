"""Tests; a package, so that they can import ``tests.reference``."""

import os

# Tiny tensors: threads only wait for each other. Here, because it is read as torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
