"""Run the C++ kernels at random shapes under the address and undefined-behaviour sanitizers.

Each run is a process that preloads the library of the sanitizers. Memory that kernels normally
reuse between calls is allocated anew at each call and filled with NaN, so that reads beyond its end
or before a write are detected. Outputs and gradients are compared with those of plain PyTorch.
``test_kernel_sanitizers.py`` starts the processes."""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.support.attention_case import DOUBLE, assert_same
from tests.support.command_line import ROOT
from tests.support.window_case import ADDED, Case, kernel
from variants.adaptive_span import bucket
from variants.kernels import native, product_search, window, window_cpu

INSTRUCTIONS = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
"""By value of ``-march``, the flag in /proc/cpuinfo of CPUs that can run its code."""
SANITIZERS = "-g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
MEMORY = (
    "if ((long)memory.size() < size) memory.resize(size);",
    "std::vector<T>(size, T(NAN)).swap(memory);",
)
"""The line of the kernels' source that reuses memory between calls, and the line that replaces
it in these runs."""
FAULTS = {
    "AddressSanitizer: heap-buffer-overflow": MEMORY[1].replace("(size,", "(size - (size > 0),"),
    "runtime error: signed integer "
    "overflow": f"volatile int most = 2147483647; most = most + (size >= 0); {MEMORY[1]}",
}
"""By message of a sanitizer, a line with a fault that causes it, in place of the second line of
``MEMORY``."""
EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300)
"""Sizes just below, at and above multiples of vectors, blocks and chunks."""


def is_supported(march: str) -> bool:
    """Return whether this CPU can run code compiled with ``-march``."""
    return INSTRUCTIONS[march] in Path("/proc/cpuinfo").read_text().split()


def sanitized(
    march: str, *, cases: int, seed: int, fault: str = "", **options
) -> subprocess.CompletedProcess:
    """Run ``fuzz`` in a process whose kernels are compiled with the sanitizers, ``-march``, and
    ``fault`` if set."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout
    command = [sys.executable, "-m", "tests.faults.sanitizer_runs", str(cases), str(seed), fault]
    with tempfile.TemporaryDirectory(prefix="sanitized-") as folder:
        # Leaks are not detected, because Python has some. The compiler runs without the sanitizers.
        variables = {
            "CXX": f"env -u LD_PRELOAD g++ {SANITIZERS}",
            native.MARCH: march,
            native.FOLDER: folder,
        }
        variables |= {"LD_PRELOAD": library.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run(command, cwd=ROOT, env=os.environ | variables, **options)


def fuzz(*, cases: int, seed: int, memory: str):
    """Compare random cases. A wrong one prints its number and raises AssertionError; a sanitizer
    ends the process."""
    assert window_cpu.SOURCE.count(MEMORY[0]) == 1
    window_cpu.SOURCE = window_cpu.SOURCE.replace(MEMORY[0], memory)
    reasons = window_cpu.obstacle(), product_search.obstacle()
    assert reasons == (None, None), reasons
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        torch.manual_seed(case)
        torch.set_num_threads(draw.choice((1, 1, 2, 5)))
        try:
            search(draw) if case % 5 == 0 else attend(draw)
        except AssertionError:
            print(f"case {case} of seed {seed}", file=sys.stderr)
            raise


def attend(draw: random.Random):
    """Compare the CPU kernel's attention and the gradients of some inputs with those of the
    plain backend."""
    edges = EDGES if draw.random() < 0.1 else EDGES[:14]
    rows, span, ramp = *draw.choices(edges, k=2), draw.choice((1, 2, 5, 8, 32))
    sizes = {"T": rows, "past": draw.choice((0, *edges)), "shift": draw.randrange(2), "ramp": ramp}
    sizes |= {"max_keys": (span,) * draw.choice((1, 1, 2, 3)), "streams": draw.choice((1, 1, 2, 3))}
    if draw.random() < 0.5:
        ends = (0.0, float(span), draw.uniform(0, span), draw.randint(0, span))
        sizes["z"] = tuple(draw.choice(ends) for _ in sizes["max_keys"])
        sizes["max_keys"] = tuple(min(span, bucket(int(n) + ramp + 1)) for n in sizes["z"])
    sizes |= {
        "width": draw.choice((1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 33)),
        **draw.choice([*ADDED.values()]),
    }
    case = Case(
        persistent=draw.choice((0, 0, 1, 3, 8, 40, 257)),
        dtype=draw.choice((DOUBLE, torch.float32)),
        **sizes,
    )
    inputs = case.inputs()
    leaves = [name for name, x in inputs.items() if x.requires_grad and draw.random() < 0.7] or [
        "q"
    ]
    inputs = {name: x.detach().requires_grad_(name in leaves) for name, x in inputs.items()}
    named, tolerance = (
        {name: inputs[name] for name in leaves},
        1e-9 if case.dtype == DOUBLE else 5e-4,
    )
    assert_same(
        case.call(kernel, inputs),
        case.call(window.attend, inputs),
        named=named,
        tolerance=tolerance,
    )


def search(draw: random.Random):
    """Compare the search of a product-key memory, sometimes with equal scores, with a sort of
    all sums."""
    heads, queries, size = draw.choice((1, 2, 3)), draw.choice((1, 2, 5, 33)), draw.choice(EDGES)
    top_k, dtype = draw.randint(1, size), draw.choice((DOUBLE, torch.float32))
    scores = torch.randn(2 * heads, queries, size, dtype=dtype)
    scores = scores.round() if draw.random() < 0.3 else scores
    slots, sums = product_search.search(scores, top_k)
    first, second = scores.unflatten(0, (heads, 2)).unbind(1)  # [H, n, C]
    all_sums = (first[..., :, None] + second[..., None, :]).flatten(-2)
    assert torch.equal(
        sums.sort(-1).values.transpose(0, 1), all_sums.topk(top_k).values.sort(-1).values
    )
    assert torch.equal(all_sums.gather(-1, slots.transpose(0, 1)), sums.transpose(0, 1))
    assert all(len(set(row)) == top_k for row in slots.flatten(0, 1).tolist())


if __name__ == "__main__":
    number_of_cases, first_seed, planted = sys.argv[1:]
    fuzz(cases=int(number_of_cases), seed=int(first_seed), memory=FAULTS.get(planted, MEMORY[1]))
