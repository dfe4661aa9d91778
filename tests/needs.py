"""What some tests need and not every machine has; the gate installs all of it, so there its absence is a failure."""

import os

import pytest


def need(found: object, reason: str) -> None:
    """Skip with the reason unless ``found``; in CI, fail."""
    if not found:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
