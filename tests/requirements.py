"""What some tests need and not every machine has; the gate installs all of it, so there its absence is a failure."""

import os

import pytest


def require(present: object, reason: str) -> None:
    """Skip with the reason unless ``present``; in CI, fail."""
    if not present:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
