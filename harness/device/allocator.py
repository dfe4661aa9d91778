"""Allocator of the C library, and what becomes of memory that was freed: ``keep`` or ``return``.

Left alone, glibc gives every block from 32 MiB on back to the system as soon as it is freed. A step with large
temporaries then gets them anew each time, page by page, and may lose a third of its time so. ``keep`` leaves all of it to
the process: fast, and its peak has the gaps between blocks in it. ``return`` gives back what is 64 KiB or more: slow, and
its peak is near to what was in use.
"""

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # as glibc's <malloc.h> has them
_NEVER, _FROM_BYTES = -1, 2**16
SETTINGS = {
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER},
    "return": {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: _FROM_BYTES, _TRIM_THRESHOLD: _FROM_BYTES},
}


def use(setting: str) -> str | None:
    """Carry out a setting, for the whole process from now on; gaps that an earlier ``keep`` has left are still filled.

    Returns:
        the setting, or None where it has no effect: a C library other than glibc, or an allocator that the user has tuned
        or replaced by the environment.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or is_users_own(os.environ):
        return None
    for name, value in SETTINGS[setting].items():
        library.mallopt(name, value)
    if setting == "return":
        library.malloc_trim(0)
    return setting


def is_users_own(environment: Mapping[str, str]) -> bool:
    """Whether the environment tunes or replaces the allocator: what is called here would undo it, or do nothing."""
    named = any(name.startswith("MALLOC_") for name in environment)
    words = {"GLIBC_TUNABLES": "glibc.malloc.", "LD_PRELOAD": "malloc"}
    return named or any(word in environment.get(name, "") for name, word in words.items())
