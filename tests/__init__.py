"""The tests are a package, so that they can import ``tests.reference``."""

import os

# With tiny tensors threads only wait for each other. torch reads the variable when it is imported, so it is set before.
os.environ.setdefault("OMP_NUM_THREADS", "1")
