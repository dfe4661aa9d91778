"""FlexAttention's fixed window as a peer: what it computes, and where it takes part."""

import pytest
import torch
import torch.nn.functional as F

from bench.baselines.packages import PACKAGES, Memory, Sizes
from bench.baselines.reference_model import ReferenceModel, WindowAttention, WindowModel
from tests.command import call
from tests.command import empty_folder as here  # noqa: F401 - a fixture
from variants.kernels.window import visible

MEMORY = Memory(half_keys=32, top_k=4, heads=2, d_query=8)
SIZES = Sizes(vocabulary=256, d_model=32, layers=2, heads=2, context=24, persistent=8, window=7, memory=MEMORY)


@pytest.mark.numeric
@torch.no_grad()  # torch has no backward pass of it on a CPU
def test_a_window_as_wide_as_the_context_is_the_reference_model():
    whole = PACKAGES["flex-window"].arguments(SIZES) | {"window": 24}
    flex, plain = WindowModel(**whole), ReferenceModel(**PACKAGES["reference_model"].arguments(SIZES))
    plain.load_state_dict(flex.state_dict())
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(flex(tokens), plain(tokens), atol=1e-4)


@pytest.mark.numeric
def test_a_query_sees_its_window_and_no_more():
    model = PACKAGES["flex-window"].build(SIZES, PACKAGES["flex-window"].arguments(SIZES))
    q, k, v = torch.randn(3, 2, 2, 24, 16, generator=torch.Generator().manual_seed(0))
    seen = visible(24, 24, 7, shift=0, device=q.device)
    found = WindowAttention(32, heads=2).attend(q, k, v, model.mask(24, q.device))
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, attn_mask=seen), atol=1e-5)
    assert model.mask(24, q.device) is model.mask(24, q.device)


def test_on_a_cpu_it_is_refused_with_a_word(here):  # noqa: F811
    ended = call("bench/peers.py", "peers=[flex-window]", "runtime.device=cpu", "data.bytes=20000")
    assert ended.code == 2 and "peers=[flex-window]" in ended.err and "runtime.device=cuda only" in ended.err
    assert "x-transformers" in ended.err and not list(here.iterdir())
