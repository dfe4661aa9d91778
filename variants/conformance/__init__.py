"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

``suite`` runs all checks on a model. ``sizes`` checks which bytes may move which outputs; ``promises`` checks forward
passes, state, parameters and losses; ``numbers`` checks the computed values. ``fixture`` has what these use.
"""

from variants.conformance.fixture import move
from variants.conformance.sizes import SIZED, Size
from variants.conformance.suite import BEFORE_TRAINING, CHECKS, Finding, check, finding_of, outcome

__all__ = ["BEFORE_TRAINING", "CHECKS", "SIZED", "Finding", "Size", "check", "finding_of", "move", "outcome"]
