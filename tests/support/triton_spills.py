"""Compile every configuration of the Triton kernels without a device, and print the resources that
it needs.

    python -m tests.support.triton_spills [word ...]

Each line has a kernel's registers, the bytes that it spills, and its shared memory. With words,
only configurations whose line contains all of them are compiled. The exit code is 1 if a kernel
spills or needs more shared memory than a block of threads may have. TRITON_INTERPRET must not be
set."""

import contextlib
import io
import re
import sys
import tempfile
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from variants.kernels import _triton_kernels as kernels
from variants.kernels import triton_window

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory of a block of threads, by compute capability (CUDA programming guide, table
of memory limits)."""
WIDTHS = (16, 32, 64, 96, 128)
DTYPES = {
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "ieee"),
}
PARTS = {
    "persistent": {"ALL": True, "ramp_end": None, "table": None, "vectors": None},
    "persistent+vectors": {"ALL": True, "ramp_end": None, "table": None, "vectors": None},
    "hard": {"ramp_end": None, "table": None, "vectors": None, "dz": None},
    "soft": {"table": None, "vectors": None},
    "soft+table": {"vectors": None},
    "hard+vectors": {"ramp_end": None, "table": None, "dz": None},
    "soft+vectors": {"table": None},
}
BIASES = dict.fromkeys(("key_bias", "query_bias", "dkey_bias", "dquery_bias"))
TYPES = dict.fromkeys(
    ("prior", "prior_lse", "lse", "delta", "dz", "ramp_end", "table", "dvectors"), "*fp32"
)
TYPES |= {"heads": "*i32", "seed": "*i64"}
FLOAT32_OUTPUTS = {"forward": ("y",), "query_gradient": (), "key_gradient": ("dk", "dv")}
"""Outputs for persistent vectors in float32: y is merged with the window's, and dk and dv are
summed over streams."""


def build(
    name: str, options: dict, part: str, *, architecture: int, dtype: str, width: int, dropout: bool
) -> tuple:
    """Return the registers of a thread, bytes that it spills, and bytes of shared memory, as the
    compiler reports them."""
    kernel, persistent = getattr(kernels, name), "persistent" in part
    constants = (
        {"ALL": False, "SEGMENT_ONLY": True, "table": None, "DROP": 2**30, "SCALE": 1.25}
        | BIASES
        | PARTS[part]
    )
    constants |= {
        "K": width,
        "WIDTH": triton_window.padded_width(width),
        "PRECISION": DTYPES[dtype][1],
    }
    constants |= {"BLOCK": options["BLOCK"]} | (
        {} if dropout else {"seed": None, "DROP": 0, "SCALE": 1.0}
    )
    constants |= (
        dict.fromkeys(("prior", "prior_lse", "dz")) | {"SEGMENT_ONLY": False} if persistent else {}
    )
    constants = {
        argument: constants[argument] for argument in kernel.arg_names if argument in constants
    }
    types = TYPES | dict.fromkeys(
        ("g", "q", "k", "v", "y", "dq", "dk", "dv", "vectors"), f"*{dtype[:4].replace('tf', 'fp')}"
    )
    types |= dict.fromkeys(FLOAT32_OUTPUTS[name], "*fp32") if persistent else {}
    types = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    attributes = {
        (at,): [["tt.divisibility", 16]] for at, x in enumerate(types.values()) if x.startswith("*")
    }
    log, launch = (
        io.StringIO(),
        {option: number for option, number in options.items() if option != "BLOCK"},
    )
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.cache.scope(),
        # an empty cache: a cached kernel would have no log
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.nvidia.dump_ptxas_log, triton.knobs.cache.dir = True, folder
        source, target = (
            ASTSource(kernel, types, constants, attributes),
            GPUTarget("cuda", architecture, 32),
        )
        shared = triton.compile(source, target=target, options=launch).metadata.shared
    lines = (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    return *(int(re.search(line, log.getvalue())[1]) for line in lines), shared


def main(words: list[str]) -> int:
    """Print a line for each configuration. Returns how many of them spill or need too much
    shared memory."""
    n_failures, names = 0, ("forward", "query_gradient", "key_gradient", "vector_gradient")
    for architecture, dtype, width, part, dropout, name in product(
        SHARED_BYTES, DTYPES, WIDTHS, PARTS, (True, False), names
    ):
        if name == "vector_gradient" and part not in ("hard+vectors", "soft+vectors"):
            continue
        kind, precision = DTYPES[dtype]
        choices = {
            "precision": precision,
            "vectors": "vectors" in part,
            "architecture": architecture,
        }
        options = triton_window.launch_options(width, kind, **choices)
        options |= triton_window.key_gradient_options(options) if name == "key_gradient" else {}
        line = f"sm_{architecture} {dtype} K={width} {name} {part} {'dropout' if dropout else '-'}"
        if all(word in line.split() for word in words):
            choices = {
                "architecture": architecture,
                "dtype": dtype,
                "width": width,
                "dropout": dropout,
            }
            registers, spilled, shared = build(name, options, part, **choices)
            n_failures += bool(spilled) or shared > SHARED_BYTES[architecture]
            needs = f"{registers} registers, {spilled} bytes spilled, {shared} bytes shared"
            print(f"{line} {options}: {needs}", flush=True)
    return n_failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
