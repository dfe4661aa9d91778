"""Imported last by the server whose forks are the processes of tests: what every run composes is there before a fork, and a
job's first collection need not look at what was imported."""

import gc

from harness import source
from harness.loop import scoring
from tests.small_configs import plan
from tests.small_runs import MOVING, SMALL, _hydra

scoring.PLACES = 6  # as in conftest.py
_hydra()
source.digest(plan(*SMALL, *MOVING).config)
gc.collect()
gc.freeze()
