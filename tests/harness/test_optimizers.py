"""Adagrad, compared with a loop, and Muon, compared with ``torch.optim.Muon``."""

import pytest
import torch
from torch import nn

from harness.optim import ClippedAdagrad, Muon
from harness.optim.muon import product_dtype

pytestmark = pytest.mark.numeric


def adagrad_reference(weights, gradients, *, lr, clip, eps):
    """Return the update of the published code, in Python floats by loops over numbers."""
    totals = [[0.0] * len(weight) for weight in weights]
    for tensors in gradients:
        for weight, total, gradient in zip(weights, totals, tensors, strict=True):
            norm = sum(g * g for g in gradient) ** 0.5
            rate = lr * clip / norm if norm > clip else lr
            for i, g in enumerate(gradient):
                total[i] += g * g
                weight[i] -= rate * g / (total[i] ** 0.5 + eps)
    return weights


@pytest.mark.parametrize("clip", [0.03, 1e9])
def test_adagrad_equals_the_loop(clip):
    torch.manual_seed(1)
    start = [torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    history = [
        [torch.randn(5).double() * s, torch.randn(3).double() * 0.01] for s in (1.0, 0.02, 3.0, 0.0)
    ]
    parameters = [nn.Parameter(value.clone()) for value in start]
    optimizer = ClippedAdagrad(parameters, lr=0.07, clip=clip)
    for gradients in history:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    expected = adagrad_reference(
        [value.tolist() for value in start],
        [[gradient.tolist() for gradient in tensors] for tensors in history],
        lr=0.07,
        clip=clip,
        eps=1e-10,
    )
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(
            parameter.detach(), torch.tensor(value, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_adagrad_accepts_sparse_gradients_with_repeated_rows():
    dense, sparse = (nn.Parameter(torch.ones(6, 2, dtype=torch.float64)) for _ in range(2))
    optimizers = [
        ClippedAdagrad([dense], lr=0.1, clip=0.5),
        ClippedAdagrad([sparse], lr=0.1, clip=0.5),
    ]
    for rows in ([1, 4, 1], [4, 5, 5]):
        values = torch.randn(3, 2, dtype=torch.float64)
        sparse.grad = torch.sparse_coo_tensor(
            torch.tensor([rows]), values, (6, 2), check_invariants=True
        )
        dense.grad = sparse.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-14)
    assert torch.equal(sparse[0], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    "precision, dtype, tolerance",
    [
        # with 8 significant bits, the error of an update is a few percent
        ("bfloat16", torch.float32, 0.05),
        ("float32", torch.float32, 1e-4),
        ("auto", torch.float64, 1e-12),
    ],
)
def test_muon_equals_that_of_torch(precision, dtype, tolerance, monkeypatch):
    """torch's Muon multiplies in bfloat16 only, so for other precisions the test replaces its
    conversion by a copy."""
    if precision != "bfloat16":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(5)
    shapes = [(16, 16), (48, 16), (16, 48), (16, 16), (48, 16)]
    start = [torch.randn(shape, dtype=dtype) * 0.1 for shape in shapes]
    ours = [nn.Parameter(value.clone()) for value in start]
    theirs = [nn.Parameter(value.clone()) for value in start]
    lr, decay, steps = 0.02, 0.1, 5
    optimizers = [
        Muon(ours, lr=lr, momentum=0.95, weight_decay=decay, precision=precision),
        torch.optim.Muon(theirs, lr=lr, momentum=0.95, weight_decay=decay, adjust_lr_fn="original"),
    ]
    for _ in range(steps):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, value in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < tolerance * (b - value).norm(), a.shape


@pytest.mark.parametrize("amx", [False, True])
def test_muons_products_have_the_configured_precision_and_auto_depends_on_the_cpu(amx, monkeypatch):
    monkeypatch.setattr("harness.optim.muon._has_amx", lambda: amx)
    likes = [
        torch.zeros(1, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    auto = torch.bfloat16 if amx else torch.float32
    assert [product_dtype("auto", like=like) for like in likes] == [torch.float64, auto, auto]
    assert [product_dtype(name, like=likes[1]) for name in ("float32", "bfloat16")] == [
        torch.float32,
        torch.bfloat16,
    ]
