"""Compiles C++ sources on the machine that runs them.

The sources are plain C++ with OpenMP, without torch's headers. Compiling takes a few seconds, once per source, compiler
and kind of CPU. The library is kept in ``WINDTUNNEL_KERNELS``, which the harness sets, or where torch keeps its
extensions. It shares torch's threads, because both load libgomp.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
MARCH = "WINDTUNNEL_MARCH"
"""Environment variable with the CPU to compile for, if not this one: a value of ``-march``, as ``x86-64-v3``."""
FOLDER = "WINDTUNNEL_KERNELS"
COMPILERS = ("c++", "g++", "clang++")


def load(name: str, source: str) -> ctypes.CDLL | str:
    """The library compiled from ``source``, or the reason why there is none.

    The compiler is ``CXX``, or the first of ``COMPILERS`` on the PATH.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or list(filter(None, map(shutil.which, COMPILERS)))[:1]
    if not compiler:
        return f"no C++ compiler (none of {', '.join(COMPILERS)} is on the PATH)"
    try:
        return ctypes.CDLL(str(_built(name, source, compiler)))
    except subprocess.CalledProcessError as error:
        first = next(iter((error.stderr or "").strip().splitlines()), error)
        return f"a C++ compiler that fails ({compiler[0]}: {first})"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return f"a C++ kernel that cannot be built ({error})"


def _built(name: str, source: str, compiler: list[str]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = (*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}")
    facts = "\0".join((source, *flags, *compiler, version, _cpu()))
    folder = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "torch_extensions")
    path = folder / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as passing:
        built = Path(passing) / path.name
        command = [*compiler, *flags, "-x", "c++", "-", "-o", str(built)]
        subprocess.run(command, input=source, capture_output=True, text=True, check=True)
        with open(built, "rb") as file:
            os.fsync(file.fileno())  # before the rename: a crash must not leave an incomplete library
        os.replace(built, path)  # others see a whole library or none
    return path


def _cpu() -> str:
    """Facts that -march=native may depend on: machines of several kinds may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    own = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\0".join([platform.machine(), platform.processor(), *sorted(own)])
