"""What tests require but a machine may lack. CI installs all of it, so a missing requirement is
a failure in CI."""

import os

import pytest


def require(present: object, reason: str):
    """Unless ``present``, skip the test with the reason or, in CI, fail it."""
    if not present:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
