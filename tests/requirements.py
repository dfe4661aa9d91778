"""Requirements of tests that a machine may lack. CI installs all of them, so in CI a missing one is a failure."""

import os

import pytest


def require(present: object, reason: str) -> None:
    """Unless ``present``, skip the test with the reason or, in CI, fail it."""
    if not present:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
