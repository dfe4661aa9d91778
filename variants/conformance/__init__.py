"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

``suite`` runs all checks on a model. ``sizes`` checks which bytes may move which outputs.
``promises`` checks forward passes, state, parameters and losses. ``numerics`` checks gradients
and other numbers. These modules use ``fixture``."""

from variants.conformance.fixture import perturb
from variants.conformance.sizes import Size
from variants.conformance.suite import (
    AT_RUN_SIZES,
    AT_SIZES,
    BEFORE_TRAINING,
    CHECKS,
    FIRST,
    Finding,
    check,
    collect_breaks,
    run_check,
)

__all__ = ["AT_RUN_SIZES", "AT_SIZES", "BEFORE_TRAINING", "CHECKS", "FIRST", "Finding", "Size"]
__all__ += ["check", "run_check", "perturb", "collect_breaks"]
