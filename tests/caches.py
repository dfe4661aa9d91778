"""A cache folder of a test's own, whose kernels were compiled before: another process would take seconds for each."""

import os
from pathlib import Path

import pytest


def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch, *, kernels: Path | None = None) -> None:
    """Let ``home`` be ``XDG_CACHE_HOME``, unless that cannot be made, as ``.ci/machines`` has it: then it stays so.

    Args:
        kernels: where compiled kernels are; None for where they are now.
    """
    if Path(os.environ.get("XDG_CACHE_HOME", "")).parent.is_file():
        return
    if kernels:
        monkeypatch.setenv("WINDTUNNEL_KERNELS", str(kernels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
