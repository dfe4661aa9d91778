"""Load: what others took of the machine's cores while something was timed. Their work makes times longer, not memory.

Linux counts how long all cores were busy, how long a hypervisor withheld them (``/proc/stat``), and how long each
process ran; what is left after this process and its descendants is others'. Elsewhere the load average has to do.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TAKEN_CORES, LEAST_SECONDS, WAITING = 0.1, 0.2, 0.5
"""Busy is a tenth of a core, since a step waits for its slowest thread; at least 0.2 s of work, since the system counts
in hundredths; and half a process too many in the load average, where nothing else is counted."""


class Reading(NamedTuple):
    """Seconds since some moment in the past: by the clock, others' of processor time, and withheld by a hypervisor."""

    clock: float
    others: float
    stolen: float


class LoadMeter:
    """What others took since this was made, beside a process that computes on so many cores (``wanted``): descendants
    of ``root``, or of this one, are no others."""

    def __init__(self, *, wanted: int, root: int | None = None):
        self._wanted, self._root = wanted, root or os.getpid()
        self._average, self._before = os.getloadavg()[0], read(self._root)

    def read(self) -> dict[str, float | bool | None]:
        """As rows have it; seconds and cores are None where the system does not count, as in some sandboxes."""
        load = {"average_at_start": self._average, "cores": os.cpu_count() or 1, "wanted_cores": self._wanted}
        load |= dict.fromkeys(("seconds", "others_cores", "stolen_cores"))
        after = read(self._root)
        if self._before and after:
            seconds, others, stolen = (end - begin for end, begin in zip(after, self._before, strict=True))
            seconds = max(seconds, 1e-9)
            load |= {"seconds": seconds, "others_cores": max(0.0, others) / seconds, "stolen_cores": stolen / seconds}
        return load | {"busy": is_busy(load)}


def read(root: int) -> Reading | None:
    """The machine's counters without the processor time of the process ``root`` and its descendants; None without
    counters."""
    parents, ticks, hertz = {}, {}, os.sysconf("SC_CLK_TCK")
    try:
        counters = (PROC / "stat").read_text(encoding="ascii").partition("\n")[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, stolen = map(int, counters)
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            words = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            number = int(path.parent.name)
            parents[number], ticks[number] = int(words[1]), sum(map(int, words[11:15]))  # with ended children's

    def descends(number: int) -> bool:
        return number == root or (number in parents and descends(parents[number]))

    busy = user + nice + system + interrupts + soft
    others = busy - sum(ticks[number] for number in ticks if descends(number))
    return Reading(time.monotonic(), others / hertz, stolen / hertz) if busy else None


def is_busy(load: Mapping[str, float | None]) -> bool:
    """Whether others had more than a tenth of the cores that were wanted, what a hypervisor withheld included; what
    they did on cores that would have been idle does not count."""
    spare = max(0, load["cores"] - load["wanted_cores"])
    if load["others_cores"] is None:
        return load["average_at_start"] > spare + WAITING
    missing = max(0.0, load["others_cores"] - spare) + load["stolen_cores"]
    return missing > max(TAKEN_CORES, LEAST_SECONDS / load["seconds"])
