"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

``suite`` runs all checks on a model. ``sizes`` checks which bytes may move which outputs. ``promises`` checks forward
passes, state, parameters and losses. ``numerics`` checks gradients and other numbers. These modules use ``fixture``."""

from variants.conformance.fixture import perturb
from variants.conformance.sizes import SIZED, Size
from variants.conformance.suite import BEFORE_TRAINING, CHECKS, Finding, check, collect_breaks, run_check

__all__ = ["BEFORE_TRAINING", "CHECKS", "SIZED", "Finding", "Size", "check", "run_check", "perturb", "collect_breaks"]
