"""The gate before anything is measured: a variant that breaks the contract is refused."""

import hashlib
import json
import platform
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch and all that needs it is imported late, so that a wrong word is answered at once
    from harness.plan.build import Plan
    from variants.conformance import Finding


def gate(plan: "Plan") -> "list[Finding]":
    """The promises that a plan breaks, in a second or two, or at once where nothing has changed since they were kept.

    The plan is checked with its own position scheme, cache, ``attend_self``, dropout and path, at the sizes of
    ``bench.conformance.shrunk``, in float64 on the CPU. That nothing was broken is remembered in the user's cache folder,
    under a hash of configuration, code and versions; breaks never are, nor variants from outside.

    Raises:
        ValueError: the plan cannot be built, or its path cannot run.
    """
    from bench.conformance import findings, shrunk
    from harness import source
    from harness.cache import cache_folder, write_whole

    small = shrunk(plan)
    what = {
        "config": [small.config["variant"], small.config["model"] | {"default_bytes": None}, small.config["position"]],
        "vocabulary": small.data["vocabulary"],
        "path": small.runtime.path,
        "code": source.digest(measuring=True),
        "versions": [platform.python_version(), platform.machine(), *map(version, ("torch", "einops"))],
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    kept = cache_folder() / "gate" / key
    if not small.trust and kept.exists():
        return []
    broken = [finding for finding in findings(small) if not finding.passed]
    if not small.trust and not broken:
        with suppress(OSError):  # then the next call checks again
            write_whole(kept, b"")
    return broken


def passed(plan: "Plan") -> None:
    """Refuse to measure a variant that breaks the contract: ValueError naming it and the first breaks."""
    broken = gate(plan)
    if broken:
        first = "; ".join(f"{finding.promise}: {finding.detail}" for finding in broken[:2])
        more = f"; and {len(broken) - 2} more" if len(broken) > 2 else ""
        raise ValueError(
            f"variant={plan.variant}: breaks the contract, so it is not measured: {first}{more}; "
            f"all of it says python -m bench.check variant={plan.variant}"
        )
