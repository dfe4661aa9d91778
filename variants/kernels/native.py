"""Compilation of C++ sources on the machine that runs them.

The sources are plain C++ with OpenMP, without torch's headers. Compilation takes a few seconds,
once for each source, compiler and CPU model. Libraries are stored in ``WINDTUNNEL_KERNELS``, which
the harness sets, or in the folder of torch's extensions. They share torch's threads, because
torch and they load the same libgomp."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
MARCH = "WINDTUNNEL_MARCH"
"""Environment variable with the value of ``-march``, such as ``x86-64-v3``; by default that of
this CPU."""
FOLDER = "WINDTUNNEL_KERNELS"
COMPILERS = ("c++", "g++", "clang++")


def load(name: str, source: str) -> ctypes.CDLL | str:
    """Return the library compiled from ``source``, or the reason why it cannot be compiled or
    loaded.

    The compiler is ``CXX``, or the first of ``COMPILERS`` on the PATH."""
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or list(filter(None, map(shutil.which, COMPILERS)))[:1]
    )
    if not compiler:
        return f"no C++ compiler (none of {', '.join(COMPILERS)} is on the PATH)"
    try:
        return ctypes.CDLL(str(_compile(name, source, compiler)))
    except subprocess.CalledProcessError as error:
        first_line = next(iter((error.stderr or "").strip().splitlines()), error)
        return f"a C++ compiler that fails ({compiler[0]}: {first_line})"
    except (OSError, RuntimeError) as error:  # RuntimeError if the user has no home folder
        return f"a C++ kernel that cannot be built ({error})"


def _compile(name: str, source: str, compiler: list[str]) -> Path:
    """Return the path of the compiled library, which is compiled unless it exists."""
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    flags = (*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}")
    cache_key = "\0".join((source, *flags, *compiler, version, _cpu()))
    folder = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "torch_extensions")
    path = folder / f"{name}-{hashlib.sha256(cache_key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as temporary:
        library = Path(temporary) / path.name
        command = [*compiler, *flags, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=source, capture_output=True, text=True, check=True)
        with open(library, "rb") as file:
            # before the rename: a crash must not leave an incomplete library
            os.fsync(file.fileno())
        os.replace(library, path)  # atomic: other processes see a complete library or none
    return path


def _cpu() -> str:
    """Return properties of the CPU on which -march=native depends: machines with different CPUs may
    share a folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    properties = {
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return "\0".join([platform.machine(), platform.processor(), *sorted(properties)])
