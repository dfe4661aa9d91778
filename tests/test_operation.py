"""Attention as one operation: fake tensors, gradients and FLOPs of what a backend does, by the rules that torch has."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.attention_case import DOUBLE, assert_near, assert_same
from variants.kernels import fused, operation, window
from variants.kernels.window import Persistent, Window

WINDOWS = {"hard": (8, 8), "soft": (11, 6)}


def inputs(*, rows: int, keys: int, width: int = 8, dtype: torch.dtype = DOUBLE) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, width, dtype=dtype, requires_grad=True) for n in (rows, keys, keys)]


def persistent(q: torch.Tensor) -> Persistent:
    k, v = (torch.randn(2, 3, q.shape[-1], dtype=q.dtype, requires_grad=True) for _ in range(2))
    return Persistent((q * 0.5).detach().requires_grad_(), k, v)


def seen(kind: str, dtype: torch.dtype = DOUBLE) -> Window:
    z = torch.tensor([8.0, 1.5], dtype=dtype, requires_grad=True) if kind == "soft" else None
    return Window(WINDOWS[kind], 0, z, 3 if kind == "soft" else 0)


@pytest.mark.parametrize("kind", WINDOWS)
def test_it_is_the_plain_function(kind):
    q, k, v = inputs(rows=5, keys=12)
    look, extra = seen(kind), persistent(q)
    named = {"q": q, "k": k, "v": v} | {f"persistent {name}": x for name, x in extra._asdict().items()}
    named |= {} if look.z is None else {"z": look.z}
    y = operation.attend("fused", q, k, v, look, persistent=extra)
    assert_same(y, window.attend(q, k, v, look, persistent=extra), named=named)


def test_keys_of_the_segment_alone_have_gradients_where_they_are_given():
    q, k, v = inputs(rows=5, keys=12)
    whole = torch.autograd.grad(operation.attend("fused", q, k, v, seen("soft")).square().sum(), (q, k, v))
    segment = tuple(x.detach()[:, :, -5:].requires_grad_() for x in (k, v))
    y = operation.attend("fused", q, k.detach(), v.detach(), seen("soft"), own=segment)
    alone = torch.autograd.grad(y.square().sum(), (q, *segment))
    for expected, gradient in zip((whole[0], *(x[:, :, -5:] for x in whole[1:])), alone, strict=True):
        assert_near(gradient, expected)


def test_torch_finds_it_well_made():
    """Schema, fake tensors, autograd registration, and that it traces with symbolic shapes."""
    q, k, v = inputs(rows=5, keys=12, dtype=torch.float32)
    look, extra = seen("soft", torch.float32), persistent(q)
    arguments = ("fused", torch.tensor(look.max_keys), 0, look.ramp, 0.0, q, k, v, look.z, *extra)
    torch.library.opcheck(torch.ops.windtunnel.attention_forward.default, (*arguments, None, None, None, None, None))


def test_a_layout_that_a_graph_chose_changes_nothing():
    """Elements of a row that lie apart: torch's flash attention for CPUs reads them as if they did not."""
    q, k, v = (x.detach() for x in inputs(rows=5, keys=5, dtype=torch.float32))
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    look = seen("hard")
    assert apart[0].stride(-1) != 1
    assert torch.equal(operation.attend("fused", *apart, look), operation.attend("fused", q, k, v, look))


@pytest.mark.parametrize("traced", [False, True])
def test_its_flops_are_counted(traced):
    q, k, v = inputs(rows=5, keys=12, dtype=torch.float32)
    look = seen("soft", torch.float32)

    def loss(q, k, v, z):
        limited = look._replace(z=z, limits=torch.tensor(look.max_keys))
        return operation.attend("fused", q, k, v, limited).square().sum()

    torch.compiler.reset()
    call = torch.compile(loss, backend="aot_eager") if traced else loss
    with FlopCounterMode(display=False) as counter:
        call(q, k, v, look.z).backward()
    sizes = {"streams": 2, "rows": 5, "keys": 12, "width": 8, "persistent": 0}
    assert counter.get_total_flops() == sum(fused.executed_flops(look, device=q.device, **sizes))
