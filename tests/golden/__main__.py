"""Write the golden files of whatever has new ``numerics``: `python -m tests.golden [case ..]`.

With `check` it only compares, with `plain` or `kernel` beside it by that backend alone.
"""

import json
import sys
from collections.abc import Sequence

from tests.golden import BACKENDS, CASES, differences, explained, measure, numerics, path_of, read


def main(words: list[str]) -> int:
    """Exit code: 1 where a number differs that was not to move."""
    checking, only = "check" in words, [word for word in words if word in BACKENDS]
    cases = [word for word in words if word not in ("check", *BACKENDS)] or CASES
    moved = [told for case in cases for told in _one(case, (checking and only) or BACKENDS, checking=checking)]
    print("\n".join(moved) or "all as in the files")
    return 1 if moved else 0


def _one(case: str, backends: Sequence[str], *, checking: bool) -> list[str]:
    by_backend = {name: found for name in backends if (found := measure(case, backend=name))}
    old = read(case) if path_of(case).exists() else {}
    if checking or old.get("numerics") == numerics(case):
        moved = [f"{name}: {told}" for name, found in by_backend.items() for told in differences(old, found)]
        return [explained(case, moved)] if moved else []
    file = {"numerics": numerics(case)} | {key: old[key] for key in ("tolerance", "why") if key in old}
    file |= by_backend["plain"]
    for key in ("state_bytes", "executed_flops_per_byte"):
        file[key] = {name: found[key][name] for name, found in by_backend.items()}
    path_of(case).write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
    print("written", case)
    return [explained(case, moved)] if (moved := differences(file, by_backend.get("kernel", {}))) else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
