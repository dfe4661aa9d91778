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
_NEVER, _FROM_BYTES, _LARGEST_BYTES = -1, 2**16, 2**40
_MAPPED = 2  # of the size before a block: mmap(2) made it, and free gives it back
SETTINGS = {
    "keep": {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER},
    "return": {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: _FROM_BYTES, _TRIM_THRESHOLD: _FROM_BYTES},
}
_held: list[int] = []


def use(setting: str) -> str | None:
    """Carry out a setting, for the whole process from now on.

    Returns:
        the setting, or None where it has no effect: a C library other than glibc, or an allocator that the user has tuned
        or replaced by the environment.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or is_users_own(os.environ):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    for name, value in SETTINGS[setting].items():
        library.mallopt(name, value)
    if setting == "keep":
        while _held:
            library.free(_held.pop())
    else:
        _hold_gaps(library)
    return setting


def is_users_own(environment: Mapping[str, str]) -> bool:
    """Whether the environment tunes or replaces the allocator: what is called here would undo it, or do nothing."""
    named = any(name.startswith("MALLOC_") for name in environment)
    words = {"GLIBC_TUNABLES": "glibc.malloc.", "LD_PRELOAD": "malloc"}
    return named or any(word in environment.get(name, "") for name, word in words.items())


def _hold_gaps(library: ctypes.CDLL) -> None:
    """Take the gaps that an earlier ``keep`` left in the heap: blocks are put there first, and stay there when freed.

    Nobody writes into what is held, so it takes addresses and no memory.
    """
    library.malloc_trim(0)
    size = _LARGEST_BYTES
    while size >= _FROM_BYTES:
        block = library.malloc(size)
        if block and not ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED:
            _held.append(block)
        else:
            library.free(block)
            size //= 2
