"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

``suite`` runs them all on a model; ``sizes`` has those about what bytes may move, ``promises`` those about forward passes, state,
parameters and losses, ``numbers`` those about what is computed, ``fixture`` is what they work with.
"""

from variants.conformance.fixture import move
from variants.conformance.sizes import SIZED, Size
from variants.conformance.suite import BEFORE_TRAINING, CHECKS, Finding, check, finding_of, outcome

__all__ = ["BEFORE_TRAINING", "CHECKS", "SIZED", "Finding", "Size", "check", "finding_of", "move", "outcome"]
