"""Requirements of tests that a machine may lack. CI installs all of them, so their absence there is a failure."""

import os

import pytest


def require(present: object, reason: str) -> None:
    """Skip with the reason unless ``present``; in CI, fail."""
    if not present:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
