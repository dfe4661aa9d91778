"""Write the golden files of cases whose ``numerics`` are new: `python -m tests.golden [case ..]`.

`check` compares without writing; `check plain` and `check kernel` measure by that backend alone."""

import json
import sys
from collections.abc import Sequence

from tests.golden import BACKENDS, CASES, differences, explanation, measure, numerics, path_of, read


def main(words: list[str]) -> int:
    """Write or compare files. Returns the exit code: 1 if a number moved and ``numerics`` are
    those of its file."""
    checking, only = "check" in words, [word for word in words if word in BACKENDS]
    cases = [word for word in words if word not in ("check", *BACKENDS)] or CASES
    moved = {
        case: _moved(case, (checking and only) or BACKENDS, checking=checking) for case in cases
    }
    messages = [explanation(case, differing) for case, differing in moved.items() if differing]
    print("\n".join(messages) or "all as in the files")
    return 1 if messages else 0


def _moved(case: str, backends: Sequence[str], *, checking: bool) -> list[str]:
    """Write the file of a case if its ``numerics`` are new, unless ``checking``. Returns the
    numbers that moved."""
    measured = {name: numbers for name in backends if (numbers := measure(case, backend=name))}
    file = read(case) if path_of(case).exists() else {}
    if not checking and file.get("numerics") != (current := numerics(case)):
        file = (
            {"numerics": current}
            | {k: file[k] for k in ("tolerance", "why") if k in file}
            | measured["plain"]
        )
        for key in ("state_bytes", "executed_flops_per_byte"):
            file[key] = {name: numbers[key][name] for name, numbers in measured.items()}
        path_of(case).write_text(json.dumps(file, indent=1) + "\n")
        print("written", case)
    lost = {*backends} & {*file.get("state_bytes", ())} - measured.keys()
    moved = [f"{name} is not measured now" for name in lost]
    return moved + [
        f"{name}: {line}"
        for name, numbers in measured.items()
        for line in differences(file, numbers)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
