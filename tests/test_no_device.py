"""Backends on tensors without data, as on a GPU: no tensor that is made on a CPU meets them, and no value is waited for."""

import pytest
import torch

from tests.window_case import AWKWARD, Case
from variants.kernels import chunked, fused
from variants.kernels.given import Given

DROPOUT = Case(T=150, max_keys=(24, 64, 24), z=(9.0, 60.0, 3.0), dropout=0.1, vectors=True)
CASES = {fused: AWKWARD, chunked: AWKWARD | {"dropout": DROPOUT}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", CASES, ids=["fused", "chunked"])
def test_shapes_types_and_devices(backend, dtype, monkeypatch):
    monkeypatch.setitem(fused.ENGINES, "meta", fused.ENGINES["cuda"])
    for name, case in CASES[backend].items():
        lost = {field: x.detach().to("meta", dtype) for field, x in case.inputs().items()}
        given = Given(**lost, dropout=case.dropout, seed=torch.empty((), dtype=torch.int64, device="meta"))
        y, saved = backend.forward(given, case.hard())
        assert (y.shape, y.dtype, y.device.type) == (given.q.shape, dtype, "meta"), name
        wanted = frozenset(lost) - {"bias"}
        found = backend.backward(torch.ones_like(y), y, saved, given, case.hard(), wanted)
        for field, gradient in found.items():
            assert (gradient.shape, gradient.dtype) == (lost[field].shape, dtype), (name, field)
            assert gradient.device.type == "meta", (name, field)
