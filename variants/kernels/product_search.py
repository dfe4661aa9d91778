"""The search of a product-key memory on a CPU: ``product_search.cpp``, compiled at its first use
(``native.py``)."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from variants.kernels import native

CPU = torch.device("cpu")
SOURCE = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")


@torch.compiler.assume_constant_result
def obstacle(device: torch.device = CPU) -> str | None:
    """Return the reason why this search cannot run on ``device``; None if it can."""
    if device.type != "cpu":
        return f"runtime.device={device.type}"
    library = _library()
    if isinstance(library, str):
        return library
    return None


@torch.library.custom_op("windtunnel::product_search", mutates_args=(), device_types="cpu")
def search(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest sums of one score of each half, for each query and head.

    Args:
        scores: float32 or float64 ``[2 H, n, C]``, with the two halves of a head next to each
            other.
        top_k: from 1 to C.

    Returns: slots i C + j, int64, and their sums; both are ``[n, H, top_k]`` in any order."""
    scores = scores.contiguous()
    n_halves, queries, size = scores.shape
    slots, sums = _empty_results(scores, top_k)
    c_type = {torch.float32: "float", torch.float64: "double"}[scores.dtype]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (scores, slots, sums)]
    sizes = [ctypes.c_int64(n) for n in (n_halves // 2, queries, size, top_k)]
    getattr(_library(), f"search_{c_type}")(*pointers, *sizes, torch.get_num_threads())
    return slots, sums


@search.register_fake
def _empty_results(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[1], scores.shape[0] // 2, top_k)
    return scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape)


@lru_cache
def _library() -> ctypes.CDLL | str:
    return native.load("product_search", SOURCE)
