"""The tests are a package, so that they can import ``tests.reference``."""

import os

# Test processes run on all cores, and threads would be slower on small tensors. torch reads the
# variable at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
