"""The contract as runnable checks, for any variant: ours, another package's, or a single file's.

``suite`` runs them all on a model; ``forward`` has those about a forward pass, ``parameters`` those about parameters, losses and
statistics, ``numbers`` those about what it computes, ``fixture`` is what they work with.
"""

from variants.conformance.fixture import gradients_of, move
from variants.conformance.suite import BEFORE_TRAINING, CHECKS, Finding, agree, check, finding_of, learns

__all__ = ["BEFORE_TRAINING", "CHECKS", "Finding", "agree", "check", "finding_of", "gradients_of", "learns", "move"]
