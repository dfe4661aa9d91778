"""Last module that the fork server imports. Its forks inherit a composed configuration and
frozen objects."""

import gc

from harness import source
from harness.objective import scoring
from tests.support.small_configs import plan
from tests.support.small_runs import SMALL, SPANS, _hydra

scoring.MIN_CUTS, scoring.CUTS = 6, 32  # as in conftest.py
_hydra()
source.digest(plan(*SMALL, *SPANS).config)
gc.collect()
gc.freeze()
