"""The counter of FLOPs against numbers worked out by hand: single operations, what kernels say that they execute, and models."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.count.flops import count_flops, forward_flops_per_byte
from harness.model import LanguageModel
from variants.adaptive_span import AdaptiveSpan
from variants.attention import Attention
from variants.contract import LayerContext, Sublayer, SublayerOutput
from variants.feed_forward import FeedForward
from variants.kernels import window_cpu
from variants.kernels.window import PastKV, Window
from variants.local import LocalAttention
from variants.position import Rotary
from variants.product_key_memory import ProductKeyMemory

aten = torch.ops.aten


def heads(rows: int, keys: int, **choices) -> list[Tensor]:
    """Queries, keys and values of 2 streams, 3 heads, 8 wide."""
    return [torch.randn(2, 3, length, 8, **choices) for length in (rows, keys, keys)]


PLAIN = (None, True, 0.0)  # no bias, with what the backward needs, no dropout
ATTENTION = {
    "cpu": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    "flash": lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0],
    "efficient": lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(q, k, v, *PLAIN, causal)[0],
    "cudnn": lambda q, k, v, causal: aten._scaled_dot_product_cudnn_attention(q, k, v, *PLAIN, causal)[0],
}


@pytest.mark.numeric
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_attention_counts_the_pairs_that_are_visible(kernel, causal):
    rows, keys = (7, 5) if kernel == "cpu" else (7, 7)
    pairs = int(torch.ones(rows, keys).tril().sum()) if causal else rows * keys
    place = {} if kernel == "cpu" else {"device": "meta", "dtype": torch.bfloat16}  # shapes alone: no GPU is needed
    q, k, v = heads(rows, keys, requires_grad=True, **place)
    forward = partial(ATTENTION[kernel], q, k, v, causal)
    assert count_flops(forward) == (4 * 2 * 3 * pairs * 8, {})
    whole = count_flops(lambda: forward().sum().backward(), gradients=True)
    assert whole == ((4 + 10) * 2 * 3 * pairs * 8, {"sum": 1})  # two products forward, five backward


# 12 rows of a table of 9, each 5 wide, in 3 bags.
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_reads_of_a_table_and_their_gradients(weighted, sparse):
    table, rows = torch.randn(9, 5, requires_grad=True), torch.randint(9, (3, 4))
    weights = torch.rand(3, 4, requires_grad=True) if weighted else None

    def read() -> Tensor:
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights, sparse=sparse)

    assert count_flops(read) == ((2 if weighted else 1) * 12 * 5, {})
    passes = 2 + 2 + 2 if weighted else 1 + 1  # forward, gradient of the table, gradient of the weights
    assert count_flops(lambda: read().backward(torch.ones(3, 5)), gradients=True) == (passes * 12 * 5, {})


def test_gradients_of_reading_by_index():
    table, at = torch.randn(9, 5, requires_grad=True), torch.tensor([4, 4, 0])
    reads = {
        "embedding": lambda: F.embedding(at, table),
        "index_select": lambda: table.index_select(0, at),
        "index": lambda: table[at],
        "gather": lambda: table.gather(0, at[:, None].expand(3, 5)),
    }
    for read in reads.values():
        table.grad = None
        assert count_flops(lambda read=read: read().backward(torch.ones(3, 5)), gradients=True) == (3 * 5, {})


def test_operations_without_a_formula_are_named():
    x, at = torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.int64)

    def call():
        assert not torch.is_grad_enabled()
        y = x.softmax(-1).T.contiguous().clone().view(4, 3).double().float()  # one operation, views and copies
        y = torch.cat([y, torch.zeros(4, 3)]).mul(2).mul_(3).exp()
        return y.topk(2), x.gather(1, at), x.index_select(1, at[0]), x[at[0, :1]], x @ x.T

    flops = count_flops(call)
    assert flops.total == 2 * 3 * 4 * 3
    assert list(flops.unknown.items()) == [("mul", 2), ("_softmax", 1), ("exp", 1), ("topk", 1)]


def test_sorts_and_running_sums_count():
    x = torch.randn(3, 5)
    assert count_flops(lambda: x.cumsum(-1)) == (3 * 4, {})  # lines of five
    assert count_flops(lambda: x.cummax(0)) == (2 * 5, {})  # lines of three
    assert count_flops(lambda: x.sort()) == (3 * 5 * 3, {})  # three levels merge up to eight
    assert count_flops(lambda: x.argsort(dim=0, stable=True)) == (5 * 3 * 2, {})
    assert count_flops(lambda: (x[:, :1].sort(), x[:0].cumsum(0), x.int().argsort(stable=True))).total == 0


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("old", [False, True], ids=["past is carried", "past has gradients"])
def test_the_kernel_executes_the_pairs_that_heads_see_and_little_more(old):
    """Chunks are met by blocks of at most 8 rows, so each head's keys and 7 others, and whole vectors of at most 16 keys."""
    rows, past, width, n = 128, 600, 16, (37, 517)  # keys with a weight or a gradient, z + R and the nearest
    q, k, v = (torch.randn(2, 2, rows, width, requires_grad=True) for _ in range(3))
    before = [torch.randn(2, 2, past, width, requires_grad=old) for _ in range(2)]
    z = torch.tensor([20.0, 500.5], requires_grad=True)

    def attend():
        return window_cpu.attend(q, k, v, Window((64, 640), z=z, ramp=16), past=[PastKV((0, 1), *before)])

    products = 2 * 2 * rows * width  # of two streams with a key, for all rows
    forward = count_flops(attend).total
    assert 2 * products * sum(n) <= forward <= 2 * products * sum(met + 7 + 2 * 16 for met in n)
    backward = count_flops(lambda: attend().sum().backward(), gradients=True).total - forward
    learned = sum(n) if old else sum(min(met, rows) - min(met, rows) ** 2 / (2 * rows) for met in n)
    assert products * (3 * sum(n) + 2 * learned) <= backward <= 1.25 * products * (3 * sum(n) + 2 * learned + 2 * 48)


D, H, K, V, HIDDEN, VECTORS = 16, 4, 4, 32, 24, 5
HEAD, PROJECTIONS = 2 * D * V, 4 * 2 * D * D


def feed_forward(place: LayerContext) -> FeedForward:
    return FeedForward(place, hidden=HIDDEN, activation="relu", bias=True, zero_init=False)


def memory_table(place: LayerContext, *, sparse: bool = False) -> ProductKeyMemory:
    sizes = {"half_keys": 8, "top_k": 4, "heads": 2, "d_query": 6}
    choices = {"query_norm": "layer", "activation": "softmax", "share": "layer", "sparse": sparse}
    return ProductKeyMemory(place, **sizes, **choices)


def build(*makers, span: int = 24, backend: str = "auto", shift: int = 0, cache: str = "kv") -> LanguageModel:
    """One layer with a sublayer from each of ``makers``."""
    torch.manual_seed(0)
    common = {"heads": H, "span": span, "attend_self": not shift, "backend": backend, "cache": cache, "scheme": Rotary}
    layer = {f"part{i}": make for i, make in enumerate(makers)}
    return LanguageModel([layer], lambda i: LayerContext(d_model=D, layer=i, n_layers=1, **common), vocabulary=V)


def per_byte(model: LanguageModel, segment: int) -> float:
    flops = forward_flops_per_byte(model, segment=segment, max_bytes=1000)
    assert flops.warm
    return flops.per_byte


def band(segment: int, columns: int, chunk: int) -> int:
    """FLOPs of one head that meets, ``chunk`` queries at a time, the keys that any of them sees."""
    rows = [min(chunk, segment - begin) for begin in range(0, segment, chunk)]
    return sum(4 * r * (columns - 1 + r) * K for r in rows)


@pytest.mark.parametrize("segment, shift", [(1, 0), (100, 1)])
def test_attention_in_warm_state(segment, shift):
    plain = build(Attention, feed_forward, span=24, backend="plain", shift=shift)
    keys = segment + 24 - 1 + shift  # every query meets all of them, seen or not
    assert per_byte(plain, segment) == HEAD + PROJECTIONS + 4 * H * keys * K + 2 * 2 * D * HIDDEN
    fused = build(Attention, span=40, backend="fused", shift=shift)
    expected = HEAD + PROJECTIONS + H * band(segment, 40, 40) / segment
    assert per_byte(fused, segment) == pytest.approx(expected, rel=1e-12)


def test_a_block_longer_than_a_segment_is_counted_whole():
    """Four queries at a time meet 4, 8 and 12 keys of their block."""
    model = build(partial(LocalAttention, block=12), span=12, backend="plain")
    assert per_byte(model, 4) == HEAD + PROJECTIONS + 4 * D * 8 >= model.ideal_flops()


def test_the_run_is_not_disturbed():
    model = build(partial(Attention, span=partial(AdaptiveSpan, ramp=8)), memory_table, feed_forward)
    model.train()
    model.norm.eval()  # one module in another mode than the rest
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    generator, drawn = torch.get_rng_state(), []
    model.head.register_forward_hook(
        lambda *_: drawn.append((torch.rand(()), model.training or torch.is_grad_enabled()))
    )
    forward_flops_per_byte(model, segment=5, max_bytes=100)
    assert drawn and not any(wrong for _, wrong in drawn)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Growing(Sublayer):
    """Keeps everything it has seen."""

    def __init__(self, place: LayerContext):
        super().__init__()

    def forward(self, x, state=None, start=None, *, collect_stats=False):
        state = x if state is None else torch.cat([state, x], dim=1)
        return SublayerOutput(torch.zeros_like(x) + (x @ state.mT).sum(), state)


def test_a_state_that_never_stops_growing_is_not_called_warm():
    flops = forward_flops_per_byte(build(Growing), segment=4, max_bytes=18)
    assert not flops.warm
    assert flops.per_byte == HEAD + 2 * D * (5 * 4 + 4)  # five segments fed, the sixth counted
    assert flops.state_bytes == 8 + 5 * 4 * D * 4
