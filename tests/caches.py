"""A cache folder of a test's own, whose kernels were compiled before: another process would take seconds for each."""

from pathlib import Path

import pytest


def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch, *, kernels: Path | None = None) -> None:
    """Let ``home`` be ``XDG_CACHE_HOME``.

    Args:
        kernels: where compiled kernels are; None for where they are now.
    """
    if kernels:
        monkeypatch.setenv("WINDTUNNEL_KERNELS", str(kernels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
