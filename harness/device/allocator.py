"""Allocator of the C library, and what becomes of memory that was freed: ``keep`` or ``return``.

Left alone, glibc gives every block from 32 MiB on back to the system as soon as it is freed. A step with large
temporaries then gets them anew each time, page by page, and may lose a third of its time so. ``keep`` leaves all of it
to
the process: fast, and its peak has the gaps between blocks in it. ``return`` gives back what is 64 KiB or more: slow,
and its peak is near to what was in use.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # as glibc's <malloc.h> has them
SETTINGS = {
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1},
    "return": {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**16, _TRIM_THRESHOLD: 2**16},
}


def use(setting: str) -> str | None:
    """Carry out a setting, for the whole process from now on; gaps that an earlier ``keep`` has left are still filled.

    Returns:
        the setting, or None where it has no effect: a C library other than glibc, or an allocator that the user has
        tuned or replaced by the environment.
    """
    library, variables = ctypes.CDLL(None), os.environ
    tuned = any(name.startswith("MALLOC_") for name in variables) or "malloc" in variables.get("LD_PRELOAD", "")
    if tuned or "glibc.malloc." in variables.get("GLIBC_TUNABLES", "") or not hasattr(library, "mallopt"):
        return None
    for name, value in SETTINGS[setting].items():
        library.mallopt(name, value)
    if setting == "return":
        library.malloc_trim(0)
    return setting
