"""What the compiler says of every configuration of the Triton kernels that is used, without a device.

    python -m tests.triton_spills [word ...]

A line a kernel: registers, bytes of registers spilled to memory, shared memory. Words keep the lines that hold all of
them. Exits with 1 if a kernel spills or asks for more shared memory than a multiprocessor has. TRITON_INTERPRET must not
be set.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from variants.kernels import _triton_kernels as kernels
from variants.kernels import triton_window

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one block of threads may ask for, for each architecture (CUDA's compute capabilities, table of memory limits)."""
WIDTHS = (16, 32, 64, 96, 128)
DTYPES = {"bf16": (torch.bfloat16, "ieee"), "tf32": (torch.float32, "tf32"), "fp32": (torch.float32, "ieee")}
PARTS = {
    "persistent": {"ALL": True, "far": None, "table": None, "vectors": None},
    "persistent+vectors": {"ALL": True, "far": None, "table": None, "vectors": None},
    "hard": {"far": None, "table": None, "vectors": None},
    "soft": {"table": None, "vectors": None},
    "soft+table": {"vectors": None},
    "hard+vectors": {"far": None, "table": None},
    "soft+vectors": {"table": None},
}
FLOATS = ("start", "start_lse", "lse", "delta", "dz", "far", "table", "dvectors")
PARTIAL = {"forward": ("y",), "query_gradient": (), "key_gradient": ("dk", "dv")}
"""What kernels give in float32 for persistent vectors, because something is added to it."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One kernel as it is launched."""

    kernel: str
    architecture: int
    dtype: str
    width: int
    part: str
    dropout: bool

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options().items())
        dropout = "dropout" if self.dropout else "-"
        return f"sm_{self.architecture} {self.dtype} K={self.width} {self.kernel} {self.part} {dropout} {options}"

    def options(self) -> dict[str, int]:
        dtype, precision = DTYPES[self.dtype]
        return triton_window.launch_options(self.width, dtype, precision=precision, vectors="vectors" in self.part)

    def compile(self) -> tuple[int, int, int]:
        """Registers of a thread, bytes that it stores beside them, and shared memory, as the compiler says."""
        options = self.options()
        given = {"ALL": False, "table": None, "DROP": 2**30, "SCALE": 1.25} | PARTS[self.part]
        given |= {"K": self.width, "WIDTH": triton_window.padded(self.width), "PRECISION": DTYPES[self.dtype][1]}
        given |= {"BLOCK": options.pop("BLOCK")} | ({} if self.dropout else {"seed": None, "DROP": 0, "SCALE": 1.0})
        kernel = getattr(kernels, self.kernel)
        constants = {name: given[name] for name in kernel.arg_names if name in given}
        if "persistent" in self.part:
            constants |= {name: None for name in ("start", "start_lse", "dz") if name in kernel.arg_names}
        elif self.part.startswith("hard") and "dz" in kernel.arg_names:
            constants["dz"] = None
        types = {name: "constexpr" if name in constants else self._type(name) for name in kernel.arg_names}
        attributes = {(at,): [["tt.divisibility", 16]] for at, x in enumerate(types.values()) if x.startswith("*")}
        log, target = io.StringIO(), GPUTarget("cuda", self.architecture, 32)
        with (
            triton.knobs.nvidia.scope(),
            triton.knobs.cache.scope(),
            tempfile.TemporaryDirectory() as folder,  # what was compiled before is not compiled again, and says nothing
            contextlib.redirect_stdout(log),
        ):
            triton.knobs.nvidia.dump_ptxas_log, triton.knobs.cache.dir = True, folder
            built = triton.compile(ASTSource(kernel, types, constants, attributes), target=target, options=options)
        registers, spilled = (
            int(re.search(line, log.getvalue())[1]) for line in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
        )
        return registers, spilled, built.metadata.shared

    def _type(self, name: str) -> str:
        if name in FLOATS or ("persistent" in self.part and name in PARTIAL[self.kernel]):
            return "*fp32"
        if name in ("g", "q", "k", "v", "y", "dq", "dk", "dv", "vectors"):
            return "*bf16" if self.dtype == "bf16" else "*fp32"
        return {"max_keys": "*i32", "order": "*i32", "seed": "*i64"}.get(name, "i32")


def configurations() -> Iterator[Configuration]:
    """All that ``triton_window`` launches."""
    for architecture, dtype, width, part, dropout in product(SHARED_BYTES, DTYPES, WIDTHS, PARTS, (True, False)):
        same = {"architecture": architecture, "dtype": dtype, "width": width, "part": part, "dropout": dropout}
        for kernel in ("forward", "query_gradient", "key_gradient", "vector_gradient"):
            if kernel != "vector_gradient" or part in ("hard+vectors", "soft+vectors"):
                yield Configuration(kernel=kernel, **same)


def main(words: list[str]) -> int:
    """Print a line for each configuration; how many spill or need too much."""
    bad = 0
    for configuration in configurations():
        if not all(word in str(configuration).split() for word in words):
            continue
        registers, spilled, shared = configuration.compile()
        bad += bool(spilled) or shared > SHARED_BYTES[configuration.architecture]
        print(f"{configuration}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
