"""Tests; a package, so that they can import ``tests.reference``."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read as torch is imported; tiny tensors: threads only wait for each other
