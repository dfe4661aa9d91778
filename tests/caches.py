"""A cache folder of a test's own, whose kernels were compiled before: another process would take seconds for each."""

import os
from pathlib import Path

import pytest

from harness.cache import cache_folder


def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch, *, kernels: Path | None = None) -> None:
    """Let ``home`` be ``XDG_CACHE_HOME``, unless that cannot be made, as ``.ci/machines`` has it: then it stays so.

    Args:
        kernels: where compiled kernels are; None for where they are now.
    """
    if Path(os.environ.get("XDG_CACHE_HOME", "")).parent.is_file():
        return
    kernels = (kernels or cache_folder() / "kernels").resolve()
    kernels.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    cache_folder().mkdir(parents=True)
    (cache_folder() / "kernels").symlink_to(kernels)
